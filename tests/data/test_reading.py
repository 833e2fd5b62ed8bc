import gzip
import json
import subprocess
import sys
import tracemalloc

import pytest

from pentameter.data.reading import read_documents
from pentameter.data.text import text_from_paths
from pentameter.errors import ConfigError, CorruptError

RECORDS = ["one", "", "naïve\r\n日本 🙂", "a\0b\n"]
JSONL = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in RECORDS).encode()


def documents(file):
    return ["".join(pieces) for pieces in read_documents(file)]


def write(path, data):
    path.write_bytes(data)
    return path


def zstd():
    return pytest.importorskip("zstandard", reason="needs the extra zstd")


@pytest.mark.parametrize("name", ["a.jsonl", "A.NDJSON"])
def test_a_record_is_a_document(tmp_path, name):
    file = write(tmp_path / name, b"\xef\xbb\xbf" + JSONL.replace(b"\n", b"\r\n\n"))
    assert documents(file) == RECORDS
    assert documents(write(tmp_path / "b.jsonl", b'{"text": "no line end"}')) == ["no line end"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{nonsense}", "line 2 is not JSON"),
        (b'{"text": "\xff"}', "line 2 is not JSON"),
        (b'{"content": "x"}', r"line 2 has no field 'text' \(its keys are \['content'\]\)"),
        (b'["text"]', r"line 2 has no field 'text' \(no object\)"),
        (b'{"text": 3}', "line 2: 'text' is int 3, not a string"),
        (b'{"text": null}', "line 2: 'text' is NoneType"),
        (b'{"text": "\\ud83d"}', r"half a surrogate pair \(\\ud83d\)"),
        (b"[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_a_wrong_record_is_named_with_file_and_line(tmp_path, line, message):
    file = write(tmp_path / "a.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(CorruptError, match=message) as error:
        documents(file)
    assert str(file) in str(error.value)


def test_gzip_of_text_and_of_jsonl(tmp_path):
    text = "text, " * 50_000
    file = write(tmp_path / "a.txt.gz", gzip.compress(text.encode()) + gzip.compress(b"more"))
    assert documents(file) == [text + "more"]
    assert documents(write(tmp_path / "a.jsonl.gz", gzip.compress(JSONL))) == RECORDS
    assert len(list(text_from_paths([tmp_path]).documents())) == 5


@pytest.mark.parametrize("damage", [lambda d: d[:-20], lambda d: b"no gzip", lambda d: d[:60] * 2])
def test_damaged_gzip_is_named(tmp_path, damage):
    data = gzip.compress(bytes(range(32, 127)) * 50)
    file = write(tmp_path / "a.txt.gz", damage(data))
    with pytest.raises(CorruptError, match=r"a\.txt\.gz is damaged or cut short"):
        documents(file)


def test_zstandard_of_text_and_of_jsonl(tmp_path):
    library = zstd()
    text = "text, " * 50_000
    frames = library.compress(text.encode()) + library.compress(b"more")
    assert documents(write(tmp_path / "a.txt.zst", frames)) == [text + "more"]
    assert documents(write(tmp_path / "a.jsonl.zst", library.compress(JSONL))) == RECORDS
    for damaged in (frames[:-3], b"no zstd"):
        with pytest.raises(CorruptError, match="damaged or cut short"):
            documents(write(tmp_path / "b.zst", damaged))


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python has its own Zstandard")
def test_zstandard_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'pentameter\[zstd\]'"):
        documents(write(tmp_path / "a.zst", b"x"))


def test_reading_loads_no_decompressor_that_is_not_needed():
    code = "import sys, pentameter.data; assert not {'zstandard', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_has_a_longest_length(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("pentameter.data.reading.LONGEST_LINE_BYTES", 1 << 20)
    longest = json.dumps({"text": "x" * ((1 << 20) - 13)}).encode() + b"\n"
    assert len(longest) == 1 << 20
    compress = gzip.compress if suffix else bytes
    file = write(tmp_path / f"a.jsonl{suffix}", compress(longest * 2))
    assert [len(text) for text in documents(file)] == [(1 << 20) - 13] * 2
    write(file, compress(longest + b" " * 60_000_000))
    tracemalloc.start()
    with pytest.raises(CorruptError, match=r"a\.jsonl.*, line 2 is longer than 1 MiB"):
        documents(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


def test_zstandard_of_much_from_little_stays_small(tmp_path):
    """4 KiB that hold 128 MiB: a few pieces of the file at a time."""
    file = write(tmp_path / "a.txt.zst", zstd().compress(b"a" * (1 << 27)))
    (pieces,) = read_documents(file)
    tracemalloc.start()
    assert sum(map(len, pieces)) == 1 << 27
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80 << 20
