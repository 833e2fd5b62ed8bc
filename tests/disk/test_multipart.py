"""Large objects with s3fs, which sends them in parts."""

from __future__ import annotations

import hashlib
import importlib.util

import pytest

from pentameter.disk import remote_folder
from pentameter.disk.atomic import FileRecord
from pentameter.disk.remote_folder import RemoteFolder
from trials.faults import object_store
from trials.faults.object_store import forget_client, running_store, use_client

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed"),
]


@pytest.mark.parametrize(
    ("what", "fault"),
    [("PART", "500"), ("PART", "truncate"), ("COMPLETE", "500 after"), ("GET", "truncate")],
)
def test_parts_that_fail(tmp_path, monkeypatch, fault, what):
    monkeypatch.setattr(remote_folder, "START_PAUSES", (0.0,) * 4)
    monkeypatch.setattr(object_store, "SILENCE_SECONDS", 60.0)
    n_bytes = 101 * 2**20  # more than two of s3fs's blocks
    source = tmp_path / "large"
    with source.open("wb") as file:
        file.truncate(n_bytes)
        file.seek(n_bytes // 3)
        file.write(b"a part of it")
    with source.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    left = [fault]
    with running_store() as store:
        store.fault = lambda r: left.pop() if left and r.what == what else None
        use_client("s3fs", store.options())
        RemoteFolder("s3://bucket/run").put_file("a", source, FileRecord("a", n_bytes, sha256))
        forget_client()
        assert hashlib.sha256(store.objects["run/a"]).hexdigest() == sha256
        assert [r.what for r in store.requests].count("BEGIN") >= 1
    assert not left
