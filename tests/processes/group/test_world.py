"""`World`: what ranks tell each other of their errors."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from pentameter.errors import ConfigError, PentameterError
from pentameter.processes.group.world import OtherRankError, World
from pentameter.processes.launch.node_launch import RunFailedError


class Linked(World):
    """One of two ranks in this process, which send pickles, as torch.distributed does."""

    wire: tuple[threading.Barrier, list[bytes]]

    def all_gather(self, value):
        barrier, sent = self.wire
        try:
            sent[self.rank] = pickle.dumps(value)
            barrier.wait(10)
            received = [pickle.loads(each) for each in sent]
            barrier.wait(10)
        except BaseException:
            barrier.abort()  # a rank that leaves here leaves the other one alone
            raise
        return received

    def all_reduce_maxima(self, *values: int) -> Sequence[int]:
        return [max(each) for each in zip(*self.all_gather(values), strict=True)]


class HoldsALockError(Exception):
    def __init__(self):
        super().__init__("no answer")
        self.lock = threading.Lock()


class TakesMoreError(OSError):
    def __init__(self, message, *, response):
        super().__init__(message)
        self.response = response


def raised(error: BaseException, how: str) -> list[BaseException]:
    """What each of two ranks raises if the work of rank 1 raises `error`."""
    wire = threading.Barrier(2), [b"", b""]

    def run(rank: int) -> BaseException:
        world = type("Wired", (Linked,), {"wire": wire})(rank, 2, rank, 2)

        def work(*_):
            if rank == 1:
                raise error

        arguments = ("working", 0) if how == "patiently" else ()
        try:
            getattr(world, how)(work, *arguments)
        except BaseException as found:
            return found
        raise AssertionError(f"rank {rank} raises nothing")

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


@pytest.mark.parametrize("how", ["agreed", "gathered", "patiently"])
@pytest.mark.parametrize("error", [HoldsALockError(), TakesMoreError("no answer", response=None)])
def test_an_error_that_cannot_be_sent_is_told_to_every_rank(error, how):
    other, own = raised(error, how)
    assert own is error
    assert isinstance(other, OtherRankError)
    assert str(other) == f"{type(error).__name__}: no answer"


def test_a_known_error_that_cannot_be_sent_keeps_its_exit_code():
    other, _ = raised(RunFailedError("no room", 74), "gathered")
    assert isinstance(other, PentameterError)
    assert (str(other), other.exit_code) == ("no room", 74)


def test_an_error_that_can_be_sent_stays_what_it_is():
    other, _ = raised(ConfigError("no room"), "agreed")
    assert type(other) is ConfigError
