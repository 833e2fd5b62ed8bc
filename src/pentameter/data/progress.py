"""Progress through long passes over data: the passes' names, and plain lines that report it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `import pentameter.data` would feel it
    from rich.progress import Progress as BarsOfRich
    from rich.progress import TaskID

Progress = Callable[[str, int, int], None]
"""A callback: called with the pass's name (one of those below), the bytes done, and an estimate of
all bytes."""

READING, TRAINING, ENCODING = "reading", "training", "encoding"
MERGING = "merging"  # pairs into the tokenizer's tokens; how far that is, is not known
IMPORTING, VERIFYING = "importing", "verifying"
BEGINNING = "beginning"  # the first part of a stream
AWAITING = "awaiting"  # another process prepares the same
AWAITING_A_RANK = "awaiting a rank"  # which may be of the same run


def no_progress(name: str, done: int, total: int) -> None:
    """Do nothing: the default where a function is to be called with progress."""


LINE_SECONDS = 10.0
"""Seconds between two progress lines."""

_WORDS = {
    TRAINING: "training the tokenizer",
    MERGING: "merging pairs into the tokenizer's tokens",
    IMPORTING: "importing the tokens",
    VERIFYING: "verifying the tokens",
    BEGINNING: "tokenizing the beginning of the text; training starts after it",
    AWAITING: "another process prepares the same data; waiting for it",
    AWAITING_A_RANK: "another rank, or another run, prepares the same data; waiting for it",
}
_WAITS = (MERGING, BEGINNING, AWAITING, AWAITING_A_RANK)


def pass_in_words(name: str) -> str:
    """Return a pass's name in words for people: "encoding the text"."""
    return _WORDS.get(name, f"{name} the text")


class ProgressLines:
    """A `Progress` callback that prints a plain line every `LINE_SECONDS`, for output without a
    terminal.

    The line has the pass, its percentage, MB, MB/s, tokens (as given to `count_tokens`) and the
    time left. `say` prints one line; `clock` returns seconds.
    """

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say, self._clock = say, clock
        self._last_line = clock()
        self._pass = ""
        self._began, self._first_bytes = 0.0, 0  # of the pass, as this process saw it
        self._n_tokens = 0

    def __call__(self, name: str, done: int, total: int) -> None:
        """Print a line on the pass `name`, with `done` of about `total` bytes, if LINE_SECONDS have
        passed since the last line. A pass of which nothing more is heard gets a single line at
        once."""
        now = self._clock()
        if name != self._pass:
            self._pass, self._began, self._first_bytes = name, now, done
            if name in _WAITS:  # nothing follows until it has ended
                self._say(pass_in_words(name))
        if now - self._last_line < LINE_SECONDS or name in _WAITS:
            return
        self._last_line = now
        parts = [f"{pass_in_words(name)}: {min(done, total) / max(total, 1):.0%}"]
        parts.append(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB")
        seconds, n_bytes = now - self._began, done - self._first_bytes
        has_rate = seconds > 0 and n_bytes > 0
        if has_rate:
            parts.append(f"{n_bytes / 1e6 / seconds:,.1f} MB/s")
        if self._n_tokens:
            parts.append(f"{self._n_tokens:,} tokens")
        if has_rate:
            left = max(0, total - done) * seconds / n_bytes
            parts.append(f"{timedelta(seconds=round(left))} left")
        self._say(" · ".join(parts))

    def count_tokens(self, n_tokens: int) -> None:
        """Set the number of tokens written so far, which the next line shows."""
        self._n_tokens = n_tokens


class ProgressBars:
    """A `Progress` callback that draws one bar for each pass over the data on a terminal, the last
    one with the tokens per second. `bars` is the Progress object of the package rich, which must be
    shown meanwhile."""

    def __init__(self, bars: BarsOfRich) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._first: tuple[float, int] | None = None

    def __call__(self, name: str, done: int, total: int) -> None:
        """Update the pass's bar, created on the first call. For a pass that waits for another
        process, print a line instead."""
        if name == AWAITING:
            self._bars.console.print(pass_in_words(name))
            return
        if name == MERGING:  # a bar that moves, without an end
            self._tasks[name] = self._bars.add_task(name, total=None, tokens="")
            return
        if (merging := self._tasks.pop(MERGING, None)) is not None:
            self._bars.update(merging, completed=1, total=1)
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, tokens="")
        self._bars.update(self._tasks[name], completed=done, total=max(total, done))

    def count_tokens(self, n_tokens: int) -> None:
        """Set the number of tokens written so far; their rate counts from the first call."""
        now = time.perf_counter()
        self._first = self._first or (now, n_tokens)
        began, before = self._first
        if now > began:
            speed = f"{(n_tokens - before) / (now - began):,.0f} tokens/s"
            self._bars.update(list(self._tasks.values())[-1], tokens=speed)


@contextmanager
def progress_on_stderr() -> Iterator[ProgressLines | ProgressBars]:
    """Context manager that yields a `Progress` callback for stderr: a bar per pass on a terminal,
    else a line every LINE_SECONDS."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(lambda line: print(line, file=sys.stderr, flush=True))
        return
    columns = (
        rich.TextColumn("{task.description:>8}"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[tokens]}"),
    )
    with rich.Progress(*columns, console=console) as bars:
        yield ProgressBars(bars)
