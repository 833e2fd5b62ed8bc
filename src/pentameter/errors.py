"""The package's exceptions, one per exit code, and helpers for their messages: printable text, and
the nearest word, file or divisor that the user may have meant."""

from __future__ import annotations

import difflib
import math
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LONGEST_WORD = 600
"""Most characters of a word, such as a path, that a message shows whole; longer words lose their
middle."""

LONGEST_MESSAGE = 6000
"""Most characters of a message that are shown; more than our longest, a list of problems, has. A
longer one loses its middle."""

MOST_FILES = 8
"""Most names that a message lists from a folder with a missing file."""

LONGEST_COMPARED = 80
"""Longest prefix of a word that is compared with known words, in characters; comparing
takes quadratic time."""


def printable(text: str, keep: str = "") -> str:
    """Return `text` with characters that a terminal acts on or cannot show (control characters,
    direction marks, lone surrogates) written as escapes such as `\\x1b`; those in `keep` stay."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def terminal_message(message: str) -> str:
    """Return an error's message ready to print: line breaks kept, all else that a terminal acts on
    escaped (`printable`).

    Words over LONGEST_WORD and messages over LONGEST_MESSAGE characters lose their middle; words
    first, so that the remedy behind a path stays.
    """
    message = printable(message, keep="\n")
    message = re.sub(
        rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _without_middle(word[0], LONGEST_WORD), message
    )
    return _without_middle(message, LONGEST_MESSAGE)


def remark(*lines: str) -> None:
    """Print each line on stderr, with `pentameter: ` before it and escaped for a terminal
    (`terminal_message`)."""
    for line in lines:
        print(f"pentameter: {terminal_message(line)}", file=sys.stderr, flush=True)


def _without_middle(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half + 1 :]}"


def lone_surrogate(text: str) -> int | None:
    """Return the index of the first lone surrogate in a text (U+D800 … U+DFFF, half of a pair in
    UTF-16); None if there is none. Such a text cannot be written as UTF-8. Reading a file as UTF-8
    never gives one; escapes in JSON and arguments of a command line may."""
    if text.isascii():  # known without reading it
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the member of `known` with a spelling similar to `word`, which was probably meant;
    None if there is none."""
    matches = difflib.get_close_matches(word[:LONGEST_COMPARED], list(known), n=1)
    return matches[0] if matches else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return an ending for messages about an unknown word: "; did you mean …?", else ""."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def near_files(path: Path) -> str:
    """Return the ending of a message about the missing file `path`: `; did you mean …?` with
    similar names in its folder, else `; beside it are …` with some of the names there, else ""."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.name[0] != ".")
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return ""
    near = difflib.get_close_matches(path.name[:LONGEST_COMPARED], names, n=3)
    if near:
        return f"; did you mean {either(printable(str(path.parent / name)) for name in near)}?"
    more = ", …" if len(names) > MOST_FILES else ""
    shown = listed(map(printable, names[:MOST_FILES]))
    return f"; beside it are {shown}{more}" if names else ""


def near_run(path: Path) -> str:
    """Return the ending of a message about the missing folder `path`: `; did you mean runs/PATH?`
    if that folder exists, else ""."""
    run = "runs" / path
    try:
        is_there = run != path and run.is_dir()
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return ""
    return f"; did you mean {printable(str(run))}?" if is_there else ""


def divisors(n: int) -> list[int]:
    """Return all divisors of n, ascending; [] for 0.

    Takes √n divisions, so that a mistyped huge number is refused as fast as any other.
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def nearest_divisors(n: int, wanted: int) -> list[int]:
    """Return the four divisors of n nearest to `wanted`, ascending; all if n has fewer."""
    return sorted(sorted(divisors(n), key=lambda d: (abs(d - wanted), d))[:4])


def listed(values: Iterable[object]) -> str:
    """Join values as text with commas: "a, b, c"."""
    return ", ".join(map(str, values))


def few(values: Iterable[Any], most: int = 5) -> str:
    """Sort values and join them as text with commas; of more than `most`, the first ones and how
    many more there are: "a, b, c and 9 more"."""
    ordered = sorted(values)
    rest = len(ordered) - most
    return listed(ordered[:most]) + (f" and {rest} more" if rest > 0 else "")


def either(values: Iterable[object]) -> str:
    """Join values as text with "or": "a or b or c"."""
    return " or ".join(map(str, values))


def exit_reason(code: int) -> str:
    """Return in words how a process ended: `ended with exit code 1`, or for a negative `code`,
    which is the number of a signal, `was killed by SIGKILL (out of memory?)`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"


NO_WINDOWS = (
    "pentameter runs on Linux and macOS. On Windows it runs inside WSL 2, Microsoft's Linux: "
    "`wsl --install` in a terminal, then install and start pentameter there"
)
"""The refusal on Windows, which has neither the signals nor the file locks of others."""


class PentameterError(Exception):
    """Base for errors that the user can act on. The message gives the value, the place and a
    remedy; `exit_code` is the command's."""

    exit_code = 1


class ConfigError(PentameterError):
    """Raised for a wrong configuration, or for wrong usage of a command."""

    exit_code = 2


class CorruptError(PentameterError):
    """Raised when data or a checkpoint is damaged, malformed, or belongs to something else."""

    exit_code = 65


class TrainingFailedError(PentameterError):
    """Raised when training, or a check of it, has to give up: the loss is not finite, a worker
    hangs or dies, or results that must be equal differ."""

    exit_code = 70


class RunFolderInUseError(PentameterError):
    """Raised when another process owns the run folder."""

    exit_code = 73


class StorageError(PentameterError):
    """Raised when reading or writing fails: the disk is full, permission is denied, a folder is
    gone."""

    exit_code = 74


class InterruptedRunError(PentameterError):
    """Raised when a signal stopped the run after it was saved; the same command resumes it."""

    exit_code = 75

    def __init__(self, message: str, *, agreed: bool = True) -> None:
        super().__init__(message)
        self.agreed = agreed
        """True if all processes stop at this step; False if this one stopped by itself,
        before training."""


def missing_package(doing: str, what: str, extra: str, instead: str = "") -> ConfigError:
    """Return, without raising it, the ConfigError for a package that is not installed. Its message
    holds `doing`, the action that needs the package (`reading s3://…`), `what` is missing, the pip
    command that installs it as this package's extra `extra`, and `instead`, another way out; "" for
    none."""
    other = f", or {instead}" if instead else ""
    return ConfigError(
        f"{doing} needs a package that is not installed ({what}); "
        f"`pip install 'pentameter[{extra}]'`{other}"
    )
