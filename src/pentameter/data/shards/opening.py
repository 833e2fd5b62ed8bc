"""Opens a folder of prepared shards as a data set, and checks everything in it: sizes, ids, hashes.

`pentameter.data.open_dataset` chooses the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.data.progress import VERIFYING, Progress, no_progress
from pentameter.data.shards.dataset import AssistantRanges, Dataset, TokenSequence, TokenSplit
from pentameter.data.shards.format import (
    COUNTS,
    DTYPES,
    POSITION,
    TOKENIZER_FILE,
    data_hash,
    read_header,
)
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.disk.atomic import sha256_of, storage_errors
from pentameter.errors import ConfigError, CorruptError

CHECK_TOKENS = 1 << 21
CHECK_THREADS = 8  # files at once: one core hashes more slowly than an array of disks reads


def open_shards(
    header_path: Path,
    *,
    verify: bool = True,
    progress: Progress = no_progress,
    tokenizer: Tokenizer | None = None,
) -> Dataset:
    """Open prepared shards as a Dataset: check header, tokenizer, sizes, every id and every file's
    hash.

    Without `verify` hashes are not checked, as another process on this machine does it. tokenizer:
    the one that wrote the shards, if it is loaded already; None loads it from their folder.
    progress: called with the bytes verified so far. Raises CorruptError with file and position for
    any damage, StorageError if a file cannot be read.
    """
    header = read_header(header_path)
    folder, dtype = header_path.parent, DTYPES[header["dtype"]]
    path = folder / TOKENIZER_FILE
    try:
        tokenizer = tokenizer or load_tokenizer(path)
    except ConfigError as error:
        raise CorruptError(f"{path} is missing; prepare the data again") from error
    if tokenizer.hash != header["tokenizer"]["hash"]:
        raise CorruptError(
            f"{path} is not the tokenizer that wrote {header_path}: hash {tokenizer.hash}, "
            f"expected {header['tokenizer']['hash']}"
        )
    if tokenizer.vocab_size != header["vocab_size"]:
        raise CorruptError(
            f'{header_path}: "vocab_size" is {header["vocab_size"]}, its tokenizer has '
            f"{tokenizer.vocab_size}"
        )
    arrays = []
    for file in header["files"]:
        path, n_tokens = folder / file["name"], file["tokens"]
        _check_size(path, n_tokens * dtype.itemsize)
        arrays.append(np.memmap(path, dtype=dtype, mode="r", shape=(n_tokens,)))
    starts = _open_documents(folder, header)
    assistant = _open_answers(folder, header)
    for kind in COUNTS.keys() & header.keys() if verify else ():
        path = folder / header[kind]["name"]
        _check_hash(path, sha256_of(path), header[kind]["sha256"])
    _check_tokens(folder, header, verify, progress)
    splits = {}
    for name, part in header["splits"].items():
        tokens = TokenSequence(arrays, part["start"], part["stop"])
        splits[name] = TokenSplit(name, tokens, part["bytes"], starts[name], assistant.get(name))
    return Dataset(tokenizer, data_hash(header), splits, (folder.absolute(),), header)


def _open_documents(folder: Path, header: Mapping[str, Any]) -> dict[str, npt.NDArray[np.int64]]:
    """Return split → index of each document's first token (n_documents,), memory-mapped.

    Raises CorruptError unless, in each split, they begin at 0, rise, and stay below its token
    count.
    """
    parts = header["splits"]
    if "documents" not in header:  # version 1: one document, if there is anything
        return {
            split: np.zeros(min(1, part["stop"] - part["start"]), np.int64)
            for split, part in parts.items()
        }
    path, by_split = _open_positions(folder, header, "documents", 1)
    for split, starts in by_split.items():
        _check_starts(path, split, starts, parts[split]["stop"] - parts[split]["start"])
    return by_split


def _open_answers(folder: Path, header: Mapping[str, Any]) -> dict[str, AssistantRanges]:
    """Return the assistant tokens by split, memory-mapped; {} if all tokens are learned.

    Raises CorruptError unless each split's ranges are in order, without overlap, inside the split,
    and have as many tokens in all as the header says.
    """
    if "answers" not in header:
        return {}
    found = {}
    path, by_split = _open_positions(folder, header, "answers", 2)
    for split, positions in by_split.items():
        part, bounds = header["splits"][split], positions.reshape(-1, 2)
        lengths = bounds[:, 1] - bounds[:, 0]
        ends = [0, *bounds[:, 1][-1:].tolist(), part["stop"] - part["start"]]
        in_order = (bounds[1:, 0] >= bounds[:-1, 1]).all() and (lengths > 0).all()
        if not in_order or ends != sorted(ends) or (bounds[:1, 0] < 0).any():
            raise CorruptError(
                f"{path}: the answers of {split!r} are not in order, or leave the split's "
                f"{ends[-1]} tokens; prepare the data again"
            )
        if int(lengths.sum()) != part["answer_tokens"]:
            raise CorruptError(
                f"{path}: the answers of {split!r} have {int(lengths.sum())} tokens, its header "
                f"says {part['answer_tokens']}; prepare the data again"
            )
        found[split] = AssistantRanges(bounds, part["answer_tokens"], part["answer_bytes"])
    return found


def _open_positions(
    folder: Path, header: Mapping[str, Any], kind: str, n_each: int
) -> tuple[Path, dict[str, npt.NDArray[np.int64]]]:
    """Memory-map a data set's file of token positions. Return its path, and split → positions
    (n_items · n_each,), counted from the split's first token.

    kind: `documents`, with `n_each` = 1 position per item (where a document begins), or `answers`,
    with 2 (where a range begins and ends). header: the data set's, with the file's name and each
    split's number of items. Raises CorruptError if the file's size is wrong.
    """
    path = folder / header[kind]["name"]
    ends = np.cumsum([n_each * part[kind] for part in header["splits"].values()])
    _check_size(path, int(ends[-1]) * POSITION.itemsize)
    if not ends[-1]:  # an empty file cannot be mapped
        positions: npt.NDArray[np.int64] = np.empty(0, np.int64)
    else:
        # Positions are far below 2^63, so the same bytes are int64, which indexing wants.
        positions = np.memmap(path, dtype=np.dtype("<i8"), mode="r")
    return path, dict(zip(header["splits"], np.split(positions, ends[:-1]), strict=True))


def _check_starts(path: Path, split: str, starts: npt.NDArray[np.int64], n_tokens: int) -> None:
    """Raise CorruptError unless a split's document starts begin at 0, rise, and stay below
    `n_tokens`."""
    if (len(starts) > 0) != (n_tokens > 0) or (len(starts) and starts[0] != 0):
        raise CorruptError(f"{path}: the first document of {split!r} must start at 0")
    for first in range(0, len(starts), CHECK_TOKENS):
        block = starts[first : first + CHECK_TOKENS + 1]
        wrong = np.flatnonzero(np.diff(block) <= 0)
        if wrong.size or block[-1] >= n_tokens:
            number = first + int(wrong[0]) + 1 if wrong.size else first + len(block) - 1
            raise CorruptError(
                f"{path}: document {number} of {split!r} starts at {starts[number]}, not between "
                f"the one before and the split's {n_tokens} tokens; prepare the data again"
            )


def _check_size(path: Path, expected: int) -> None:
    """Raise CorruptError unless a file exists with exactly `expected` bytes."""
    if not path.is_file():
        raise CorruptError(f"{path} is missing or not a file; prepare the data again")
    size = path.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise CorruptError(f"{path} is {what}: {size} bytes, its header says {expected}")


def _check_hash(path: Path, found: str, expected: str) -> None:
    """Raise CorruptError, about the file at `path`, if the hash `found` is not the one
    `expected`."""
    if found != expected:
        raise CorruptError(
            f"{path} was changed: sha256 {found}, its header says {expected}; "
            "prepare the data again"
        )


def _check_tokens(
    folder: Path, header: Mapping[str, Any], verify: bool, progress: Progress
) -> None:
    """Raise CorruptError unless every id is below the vocabulary size and, with `verify`, every
    token file has the hash in the header. Files are read once for both, several at a time."""
    dtype, stopped = DTYPES[header["dtype"]], Event()

    def check(path: Path, n_tokens: int, expected: str) -> None:
        """Check one file of `n_tokens` tokens whose hash should be `expected`. Return early once
        `stopped` is set, when another file was found wrong."""
        digest = hashlib.sha256()
        # Read rather than mapped: a check of a large file must not fill this process's memory.
        buffer = np.empty(min(CHECK_TOKENS, n_tokens), dtype=dtype)
        with storage_errors(path, "read"), path.open("rb") as stream:
            for first in range(0, n_tokens, CHECK_TOKENS):
                if stopped.is_set():
                    return
                ids = buffer[: stream.readinto(buffer.data) // dtype.itemsize]
                if len(ids) and int(ids.max()) >= header["vocab_size"]:
                    index = int(np.argmax(ids >= header["vocab_size"]))
                    token = first + index
                    raise CorruptError(
                        f"{path}: token {token} (byte {token * dtype.itemsize}) has id "
                        f"{ids[index]}, the vocabulary has {header['vocab_size']}; prepare the "
                        "data again"
                    )
                if verify:
                    digest.update(ids.data)
        if verify:
            _check_hash(path, digest.hexdigest(), expected)

    n_checked = 0
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        checks = [
            pool.submit(check, folder / file["name"], file["tokens"], file["sha256"])
            for file in header["files"]
        ]
        try:
            for done, file in zip(checks, header["files"], strict=True):
                done.result()
                n_checked += file["tokens"]
                if verify:
                    itemsize = dtype.itemsize
                    progress(VERIFYING, n_checked * itemsize, header["n_tokens"] * itemsize)
        finally:  # after an error or a signal the others are not worth waiting for
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
