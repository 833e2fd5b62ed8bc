"""Objects in a store that fails: written whole, read back, told in words."""

from __future__ import annotations

import importlib.util
import random
import sys
import threading
import time
from pathlib import Path

import fsspec
import pytest

from pentameter.disk import remote_folder
from pentameter.disk.atomic import FileRecord
from pentameter.disk.remote_folder import Attempts, RemoteFolder
from pentameter.errors import ConfigError, CorruptError, StorageError
from trials.faults import object_store
from trials.faults.object_store import emptied, running_store, use_client

BODY = random.Random(7).randbytes(3000)
FAULTS = ["500", "503", "drop", "silent", "truncate", "flip", "500 after", "503 after"]


@pytest.fixture(scope="module")
def one_store():
    with running_store() as store:
        yield store


@pytest.fixture
def store(one_store, monkeypatch):
    monkeypatch.setattr(remote_folder, "START_PAUSES", (0.0,) * 4)
    monkeypatch.setattr(object_store, "SILENCE_SECONDS", 0.3)
    with emptied(one_store):
        yield one_store


def failing(store, fault, what, times=1):
    """Have the first so many requests of a kind fail."""
    left = [fault] * times
    store.fault = lambda request: left.pop() if left and request.what == what else None


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("what", ["PUT", "GET"])
def test_an_object_is_written_whole_whatever_fails_once(store, fault, what):
    folder = RemoteFolder("s3://bucket/run")
    failing(store, fault, what)
    record = folder.put("a/b.bin", BODY)
    assert store.objects == {"run/a/b.bin": BODY}
    assert (record.name, record.n_bytes) == ("b.bin", 3000)
    assert b"".join(folder.blocks("a/b.bin", 3000)) == BODY


@pytest.mark.parametrize("fault", [*sorted({*FAULTS} - {"silent"}), "403"])
def test_what_keeps_failing_is_told_in_words(store, fault):
    folder = RemoteFolder("s3://bucket/run")
    failing(store, fault, "PUT", 99)
    with pytest.raises(StorageError, match=r"cannot write s3://bucket/run/b( after 5 attempts)?: "):
        folder.put("b", BODY)
    assert len(store.requests) <= 5 * 5  # of each attempt a write, and four of reading it back


def test_a_body_that_stays_wrong_is_damage(store):
    folder = RemoteFolder("s3://bucket/run")
    folder.put("b", BODY)
    for wrong in (BODY[:-1], BODY + b"!"):
        store.objects["run/b"] = wrong
        with pytest.raises(CorruptError, match=r"s3://bucket/run/b is damaged: it does not have"):
            b"".join(folder.blocks("b", 3000))
    del store.objects["run/b"]
    with pytest.raises(CorruptError, match="is damaged: it is not there"):
        b"".join(folder.blocks("b", 3000))
    assert folder.get("b", 10_000) is None


def test_an_error_is_no_absence(store):
    folder = RemoteFolder("s3://bucket/run")
    failing(store, "500", "GET", 99)
    with pytest.raises(StorageError, match=r"cannot read .*/b after 5 attempts"):
        folder.get("b", 10)


def test_large_objects_are_read_in_blocks(store, monkeypatch, tmp_path):
    monkeypatch.setattr(remote_folder, "BLOCK_BYTES", 512)
    folder = RemoteFolder("s3://bucket/run")
    record = folder.put("b", BODY)
    (tmp_path / "b").write_bytes(BODY)
    failing(store, "truncate", "GET")
    folder.put_file("c", tmp_path / "b", record)
    assert [len(block) for block in folder.blocks("c", 3000)] == [512] * 5 + [440]


def test_a_file_that_is_not_as_recorded_is_told_from_a_store_that_fails(store, tmp_path):
    (tmp_path / "b").write_bytes(BODY)
    with pytest.raises(CorruptError, match=f"{tmp_path}/b is damaged"):
        RemoteFolder("s3://bucket/run").put_file(
            "b", tmp_path / "b", FileRecord("b", 3000, "0" * 64)
        )


@pytest.mark.parametrize("url", ["memory://here/run", "file://{}/run", "s3://bucket/run"])
def test_kinds_of_stores(store, tmp_path, url):
    folder = RemoteFolder(url.format(tmp_path))
    assert folder.names() == []
    folder.put("step/one", b"1")
    folder.put("step/one", b"one")
    folder.put("two", b"2")
    assert folder.names() == ["step/one", "two"]
    assert folder.get("step/one", 3) == b"one"
    with pytest.raises(CorruptError, match="larger than 2 bytes"):
        folder.get("step/one", 2)
    folder.remove("step/one")
    folder.remove("step/one")
    folder.remove("two")
    assert folder.names() == []


def test_a_file_system_with_folders_shows_no_half_object(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_folder, "START_PAUSES", ())
    folder = RemoteFolder(f"file://{tmp_path}")
    folder.put("a", b"old")

    def dies(path, value, **options):
        Path(path).write_bytes(value[:1])
        raise OSError("no space")

    monkeypatch.setattr(folder._fs, "pipe_file", dies)
    with pytest.raises(StorageError, match="no space"):
        folder.put("a", b"new")
    assert folder.names() == ["a"]
    assert folder.get("a", 10) == b"old"


