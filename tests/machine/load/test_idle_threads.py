"""Idle threads spin as long as was chosen, and sleep while teams of OpenMP are held."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pentameter.machine.load import idle_threads
from pentameter.machine.load.idle_threads import SPIN, is_chosen, prepare_threads

LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="GNU's runtime, and /proc")


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_how_threads_wait_is_the_users_choice(monkeypatch, name):
    monkeypatch.setattr(idle_threads, "cpu_quota", lambda: None)
    chosen = {name: "7"}
    prepare_threads(chosen)
    assert chosen == {name: "7"}
    assert not is_chosen(chosen)
    assert not is_chosen({**SPIN, "OMP_WAIT_POLICY": "PASSIVE"})


def test_how_threads_wait_is_chosen_before_torch_is_loaded():
    """The runtime reads its variables once, when torch loads it."""
    code = (
        "import os, sys, pentameter as pm; assert 'torch' not in sys.modules;"
        "from pentameter.machine.load.idle_threads import is_chosen; print(is_chosen());"
        "pm.Trainer; print('torch' in sys.modules, is_chosen())"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept
    )
    assert done.stdout == "False\nTrue True\n"


@LINUX_ONLY
def test_waiting_threads_sleep_while_more_are_managed_than_there_are_cores():
    """The runtime's own rule, with a spin count that the environment sets."""
    code = """
import os, time, torch
from pentameter.machine.load.idle_threads import put_to_sleep
n = len(os.sched_getaffinity(0))
torch.set_num_threads(max(2, n))
numbers = torch.empty(1 << 20)
def waits():
    numbers.fill_(0.0)  # after it the other threads wait
    start = time.process_time()
    time.sleep(0.2)
    return time.process_time() - start
waits()  # its own threads are managed from here on
teams = put_to_sleep(max(2, n), n)
asleep = min(waits() for _ in range(3))
teams.close()
print(asleep, max(waits() for _ in range(3)))
"""
    environment = {**os.environ, "GOMP_SPINCOUNT": "1000000000", "KMP_BLOCKTIME": "3"}
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    asleep, spinning = map(float, done.stdout.split())
    assert 20 * asleep < spinning
