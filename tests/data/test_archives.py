"""Text in tar archives: read as a stream, refused where it was cut short."""

import gzip
import io
import json
import tarfile

import pytest

from pentameter.data.corpora.files import FileContents, read_documents
from pentameter.errors import ConfigError, CorruptError

JSONL = "".join(json.dumps({"text": text}) + "\n" for text in ("x", "yy")).encode()


def archive(path, files, *, mode="w", **extra):
    with tarfile.open(path, mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for name, kind in extra.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.txt"
            tar.addfile(member)
    return path


def zstd():
    return pytest.importorskip("backports.zstd", reason="needs the extra zstd")


def documents(file, contents=FileContents()):  # noqa: B008 - frozen
    return ["".join(pieces) for pieces in read_documents(file, contents)]


FILES = {
    "./b/one.txt": "naïve 日本".encode(),
    "a.jsonl": JSONL,
    "c.txt.gz": gzip.compress(b"small"),
    ".hidden.txt": b"no",
    "d/.git/x": b"no",
    "d/e.md": b"# " + b"m" * 200_000,
}
TEXTS = ["naïve 日本", "x", "yy", "small", "# " + "m" * 200_000]


@pytest.mark.parametrize(
    ("name", "mode"), [("a.tar", "w"), ("a.tar.gz", "w:gz"), ("A.TGZ", "w:gz")]
)
def test_each_text_file_is_a_document_and_each_record(tmp_path, name, mode):
    links = {"link": tarfile.SYMTYPE, "pipe": tarfile.FIFOTYPE, "folder": tarfile.DIRTYPE}
    file = archive(tmp_path / name, FILES, mode=mode, **links)
    assert documents(file) == TEXTS
    read = read_documents(file)
    for expected in TEXTS:  # one document at a time, some of them left unread
        document = next(read)
        assert expected.startswith(next(document))


def test_zstandard_inside_and_around(tmp_path):
    module = zstd()
    files = {
        **FILES,
        "z.txt.zst": module.compress(b"inside"),
        "z.jsonl.zst": module.compress(JSONL),
    }
    file = archive(tmp_path / "a.tar", files)
    whole = tmp_path / "a.tar.zst"
    whole.write_bytes(module.compress(file.read_bytes()))
    assert documents(whole) == documents(file) == [*TEXTS, "inside", "x", "yy"]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_an_archive_that_was_cut_short_is_named(tmp_path, mode):
    file = archive(tmp_path / ("a.tar.gz" if mode == "w:gz" else "a.tar"), FILES, mode=mode)
    whole = file.read_bytes()
    assert documents(file) == TEXTS
    step = max(len(whole) // 97, 1) if mode == "w" else max(len(whole) // 41, 1)
    n_zeros = 0 if mode == "w:gz" else len(whole) - len(whole.rstrip(b"\0"))
    for size in range(0, len(whole) - n_zeros, step):
        file.write_bytes(whole[:size])
        with pytest.raises(CorruptError, match="is damaged or cut short") as refused:
            documents(file)
        assert str(file) in str(refused.value)
    for size in range(0, len(whole) - n_zeros, 512):  # where a header or a file ends
        file.write_bytes(whole[:size])
        with pytest.raises(CorruptError, match="is damaged or cut short"):
            documents(file)


def test_a_damaged_file_inside_is_named(tmp_path):
    damaged = gzip.compress(b"text" * 1000)[:-9]
    file = archive(tmp_path / "a.tar", {"good.txt": b"x", "bad.txt.gz": damaged})
    with pytest.raises(CorruptError, match=r"a\.tar: bad\.txt\.gz is damaged or cut short"):
        documents(file)
    file = archive(tmp_path / "b.tar", {"p.txt": b"%PDF-1.7 \n abc"})
    with pytest.raises(CorruptError, match=r"b\.tar: p\.txt is a PDF document, not text"):
        documents(file)
    file = archive(tmp_path / "c.tar", {"p.jsonl": b'{"text": 1}\n'})
    with pytest.raises(CorruptError, match=r"c\.tar: p\.jsonl, line 1: 'text' is int"):
        documents(file)
    (tmp_path / "d.tar").write_bytes(b"plain text, by a wrong name" * 100)
    with pytest.raises(CorruptError, match="no tar archive"):
        documents(tmp_path / "d.tar")


def test_other_encodings_inside(tmp_path):
    file = archive(tmp_path / "a.tar", {"a.txt": "Übung".encode("latin-1")})
    assert documents(file, FileContents("latin-1")) == ["Übung"]


def test_no_file_inside_is_an_empty_text(tmp_path):
    assert documents(archive(tmp_path / "a.tar", {})) == []
    from preparing import corpus_at

    from pentameter.data.prepare.from_text import TextPreparation
    from pentameter.data.prepare.splits import Splitting

    with pytest.raises(ConfigError, match="is empty"):
        TextPreparation(corpus_at(tmp_path / "a.tar"), "char", Splitting()).contents  # noqa: B018
