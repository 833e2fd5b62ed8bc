"""Text of unknown origin made harmless and visible in HTML."""

from __future__ import annotations

from html import escape


def text(value: str) -> str:
    """The value with markup escaped and what no HTML file may hold replaced.

    Control characters become their pictures (U+2400 …); half of a surrogate pair, which JSON and
    file names may contain and UTF-8 may not, becomes U+FFFD.
    """
    return escape("".join(map(_visible, value)))


def _visible(character: str) -> str:
    code = ord(character)
    if code < 32 and character not in "\n\t":
        return chr(0x2400 + code)
    return "\ufffd" if code == 127 or 0xD800 <= code < 0xE000 else character
