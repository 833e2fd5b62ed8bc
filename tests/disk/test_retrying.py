"""A request is made again while its failure may pass, after pauses that grow."""

import itertools

import pytest

from pentameter.disk import retrying
from pentameter.disk.retrying import growing, retried
from pentameter.errors import ConfigError, StorageError


def test_pauses_double_up_to_the_longest():
    assert list(growing(1.0, 5)) == [1, 2, 4, 8, 16]
    assert list(growing(1.0, 4, longest=3.0)) == [1, 2, 3, 3]
    assert list(itertools.islice(growing(0.001, longest=0.05), 5000))[-1] == 0.05
    assert list(growing(1.0, 0)) == []


def failed(error, n_calls):
    return StorageError(f"{n_calls} calls: {error}")


def asked(*answers):
    """A request that gives each of the answers, errors raised."""
    left = iter(answers)

    def ask():
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


@pytest.fixture
def slept(monkeypatch):
    pauses = []
    monkeypatch.setattr(retrying.time, "sleep", pauses.append)
    return pauses


def test_the_first_answer_is_returned(slept):
    busy = OSError("busy")
    assert retried(asked(busy, busy, 7), growing(1.0, 4), failed) == 7
    assert slept == [1, 2]


def test_the_last_failure_is_told(slept):
    with pytest.raises(StorageError, match="3 calls: busy"):
        retried(asked(*[OSError("busy")] * 3), (1, 1), failed)
    assert slept == [1, 1]


def test_what_will_not_pass_is_not_asked_again(slept):
    with pytest.raises(StorageError, match="1 calls: no"):
        retried(asked(PermissionError("no")), (1, 1), failed)
    with pytest.raises(StorageError, match="1 calls: busy"):
        retried(asked(OSError("busy")), (1, 1), failed, may_pass=lambda _: False)
    goes_on = iter((True, False))
    with pytest.raises(StorageError, match="2 calls: busy"):
        retried(asked(*[OSError("busy")] * 2), (1, 1), failed, lambda *_: next(goes_on))
    with pytest.raises(ConfigError, match="ours"):
        retried(asked(ConfigError("ours")), (1, 1), failed)
    assert not slept
