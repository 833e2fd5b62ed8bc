"""Token shards: `NAME-00000.bin`, … of little-endian ids, and `NAME.json` that describes them.

    DIR/NAME.json           dtype, counts, vocabulary size, hashes, split bounds, bytes per token
    DIR/NAME-00000.bin      uint16 or uint32 ids, nothing else; then NAME-00001.bin, …
    DIR/NAME-documents.bin  uint64: the place in its split where each document starts
    DIR/tokenizer.json      the tokenizer that wrote them

The files together are one sequence; `train`, `val` and `test` are its first, middle and last part,
and so they are in the file of documents. Version 1 had no such file: each split was one document.
`pentameter.data.shards.writer` writes them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.data.prepare.progress import VERIFYING, Progress
from pentameter.data.shards.token_sequence import TokenSequence
from pentameter.data.tokenizers.tokenizer import FORMAT as TOKENIZER_FORMAT
from pentameter.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError

FORMAT = "pentameter-shards"
VERSION = 2
SPLITS = ("train", "val", "test")
DTYPES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
)
PLACE = np.dtype("<u8")
CHECK_TOKENS = 1 << 21
CHECK_THREADS = 8  # files at once: one core hashes more slowly than an array of disks reads
HEADER_LIMIT_BYTES = 1 << 24
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Shards:
    """Prepared shards as their checked header describes them."""

    folder: Path
    name: str
    tokenizer: Tokenizer
    dtype: np.dtype[Any]
    files: tuple[tuple[str, int, str], ...]
    """(file name, tokens, sha256) of each file."""
    splits: dict[str, tuple[int, int, int]]
    """(first token, end, UTF-8 bytes of its text) of each split."""
    documents: tuple[str, str] | None
    """(file name, sha256) of the file of documents; None in version 1."""
    n_documents: dict[str, int]
    """Documents in each split."""
    hash: str
    """sha256 of the header, and through the files' hashes of all content."""

    def tokens(self) -> dict[str, TokenSequence]:
        """The tokens of each split, memory-mapped."""
        arrays = [
            np.memmap(self.folder / name, dtype=self.dtype, mode="r", shape=(n_tokens,))
            for name, n_tokens, _ in self.files
        ]
        return {
            split: TokenSequence(arrays, start, stop)
            for split, (start, stop, _) in self.splits.items()
        }

    def document_starts(self) -> dict[str, npt.NDArray[np.int64]]:
        """The place of each document's first token in its split, memory-mapped."""
        if self.documents is None:
            return {split: np.zeros(n, np.int64) for split, n in self.n_documents.items()}
        # Places are far below 2^63, so the same bytes are int64, which indexing wants.
        places = _map(self.folder / self.documents[0], np.dtype("<i8"))
        starts, first = {}, 0
        for split, n in self.n_documents.items():
            starts[split] = places[first : first + n]
            first += n
        return starts


