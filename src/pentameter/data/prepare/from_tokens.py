"""Token files from other programs, imported into shards with their ids unchanged.

Formats, recognized by header or neighboring file:

- nanoGPT: `.bin` with uint16 ids and nothing else (a `meta.pkl` beside it is never opened);
- llm.c and modded-nanogpt: a header with 256 int32 (magic 20240520, version 1, token count),
  then uint16 ids; or magic 20240801, version 7, then uint32 ids;
- Megatron: `.bin` with ids, and beside it `.idx` (`MMIDIDX`, little-endian): version 1 (uint64),
  the ids' type code (uint8), counts of sequences and document bounds (uint64 each), then the
  sequences' lengths (int32) and offsets in bytes (int64), and the documents' bounds in sequences
  (int64).

nanoGPT and Megatron put `<|endoftext|>` after a document, llm.c before it; here a document begins
after it, and one at the very start belongs to the first document.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from pentameter.config.naming import name_of
from pentameter.data.prepare.splits import Splitting
from pentameter.data.progress import IMPORTING, Progress, no_progress
from pentameter.data.shards.format import SPLITS, find_header
from pentameter.data.shards.writer import ShardWriter
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.disk.atomic import refuse_existing, storage_errors
from pentameter.disk.lock import building
from pentameter.errors import ConfigError, CorruptError

BLOCK_TOKENS = 1 << 20
HEADER_BYTES = 1024  # 256 int32
LLMC: Mapping[tuple[int, int], np.dtype[Any]] = MappingProxyType(
    {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
)
LLMC_EVALUATION = 20240522
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_HEADER = np.dtype(
    [("magic", "S9"), ("version", "<u8"), ("code", "u1"), ("sequences", "<u8"), ("bounds", "<u8")]
)
MEGATRON_DTYPES = MappingProxyType({1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"})


@dataclass(frozen=True)
class TokenFile:
    """A file with token ids that another program wrote; `first_byte` is the offset of the first
    id."""

    path: Path
    format: str
    """`nanoGPT`, `llm.c` or `Megatron`."""
    dtype: np.dtype[Any]
    n_tokens: int
    first_byte: int = 0
    document_starts: npt.NDArray[np.int64] | None = None
    """Index of each document's first token (n_documents,); None if only `<|endoftext|>` separates
    documents."""

    def blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the ids, int64, in blocks with up to BLOCK_TOKENS each (n_tokens,). CorruptError if
        the file becomes shorter, StorageError if it cannot be read."""
        with storage_errors(self.path, "read"), self.path.open("rb") as stream:
            stream.seek(self.first_byte)
            left = self.n_tokens
            while left:
                ids = np.fromfile(stream, dtype=self.dtype, count=min(left, BLOCK_TOKENS))
                if not len(ids):
                    raise CorruptError(f"{self.path} became shorter while it was read")
                left -= len(ids)
                yield ids.astype(np.int64)


def token_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files with token ids that `paths` name; an empty list unless every path names at
    least one.

    A file is one by its suffix, `.bin` or Megatron's `.idx`. A folder stands for its `.bin` files;
    it names none if it also holds text or prepared shards (nanoGPT's `data/openwebtext` with its
    scripts is accepted). Hidden files in it, such as macOS puts beside each file of an archive
    (`._train.bin`), are left out.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [each for each in sorted(path.glob("*.bin")) if each.name[0] != "."]
            has_text = any(next(path.glob(f"*{suffix}*"), None) for suffix in (".txt", ".jsonl"))
            if not inside or has_text or find_header(path) is not None:
                return []
            found += inside
        elif path.suffix in {".bin", ".idx"}:
            found.append(path)
        else:
            return []
    return found