def test_a_missing_package_or_bucket_is_named(store, monkeypatch):
    failing(store, "404", "PUT", 99)
    with pytest.raises(StorageError, match="is there such a bucket"):
        RemoteFolder("s3://bucket/run").put("a", b"1")
    with pytest.raises(ConfigError, match="nothing can be written over HTTP"):
        RemoteFolder("https://example.org/run")
    with pytest.raises(ConfigError, match=r"nosuch://bucket/run: .*nosuch"):
        RemoteFolder("nosuch://bucket/run")

    def absent(url, **options):
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "url_to_fs", absent)
    with pytest.raises(ConfigError, match=r"pip install 'pentameter\[remote\]'.*copy_to out"):
        RemoteFolder("gs://bucket/run")


def test_secrets_stay_out_of_messages(store):
    folder = RemoteFolder("s3://bucket/run?token=abc")
    assert str(folder) == "s3://bucket/run"
    failing(store, "500", "PUT", 99)
    with pytest.raises(StorageError) as caught:
        folder.put("a", b"1")
    assert "abc" not in str(caught.value)


HAS_S3FS = importlib.util.find_spec("s3fs") is not None


@pytest.mark.skipif(not HAS_S3FS, reason="s3fs is not installed")
@pytest.mark.parametrize(
    ("fault", "told", "n_requests"),
    [
        ("500", r"HTTP status 500 \(InternalError\); the store itself fails", 5),
        ("503", r"HTTP status 503 \(SlowDown\); the store itself fails", 5),
        ("301", "HTTP status 301, 10 redirects in a row lead nowhere", 50),
        ("307", "HTTP status 307, 10 redirects in a row lead nowhere", 50),
        ("403", r"HTTP status 403 \(AccessDenied\); log in", 1),
    ],
)
def test_the_stores_own_answer_is_told_and_asked_for_once_an_attempt(
    store, fault, told, n_requests
):
    options = store.options()
    del options["config_kwargs"]["retries"]  # as a user has it
    use_client("s3fs", options)
    sys.modules["s3fs"].S3FileSystem.retries = 5
    folder = RemoteFolder("s3://bucket/run")
    failing(store, fault, "PUT", 999)
    with pytest.raises(
        StorageError, match=rf"cannot write s3://bucket/run/b( after 5 .*)?: {told}"
    ):
        folder.put("b", BODY)
    assert [r.what for r in store.requests].count("PUT") == n_requests


def test_all_requests_that_fail_share_one_limit(store):
    folder = RemoteFolder("s3://bucket/run")
    folder.pauses = (0.2,) * 50
    store.fault = lambda request: "503"
    folder.attempts.limit(1.0)
    start = time.monotonic()
    with pytest.raises(StorageError, match=r"after \d+ attempts: .*503"):
        folder.put("a", BODY)
    assert 0.9 < time.monotonic() - start < 5
    n_before = len(store.requests)
    for name in "bcd":
        with pytest.raises(StorageError, match=f"cannot read .*{name}: .*503"):
            folder.get(name, 10)
    assert len(store.requests) == n_before + 3  # each is asked once
    store.fault = lambda request: None
    folder.put("a", BODY)  # what does not fail is not limited


def test_a_limit_reaches_a_request_that_waits_and_success_costs_nothing(store):
    folder = RemoteFolder("s3://bucket/run")
    folder.pauses = (60.0,)
    store.fault = lambda request: "503"
    threading.Timer(0.3, folder.attempts.limit, (0.2,)).start()
    start = time.monotonic()
    with pytest.raises(StorageError, match="503"):
        folder.put("a", BODY)
    assert time.monotonic() - start < 20
    other = RemoteFolder("s3://bucket/run")
    other.attempts.limit(5.0)
    store.fault = lambda request: None
    other.put("a", BODY)
    assert other.attempts.left_seconds == 5.0
    assert other.attempts.answer is None


def test_what_is_abandoned_makes_no_request_more_though_time_was_left(store):
    folder = RemoteFolder("s3://bucket/run")
    folder.pauses = (60.0,)
    store.fault = lambda request: "503"
    folder.attempts.limit(600.0)
    threading.Timer(0.3, folder.attempts.abandon).start()
    start = time.monotonic()
    with pytest.raises(StorageError, match="503"):
        folder.put("a", BODY)
    assert time.monotonic() - start < 20
    n_before = len(store.requests)
    with pytest.raises(StorageError, match="given up"):
        folder.put("a", BODY)
    assert len(store.requests) == n_before


def test_a_word_is_said_once_with_the_answer_and_how_long(store, monkeypatch):
    monkeypatch.setattr(remote_folder, "SAY_AFTER_SECONDS", 0.0)
    folder = RemoteFolder("s3://bucket/run")
    assert folder.attempts.take_word() is None
    said = []

    def fail(request):
        said.append(folder.attempts.take_word())
        return "503"

    store.fault = fail
    folder.pauses = (0.01, 0.01)
    with pytest.raises(StorageError):
        folder.put("a", BODY)
    (word,) = [each for each in said if each]
    assert word.startswith("cannot write s3://bucket/run/a: ")
    assert word.endswith("503; it is asked again for 0 s at most")


def test_nobody_waits_for_what_was_given_up_though_it_was_limited_before():
    attempts = Attempts()
    attempts.limit(60)
    answers = []
    began_at = time.monotonic()
    waiting = threading.Thread(
        target=lambda: answers.append(attempts.failed(began_at, "503", 30.0, 30.0))
    )
    waiting.start()
    attempts.abandon()
    waiting.join(20)
    assert answers == [False]


def test_pauses_draw_no_number_of_the_users(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_folder, "START_PAUSES", (0.0,) * 4)
    folder = RemoteFolder(f"file://{tmp_path}")
    random.seed(1)
    before = random.getstate()
    folder.put("x", b"1")
    assert random.getstate() == before
