"""Files that hold no plain text are named for what they are, in every encoding."""

import gzip
import io
import json
import random
import sqlite3
import tarfile
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import corpus_at

from pentameter.data.corpora.file_kinds import detect_kind
from pentameter.data.corpora.files import FileContents, read_documents
from pentameter.errors import CorruptError


def zipped(*names):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for name in names:
            archive.writestr(name, b"x" * 600)
    return held.getvalue()


def arrays(save):
    held = io.BytesIO()
    save(held, np.arange(4))
    return held.getvalue()


def tarred():
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return held.getvalue()


def database(path):
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (text)")
    return path.read_bytes()


def safetensors():
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + b"\0" * 4


FILES = {
    "Parquet": b"PAR1\x15\x04" + bytes(range(256)),
    "Arrow (Feather)": b"ARROW1\0\0" + b"\0" * 60,
    "a Word document (docx)": zipped("word/document.xml"),
    "a ZIP archive": zipped("a.txt"),
    "NumPy arrays (npz)": arrays(np.savez),
    "a NumPy array": arrays(np.save),
    "a tar archive": tarred(),
    "gzip data": gzip.compress(b"abc"),
    "Zstandard data": b"\x28\xb5\x2f\xfd\x04\0\x19",
    "a PDF document": b"%PDF-1.7\nabc",
    "an image": b"\x89PNG\r\n\x1a\n\0\0",
    "a model's weights (safetensors)": safetensors(),
    "a Python pickle": b"\x80\x04\x95\x01",
    "an old Office document": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    "a document in Rich Text Format": rb"{\rtf1\ansi abc}",
}


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@pytest.mark.parametrize(("name", "content"), FILES.items(), ids=FILES.keys())
def test_a_file_is_named_for_what_it_is(tmp_path, name, content, encoding):
    for file in (tmp_path / "data.txt", tmp_path / "data.jsonl"):
        file.write_bytes(content)
        with pytest.raises(CorruptError) as refused:
            [list(pieces) for pieces in read_documents(file, FileContents(encoding))]
        assert str(refused.value).startswith(f"{file} is {name}, not text; ")
        assert "encoding" not in str(refused.value)


def test_a_database_and_an_archive_in_gzip_are_known(tmp_path):
    (tmp_path / "x.txt").write_bytes(database(tmp_path / "x.sqlite"))
    with pytest.raises(CorruptError, match="an SQLite database"):
        [list(pieces) for pieces in read_documents(tmp_path / "x.txt")]
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(tarred()))
    with pytest.raises(
        CorruptError, match=r"a tar archive, not text; give it a name that ends in \.tar"
    ):
        [list(pieces) for pieces in read_documents(tmp_path / "x.txt.gz")]


def test_other_bytes_get_no_advice_to_name_an_encoding(tmp_path):
    file = tmp_path / "x.dat"
    for content in (random.Random(1).randbytes(4000), b"\x01\x02\x03\xff\x07" * 400):
        file.write_bytes(content)
        for encoding in ("utf-8", "latin-1"):
            if encoding == "latin-1" and b"\0" not in content:
                continue
            with pytest.raises(CorruptError, match="no encoding makes text of it"):
                [list(pieces) for pieces in read_documents(file, FileContents(encoding))]


@pytest.mark.parametrize("encoding", ["latin-1", "gb18030", "shift_jis", "big5", "cp1252"])
def test_text_in_another_encoding_is_still_asked_for_it(tmp_path, encoding):
    text = {"latin-1": "Übung macht den Meister", "cp1252": "„Übung“"}.get(encoding, "日本語の文章")
    if encoding == "big5":
        text = "中文的文章"
    (tmp_path / "x.txt").write_bytes(f"{text}\n".encode(encoding) * 50)
    with pytest.raises(CorruptError, match="name its encoding"):
        list(next(read_documents(tmp_path / "x.txt")))
    read = "".join(next(read_documents(tmp_path / "x.txt", FileContents(encoding))))
    assert read == f"{text}\n" * 50


@given(st.text())
def test_no_text_is_taken_for_another_kind(text):
    if not text.startswith(("{\\rtf1", "%PDF-", "Obj\x01")) and "\0" not in text:
        assert detect_kind(text.encode("utf-8", "replace")) is None


@pytest.mark.parametrize("start", ["PAR1 of", "ID3 tags", "BZh", "RIFF", "GGUF is", "MZ", "PK"])
def test_words_that_begin_as_other_files_do_are_text(start):
    assert detect_kind(f"{start} and so on, a text of some length".encode()) is None


def test_a_table_is_read_as_text_with_a_word(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\nhello,1\n")
    (tmp_path / "b.txt").write_text("b")
    text = corpus_at(tmp_path)
    assert "".join(text.chunks()) == "text,label\nhello,1\nb"
    assert f"{tmp_path / 'a.csv'} is a table, and is read as plain text" in text.warnings[0]
    assert f"read_csv('{tmp_path / 'a.csv'}')" in text.warnings[0]
    assert corpus_at(tmp_path / "b.txt").warnings == ()
