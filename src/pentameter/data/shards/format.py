"""Token shards: `NAME-00000.bin`, … with little-endian ids, and `NAME.json`, which describes them.

    DIR/NAME.json           dtype, counts, vocabulary size, hashes, split bounds, bytes per token
    DIR/NAME-00000.bin      uint16 or uint32 ids, nothing else; then NAME-00001.bin, …
    DIR/NAME-documents.bin  uint64: each document's first token, relative to its split
    DIR/NAME-answers.bin    uint64: start and stop of each range of assistant tokens, relative to
                            its split; only for conversations
    DIR/tokenizer.json      the tokenizer that wrote them

The files together are one sequence; `train`, `val` and `test` follow one another in it, and so they
do in the files of documents and answers. Version 1 had no file of documents: each split was one.
Version 3 is version 2 with a file of answers, written only if there is one, so that programs which
would learn every token refuse it. `writer.py` writes them, `opening.py` opens them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pentameter.data.tokenizers.base import FORMAT as TOKENIZER_FORMAT
from pentameter.disk.atomic import open_regular, read_json, sha256_of_json
from pentameter.errors import ConfigError, CorruptError, StorageError

FORMAT = "pentameter-shards"
VERSION = 2
VERSION_WITH_LOSS_MASK = 3
SPLITS = ("train", "val", "test")
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
)
COUNTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {"documents": ("documents",), "answers": ("answers", "answer_tokens", "answer_bytes")}
)
"""Maps a kind of positions file to the counts that each split has for it in the header."""
ENCODED_WHOLE: Mapping[str, str] = MappingProxyType({"encoded": "whole"})
"""Header entry that marks conversations as encoded whole. Shards from an earlier version, which
encoded them in fragments, lack it."""
POSITION = np.dtype("<u8")
HEADER_LIMIT_BYTES = 1 << 24
TOKENIZER_FILE = "tokenizer.json"


def header_hash(header: Mapping[str, Any]) -> str:
    """Return the sha256, in hex, over a header without its own "sha256" field."""
    content = {key: value for key, value in header.items() if key != "sha256"}
    return sha256_of_json(content)


def data_hash(header: Mapping[str, Any]) -> str:
    """Return the sha256, in hex, by which runs know whether data are the same. It is computed from
    a data set's `header` as `header_hash` does, but without the entry ENCODED_WHOLE: data prepared
    with and without it may have the same tokens."""
    content = {key: value for key, value in header.items() if key not in ENCODED_WHOLE}
    return header_hash(content)


def find_header(path: str | Path | None) -> Path | None:
    """Return the path of the header of prepared shards, given that path or its folder. None if
    there are no shards, or if `path` is None.

    Raises CorruptError for a folder that has shard files or a tokenizer but no header, ConfigError
    for one with several headers.
    """
    if path is None:
        return None
    path = Path(path)
    if path.is_file():
        return path if path.suffix == ".json" and _is_header(path) else None
    if not path.is_dir():
        return None
    headers = [file for file in sorted(path.glob("*.json")) if _is_header(file)]
    if len(headers) > 1:
        raise ConfigError(f"{path} holds several prepared data sets; name one of {headers}")
    shards = sorted(path.glob("*-[0-9][0-9][0-9][0-9][0-9].bin"))
    if not headers and shards:
        expected = path / f"{shards[0].name[:-10]}.json"
        raise CorruptError(f"{shards[0]} has no header: {expected} is missing")
    if not headers and _begins_with(path / TOKENIZER_FILE, TOKENIZER_FORMAT):
        raise CorruptError(f"{path} holds a tokenizer, but its shards and their header are missing")
    return headers[0] if headers else None


def _is_header(file: Path) -> bool:
    """Return True if a JSON file is a header, even a damaged one: it is one if a shard file lies
    beside it, or if FORMAT is in its first bytes."""
    if file.name == TOKENIZER_FILE:
        return False
    return file.with_name(f"{file.stem}-00000.bin").exists() or _begins_with(file, FORMAT)


def _begins_with(file: Path, words: str) -> bool:
    """Return True if `words` occur in a file's first 100 bytes; False if it cannot be read, or is a
    pipe, which might never answer."""
    try:
        with open_regular(file, follow_symlinks=True) as stream:
            return words.encode() in stream.read(100)
    except (CorruptError, StorageError):
        return False


def read_header(path: Path) -> dict[str, Any]:
    """Read a header file and return its parsed JSON, checked to be complete and consistent.

    Raises CorruptError with the file's name if it is missing or invalid, StorageError if it cannot
    be read.
    """
    if not path.exists():
        raise CorruptError(f"{path} is missing; prepare the data again")
    header = read_json(path, HEADER_LIMIT_BYTES)
    try:
        _check_header(header, path.stem)
    except CorruptError as error:
        raise CorruptError(f"{path}: {error}; prepare the data again") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(
            f"{path} is not a header of shards: {type(error).__name__} {error}; "
            "prepare the data again"
        ) from error
    return header


def _check_header(header: Mapping[str, Any], name: str) -> None:
    """Raise CorruptError unless a parsed header is complete and consistent; a missing entry may
    also raise a LookupError. `name` is the header file's name without suffix."""
    if header.get("format") != FORMAT:
        raise CorruptError(f'"format" is not {FORMAT!r}')
    if header.get("version") not in (1, VERSION, VERSION_WITH_LOSS_MASK):
        raise CorruptError(f'"version" is {header.get("version")!r}; this version reads 1 to 3')
    if header["name"] != name:
        raise CorruptError(f'"name" is {header["name"]!r}, the file is named {name!r}')
    if header["dtype"] not in DTYPES:
        raise CorruptError(f'"dtype" is {header["dtype"]!r}, not one of {", ".join(DTYPES)}')
    vocab_size = _count(header, "vocab_size")
    if not 1 <= vocab_size <= 1 << (8 * DTYPES[header["dtype"]].itemsize):
        raise CorruptError(f'"vocab_size" {vocab_size} does not fit "dtype" {header["dtype"]}')
    _check_counts(header, name)
    kinds = {1: (), VERSION: ("documents",), VERSION_WITH_LOSS_MASK: ("documents", "answers")}
    for kind in kinds[header["version"]]:
        file, expected = header[kind], f"{name}-{kind}.bin"
        if file["name"] != expected or not re.fullmatch("[0-9a-f]{64}", file["sha256"]):
            raise CorruptError(f'"{kind}" names {file["name"]!r}, not {expected!r}, or no hash')
        for part in header["splits"].values():
            for key in COUNTS[kind]:
                _count(part, key)
    if not isinstance(header["tokenizer"]["hash"], str):
        raise CorruptError('"tokenizer" has no "hash"')
    if header.get("sha256") != header_hash(header):
        raise CorruptError('its content does not match its "sha256": damaged or edited')


