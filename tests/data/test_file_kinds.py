"""Files that hold no plain text are named for what they are, in every encoding."""

import gzip
import io
import json
import random
import sqlite3
import struct
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


def test_a_folder_is_read_without_its_binary_files(tmp_path):
    """As the data of `strfile` beside fortunes, pictures beside the pages of a book."""
    folder = tmp_path / "book"
    (folder / "art").mkdir(parents=True)
    (folder / "one").write_text("the first page")
    (folder / "two").write_text("the second")
    (folder / "one.dat").write_bytes(struct.pack(">9I", 2, 43, 1, 14, 0, 37 << 24, 0, 43, 57))
    (folder / "two.dat").write_bytes(b"\0\0\0\x02\0\0\xd1")
    (folder / "art" / "cover.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    corpus = corpus_at(folder)
    assert "".join(corpus.chunks()) == "the first pagethe second"
    (warning,) = corpus.warnings
    assert warning == f"{folder}: 3 binary files are left out (2 × .dat, 1 × .png)"
    with pytest.raises(CorruptError, match=r"one\.dat is .*: get its text with"):
        [*corpus_at(folder / "one.dat").chunks()]  # named by itself, it was meant


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16-le"])
def test_in_another_encoding_pictures_alone_are_left_out(tmp_path, encoding):
    (tmp_path / "page").write_text("été", encoding=encoding)
    (tmp_path / "cover.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    corpus = corpus_at(tmp_path, encoding=encoding)
    assert "".join(corpus.chunks()) == "été"
    assert corpus.warnings == (f"{tmp_path}: 1 binary file is left out (1 × .png)",)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("paper.pdf", b"%PDF-1.7\0\0\0", "is a PDF document"),
        ("train.bin", struct.pack("<4H", 0xFFFD, 0, 0, 0xFFFD), "are these token ids"),
        ("latin.txt", "caf\xe9".encode("latin-1"), "name its encoding"),
        ("marked.txt", "text".encode("utf-16"), "it begins as UTF-16 does"),
    ],
)
def test_a_file_that_holds_text_in_another_form_is_never_left_out(tmp_path, name, content, reason):
    (tmp_path / "page.txt").write_text("a page")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorruptError, match=reason):
        [*corpus_at(tmp_path).chunks()]


def test_a_folder_of_binary_files_alone_is_refused(tmp_path):
    (tmp_path / "a.dat").write_bytes(b"\0\x01\x02\x03" * 40)
    with pytest.raises(CorruptError, match=r"a\.dat is binary"):
        [*corpus_at(tmp_path).chunks()]


def test_a_file_and_a_link_to_it_are_read_once(tmp_path):
    folder = tmp_path / "book"
    folder.mkdir()
    (folder / "page").write_text("a page")
    (folder / "page.u8").symlink_to("page")
    (tmp_path / "elsewhere").write_text(", another")
    (folder / "then").symlink_to(tmp_path / "elsewhere")
    assert "".join(corpus_at(folder).chunks()) == "a page, another"
