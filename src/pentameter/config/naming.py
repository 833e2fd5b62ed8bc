"""Names for runs, evaluations and prepared files: letters and digits of any alphabet, safe in every
file system.

A name is one component of a path, so it holds no separator, no control character and no mark of
direction, and does not begin as an option or a hidden file does. It is in NFC: the same word, typed
on two machines, is one name.
"""

from __future__ import annotations

import re
from unicodedata import category, normalize

LONGEST_NAME = 100
"""Maximum characters in a name."""

LONGEST_NAME_BYTES = 180
"""Maximum bytes in a name, in UTF-8. File systems allow 255, and files' names have suffixes."""

NAME_IN_WORDS = (
    f"a name: letters and digits of any alphabet, and . _ -, a letter or digit first, at most "
    f"{LONGEST_NAME} characters ({LONGEST_NAME_BYTES} bytes)"
)


def checked_name(name: str) -> str:
    """Return the run name `name` in Unicode's NFC form. Raises ValueError if it is too long or has
    characters that no name may have."""
    name = normalize("NFC", name)
    is_short = len(name) <= LONGEST_NAME and len(name.encode()) <= LONGEST_NAME_BYTES
    if not (name and name[0].isalnum() and is_short and all(map(_is_of_names, name))):
        raise ValueError(f"must be {NAME_IN_WORDS}")
    return name


def name_of(text: str, suffix: str = "") -> str:
    """Return a valid name made from any text. Characters that a name may not have become `-`, and
    whatever precedes the first letter or digit is dropped; if nothing is left, the name is "text".
    `suffix`, whose characters must be valid, is appended; the rest is cut so that both fit."""
    kept = "".join(c if _is_of_names(c) else "\0" for c in normalize("NFC", text))
    name = re.sub("\0+", "-", kept)
    first = next((i for i, c in enumerate(name) if c.isalnum()), len(name))
    longest_bytes = LONGEST_NAME_BYTES - len(suffix.encode())
    name = name[first:].encode()[:longest_bytes].decode(errors="ignore")
    return (name[: LONGEST_NAME - len(suffix)].rstrip("._-") or "text") + suffix


def _is_of_names(character: str) -> bool:
    """Return True if a name may have this character: letters, digits, combining marks, `.`, `_` and
    `-`."""
    return character.isalnum() or character in "._-" or category(character).startswith("M")
