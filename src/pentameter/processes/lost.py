"""Telling that another process of the run went away from a failure of this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pentameter.errors import TrainingFailedError

# What gloo, nccl and the stores of torch say, each as one long line of C++.
_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "ncclRemoteError",
)
_LATE = (
    "Timed out waiting",
    "timed out waiting",
    "waiting for clients",
    "Wait timeout",
    "wait timeout",
    "socket has timed out",
    "Socket Timeout",
    "collective operation timeout",
)


class LostProcessError(TrainingFailedError):
    """Another process of the run ended or stopped answering. Why, that process knows."""


def lost_process(error: BaseException) -> Literal["gone", "late"] | None:
    """How another process was lost, where that is all that `error` says; None where it is a
    failure of this process's own."""
    for each in _chain(error):
        text = str(each)
        if isinstance(each, RuntimeError):
            if any(sign in text for sign in _GONE):
                return "gone"
            if any(sign in text for sign in _LATE):
                return "late"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what it was raised after: leaving a block may fail in a second way."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__
