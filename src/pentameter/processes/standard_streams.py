"""The standard streams of a process, of which any may be closed, full or read no longer.

A verb fails with its output, and says which stream it was. A training outlives it: see `outlived`.
This file imports almost nothing, so that the command can open what is closed before all else.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

NAMES = ("stdout", "stderr")
"""The streams of a process that it writes to, as errors name them."""


def open_standard_streams() -> None:
    """Open the null device as stdin, stdout or stderr where one is closed (`2>&-`). Otherwise the
    next file to be opened would get its number, and everything that is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    for name in NAMES:
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))


class StandardStream:
    """A text stream in place of stdout or stderr, whose errors name the stream. While it `lasts` it
    raises no errors: `failure` then holds the first one's reason, and later output is lost, also
    that of child processes and C++ code."""

    def __init__(self, stream: TextIO, name: str, *, lasts: bool = False) -> None:
        self._stream, self.name, self.lasts = stream, name, lasts
        self.failure: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text` to the stream, and return its length. While the stream `lasts`, a failure
        raises no error."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError) as error:
            self._fail(error)
            return len(text)

    def flush(self) -> None:
        """Write out the text that is buffered."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._fail(error)

    def _fail(self, error: OSError | ValueError) -> None:
        if not isinstance(error, OSError) and not self._stream.closed:
            raise error  # of the text, not of the file
        reason = getattr(error, "strerror", None) or str(error)
        self.failure = self.failure or reason
        # What is held back would fail again, at the latest as the interpreter ends.
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if not self.lasts:
            raise OSError(getattr(error, "errno", errno.EBADF), reason, self.name) from None


@contextmanager
def named_standard_streams() -> Iterator[None]:
    """Context manager: replace stdout and stderr by a `StandardStream` each while the block
    runs."""
    out, err = (cast(TextIO, StandardStream(getattr(sys, name), name)) for name in NAMES)
    with redirect_stdout(out), redirect_stderr(err):
        yield


@contextmanager
def outlived() -> Iterator[None]:
    """Context manager: errors on stdout and stderr raise nothing inside the block. It needs
    `named_standard_streams` around it."""
    streams = [each for each in (sys.stdout, sys.stderr) if isinstance(each, StandardStream)]
    for each in streams:
        each.lasts = True
    try:
        yield
        for each in streams:
            each.flush()
    finally:
        for each in streams:
            each.lasts = False