def open_token_file(path: Path) -> TokenFile:
    """Return a token file with its format and size: Megatron's if it has an `.idx` beside it,
    llm.c's by its header, else nanoGPT's. `path` may be the `.idx`. The ids are not read.

    Raises ConfigError for an unknown version or a missing file, CorruptError for a damaged file,
    StorageError for one that cannot be read.
    """
    path = path.with_suffix(".bin") if path.suffix == ".idx" else path
    if not path.is_file():
        raise ConfigError(f"{path} does not exist, or is not a file (in {Path.cwd()})")
    with storage_errors(path, "read"), path.open("rb") as stream:
        size = path.stat().st_size
        header = stream.read(HEADER_BYTES)
    if (index := path.with_suffix(".idx")).is_file():
        with storage_errors(index, "read"):
            return _open_megatron(path, index, size)
    if len(header) == HEADER_BYTES:
        magic, version, n_tokens = np.frombuffer(header, dtype="<i4")[:3].tolist()
        if magic == LLMC_EVALUATION:
            raise ConfigError(f"{path} holds llm.c's multiple-choice examples, not text")
        if magic in {known for known, _ in LLMC}:
            if (magic, version) not in LLMC:
                raise ConfigError(f"{path}: version {version} of llm.c's format is not known")
            dtype = LLMC[magic, version]
            _check_size(path, size - HEADER_BYTES, n_tokens, dtype)
            return TokenFile(path, "llm.c", dtype, n_tokens, HEADER_BYTES)
    dtype = np.dtype("<u2")
    _check_size(path, size, size // dtype.itemsize, dtype)
    return TokenFile(path, "nanoGPT", dtype, size // dtype.itemsize)


def files_by_split(paths: Sequence[Path]) -> dict[str, list[Path]]:
    """Return split → files, by a word in the files' names: `train`, `val` or `test`; a file without
    one is train.

    If no file is for validation, files beside the training files are added whose names differ from
    theirs only in that word: `val.bin` for `train.bin`, `fineweb_val_*.bin` for
    `fineweb_train_000001.bin`.
    """
    splits: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in paths:
        words = set(re.split(r"[^a-z]+", path.stem.lower()))
        split = "val" if words & {"val", "valid", "validation"} else "train"
        splits["test" if split == "train" and "test" in words else split].append(path)
    if not splits["val"]:
        found: set[Path] = set()
        for path in splits["train"]:
            name = glob.escape(path.name)
            pattern, n = re.subn(r"(?<![a-z])train(?![a-z])", "val", name, flags=re.I)
            if n:
                found.update(path.parent.glob(re.sub(r"[0-9]+(?=\.)", "*[0-9]", pattern)))
        splits["val"] = sorted(found)
    return splits


def import_tokens(
    files: dict[str, list[TokenFile]],
    folder: Path,
    tokenizer: Tokenizer,
    *,
    validation_fraction: float = 0.0,
    test_fraction: float = 0.0,
    progress: Progress = no_progress,
) -> None:
    """Write the files' ids as shards in a new folder. `files` maps each split (train, val, test) to
    its files, an empty list if it has none. `progress` is called with a pass's name, the tokens
    done and the tokens in all.

    If only train has files, its last ids become validation and test, by the two fractions of its
    tokens; if val or test has files, the fractions are ignored. Raises ConfigError (impossible
    fractions, no tokens, an id outside the vocabulary, a tokenizer whose ids have no length in
    bytes, folder exists), CorruptError for a file that becomes shorter, StorageError if reading or
    writing fails.
    """
    refuse_existing(folder)
    splitting = Splitting(validation_fraction, test_fraction)
    n_tokens = {split: sum(file.n_tokens for file in files[split]) for split in SPLITS}
    n_all = sum(n_tokens.values())
    if not n_all:
        raise ConfigError("the files hold no tokens; there is nothing to learn from")
    bounds = {split: {split: n} for split, n in n_tokens.items()}  # the end of each part, in ids
    if (validation_fraction or test_fraction) and not (n_tokens["val"] or n_tokens["test"]):
        bounds["train"] = dict(zip(SPLITS, splitting.ends(n_tokens["train"]), strict=True))
    first_file = next(file for split in SPLITS for file in files[split])
    name = name_of(first_file.path.absolute().stem)
    source = {
        split: [{"name": file.path.name, "tokens": file.n_tokens} for file in files[split]]
        for split in SPLITS
    }
    sizes, n_done = _token_bytes(tokenizer), 0
    with building(folder) as unfinished, ShardWriter(unfinished, name, tokenizer) as writer:
        for split in SPLITS:
            position = 0
            for ids, starts in _blocks(files[split], tokenizer):
                begin = 0
                for target, end in bounds[split].items():
                    first, stop = max(begin - position, 0), min(end - position, len(ids))
                    if first < stop:
                        inside = starts[(starts >= first) & (starts < stop)] - first
                        if position + first == begin:  # perhaps with the rest of a document
                            inside = np.union1d(0, inside)
                        part = ids[first:stop]
                        writer.write(target, part, int(sizes[part].sum()), inside)
                    begin = end
                position += len(ids)
                n_done += len(ids)
                progress(IMPORTING, n_done, n_all)
        writer.finish({"format": first_file.format, "files": source})


def _blocks(
    files: Sequence[TokenFile], tokenizer: Tokenizer
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the files' ids in blocks (n_tokens,), each with the indices in the block at which
    documents begin. Raises ConfigError for an id outside the vocabulary."""
    for file in files:
        position, after_end = 0, True  # a file begins a document
        for ids in file.blocks():
            wrong = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
            if wrong.size:
                raise ConfigError(
                    f"{file.path}: token {position + int(wrong[0])} has id {ids[wrong[0]]}, the "
                    f"tokenizer's vocabulary has {tokenizer.vocab_size}; name the tokenizer that "
                    "wrote the file with --tokenizer"
                )
            if (known := file.document_starts) is not None:
                first, last = np.searchsorted(known, [position, position + len(ids)])
                starts = known[first:last] - position
            else:
                ends = np.flatnonzero(ids == tokenizer.end_of_text)
                if position == 0:
                    ends = ends[ends > 0]
                starts = np.concatenate([[0] if after_end else [], ends + 1]).astype(np.int64)
                after_end = bool(starts.size and starts[-1] == len(ids))
                starts = starts[starts < len(ids)]
            yield ids, starts
            position += len(ids)


def _token_bytes(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """Return how many UTF-8 bytes each id adds to the decoded text, int64 (vocab_size,); 0 for
    `<|endoftext|>`. Raises ConfigError unless the tokenizer is of kind `char` or `bpe`."""
    if isinstance(tokenizer, CharTokenizer):
        return np.array([len(c.encode()) for c in tokenizer.characters], dtype=np.int64)
    if isinstance(tokenizer, BpeTokenizer):
        # Byte-level BPE writes each byte as one character.
        sizes = np.array([len(token) for token in tokenizer.tokens], dtype=np.int64)
        if tokenizer.end_of_text is not None:
            sizes[tokenizer.end_of_text] = 0
        return sizes
    raise ConfigError(
        f"a tokenizer of kind {tokenizer.kind!r} cannot have written these files; use gpt2, or "
        "a file of a character or BPE tokenizer"
    )


def _check_size(path: Path, n_bytes: int, n_tokens: int, dtype: np.dtype[Any]) -> None:
    """Raise CorruptError, naming `path`, unless `n_bytes` are exactly `n_tokens` ids in `dtype`."""
    if n_bytes != n_tokens * dtype.itemsize:
        raise CorruptError(
            f"{path} is damaged or cut short: {n_bytes} bytes of ids, expected {n_tokens} of "
            f"{dtype.itemsize} bytes each"
        )


def _open_megatron(path: Path, index: Path, size: int) -> TokenFile:
    """Return the Megatron file `path`, which has `size` bytes, with the id type and document bounds
    that its `index` gives. Raises ConfigError for an unknown version or sequences that do not lie
    one after another in the file, CorruptError for a damaged index or another size."""
    n_bytes = index.stat().st_size
    with index.open("rb") as stream:
        raw = stream.read(MEGATRON_HEADER.itemsize)
        # A NumPy string drops the zeros at its end, so the magic is compared as bytes.
        if len(raw) < MEGATRON_HEADER.itemsize or not raw.startswith(MEGATRON_MAGIC):
            raise CorruptError(f"{index} is not a Megatron index: it does not begin with MMIDIDX")
        header = np.frombuffer(raw, dtype=MEGATRON_HEADER)[0]
        if header["version"] != 1 or int(header["code"]) not in MEGATRON_DTYPES:
            raise ConfigError(
                f"{index}: version {header['version']} with ids of type {header['code']} is not "
                "known; possible: version 1 with integers"
            )
        n_sequences, n_bounds = int(header["sequences"]), int(header["bounds"])
        expected = MEGATRON_HEADER.itemsize + 12 * n_sequences + 8 * n_bounds
        # A byte per sequence may follow: its mode, where there are images beside the text.
        if n_bytes not in {expected, expected + n_sequences}:
            raise CorruptError(f"{index} is damaged: {n_bytes} bytes, expected {expected}")
        lengths = np.fromfile(stream, dtype="<i4", count=n_sequences).astype(np.int64)
        offsets = np.fromfile(stream, dtype="<i8", count=n_sequences)
        bounds = np.fromfile(stream, dtype="<i8", count=n_bounds)
    dtype = np.dtype(MEGATRON_DTYPES[int(header["code"])])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    if (lengths < 0).any() or not np.array_equal(offsets, starts * dtype.itemsize):
        raise ConfigError(f"{index}: its sequences do not follow one another in {path}")
    if n_bounds and (bounds.min() < 0 or bounds.max() > n_sequences):
        raise CorruptError(f"{index} is damaged: a document ends beyond sequence {n_sequences}")
    falls = np.flatnonzero(np.diff(bounds) < 0)
    if falls.size:
        document = int(falls[0])
        raise CorruptError(
            f"{index} is damaged: document {document} begins at sequence {bounds[document]} and "
            f"ends before it, at {bounds[document + 1]} (byte "
            f"{MEGATRON_HEADER.itemsize + 12 * n_sequences + 8 * (document + 1)}); make it anew"
        )
    n_tokens = int(ends[-1]) if n_sequences else 0
    _check_size(path, size, n_tokens, dtype)
    # Empty documents begin where the next one does, the last bound is the end of all.
    document_starts = np.unique(np.append(starts, n_tokens)[bounds])
    document_starts = document_starts[document_starts < n_tokens]
    return TokenFile(path, "Megatron", dtype, n_tokens, 0, document_starts)
