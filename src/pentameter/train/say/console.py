"""The console: lines that scroll, on a terminal a live line below them, and log.txt with the same
text.

With several ranks, rank 0 prints. On every other machine one rank also prints its step lines, and
any rank prints warnings that rank 0 does not have; both begin with the rank's number. Each rank
logs everything in a file of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import StringIO
from pathlib import Path
from traceback import format_exception
from typing import Self, TextIO, cast
from unicodedata import category

from rich.cells import cell_len
from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from pentameter.data.progress import AWAITING, AWAITING_A_RANK, ProgressLines, pass_in_words
from pentameter.disk.atomic import no_check
from pentameter.formatting import size
from pentameter.processes.failures.failure import EXPECTED
from pentameter.processes.group.world import World
from pentameter.processes.standard_streams import StandardStream
from pentameter.record.log_files import LogFile

REFRESH_SECONDS = 0.1

BESIDE = "  │ "
"""Margin printed before each line of a text."""

COLUMN = " │ "
"""The separator between two columns of a line."""


class Console:
    """Context manager for everything that one rank prints: lines go to its log file, and those of
    rank 0 to the terminal, too. `world` None means a single process. With `quiet` nothing is
    printed, only logged."""

    def __init__(self, world: World | None = None, *, quiet: bool = False) -> None:
        self._world = world or World()
        # A console that goes away ends no training. The command has seen to that already.
        self._stream = (
            sys.stdout
            if isinstance(sys.stdout, StandardStream)
            else StandardStream(sys.stdout or StringIO(), "stdout", lasts=True)
        )
        self._is_told = False
        self._rich = RichConsole(
            file=cast(TextIO, self._stream),
            highlight=False,
            soft_wrap=True,
            quiet=quiet,
            markup=False,
        )
        self._live: Live | None = None
        self._last_refresh = 0.0
        self._log: LogFile | None = None
        self._pending: list[str] = []
        self._progress_lines = ProgressLines(self.say)

    def __enter__(self) -> Self:
        if self._rich.is_terminal and not self._rich.quiet and self._world.is_main:
            self._live = Live(console=self._rich, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._live is not None:
            self._live.stop()
        if error is not None and not self._world.is_main:  # rank 0's is printed, see `failure`
            lines = [str(error)] if isinstance(error, EXPECTED) else format_exception(error)
            self._to_log("".join(lines).rstrip("\n"))
        if self._is_told:
            self._to_log(f"warning: stdout had failed on the way: {self._stream.failure}")
        self.close_log()

    def open_log(self, path: Path, check_folder: Callable[[], None] = no_check) -> None:
        """Begin to log to the file `path`, with all lines printed so far first. `check_folder` is
        called before each write, as in a LogFile."""
        with suppress(OSError):  # LogFile warns about it, once
            path.parent.mkdir(exist_ok=True)
        self._log = LogFile(path, self.say, check_folder)
        for line in self._pending:
            self._to_log(line)
        self._pending.clear()
        self._tell_of_failure()

    def close_log(self, check_folder: Callable[[], None] | None = None) -> None:
        """Close the log file. A later line opens it again; from then on the given `check_folder`,
        if any, is called before each write."""
        if self._log is not None:
            self._log.close(check_folder)

    def say(self, text: str, *, of_machine: bool = False) -> None:
        """Log a line on this rank, and print it on rank 0. With `of_machine`, one rank on every
        other machine prints it, too. Control characters, which a sampled text may have, are
        replaced by U+FFFD."""
        self.say_columns([text], of_machine=of_machine)

    def say_text(self, text: str) -> None:
        """Log a text of several lines, " │ " before each, and print it on rank 0. Where the
        terminal wraps a line, each part has it too."""
        for line in text.splitlines():
            if self._world.is_main:
                width = self._rich.width - cell_len(BESIDE) if self._rich.is_terminal else None
                whole = Text(_shown(line))
                for part in whole.wrap(self._rich, max(width, 1)) if width and line else [whole]:
                    self._rich.print(Text(BESIDE) + part)
            self._to_log(f"{BESIDE}{line}")

    def say_columns(self, columns: Sequence[str], *, of_machine: bool = False) -> None:
        """Log a line made of columns, and print as many first columns as fit on the terminal: on
        rank 0, and with `of_machine` also on one rank of every other machine."""
        if self._world.is_main or (of_machine and self._world.local_rank == 0):
            self._print(self._fitted(columns, len(self._rank)))
        self._to_log(COLUMN.join(columns))

    def warn(self, warnings: Sequence[str]) -> None:
        """Print and log each warning, with "warning: " before it. Ranks other than 0 print only
        those that rank 0 does not have. Collective."""
        told = self._world.broadcast(list(warnings))
        for warning in warnings:
            self.say(f"warning: {warning}")
            if warning not in told:
                self._print(f"warning: {warning}")

    @property
    def _rank(self) -> str:
        """The prefix of a printed line, "rank 3: "; empty on rank 0."""
        return "" if self._world.is_main else f"rank {self._world.rank}: "

    def _print(self, text: str) -> None:
        self._rich.print(Text(self._rank + _shown(text)))
        self._tell_of_failure()

    def _tell_of_failure(self) -> None:
        """If writing to stdout has failed, write that once to stderr and to the log, if one is
        open."""
        if self._stream.failure is None or self._is_told or self._log is None:
            return
        self._is_told = True
        told = f"warning: stdout failed ({self._stream.failure}); the run goes on, and its log"
        self._to_log(f"{told}, which is this one, has all lines")
        with suppress(OSError, ValueError):
            print(f"pentameter: {told} {self._log.path} has all lines", file=sys.stderr, flush=True)

    def _fitted(self, columns: Sequence[str], n_taken: int = 0) -> str:
        """Join columns into one line: as many of the first ones as the terminal has room for, if
        `n_taken` character cells are taken already; at least one. If the output is no terminal,
        join all."""
        n = len(columns)
        if self._rich.is_terminal:
            room = self._rich.width - n_taken
            while n > 1 and cell_len(COLUMN.join(columns[:n])) > room:
                n -= 1
        return COLUMN.join(columns[:n])

    def sync(self) -> int:
        """Sync this rank's log file to disk if possible, and return its size so far in bytes; 0 if
        no log is open."""
        return 0 if self._log is None else self._log.sync()

    def status(self, columns: Sequence[str], below: str = "") -> None:
        """Replace the terminal's live line by those of the first `columns` that fit, and the line
        under it by `below`. Does nothing if the output is no terminal, or within REFRESH_SECONDS of
        the last call."""
        now = time.monotonic()
        if now - self._last_refresh >= REFRESH_SECONDS:
            self.show(self._fitted(columns), below)
            self._last_refresh = now

    def show(self, text: str, below: str = "") -> None:
        """Replace the live line at once by `text`, with `below` on the line under it. An empty
        `text` clears it. The next `status` is drawn at once, too. Does nothing without a
        terminal."""
        self._last_refresh = 0.0
        if self._live is not None:
            line = Text(text, style="bold", no_wrap=True, overflow="ellipsis")
            if below:
                line.append(f"\n{below}", style="not bold dim")
            self._live.update(line, refresh=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Report data preparation on this rank: `done` of `total` bytes (0: unknown) in the pass
        named `what`, such as `encoding`. It shows on the live line; without a terminal, a line is
        printed every 10 s."""
        if what == AWAITING and self._world.size > 1:
            what = AWAITING_A_RANK  # every rank prepares the data, and one is the first
        if self._live is None:
            self._progress_lines(what, done, total)
            return
        percent = f" · {100 * done / total:.0f}%" if total else ""
        self.status([f"{pass_in_words(what)} · {size(done)} of {size(total)}{percent}"])

    def _to_log(self, text: str) -> None:
        text = _shown(text)
        if self._log is None:
            self._pending.append(text)
        else:
            self._log.append(text)


def _shown(text: str) -> str:
    """Return `text` with control characters, except tabs and newlines, replaced by U+FFFD."""
    if text.isprintable():
        return text
    # Category Z has all kinds of spaces, which are harmless; Cf marks the direction of writing.
    return "".join(
        c if c.isprintable() or c in "\t\n" or category(c) == "Zs" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )
