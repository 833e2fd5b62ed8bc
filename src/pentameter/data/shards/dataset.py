"""Prepared shards as training and evaluation see them: a tokenizer and three splits of tokens.

`open_shards` opens a folder of shards and checks all of it; `pentameter.data.open_dataset` decides
which folder that is.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pentameter.data.progress import VERIFYING, Progress
from pentameter.data.shards.format import DTYPES, PLACE, SPLITS, TOKENIZER_FILE, read_header
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError

Int64 = npt.NDArray[np.int64]

CHECK_TOKENS = 1 << 21
CHECK_THREADS = 8  # files at once: one core hashes more slowly than an array of disks reads


class TokenSequence:
    """Token ids over one or more memory-mapped arrays, read like one 1-D array.

    `tokens[a:b]` is an array (a view where it lies in one file), `tokens[i]` an int.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], start: int, stop: int) -> None:
        self._arrays = list(arrays)
        self._starts = [0]  # place of each array's first token in the whole, and the end
        for array in self._arrays:
            self._starts.append(self._starts[-1] + len(array))
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def dtype(self) -> np.dtype[Any]:
        """uint16 or uint32, little-endian."""
        return self._arrays[0].dtype

    def part(self, start: int, stop: int) -> TokenSequence:
        """The tokens [start, stop), over the same arrays."""
        return TokenSequence(self._arrays, self._start + start, self._start + stop)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """The tokens as one or more arrays, views of those they lie over."""
        found = []
        for first, array in zip(self._starts, self._arrays, strict=False):
            begin, end = max(self._start, first), min(self._stop, first + len(array))
            if begin < end:
                found.append(array[begin - first : end - first])
        return found or [np.empty(0, dtype=self.dtype)]

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> npt.NDArray[Any]: ...
    def __getitem__(self, place: int | slice) -> int | npt.NDArray[Any]:
        if not isinstance(place, slice):
            index = range(len(self))[place]  # IndexError, and negative places, as for a list
            return int(self[index : index + 1][0])
        start, stop, step = place.indices(len(self))
        if step != 1:
            raise ValueError(f"tokens are read in steps of 1, not {step}")
        start, stop = self._start + start, self._start + max(start, stop)
        parts = []
        number = bisect.bisect_right(self._starts, start) - 1
        while start < stop:
            end = min(stop, self._starts[number + 1])
            first = self._starts[number]
            parts.append(self._arrays[number][start - first : end - first])
            start, number = end, number + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self[:], dtype=dtype)


@dataclass(frozen=True, eq=False)
class Answers:
    """The answers of a split: the tokens that a model learns where it does not learn all."""

    bounds: npt.NDArray[np.int64]
    """Where each starts and stops (n_answers, 2), in order and apart; memory-mapped."""
    n_tokens: int
    n_bytes: int
    """UTF-8 bytes of their text."""

    def mask(self, start: int, stop: int) -> npt.NDArray[np.bool_]:
        """True for each of the split's tokens [start, stop) that lies in an answer."""
        inside = np.zeros(stop - start, dtype=bool)
        number = int(np.searchsorted(self.bounds[:, 1], start, side="right"))
        while number < len(self.bounds) and self.bounds[number, 0] < stop:
            first, last = self.bounds[number].tolist()
            inside[max(first - start, 0) : last - start] = True
            number += 1
        return inside

    def count(self, starts: Int64, stops: Int64) -> Int64:
        """The tokens of answers in each of the ranges [start, stop) (n,)."""
        lengths = self.bounds[:, 1] - self.bounds[:, 0]
        before = np.append(0, np.cumsum(lengths))  # tokens of the answers before each

        def up_to(places: Int64) -> Int64:
            number = np.searchsorted(self.bounds[:, 1], places, side="right")
            starts = np.append(self.bounds[:, 0], np.iinfo(np.int64).max)[number]
            return np.asarray(before[number] + np.maximum(places - starts, 0))

        return up_to(stops) - up_to(starts)

    def meet(self, starts: Int64, stops: Int64) -> npt.NDArray[np.bool_]:
        """True for each of the ranges [start, stop) (n,) that has a token of an answer."""
        numbers = np.searchsorted(self.bounds[:, 1], starts, side="right")
        firsts = np.append(self.bounds[:, 0], np.iinfo(np.int64).max)[numbers]
        return np.asarray((firsts < stops) & (starts < stops))


