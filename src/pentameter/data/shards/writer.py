"""Writes token shards, with the splits in any order; `format.py` describes the files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.shards.format import (
    COUNTS,
    DTYPES,
    ENCODED_WHOLE,
    FORMAT,
    POSITION,
    SPLITS,
    TOKENIZER_FILE,
    VERSION,
    VERSION_WITH_LOSS_MASK,
    header_hash,
)
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.disk.atomic import sha256_of, sync, sync_descriptor

SHARD_TOKENS = 1 << 28  # half a GiB of uint16


class _Split:
    """One split (train, val or test) while it is written: its token files, its files of positions
    in the tokens, and its counts for the header. `kinds` names the position files to write:
    `documents` (where each begins), `answers` (where each begins and ends)."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], kinds: Sequence[str]) -> None:
        self._folder, self._name, self._dtype = folder, name, dtype
        self.files: list[tuple[Path, int, str]] = []
        """(temporary path, tokens, sha256) for each finished token file."""
        self.n_tokens = 0
        self.counts = dict.fromkeys(("bytes", *(key for kind in kinds for key in COUNTS[kind])), 0)
        """Maps a header key to its count so far."""
        self.positions = {kind: (folder / f"{name}.{kind}").open("xb") for kind in kinds}
        """Maps a kind (`documents`, `answers`) to its open file of positions."""
        self._stream: BinaryIO | None = None
        self._in_file = 0
        self._hasher = hashlib.sha256()

    def add_positions(self, kind: str, positions: npt.NDArray[np.int64]) -> None:
        """Append positions (n,) to the file for `kind`. They count from the next token to be
        written."""
        self.positions[kind].write((positions + self.n_tokens).astype(POSITION).tobytes())

    def append(self, ids: npt.NDArray[Any]) -> None:
        """Append ids (n_tokens,) to the current token file; a new file begins whenever one has
        SHARD_TOKENS."""
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
        """Sync and close the current token file and record its hash; does nothing if none is
        open."""
        if self._stream is None:
            return
        self._stream.flush()
        sync_descriptor(self._stream.fileno())
        self._stream.close()
        self.files.append((Path(self._stream.name), self._in_file, self._hasher.hexdigest()))
        self._stream = None

    def close(self) -> None:
        """Close all open files without syncing them."""
        for stream in (*self.positions.values(), self._stream):
            if stream is not None:
                stream.close()


class ShardWriter:
    """Context manager that writes shards, `NAME-00000.bin` and so on, into an empty folder: call
    `write` repeatedly, then `finish`.

    With `has_loss_mask`, every `write` needs a loss mask. Without it no loss mask is stored, and
    all tokens are learned.
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
        """Tokens written so far, over all splits."""
        return sum(split.n_tokens for split in self._splits.values())

    def n_tokens_in(self, split: str) -> int:
        """Return the tokens written so far into a split."""
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
        """Append ids (n_tokens,), which encode `n_bytes` UTF-8 bytes of text, to a split (train,
        val, test).

        `starts` are the indices in `ids` at which documents begin. `loss_mask` (n_tokens,) is True
        for tokens to be learned, which encode `n_target_bytes` bytes; both are given if the writer
        has a loss mask.
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
        """Name the token files, and write the tokenizer and the header. `text` describes the source
        in the header, as JSON values."""
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
            **(ENCODED_WHOLE if "answers" in self._kinds else {}),
        }
        header["sha256"] = header_hash(header)
        path = self._folder / f"{self._name}.json"
        path.write_text(json.dumps(header, indent=1) + "\n", encoding="ascii")
        sync(path)

    def _joined(self, kind: str) -> dict[str, str]:
        """Concatenate the splits' position files (document starts, or assistant tokens' ranges, by
        `kind`) into one; return its header entry {"name", "sha256"}."""
        path = self._folder / f"{self._name}-{kind}.bin"
        with path.open("xb") as joined:
            for split in SPLITS:
                part = self._folder / f"{split}.{kind}"
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, joined)
                part.unlink()
        sync(path)
        return {"name": path.name, "sha256": sha256_of(path)}
