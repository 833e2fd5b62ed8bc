import gzip
import json
import subprocess
import sys
import time
import tracemalloc
from encodings.aliases import aliases

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import corpus_at

from pentameter.config.data_schema import encoding_problem
from pentameter.data.corpora.files import UTF8, FileContents, read_documents
from pentameter.errors import ConfigError, CorruptError

NO_MARK = "does not start with BOM" + (r"\)" if sys.version_info >= (3, 13) else "")
"""Beginning of the error for a text without the mark of its byte order; Python 3.13 places it."""

CHARACTERS = {
    "utf-16": "日本 🙂 naïve\r\n",
    "utf-32": "日本 🙂 naïve\r\n",
    "utf-16-be": "日本 🙂\u0a0a\n",  # whose bytes are line ends
    "utf-8-sig": "日本 🙂\n",
    "utf-7": "日本 🙂 a+b\n",
    "gb18030": "日本 naïve € 🙂 語 語\n",
    "gbk": "日本語\n",
    "big5": "日本語\n",
    "shift_jis": "日本語 ソ表\n",  # whose second bytes are backslashes
    "euc-kr": "한국어\n",
    "iso2022_jp": "日本 and 語\n",  # switches between sets of characters
    "hz": "~{}~中文 and 文\n",
    "latin-1": "naïve\xa0\x85\r\n",
    "cp1252": "naïve €\n",
    "koi8-r": "Привет\n",
    "cp037": "EBCDIC\n",
}
MARKS = {
    "utf-16": (b"\xff\xfe", b"\xfe\xff"),
    "utf-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"),
}
RECORDS = ["one", "", "naïve\r\n日本 🙂", "a\0b\n"]
JSONL = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in RECORDS).encode()


def documents(file, contents=UTF8):
    return ["".join(pieces) for pieces in read_documents(file, contents)]


def write(path, data):
    path.write_bytes(data)
    return path


def zstd():
    return pytest.importorskip("backports.zstd", reason="needs the extra zstd")


