"""Encodings of text files by name, as Python's codecs have them."""

from __future__ import annotations

import codecs
import difflib
from encodings.aliases import aliases

USUAL = ("utf-8", "utf-16", "gb18030", "big5", "shift_jis", "euc-kr", "cp1252", "latin-1")
_NOT_OF_FILES = frozenset(("idna", "punycode", "unicode-escape", "raw-unicode-escape"))
"""Encodings of names and of source code: text files have none of them."""


def encoding_problem(name: str) -> str | None:
    """Why `name` is no encoding of text files, and which it may have meant; None where it is one.

    Python's other codecs (`base64`, `zlib`, `rot13`) turn bytes into bytes or text into text.
    """
    if _is_text_encoding(name):
        return None
    try:
        codecs.lookup(name)
        known = True
    except (LookupError, ValueError):  # a name with a NUL is a ValueError
        known = False
    if known:
        reason = "is no encoding of text files"
    else:
        near = difflib.get_close_matches(name.lower().replace("-", "_")[:40], _known(), n=1)
        hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
        reason = f"is not known{hint}"
    return f"{reason} (usual ones: {', '.join(USUAL)})"


def _is_text_encoding(name: str) -> bool:
    try:
        "a".encode(name)  # which knows of each codec whether it is for text
        return codecs.lookup(name).name not in _NOT_OF_FILES
    except (LookupError, ValueError):
        return False


def _known() -> list[str]:
    return [name for name in sorted({*aliases, *aliases.values()}) if _is_text_encoding(name)]
