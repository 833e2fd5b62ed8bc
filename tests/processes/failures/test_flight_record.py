"""What a rank was at, read off the record of its collectives that PyTorch writes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch._C import _distributed_c10d

from pentameter.processes.failures.activity import Activity, activity_path
from pentameter.processes.failures.flight_record import (
    FlightRecord,
    read_flight_record,
    record_path,
    recorder_variables,
    told_by_records,
    waits_on_nccl,
)

LAUNCHED = Path(__file__).parents[1] / "launched.py"
RECORD = Path(__file__).parent / "record-of-nccl.json"
FRAMES = [
    {
        "filename": "/x/site-packages/torch/distributed/c10d_logger.py",
        "line": 83,
        "name": "wrapper",
    },
    {"filename": "/x/site-packages/torch/nn/modules/module.py", "line": 7, "name": "_call_impl"},
    {"filename": "/x/pentameter/parallel/linear.py", "line": 41, "name": "forward"},
    {"filename": "/x/pentameter/train/loop.py", "line": 9, "name": "run"},
]


def entry(number=0, name="nccl:all_reduce", group=("3", "tensor"), **changed):
    return {
        "record_id": number,
        "process_group": group,
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "time_created_ns": time.time_ns() - 5 * 10**9 + number,
        "state": "started",
        "retired": False,
        "timeout_ms": 3000,
        "is_p2p": False,
        "frames": FRAMES,
        **changed,
    }


@pytest.fixture
def leave(tmp_path):
    """A function that leaves the record of a rank with these entries; returns it as read."""

    def write(*entries, rank=0):
        groups = {
            "3": {"name": "3", "desc": "tensor", "ranks": "[0, 1]"},
            "4": {"ranks": "[1, 2]"},
            "5": {"ranks": "[0, 2]"},
        }
        record = {"version": "2.10", "entries": list(entries), "pg_config": groups}
        record_path(tmp_path, rank).write_bytes(pickle.dumps(record, protocol=2))
        return read_flight_record(tmp_path, rank)

    return write


def test_the_first_collective_that_is_not_done_is_told(leave):
    done = entry(1, state="completed")
    found = leave(entry(3, "nccl:broadcast"), entry(2), done, entry(0, retired=True))
    assert str(found.wait) == (
        "the all-reduce along tensor of forward (parallel/linear.py:41) in the forward pass"
    )
    assert found.wait.stack == ("  train/loop.py:9 in run\n  parallel/linear.py:41 in forward")
    assert (found.wait.ranks, found.wait.timed_out, found.timeout_seconds) == ([0, 1], True, 3)
    assert leave(done) == FlightRecord(begun={"3": 2}, end=done["time_created_ns"])


@pytest.mark.parametrize(
    ("name", "is_message", "words"),
    [
        ("nccl:_all_gather_base", False, "all-gather"),
        ("nccl:_reduce_scatter_base", False, "reduce-scatter"),
        ("nccl:reduce_scatter_tensor_coalesced", False, "reduce-scatter"),
        ("nccl:allreduce_coalesced", False, "all-reduce"),
        ("nccl:all_to_all", False, "all-to-all"),
        ("nccl:reduce", False, "reduce"),
        ("nccl:_broadcast_oop", False, "broadcast"),
        ("nccl:all_reduce_barrier", False, "all-reduce"),
        ("nccl:send 0->1", True, "messages"),
        ("nccl:coalesced", True, "messages"),
        ("nccl:coalesced", False, "collective"),
    ],
)
def test_collectives_have_the_names_of_other_messages(leave, name, is_message, words):
    assert leave(entry(name=name, is_p2p=is_message)).wait.collective == words


def test_a_group_without_a_dimension_and_a_backward_pass(leave):
    backward = [{"filename": "/x/pentameter/a.py", "line": 1, "name": "backward"}]
    found = leave(entry(group=("0", "default_pg"), frames=backward))
    assert str(found.wait) == (
        "the all-reduce over all ranks of backward (a.py:1) in the backward pass"
    )
    found = leave(entry(group=("4", "undefined"), frames=[]))
    assert (found.wait.along, found.wait.ranks, found.wait.calls) == ("", [1, 2], "")


def test_ranks_that_wait_themselves_are_not_named(leave, tmp_path):
    """Rank 0 waits for rank 1, and that for rank 2, which hangs."""
    Activity(activity_path(tmp_path, 1)).note("training", 7)
    leave(entry(5), rank=0)
    leave(entry(4, "nccl:recv 0<-1", ("4", "pipeline"), is_p2p=True), rank=1)
    leave(rank=2)
    said = told_by_records(tmp_path, 4, [])
    assert said is not None
    assert said.startswith(
        "rank 2 did not answer within 3 s (parallel.timeout_seconds) in step 7 (training): it did "
        "not reach the messages along pipeline of forward"
    )
    assert said.endswith("where rank 1 waits.")
    assert told_by_records(tmp_path, 2, [3]).startswith("rank 3 did not answer")


def test_messages_of_a_batch_are_done_when_the_batch_is(leave, tmp_path):
    """Theirs are entries without a state, in the rank that hangs, too."""
    pair = [
        entry(4, f"nccl:{name}", state="scheduled", is_p2p=True)
        for name in ("send 0->1", "recv 0<-1")
    ]
    batch = entry(4, "nccl:coalesced", is_p2p=True, frames=[])
    done = [*pair, batch | {"state": "completed", "retired": True}]
    leave(*done, rank=1)
    leave(*done, entry(5), rank=0)
    said = told_by_records(tmp_path, 2, [])
    assert said is not None
    assert said.startswith("rank 1 did not answer")
    assert "it did not reach the all-reduce along tensor" in said
    assert said.endswith("where rank 0 waits.")
    assert str(leave(*pair, batch).wait).startswith("the messages along tensor of forward")


def test_who_hangs_ahead_of_its_device_lacks_what_others_wait_for(leave, tmp_path):
    """Rank 1 has begun a collective with rank 2, which waits for rank 0, and that for rank 1."""
    leave(entry(1, "nccl:broadcast", ("4", "data")), entry(0), rank=1)
    leave(entry(4, group=("5", "context")), rank=2)
    leave(entry(3), rank=0)
    said = told_by_records(tmp_path, 3, [])
    assert said is not None
    assert said.startswith("rank 1 did not answer")
    assert said.endswith("where rank 0 waits.")
    leave(entry(1, "nccl:broadcast", ("4", "data")), entry(3), rank=1)  # all came to it
    assert len(waits_on_nccl(tmp_path, range(2))) == 2


def test_the_record_of_a_rank_on_a_gpu_is_read(tmp_path):
    """Part of one that PyTorch 2.11 wrote of NCCL on an H200, in which rank 1 hung."""
    record = json.loads(RECORD.read_text())
    record_path(tmp_path, 0).write_bytes(pickle.dumps(record, protocol=2))
    last = next(i for i, each in enumerate(record["entries"]) if not each["retired"])
    record["entries"] = record["entries"][:last]
    record_path(tmp_path, 1).write_bytes(pickle.dumps(record, protocol=2))
    assert told_by_records(tmp_path, 2, []) == (
        "rank 1 did not answer within 6 s (parallel.timeout_seconds) while starting: it did not "
        "reach the all-reduce over all ranks of _sum (parallel/engine.py:504), where rank 0 waits."
    )


def test_a_collective_that_failed_before_its_time_lost_a_rank(leave, tmp_path):
    leave(entry(time_created_ns=time.time_ns()), rank=0)
    assert told_by_records(tmp_path, 2, []) == (
        "rank 1 went away while starting, before the all-reduce along tensor of forward "
        "(parallel/linear.py:41) in the forward pass; look for its message."
    )


def test_without_records_nothing_is_told(leave, tmp_path):
    assert read_flight_record(tmp_path, 0) is None
    leave(rank=0)
    assert told_by_records(tmp_path, 2, []) is None


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({"entries": [Harmful()], "pg_config": {}}),
        pickle.dumps({"entries": [entry()], "pg_config": {}})[:-20],
        pickle.dumps({"entries": [{"record_id": 0}], "pg_config": {}}),
        pickle.dumps([1]),
        b"",
    ],
    ids=["code", "incomplete", "another format", "a list", "empty"],
)
def test_what_is_no_record_is_left_alone(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    record_path(tmp_path, 0).write_bytes(content)
    assert read_flight_record(tmp_path, 0) is None
    assert not (tmp_path / "harmed").exists()


def test_a_users_settings_of_the_recorder_stay(tmp_path):
    ours = recorder_variables(tmp_path, {})
    assert ours["TORCH_FR_DUMP_TEMP_FILE"] + "12" == str(record_path(tmp_path, 12))
    assert recorder_variables(tmp_path, {"TORCH_FR_BUFFER_SIZE": "0"}) == {
        name: value for name, value in ours.items() if name != "TORCH_FR_BUFFER_SIZE"
    }


@pytest.mark.skipif(not hasattr(_distributed_c10d, "_dump_fr_trace"), reason="another torch")
def test_what_pytorch_writes_is_read(tmp_path):
    """Its recorder for gloo writes the format of the one for NCCL."""
    command = [sys.executable, LAUNCHED, "launch", "2", "record", tmp_path]
    subprocess.run(command, check=True, timeout=60)
    found = read_flight_record(tmp_path, 0)
    assert found is not None
    assert found.wait is not None
    assert str(found.wait).startswith("the all-reduce along tensor of record (launched.py:")
    assert found.wait.stack.splitlines()[-1].endswith(" in record")
    assert found.timeout_seconds > 0