@dataclass(frozen=True)
class TokenSplit:
    """One split of a data set."""

    name: str
    """train, val or test."""
    tokens: TokenSequence
    """Token ids (n_tokens,), memory-mapped; reads like a 1-D array."""
    n_bytes: int
    """UTF-8 bytes of the split's text: bits per byte are per these."""
    document_starts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """First token of each document (n_documents,), counted from the split's own first."""
    answers: Answers | None = None
    """The tokens that a model learns; None where it learns all."""
    parts: tuple[TokenSplit, ...] = ()
    """The splits, each of its own data set, that this one is made of; none where it is one."""

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the split."""
        return len(self.tokens)

    @property
    def first_question(self) -> npt.NDArray[np.int64]:
        """Token ids (n_tokens,) of the first conversation up to its first answer; none where there
        is no conversation, or nothing stands before its answer."""
        for split in self.parts or (self,):
            if split.answers is not None and len(split.answers.bounds):
                answer = int(split.answers.bounds[0, 0])
                bounds = split.document_bounds
                start = int(bounds[np.searchsorted(bounds, answer, side="right") - 1])
                return np.asarray(split.tokens[start:answer], dtype=np.int64)
        return np.zeros(0, dtype=np.int64)

    @property
    def tokens_per_byte(self) -> float:
        """Tokens that are learnt ÷ UTF-8 bytes of their text."""
        if self.answers is None:
            return self.n_tokens / self.n_bytes
        return self.answers.n_tokens / self.answers.n_bytes

    @property
    def document_bounds(self) -> npt.NDArray[np.int64]:
        """First token of each document, then the end of the last (n_documents + 1,)."""
        return np.append(np.asarray(self.document_starts, dtype=np.int64), self.n_tokens)


def joined(name: str, parts: Sequence[TokenSplit]) -> TokenSplit:
    """The split that is several, one after another; it knows them as its `parts`."""
    ends = np.cumsum([0, *(part.n_tokens for part in parts)]).tolist()
    arrays = [array for part in parts if part.n_tokens for array in part.tokens.arrays()]
    starts = [
        np.asarray(p.document_starts, np.int64) + n for p, n in zip(parts, ends, strict=False)
    ]
    answers = None
    if any(part.answers is not None for part in parts):
        bounds = []
        for part, end in zip(parts, ends, strict=False):
            own = part.answers
            whole = np.array([[0, part.n_tokens]] if part.n_tokens else [], np.int64).reshape(-1, 2)
            bounds.append((whole if own is None else np.asarray(own.bounds)) + end)
        answers = Answers(
            np.concatenate(bounds),
            sum(p.n_tokens if p.answers is None else p.answers.n_tokens for p in parts),
            sum(p.n_bytes if p.answers is None else p.answers.n_bytes for p in parts),
        )
    return TokenSplit(
        name,
        TokenSequence(arrays or parts[0].tokens.arrays(), 0, ends[-1]),
        sum(part.n_bytes for part in parts),
        np.concatenate(starts),
        answers,
        tuple(parts),
    )


def beginning(split: TokenSplit, n_tokens: int) -> TokenSplit:
    """About the first `n_tokens` of a split, whole documents where it has several; of a split that
    is several, of each in proportion to its size.

    Its `n_bytes` are in proportion to its tokens.
    """
    if n_tokens >= split.n_tokens:
        return split
    if split.parts:
        sizes = [-(-n_tokens * part.n_tokens // split.n_tokens) for part in split.parts]
        return joined(
            split.name, [beginning(p, size) for p, size in zip(split.parts, sizes, strict=True)]
        )
    bounds = split.document_bounds
    whole = int(np.searchsorted(bounds, n_tokens))  # the document in which they end
    stop = int(bounds[whole]) if len(bounds) > 2 else n_tokens
    answers = split.answers
    if answers is not None:
        kept = answers.bounds[: np.searchsorted(answers.bounds[:, 0], stop)]
        count = int((kept[:, 1] - kept[:, 0]).sum())
        share = count / answers.n_tokens
        answers = Answers(kept, count, max(1, round(answers.n_bytes * share)))
    return TokenSplit(
        split.name,
        split.tokens.part(0, stop),
        max(1, round(split.n_bytes * stop / split.n_tokens)),
        split.document_starts[:whole] if len(bounds) > 2 else split.document_starts,
        answers,
    )


@dataclass(frozen=True)
class Dataset:
    """Prepared data, opened and checked."""

    tokenizer: Tokenizer
    """The tokenizer that made the tokens."""
    hash: str
    """sha256, in hex, of tokens, splits and tokenizer: the same data, wherever it lies."""
    splits: Mapping[str, TokenSplit]

    @property
    def vocab_size(self) -> int:
        """Number of distinct ids."""
        return self.tokenizer.vocab_size

    @property
    def has_conversations(self) -> bool:
        """Whether some of it are conversations, of which the answers are learnt."""
        return self.split("train").answers is not None

    def split(self, name: str) -> TokenSplit:
        """The split `train`, `val` or `test`; it may be empty. ConfigError for another name."""
        if name not in self.splits:
            raise ConfigError(f"there is no split {name!r}; possible: {', '.join(SPLITS)}")
        return self.splits[name]


def open_shards(
    header_path: Path, *, verify: bool = True, progress: Progress | None = None
) -> Dataset:
    """Open prepared shards: header, tokenizer, sizes, every id and every file's hash are checked.

    Without `verify` the hashes are not: another process of this machine checks them. Raises
    CorruptError that names file and place for whatever is damaged.
    """
    header = read_header(header_path)
    folder, dtype = header_path.parent, DTYPES[header["dtype"]]
    path = folder / TOKENIZER_FILE
    try:
        tokenizer = load_tokenizer(path)
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
    starts = _open_documents(folder, header, verify)
    answers = _open_answers(folder, header, verify)
    _check_tokens(folder, header, verify, progress)
    splits = {
        name: TokenSplit(
            name,
            TokenSequence(arrays, part["start"], part["stop"]),
            part["bytes"],
            starts[name],
            answers.get(name),
        )
        for name, part in header["splits"].items()
    }
    return Dataset(tokenizer, header["sha256"], splits)


def _open_documents(
    folder: Path, header: Mapping[str, Any], verify: bool
) -> dict[str, npt.NDArray[np.int64]]:
    """The first token of each document, by split, memory-mapped.

    Raises CorruptError unless those of each split begin at 0, rise, and lie in the split.
    """
    parts = header["splits"]
    if "documents" not in header:  # version 1: one document, if there is anything
        return {
            split: np.zeros(min(1, part["stop"] - part["start"]), np.int64)
            for split, part in parts.items()
        }
    path = folder / header["documents"]["name"]
    places = _open_places(path, sum(part["documents"] for part in parts.values()))
    by_split, first = {}, 0
    for split, part in parts.items():
        starts = by_split[split] = places[first : first + part["documents"]]
        first += part["documents"]
        _check_starts(path, split, starts, part["stop"] - part["start"])
    if verify:
        _check_file(path, header["documents"]["sha256"])
    return by_split


def _open_answers(folder: Path, header: Mapping[str, Any], verify: bool) -> dict[str, Answers]:
    """The answers by split, memory-mapped; none where all tokens are learnt.

    Raises CorruptError unless those of each split lie in it, in order and apart.
    """
    if "answers" not in header:
        return {}
    parts, path = header["splits"], folder / header["answers"]["name"]
    places = _open_places(path, 2 * sum(part["answers"] for part in parts.values()))
    by_split, first = {}, 0
    for split, part in parts.items():
        bounds = places[first : first + 2 * part["answers"]].reshape(-1, 2)
        first += 2 * part["answers"]
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
        by_split[split] = Answers(bounds, part["answer_tokens"], part["answer_bytes"])
    if verify:
        _check_file(path, header["answers"]["sha256"])
    return by_split


def _open_places(path: Path, n_places: int) -> npt.NDArray[np.int64]:
    """A file of places in splits (n_places,), memory-mapped; CorruptError for another size."""
    _check_size(path, n_places * PLACE.itemsize)
    if not n_places:  # an empty file cannot be mapped
        return np.empty(0, np.int64)
    # Places are far below 2^63, so the same bytes are int64, which indexing wants.
    return np.memmap(path, dtype=np.dtype("<i8"), mode="r")


def _check_starts(path: Path, split: str, starts: npt.NDArray[np.int64], n_tokens: int) -> None:
    """Raise CorruptError unless the starts of a split's documents are as they must be."""
    if (len(starts) > 0) != (n_tokens > 0) or (len(starts) and starts[0] != 0):
        raise CorruptError(f"{path}: the first document of {split!r} must start at 0")
    for first in range(0, len(starts), CHECK_TOKENS):
        block = starts[first : first + CHECK_TOKENS + 1]
        wrong = np.flatnonzero(np.diff(block) <= 0)
        if wrong.size or block[-1] >= n_tokens:
            place = first + int(wrong[0]) + 1 if wrong.size else first + len(block) - 1
            raise CorruptError(
                f"{path}: document {place} of {split!r} starts at {starts[place]}, not between "
                f"the one before and the split's {n_tokens} tokens; prepare the data again"
            )


