import os
import socket
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import corpus_at, text_of_documents

from pentameter.data.corpora.files import read_documents
from pentameter.data.corpora.inputs import files_below
from pentameter.errors import ConfigError, CorruptError, StorageError

# What UTF-8 files can hold: any Unicode but surrogates; NUL counts as binary.
file_text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def read_in(file, chunk_bytes):
    with mock.patch("pentameter.data.corpora.files.CHUNK_BYTES", chunk_bytes):
        return list(next(read_documents(file)))


@given(file_text, st.integers(1, 7))
def test_pieces_join_to_the_text_wherever_the_bytes_are_cut(tmp_path_factory, text, chunk_bytes):
    file = write(tmp_path_factory.mktemp("text") / "a.txt", text.encode())
    expected = text.replace("\n\ufeff", "\n").removeprefix("\ufeff")
    assert "".join(read_in(file, chunk_bytes)) == expected


def test_line_ends_are_kept(tmp_path):
    file = write(tmp_path / "a.txt", b"one\r\ntwo\rthree\n\n")
    assert "".join(next(read_documents(file))) == "one\r\ntwo\rthree\n\n"


@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 100])
def test_byte_order_marks_are_dropped_where_a_file_begins(tmp_path, chunk_bytes):
    """Of files that were joined too: `cat a.txt b.txt`. Within a line it is a character."""
    file = write(tmp_path / "a.txt", "\ufeffa\ufeffb\n\ufeffc\n".encode())
    assert "".join(read_in(file, chunk_bytes)) == "a\ufeffb\nc\n"


def test_records_of_joined_files_are_read(tmp_path):
    record = '\ufeff{"text": "a"}\n'
    file = write(tmp_path / "a.jsonl", (record + record).encode())
    assert ["".join(each) for each in read_documents(file)] == ["a", "a"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"abc\0def", "NUL byte at offset 3"),
        (b"abcdefgh\xff", "0xff at offset 8"),
        (b"abcdefgh\xe2\x82", "0xe2 at offset 8"),  # the file ends inside a character
        (b"ab\xed\xa0\x80", "0xed at offset 2"),  # an encoded surrogate
        ("text".encode("utf-16"), "UTF-16"),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [4, 1000])
def test_binary_files_are_refused_with_file_and_offset(tmp_path, data, message, chunk_bytes):
    file = write(tmp_path / "a.txt", data)
    with pytest.raises(CorruptError, match=message) as error:
        list(read_in(file, chunk_bytes))
    assert str(file) in str(error.value)


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("b/2", "b/10", "a.txt", "c", ".hidden"):
        write(tmp_path / name, f"<{name}>".encode())
    for name in (".git", "__pycache__"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "file", b"no")
    assert "".join(corpus_at(tmp_path).chunks()) == "<a.txt><b/10><b/2><c>"


def test_odd_files_are_left_out_and_never_opened(tmp_path):
    write(tmp_path / "a.txt", b"text")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "loop").symlink_to(tmp_path)
    server = socket.socket(socket.AF_UNIX)
    cwd = Path.cwd()
    os.chdir(tmp_path)  # the name of a socket may be at most about 100 bytes
    server.bind("socket")
    os.chdir(cwd)
    server.close()
    assert files_below(tmp_path) == [tmp_path / "a.txt"]
    with pytest.raises(ConfigError, match="neither a regular file nor a folder"):
        corpus_at(tmp_path / "pipe")


def test_a_link_to_nowhere_and_an_unreadable_file_are_named(no_other_reads, tmp_path):
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StorageError, match=r"gone\.txt"):
        list(corpus_at(tmp_path).chunks())
    (tmp_path / "gone.txt").unlink()
    secret = write(tmp_path / "secret.txt", b"text")
    secret.chmod(0)
    with pytest.raises(StorageError, match=r"secret\.txt"):
        list(corpus_at(tmp_path).chunks())


def test_missing_and_empty_paths_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        corpus_at(tmp_path / "no.txt")
    with pytest.raises(ConfigError, match="no text file below"):
        corpus_at(tmp_path)


@given(file_text, st.integers(1, 40))
def test_first_bytes_is_the_longest_start_that_fits(text, max_bytes):
    start = "".join(
        text_of_documents(lambda: iter([iter([text[:3], text[3:]])]), max_bytes=max_bytes).chunks()
    )
    assert text.startswith(start)
    assert len(start.encode()) <= max_bytes
    assert start == text or len(text[: len(start) + 1].encode()) > max_bytes
