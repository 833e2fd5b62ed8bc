"""Telling that another process of the run went away from a failure of this one."""

from __future__ import annotations

from collections.abc import Iterator

from pentameter.errors import TrainingFailedError

# What gloo, nccl and the stores of torch say, each as one long line of C++.
_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "failed to recv, got 0 bytes",
    "remote process exited",
    "ncclRemoteError",
)
_LATE = (
    "Timed out waiting",
    "waiting for clients",
    "Wait timeout",
    "wait timeout",
    "socket has timed out",
    "Socket Timeout",
    "collective operation timeout",
)


class LostProcessError(TrainingFailedError):
    """Another process of the run ended or stopped answering. Why, that process knows."""


def lost_process(error: BaseException) -> LostProcessError | None:
    """The error to raise instead of a RuntimeError that only says another process is missing.

    None where `error` is this process's own failure.
    """
    for each in _chain(error):
        text = str(each)
        if isinstance(each, RuntimeError):
            if any(sign in text for sign in _GONE):
                return LostProcessError(f"another process of the run went away ({_short(text)})")
            if any(sign in text for sign in _LATE):
                return LostProcessError(
                    f"another process of the run did not come or does not answer ({_short(text)})"
                )
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what it was raised after: leaving a block may fail in a second way."""
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


def _short(text: str) -> str:
    """The first sentence, without the place in the C++ source."""
    line = text.strip().splitlines()[0].partition("] ")
    return (line[2] if text.startswith("[") and line[2] else line[0]).split(". ")[0].rstrip(".")