def _check_size(path: Path, expected: int) -> None:
    """Raise CorruptError unless a file is there with exactly the expected number of bytes."""
    if not path.is_file():
        raise CorruptError(f"{path} is missing or not a file; prepare the data again")
    size = path.stat().st_size
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise CorruptError(f"{path} is {what}: {size} bytes, its header says {expected}")


def _check_file(path: Path, expected: str) -> None:
    """Raise CorruptError where a file does not have the expected sha256, in hex."""
    try:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    _check_hash(path, found, expected)


def _check_hash(path: Path, found: str, expected: str) -> None:
    """Raise CorruptError where a file's content is not what was written: a flipped bit, say."""
    if found != expected:
        raise CorruptError(
            f"{path} was changed: sha256 {found}, its header says {expected}; "
            "prepare the data again"
        )


def _check_tokens(
    folder: Path, header: Mapping[str, Any], verify: bool, progress: Progress | None
) -> None:
    """Raise CorruptError unless every id is below the vocabulary size and, with `verify`, every
    file has its hash: the files are read once for both, a few of them at a time."""
    dtype, stopped = DTYPES[header["dtype"]], Event()

    def check(path: Path, n_tokens: int, expected: str) -> None:
        """Check a file of tokens; return early once `stopped` is set."""
        digest = hashlib.sha256()
        # Read rather than mapped: a check of a large file must not fill this process's memory.
        buffer = np.empty(min(CHECK_TOKENS, n_tokens), dtype=dtype)
        try:
            with path.open("rb") as stream:
                for first in range(0, n_tokens, CHECK_TOKENS):
                    if stopped.is_set():
                        return
                    ids = buffer[: stream.readinto(buffer.data) // dtype.itemsize]
                    if len(ids) and int(ids.max()) >= header["vocab_size"]:
                        place = int(np.argmax(ids >= header["vocab_size"]))
                        token = first + place
                        raise CorruptError(
                            f"{path}: token {token} (byte {token * dtype.itemsize}) has id "
                            f"{ids[place]}, the vocabulary has {header['vocab_size']}; prepare "
                            "the data again"
                        )
                    if verify:
                        digest.update(ids.data)
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
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
                if progress is not None and verify:
                    itemsize = dtype.itemsize
                    progress(VERIFYING, n_checked * itemsize, header["n_tokens"] * itemsize)
        finally:  # after an error or a signal the others are not worth waiting for
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
