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