def _check_counts(header: Mapping[str, Any], name: str) -> None:
    """Raise CorruptError unless the token counts of files and splits agree and files are named
    NAME-00000.bin, NAME-00001.bin, … for this `name`."""
    n_tokens = _count(header, "n_tokens")
    for number, file in enumerate(header["files"]):
        # Only this name: a header cannot point outside its folder.
        if file["name"] != f"{name}-{number:05d}.bin":
            raise CorruptError(f'"files"[{number}] is named {file["name"]!r}')
        if not re.fullmatch("[0-9a-f]{64}", file["sha256"]) or _count(file, "tokens") < 1:
            raise CorruptError(f'"files"[{number}] has no proper "sha256" or "tokens"')
    in_files = sum(file["tokens"] for file in header["files"])
    if in_files != n_tokens or n_tokens < 1:
        raise CorruptError(f'"n_tokens" is {n_tokens}, its files have {in_files}')
    end = 0
    if tuple(header["splits"]) != SPLITS:
        raise CorruptError(f'"splits" are {list(header["splits"])}, not {list(SPLITS)}')
    for split, part in header["splits"].items():
        start, stop = _count(part, "start"), _count(part, "stop")
        _count(part, "bytes")
        if start != end or stop < start:
            raise CorruptError(f"split {split!r} is {start} … {stop}; it must start at {end}")
        end = stop
    if end != n_tokens:
        raise CorruptError(f'the splits end at {end}, "n_tokens" is {n_tokens}')


def _count(part: Mapping[str, Any], key: str) -> int:
    value = part[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CorruptError(f"{key!r} is {value!r}, not a count")
    return value
