"""Text in tar archives: read as a stream, refused where it was cut short."""

import gc
import gzip
import io
import json
import tarfile
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.data.corpora.archives import members
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
    "../b/two.txt": b"above",
    ".hidden.txt": b"no",
    "d/.git/x": b"no",
    "d/e.md": b"# " + b"m" * 200_000,
}
TEXTS = ["naïve 日本", "x", "yy", "small", "above", "# " + "m" * 200_000]


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


# -- archives of other programs, and damaged ones -------------------------------------------------

NAMES = st.text("aé日/.", min_size=1, max_size=150).filter(
    lambda name: not (name.endswith("/") or any(part[:1] == "." for part in name.split("/")))
)


@given(
    st.dictionaries(NAMES, st.binary(max_size=600), min_size=1, max_size=5),
    st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_members_are_those_that_tarfile_finds(files, form):
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=form, pax_headers={"comment": "é"}) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.uid = len(content), 1 << 30
            with suppress(ValueError):  # too long a name for the format
                tar.addfile(member, io.BytesIO(content))
    expected = []
    with tarfile.open(fileobj=io.BytesIO(written.getvalue())) as tar:
        for member in tar:
            if member.isreg():
                expected.append((member.name, tar.extractfile(member).read()))
    written.seek(0)
    found = [(name, content.read()) for name, content in members(written, "a.tar")]
    assert found == expected


@given(
    st.sampled_from(["a.tar", "a.tar.gz", "a.tar.zst", "a.jsonl.gz", "a.txt.zst", "a.jsonl"]),
    st.lists(
        st.tuples(st.floats(0, 1), st.binary(max_size=4) | st.sampled_from([b"8" * 12, b"\x80"])),
        max_size=4,
    ),
)
def test_any_bytes_are_documents_or_an_error_in_words(tmp_path_factory, name, changes):
    folder = tmp_path_factory.mktemp("any")
    data = archive(folder / "whole.tar", {**FILES, "n" * 200: b"x"}).read_bytes()
    data = data if ".tar" in name else JSONL
    data = gzip.compress(data) if ".gz" in name else data
    data = bytearray(zstd().compress(data) if ".zst" in name else data)
    for place, change in changes:
        at = int(place * (len(data) - 1))
        data[at : at + max(len(change), 1)] = change
    file = folder / name
    file.write_bytes(data)
    with suppress(CorruptError):
        documents(file)


def header(name, size, kind, **fields):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def test_a_file_with_holes_is_refused_in_words(tmp_path):
    end = bytes(1024)
    file = tmp_path / "a.tar"
    file.write_bytes(header("a.txt", 4, tarfile.GNUTYPE_SPARSE) + b"text".ljust(512, b"\0") + end)
    with pytest.raises(CorruptError, match=r"a\.tar: a\.txt is stored as a file with holes"):
        documents(file)
    for keys in ({"GNU.sparse.map": "0,1,2"}, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}):
        member = tarfile.TarInfo("a.txt")
        member.pax_headers = keys
        file.write_bytes(member.tobuf(tarfile.PAX_FORMAT) + end)
        with pytest.raises(CorruptError, match="is stored as a file with holes"):
            documents(file)


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (header("././@LongLink", 1 << 40, tarfile.GNUTYPE_LONGNAME), "a header of 1,0.* bytes"),
        (header("x", 11, tarfile.XHDTYPE) + b"99 path=a\n".ljust(512, b"\0"), "no pax header"),
        (header("x", 11, tarfile.XHDTYPE) + b"9 size=x\n".ljust(512, b"\0"), "no number in the"),
        (b"7" * 512, "no header at byte 0"),
    ],
)
def test_a_damaged_header_is_placed(tmp_path, before, said):
    file = tmp_path / "a.tar"
    file.write_bytes(before + archive(tmp_path / "b.tar", {"b.txt": b"b"}).read_bytes())
    with pytest.raises(CorruptError, match=rf"a\.tar is damaged .*{said}"):
        documents(file)


def test_a_damaged_header_is_not_the_end(tmp_path):
    file = archive(tmp_path / "a.tar", {"a.txt": b"a", "b.txt": b"b", "c.txt": b"c"})
    data = bytearray(file.read_bytes())
    data[1024 + 100] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptError, match="no header at byte 1,024"):
        documents(file)


def test_archives_behind_one_another_are_read_to_the_end(tmp_path):
    both = (
        archive(tmp_path / "a.tar", {"a.txt": b"a"}),
        archive(tmp_path / "b.tar", {"b.txt": b"b"}),
    )
    file = tmp_path / "c.tar"
    file.write_bytes(b"".join(each.read_bytes() for each in both))
    assert documents(file) == ["a", "b"]


def test_memory_does_not_grow_with_the_members(tmp_path):
    file, n = tmp_path / "a.tar", 5000
    file.write_bytes(header("a.txt", 0, tarfile.REGTYPE) * n + bytes(1024))
    assert sum(1 for _ in read_documents(file)) == n
    tracemalloc.start()
    try:
        for number, _ in enumerate(read_documents(file)):
            if number == n - 1:
                gc.collect()
                held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 200_000  # 5 MB where each header is kept
