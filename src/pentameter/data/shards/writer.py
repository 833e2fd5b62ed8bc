"""Writing token shards, the splits in any order; `format.py` describes the files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.shards.format import (
    COUNTS,
    DTYPES,
    FORMAT,
    POSITION,
    SPLITS,
    TOKENIZER_FILE,
    VERSION,
    VERSION_WITH_LOSS_MASK,
    header_hash,
)
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.disk.atomic import sync

SHARD_TOKENS = 1 << 28  # half a GiB of uint16


class _Split:
    """One split as it grows: files with tokens, files with positions, and the header's counts."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], kinds: Sequence[str]) -> None:
        self._folder, self._name, self._dtype = folder, name, dtype
        self.files: list[tuple[Path, int, str]] = []
        """(path until its final name is known, tokens, sha256) for each full file."""
        self.n_tokens = 0
        self.counts = dict.fromkeys(("bytes", *(key for kind in kinds for key in COUNTS[kind])), 0)
        """Header key → count."""
        self.positions = {kind: (folder / f"{name}.{kind}").open("xb") for kind in kinds}
        """Kind (`documents`, `answers`) → file of positions in the split."""
        self._stream: BinaryIO | None = None
        self._in_file = 0
        self._hasher = hashlib.sha256()

    def add_positions(self, kind: str, positions: npt.NDArray[np.int64]) -> None:
        """Append positions (n,), relative to the next token, to the file of their kind."""
        self.positions[kind].write((positions + self.n_tokens).astype(POSITION).tobytes())

    def append(self, ids: npt.NDArray[Any]) -> None:
        """Append ids (n_tokens,) to the current file of tokens, and to new ones as it fills."""
        self.n_tokens += len(ids)
        while len(ids):
            if self._stream is None:
                self._stream = (self._folder / f"{self._name}-{len(self.files):05d}").open("xb")
                self._hasher, self._in_file = hashlib.sha256(), 0
            block = ids[: SHARD_TOKENS - self._in_file]
            data = np.ascontiguousarray(block, dtype=self._dtype).data
            self._stream.write(data)
            self._hasher.update(data)
            self._in_file += len(block)
            ids = ids[len(block) :]
            if self._in_file == SHARD_TOKENS:
                self.finish_file()

    def finish_file(self) -> None:
        """Sync and close the current file of tokens, if there is one."""
        if self._stream is None:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self.files.append((Path(self._stream.name), self._in_file, self._hasher.hexdigest()))
        self._stream = None

    def close(self) -> None:
        """Close the open files, whatever is in them."""
        for stream in (*self.positions.values(), self._stream):
            if stream is not None:
                stream.close()


class ShardWriter:
    """Writes shards into an empty folder: `write`, then `finish`.

    `has_loss_mask`: every `write` has a loss mask; otherwise all tokens are learned.
    """

    def __init__(
        self, folder: Path, name: str, tokenizer: Tokenizer, *, has_loss_mask: bool = False
    ) -> None:
        self._folder, self._name, self._tokenizer = folder, name, tokenizer
        self._kinds = ("documents", "answers") if has_loss_mask else ("documents",)
        self._dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._splits = {
            split: _Split(folder, split, DTYPES[self._dtype], self._kinds) for split in SPLITS
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for split in self._splits.values():
            split.close()

    @property
    def n_tokens(self) -> int:
        """Tokens written so far."""
        return sum(split.n_tokens for split in self._splits.values())

    def n_tokens_in(self, split: str) -> int:
        """Tokens written so far into a split."""
        return self._splits[split].n_tokens

    def write(
        self,
        split: str,
        ids: npt.NDArray[Any],
        n_bytes: int,
        starts: Sequence[int] | npt.NDArray[np.int64] = (),
        loss_mask: npt.NDArray[np.bool_] | None = None,
        n_target_bytes: int = 0,
    ) -> None:
        """Append ids (n_tokens,), which stand for `n_bytes` UTF-8 bytes of text, to a split.

        Documents begin at the indices `starts`. `loss_mask` (n_tokens,) is True for tokens to be
        learned, which stand for `n_target_bytes` bytes.
        """
        part = self._splits[split]
        if "answers" in self._kinds:
            assert loss_mask is not None
            edges = np.flatnonzero(np.diff(loss_mask, prepend=False, append=False))
            part.add_positions("answers", edges)
            part.counts["answers"] += len(edges) // 2
            part.counts["answer_tokens"] += int(loss_mask.sum())
            part.counts["answer_bytes"] += n_target_bytes
        part.add_positions("documents", np.asarray(starts, np.int64))
        part.counts["documents"] += len(starts)
        part.counts["bytes"] += n_bytes
        part.append(ids)

    def finish(self, text: dict[str, Any]) -> None:
        """Write the tokenizer and the header, which records `text`, a description of the
        source."""
        files: list[dict[str, Any]] = []
        splits: dict[str, dict[str, int]] = {}
        start = 0
        for split, part in self._splits.items():
            part.finish_file()
            part.close()
            for path, n_tokens, sha256 in part.files:
                name = f"{self._name}-{len(files):05d}.bin"
                path.rename(self._folder / name)
                files.append({"name": name, "tokens": n_tokens, "sha256": sha256})
            splits[split] = {"start": start, "stop": start + part.n_tokens, **part.counts}
            start += part.n_tokens
        n_bytes = sum(part.counts["bytes"] for part in self._splits.values())
        self._tokenizer.save(self._folder / TOKENIZER_FILE)
        sync(self._folder / TOKENIZER_FILE)
        header: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION_WITH_LOSS_MASK if "answers" in self._kinds else VERSION,
            "name": self._name,
            "dtype": self._dtype,
            "vocab_size": self._tokenizer.vocab_size,
            "n_tokens": start,
            "bytes_per_token": n_bytes / max(start, 1),
            "tokenizer": {"kind": self._tokenizer.kind, "hash": self._tokenizer.hash},
            "splits": splits,
            "files": files,
            **{kind: self._joined(kind) for kind in self._kinds},
            "text": text,
        }
        header["sha256"] = header_hash(header)
        path = self._folder / f"{self._name}.json"
        path.write_text(json.dumps(header, indent=1) + "\n", encoding="ascii")
        sync(path)

    def _joined(self, kind: str) -> dict[str, str]:
        """Concatenate the splits' files of positions; return the header's entry for the result."""
        path = self._folder / f"{self._name}-{kind}.bin"
        with path.open("w+b") as joined:
            for split in SPLITS:
                part = self._folder / f"{split}.{kind}"
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, joined)
                part.unlink()
            joined.seek(0)
            sha256 = hashlib.file_digest(joined, "sha256").hexdigest()
        sync(path)
        return {"name": path.name, "sha256": sha256}
