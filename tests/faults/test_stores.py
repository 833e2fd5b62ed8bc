"""A few trials of each class of faults of object stores; `stores.py` has the classes."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
from contextlib import suppress

import pytest

from trials.faults.object_store import forget_client, wait_until
from trials.faults.oracle import assert_same_run, events, launched, tiny_config
from trials.faults.stores import (
    MOST_REQUESTS,
    StoreTrial,
    failing_requests,
    killed_at_a_request,
    killed_while_requests_fail,
    out_of_order,
)

HAS_S3FS = importlib.util.find_spec("s3fs") is not None
CLIENTS = [
    "plain",
    pytest.param(
        "s3fs",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not HAS_S3FS, reason="s3fs is not installed"),
        ],
    ),
]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch):
    """Trials set the pauses between attempts, and what opens s3://, in this process, too."""
    from pentameter.disk import remote_folder
    from pentameter.train.keep import copying

    monkeypatch.setattr(remote_folder, "START_PAUSES", remote_folder.START_PAUSES)
    monkeypatch.setattr(copying, "PAUSES", copying.PAUSES)
    yield
    forget_client()


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "act",
    [
        killed_at_a_request,
        *(
            pytest.param(act, marks=pytest.mark.slow)
            for act in (failing_requests, killed_while_requests_fail, out_of_order)
        ),
    ],
)
def test_a_new_machine_gives_the_undisturbed_run(tmp_path, shared, act, client):
    number = 68 if act is killed_at_a_request else 1  # at a manifest, or near one
    assert act(StoreTrial(number, random.Random(number), tmp_path, shared, client=client))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 2 * MOST_REQUESTS, 7))
def test_killed_at_any_request(tmp_path, shared, number):
    assert killed_at_a_request(StoreTrial(number, random.Random(number), tmp_path, shared))


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_two_processes_go_on_elsewhere(tmp_path, sent):
    """All wait for the one that copies, and for the one that brings a run back."""
    settings = {"parallel.data": 2, "parallel.zero": 1, "checkpoint.interval": 10}
    config = tiny_config(tmp_path, **settings)
    undisturbed = tmp_path / "undisturbed"
    assert launched(config, undisturbed).wait(120) == 0
    copied = {"checkpoint.copy_to": f"file://{tmp_path}/store", "train.sample_interval": 20}
    config = tiny_config(tmp_path, **settings, **copied)
    process = launched(config, tmp_path / "gone")
    manifest = tmp_path / "store" / "step-00000010" / "manifest.json"
    wait_until(lambda: manifest.exists() or process.poll() is not None, 120)
    with suppress(ProcessLookupError):
        (os.killpg if sent == signal.SIGKILL else os.kill)(process.pid, sent)
    process.communicate()
    assert process.returncode in (-sent, 75, 0)
    process = launched(config, tmp_path / "new")
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors
    assert events(tmp_path / "new", "resume")[0]["step"] >= 10
    assert_same_run(tmp_path / "new", undisturbed)