def header_hash(header: dict[str, Any]) -> str:
    """sha256, in hex, of a header without its own "sha256"."""
    content = {key: value for key, value in header.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find_header(path: Path) -> Path | None:
    """The header file of prepared shards at a path, None where there are none.

    `path` is the header itself or its folder. Raises CorruptError for a folder that has shard
    files but no header, ConfigError for one with several.
    """
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
    """Whether a JSON file is, or once was, a header: by its neighbour or its first words."""
    if file.name == TOKENIZER_FILE:
        return False
    return file.with_name(f"{file.stem}-00000.bin").exists() or _begins_with(file, FORMAT)


def _begins_with(file: Path, words: str) -> bool:
    """Whether `words` stand in the first bytes of a file that can be read."""
    try:
        with file.open("rb") as stream:
            return words.encode() in stream.read(100)
    except OSError:
        return False


def open_shards(
    header_path: Path, *, verify: bool = True, progress: Progress | None = None
) -> Shards:
    """Open prepared shards: header, tokenizer, sizes, every id and every file's hash are checked.

    Without `verify` the hashes are not: another process of this machine checks them. Raises
    CorruptError that names file and place for whatever is damaged.
    """
    header = _read_header(header_path)
    folder, name = header_path.parent, header_path.stem
    try:
        tokenizer = load_tokenizer(folder / TOKENIZER_FILE)
    except ConfigError as error:
        raise CorruptError(
            f"{folder / TOKENIZER_FILE} is missing; prepare the data again"
        ) from error
    if tokenizer.hash != header["tokenizer"]["hash"]:
        raise CorruptError(
            f"{folder / TOKENIZER_FILE} is not the tokenizer that wrote {header_path}: hash "
            f"{tokenizer.hash}, expected {header['tokenizer']['hash']}"
        )
    if tokenizer.vocab_size != header["vocab_size"]:
        raise CorruptError(
            f'{header_path}: "vocab_size" is {header["vocab_size"]}, its tokenizer has '
            f"{tokenizer.vocab_size}"
        )
    shards = Shards(
        folder=folder,
        name=name,
        tokenizer=tokenizer,
        dtype=DTYPES[header["dtype"]],
        files=tuple((file["name"], file["tokens"], file["sha256"]) for file in header["files"]),
        splits={
            split: (part["start"], part["stop"], part["bytes"])
            for split, part in header["splits"].items()
        },
        documents=_documents_file(header),
        n_documents={
            # Version 1: one document, if there is anything.
            split: part.get("documents", min(1, part["stop"] - part["start"]))
            for split, part in header["splits"].items()
        },
        hash=header["sha256"],
    )
    for file_name, n_tokens, _ in shards.files:
        _check_size(folder / file_name, n_tokens * shards.dtype.itemsize)
    if shards.documents is not None:
        _check_documents(folder / shards.documents[0], shards, verify=verify)
    _check_tokens(shards, verify, progress)
    return shards


def _documents_file(header: dict[str, Any]) -> tuple[str, str] | None:
    file = header.get("documents")
    return None if file is None else (file["name"], file["sha256"])


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")


def _read_header(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > HEADER_LIMIT_BYTES:
            raise CorruptError(f"{path} is not a header of shards: {path.stat().st_size} bytes")
        header = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CorruptError(f"{path} is missing; prepare the data again") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{path} is not JSON: {error}") from error
    try:
        _check_header(header, path.stem)
    except CorruptError as error:
        raise CorruptError(f"{path}: {error}; prepare the data again") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(
            f"{path} is not a header of shards: {type(error).__name__} {error}; "
            "prepare the data again"
        ) from error
    checked: dict[str, Any] = header
    return checked


def _check_header(header: Any, name: str) -> None:
    """Raise CorruptError (or a lookup error) unless a parsed header is whole and consistent."""
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise CorruptError(f'"format" is not {FORMAT!r}')
    if header.get("version") not in (1, VERSION):
        raise CorruptError(f'"version" is {header.get("version")!r}; this version reads 1 and 2')
    if header["name"] != name:
        raise CorruptError(f'"name" is {header["name"]!r}, the file is named {name!r}')
    if header["dtype"] not in DTYPES:
        raise CorruptError(f'"dtype" is {header["dtype"]!r}, not one of {", ".join(DTYPES)}')
    vocab_size = _count(header, "vocab_size")
    if not 1 <= vocab_size <= 1 << (8 * DTYPES[header["dtype"]].itemsize):
        raise CorruptError(f'"vocab_size" {vocab_size} does not fit "dtype" {header["dtype"]}')
    _check_counts(header, name)
    if header["version"] != 1:
        file, expected = header["documents"], f"{name}-documents.bin"
        if file["name"] != expected or not re.fullmatch("[0-9a-f]{64}", file["sha256"]):
            raise CorruptError(f'"documents" names {file["name"]!r}, not {expected!r}, or no hash')
        for part in header["splits"].values():
            _count(part, "documents")
    if not isinstance(header["tokenizer"]["hash"], str):
        raise CorruptError('"tokenizer" has no "hash"')
    if header.get("sha256") != header_hash(header):
        raise CorruptError('its content does not match its "sha256": damaged or edited')


def _check_counts(header: dict[str, Any], name: str) -> None:
    """Raise CorruptError unless files and splits add up."""
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
    place = 0
    if tuple(header["splits"]) != SPLITS:
        raise CorruptError(f'"splits" are {list(header["splits"])}, not {list(SPLITS)}')
    for split, part in header["splits"].items():
        start, stop = _count(part, "start"), _count(part, "stop")
        _count(part, "bytes")
        if start != place or stop < start:
            raise CorruptError(f"split {split!r} is {start} … {stop}; it must start at {place}")
        place = stop
    if place != n_tokens:
        raise CorruptError(f'the splits end at {place}, "n_tokens" is {n_tokens}')


def _count(part: dict[str, Any], key: str) -> int:
    value = part[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise CorruptError(f"{key!r} is {value!r}, not a count")
    return value


def _check_size(path: Path, expected: int) -> None:
    """Raise CorruptError unless a file is there with exactly the expected number of bytes."""
    if not path.is_file():
        raise CorruptError(f"{path} is missing or not a file; prepare the data again")
    size = path.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise CorruptError(f"{path} is {what}: {size} bytes, its header says {expected}")


def _check_tokens(shards: Shards, verify: bool, progress: Progress | None) -> None:
    """Raise CorruptError unless every id is below the vocabulary size and, with `verify`, every
    file has its hash: the files are read once for both, a few of them at a time."""
    stopped = Event()
    n_tokens = sum(n for _, n, _ in shards.files)
    n_checked = 0
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        checks = [
            pool.submit(_check_file, shards, number, verify, stopped)
            for number in range(len(shards.files))
        ]
        try:
            for check, (_, n, _) in zip(checks, shards.files, strict=True):
                check.result()
                n_checked += n
                if progress is not None and verify:
                    size = shards.dtype.itemsize
                    progress(VERIFYING, n_checked * size, n_tokens * size)
        finally:  # after an error or a signal the others are not worth waiting for
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)


def _check_file(shards: Shards, number: int, verify: bool, stopped: Event) -> None:
    """Check a file of tokens as `_check_tokens` says; return early once `stopped` is set."""
    name, n_tokens, expected = shards.files[number]
    path, dtype, vocab_size = shards.folder / name, shards.dtype, shards.tokenizer.vocab_size
    digest = hashlib.sha256()
    # Read rather than mapped: a check of a large file must not fill this process's memory.
    buffer = np.empty(min(CHECK_TOKENS, n_tokens), dtype=dtype)
    try:
        with path.open("rb") as stream:
            for first in range(0, n_tokens, CHECK_TOKENS):
                if stopped.is_set():
                    return
                ids = buffer[: stream.readinto(buffer.data) // dtype.itemsize]
                if len(ids) and int(ids.max()) >= vocab_size:
                    place = int(np.argmax(ids >= vocab_size))
                    token = first + place
                    raise CorruptError(
                        f"{path}: token {token} (byte {token * dtype.itemsize}) has id "
                        f"{ids[place]}, the vocabulary has {vocab_size}; prepare the data again"
                    )
                if verify:
                    digest.update(ids.data)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    if verify:
        _check_hash(path, digest.hexdigest(), expected)


def _check_hash(path: Path, found: str, expected: str) -> None:
    """Raise CorruptError where a file's content is not what was written: a flipped bit, say."""
    if found != expected:
        raise CorruptError(
            f"{path} was changed: sha256 {found}, its header says {expected}; "
            "prepare the data again"
        )


def _check_documents(path: Path, shards: Shards, *, verify: bool) -> None:
    """Raise CorruptError unless the starts of each split begin at 0, rise, and lie in the split."""
    _check_size(path, sum(shards.n_documents.values()) * PLACE.itemsize)
    for split, starts in shards.document_starts().items():
        start, stop, _ = shards.splits[split]
        if (len(starts) > 0) != (stop > start) or (len(starts) and starts[0] != 0):
            raise CorruptError(f"{path}: the first document of {split!r} must start at 0")
        for first in range(0, len(starts), CHECK_TOKENS):
            block = starts[first : first + CHECK_TOKENS + 1]
            wrong = np.flatnonzero(np.diff(block) <= 0)
            if wrong.size or block[-1] >= stop - start:
                place = first + int(wrong[0]) + 1 if wrong.size else first + len(block) - 1
                raise CorruptError(
                    f"{path}: document {place} of {split!r} starts at {starts[place]}, not between "
                    f"the one before and the split's {stop - start} tokens; prepare the data again"
                )
    if verify and shards.documents is not None:
        try:
            with path.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        _check_hash(path, found, shards.documents[1])
