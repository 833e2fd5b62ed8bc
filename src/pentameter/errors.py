"""One exception per exit code, and what their messages are made of: printable text and the nearest
word or divisor that the user may have meant."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from pathlib import Path

LONGEST_WORD = 600
"""Characters without a space, as of a path, that a message shows whole."""

LONGEST_MESSAGE = 6000
"""Characters of a message; more than the longest of ours has, a list of problems."""

MOST_FILES = 8
"""Files of a folder that a message names."""

LONGEST_COMPARED = 80
"""Characters of a word that is compared with the known ones, which takes the square of them."""


def printable(text: str, keep: str = "") -> str:
    """`text` with what a terminal would act on or cannot show (control characters, marks of
    direction, lone surrogates) written as escapes: `\\x1b`. The characters of `keep` stay."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii")
        for c in text
    )


def terminal_message(message: str) -> str:
    """An error's message as it is printed: its own line breaks kept, everything else `printable`.

    What is too long loses its middle: a word first, so that the remedy behind a path stays.
    """
    message = printable(message, keep="\n")
    message = re.sub(
        rf"\S{{{LONGEST_WORD + 1},}}", lambda word: _without_middle(word[0], LONGEST_WORD), message
    )
    return _without_middle(message, LONGEST_MESSAGE)


def _without_middle(text: str, longest: int) -> str:
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half + 1 :]}"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The member of `known` that `word` was probably meant to be, if any."""
    matches = difflib.get_close_matches(word[:LONGEST_COMPARED], list(known), n=1)
    return matches[0] if matches else None


def near_files(path: Path) -> str:
    """The end of a message about a path that does not exist: the files of its folder that may have
    been meant, or else some of those that are there; nothing where there are none."""
    try:
        names = sorted(entry.name for entry in path.parent.iterdir() if entry.name[0] != ".")
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name[:LONGEST_COMPARED], names, n=3)
    if near:
        return f"; did you mean {either(printable(str(path.parent / name)) for name in near)}?"
    more = ", …" if len(names) > MOST_FILES else ""
    shown = listed(map(printable, names[:MOST_FILES]))
    return f"; beside it are {shown}{more}" if names else ""


def nearest_divisors(n: int, wanted: int, count: int = 4) -> list[int]:
    """The `count` divisors of `n` nearest to `wanted`, ascending.

    Takes √n divisions, so that a mistyped huge number is refused as fast as any other.
    """
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = {*small, *(n // d for d in small)}
    return sorted(sorted(divisors, key=lambda d: (abs(d - wanted), d))[:count])


def listed(values: Iterable[object]) -> str:
    """The values with commas between them."""
    return ", ".join(map(str, values))


def either(values: Iterable[object]) -> str:
    """The values with an `or` between them."""
    return " or ".join(map(str, values))


class PentameterError(Exception):
    """Anything the user can act on. The message says what, where and what to do instead."""

    exit_code = 1


class ConfigError(PentameterError):
    """Wrong usage or configuration."""

    exit_code = 2


class CorruptError(PentameterError):
    """Data or a checkpoint is damaged, malformed or does not belong here."""

    exit_code = 65


class TrainingFailedError(PentameterError):
    """Training gave up: the loss is not finite, a worker hangs, or copies of a weight differ."""

    exit_code = 70


class RunFolderInUseError(PentameterError):
    """Another process owns the run folder."""

    exit_code = 73


class StorageError(PentameterError):
    """Reading or writing failed: disk full, permission denied, folder gone."""

    exit_code = 74


class InterruptedRunError(PentameterError):
    """A signal stopped the run after it was saved; the same command continues it."""

    exit_code = 75

    def __init__(self, message: str, *, agreed: bool = True) -> None:
        super().__init__(message)
        self.agreed = agreed
        """True if all processes stop at this step; else this one left alone, before any."""