@pytest.mark.parametrize("name", ["a.jsonl", "A.NDJSON"])
def test_a_record_is_a_document(tmp_path, name):
    file = write(tmp_path / name, b"\xef\xbb\xbf" + JSONL.replace(b"\n", b"\r\n\n"))
    assert documents(file) == RECORDS
    assert documents(write(tmp_path / "b.jsonl", b'{"text": "no line end"}')) == ["no line end"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{nonsense}", "line 2 is not JSON"),
        (
            b'{"text": "\xff"}',
            r"line 2 is not UTF-8 text: byte 0xff at offset 27 .*--data.encoding",
        ),
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


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize("encoding", CHARACTERS)
def test_a_named_encoding_is_decoded_whatever_a_block_cuts(
    tmp_path, monkeypatch, encoding, chunk_bytes
):
    monkeypatch.setattr("pentameter.data.corpora.files.CHUNK_BYTES", chunk_bytes)
    assert encoding_problem(encoding) is None
    text = CHARACTERS[encoding] * 3
    contents = FileContents(encoding)
    assert documents(write(tmp_path / "a.txt", text.encode(encoding)), contents) == [text]
    lines = json.dumps({"text": text}, ensure_ascii=False) + "\n\n" + json.dumps({"text": "b"})
    data = gzip.compress(lines.encode(encoding))
    assert documents(write(tmp_path / "a.jsonl.gz", data), contents) == [text, "b"]


def test_every_encoding_that_is_taken_can_be_read(tmp_path):
    taken = [name for name in sorted({*aliases.values()}) if encoding_problem(name) is None]
    assert len(taken) > 80
    for name in taken:
        file = write(tmp_path / f"{name}.txt", "abc\n".encode(name))
        assert documents(file, FileContents(name)) == ["abc\n"]


@pytest.mark.parametrize("chunk_bytes", [1, 3, 1 << 16])
@pytest.mark.parametrize(
    ("encoding", "data", "said"),
    [
        (
            "gb18030",
            "日本".encode("gb18030") + b"\xff\n",
            r"GB18030 text: byte 0xff at offset 4 \(",
        ),
        ("gb18030", "日本".encode("gb18030") + b"\x81", r"byte 0x81 at offset 4 \(incomplete"),
        ("gb18030", "🙂".encode("gb18030")[:3], "byte 0x95 at offset 0 "),
        ("shift_jis", "日本語".encode("shift_jis")[:-1], "byte 0x8c at offset 4 "),
        ("utf-16", b"\xff\xfea\0\0\xd8b\0", "byte 0x00 at offset 4 "),
        ("utf-16", b"\xff\xfea\0b", "byte 0x62 at offset 4 "),
        ("utf-16", b"a\0b\0", rf"{NO_MARK}; .*: utf-16-le or utf-16-be"),
        ("U32", b"a\0\0\0", rf"{NO_MARK}; .*: utf-32-le or utf-32-be"),
        ("ascii", b"abc\xe9", "ASCII text: byte 0xe9 at offset 3 .*--data.encoding gb18030"),
        ("utf-8-sig", b"\xef\xbb\xbfab\xff", "byte 0xff at offset 5 "),
        ("latin-1", b"ab\xe9\0", "latin-1 text: NUL at character 3; no encoding makes"),
    ],
)
def test_what_does_not_decode_is_placed(tmp_path, monkeypatch, encoding, data, said, chunk_bytes):
    monkeypatch.setattr("pentameter.data.corpora.files.CHUNK_BYTES", chunk_bytes)
    file = write(tmp_path / "a.txt", data)
    with pytest.raises(CorruptError, match=said) as error:
        documents(file, FileContents(encoding))
    assert str(file) in str(error.value)


@given(st.sampled_from(sorted(CHARACTERS)), st.binary(max_size=40), st.integers(1, 9))
def test_any_bytes_are_the_text_python_makes_of_them_or_an_error(
    tmp_path_factory, encoding, data, chunk_bytes
):
    file = write(tmp_path_factory.mktemp("any") / "a.txt", data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pentameter.data.corpora.files.CHUNK_BYTES", chunk_bytes)
        try:
            (found,) = documents(file, FileContents(encoding))
        except CorruptError:
            found = None
    try:
        expected = data.decode(encoding).removeprefix("\ufeff")
        expected.encode()
        unordered = encoding in MARKS and not data.startswith(MARKS[encoding])
        wrong = "\0" in expected or (unordered and data)
    except UnicodeError:
        wrong = True
    assert found is None if wrong else found == expected


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_the_mark_of_another_encoding_is_told_and_not_followed(tmp_path, name, encoding):
    file = write(tmp_path / name, '{"text": "a"}'.encode(encoding))
    with pytest.raises(CorruptError, match=f"not UTF-8 .*begins as .*--data.encoding {encoding}$"):
        documents(file)
    assert documents(file, FileContents(encoding)) in (["a"], ['{"text": "a"}'])


def test_the_text_may_stand_in_another_field(tmp_path):
    file = write(tmp_path / "a.jsonl", b'{"content": "one", "text": 3}\n{"content": "two"}\n')
    assert documents(file, FileContents(text_field="content")) == ["one", "two"]
    with pytest.raises(
        CorruptError, match=r"line 1 has no field 'body' .*'content', 'text'.*field"
    ):
        documents(file, FileContents(text_field="body"))


def test_gzip_of_text_and_of_jsonl(tmp_path):
    text = "text, " * 50_000
    file = write(tmp_path / "a.txt.gz", gzip.compress(text.encode()) + gzip.compress(b"more"))
    assert documents(file) == [text + "more"]
    assert documents(write(tmp_path / "a.jsonl.gz", gzip.compress(JSONL))) == RECORDS
    assert len(list(corpus_at(tmp_path).documents())) == 5


@pytest.mark.parametrize("damage", [lambda d: d[:-20], lambda d: b"no gzip", lambda d: d[:60] * 2])
def test_damaged_gzip_is_named(tmp_path, damage):
    data = gzip.compress(bytes(range(32, 127)) * 50)
    file = write(tmp_path / "a.txt.gz", damage(data))
    with pytest.raises(CorruptError, match=r"a\.txt\.gz is damaged or cut short"):
        documents(file)


def test_an_empty_file_is_no_compressed_text(tmp_path):
    for name in ("a.txt.gz", "a.jsonl.gz", "a.tar.gz"):
        with pytest.raises(CorruptError, match=r"\.gz is damaged or cut short \(it is empty\)"):
            documents(write(tmp_path / name, b""))
    assert documents(write(tmp_path / "a.txt.gz", gzip.compress(b""))) == [""]
    zeros = gzip.compress(b"a") + bytes(100_000) + gzip.compress(b"b") + bytes(9)
    assert documents(write(tmp_path / "a.txt.gz", zeros)) == ["ab"]
    for garbage in (b"more", bytes(9) + b"more"):
        with pytest.raises(CorruptError, match="is damaged"):
            documents(write(tmp_path / "a.txt.gz", gzip.compress(b"a") + garbage))


def test_a_long_name_within_gzip_takes_no_time(tmp_path):
    plain = gzip.compress(b"text")
    data = plain[:3] + b"\x08" + plain[4:10] + b"n" * 50_000_000 + b"\0" + plain[10:]
    file = write(tmp_path / "a.txt.gz", data)
    begun = time.process_time()
    assert documents(file) == ["text"]
    assert time.process_time() - begun < 1  # 4 to 23 s byte by byte, 0.03 s so


def test_a_suffix_in_a_folders_name_asks_for_no_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    folder = tmp_path / "corpus.zst"
    folder.mkdir()
    assert documents(write(folder / "a.txt", b"a")) == ["a"]
    assert documents(write(folder / "a.txt.gz", gzip.compress(b"a"))) == ["a"]


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
    monkeypatch.setitem(sys.modules, "backports.zstd", None)
    with pytest.raises(ConfigError, match=r"pip install 'pentameter\[zstd\]'"):
        documents(write(tmp_path / "a.zst", b"x"))


def test_reading_loads_no_decompressor_that_is_not_needed():
    code = "import sys, pentameter.data; assert not {'backports', 'tokenizers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_has_a_longest_length(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("pentameter.data.corpora.files.LONGEST_LINE_BYTES", 1 << 20)
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
