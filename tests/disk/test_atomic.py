import hashlib

import pytest

from pentameter.disk import atomic
from pentameter.errors import StorageError


def test_an_atomic_write_that_fails_names_the_file_and_not_the_temporary_one(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    path = tmp_path / "config.toml"
    path.write_text("before")
    monkeypatch.setattr(atomic.os, "write", refuse)
    with pytest.raises(StorageError, match=r"config\.toml: No space left on device; free"):
        atomic.write_atomic(path, b"after")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_a_reader_is_told_what_a_reader_can_do(tmp_path):
    refused = PermissionError(13, "Permission denied")
    said = {doing: str(atomic.storage_error("f", doing, refused)) for doing in ("read", "write")}
    assert said["read"].startswith("cannot read f: Permission denied; this user may not read it")
    assert said["write"].endswith("permission denied; use a folder you may write to")


def test_the_hash_of_a_file_is_that_of_its_bytes_also_through_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert atomic.sha256_of(tmp_path / "link") == hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(StorageError, match=r"cannot read .*: Is a directory; .*name a file"):
        atomic.sha256_of(tmp_path)
    with pytest.raises(StorageError, match=r"cannot read .*gone: No such file"):
        atomic.sha256_of(tmp_path / "gone")
