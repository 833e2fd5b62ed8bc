"""GPT-2's byte alphabet: one visible character per byte."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_VISIBLE_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHER_BYTES = sorted({*range(256)} - {*_VISIBLE_BYTES})
BYTE_CHARACTERS: Mapping[str, int] = MappingProxyType(
    {chr(byte): byte for byte in _VISIBLE_BYTES}
    | {chr(0x100 + rank): byte for rank, byte in enumerate(_OTHER_BYTES)}
)
"""Maps a character of GPT-2's byte alphabet to its byte, in the order of GPT-2's ids. Visible
Latin-1 characters stand for their own bytes, characters from U+0100 on for the others."""
