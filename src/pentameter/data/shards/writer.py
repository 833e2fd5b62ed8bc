"""Writes token shards, in any order of the splits; `format.py` says what lies where."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.shards.format import (
    DTYPES,
    FORMAT,
    PLACE,
    SPLITS,
    TOKENIZER_FILE,
    VERSION,
    VERSION_WITH_ANSWERS,
    header_hash,
)
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.disk.atomic import sync

SHARD_TOKENS = 1 << 28  # half a GiB of uint16
Starts = Sequence[int] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class NewAnswers:
    """The answers among ids that are written: what of them a model learns."""

    runs: Sequence[tuple[int, int]]
    """Where each starts and stops among the ids."""
    n_bytes: int
    """UTF-8 bytes of their text."""


class _Split:
    """One split as it grows: files of tokens, a file of document starts, and their counts."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._folder, self._name, self._dtype = folder, name, dtype
        self._shard_tokens = shard_tokens
        self.files: list[tuple[Path, int, str]] = []
        """(path until its final name is known, tokens, sha256) of each full file."""
        self.n_tokens = self.n_bytes = self.n_documents = 0
        self.n_answers = self.n_answer_tokens = self.n_answer_bytes = 0
        self.starts_path, self.answers_path = (
            folder / f"{name}.{kind}" for kind in ("documents", "answers")
        )
        self._starts, self._answers = self.starts_path.open("xb"), self.answers_path.open("xb")
        self._stream: BinaryIO | None = None
        self._in_file = 0
        self._hasher = hashlib.sha256()

    def write(
        self, ids: npt.NDArray[Any], n_bytes: int, starts: Starts, answers: NewAnswers | None
    ) -> None:
        """Append ids, as `ShardWriter.write` says."""
        if answers is not None:
            runs = np.asarray(answers.runs, dtype=np.int64).reshape(-1, 2)
            self._answers.write((runs + self.n_tokens).astype(PLACE).tobytes())
            self.n_answers += len(runs)
            self.n_answer_tokens += int((runs[:, 1] - runs[:, 0]).sum())
            self.n_answer_bytes += answers.n_bytes
        if len(starts):
            self._starts.write((np.asarray(starts) + self.n_tokens).astype(PLACE).tobytes())
            self.n_documents += len(starts)
        self.n_tokens += len(ids)
        self.n_bytes += n_bytes
        while len(ids):
            if self._stream is None:
                self._stream = (self._folder / f"{self._name}-{len(self.files):05d}").open("xb")
                self._hasher, self._in_file = hashlib.sha256(), 0
            part = ids[: self._shard_tokens - self._in_file]
            data = np.ascontiguousarray(part, dtype=self._dtype).data
            self._stream.write(data)
            self._hasher.update(data)
            self._in_file += len(part)
            ids = ids[len(part) :]
            if self._in_file == self._shard_tokens:
                self.finish_file()

    def finish_file(self) -> None:
        """Bring the file of tokens at hand, if there is one, to the disk."""
        if self._stream is None:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self.files.append((Path(self._stream.name), self._in_file, self._hasher.hexdigest()))
        self._stream = None

    def close(self) -> None:
        """Close the open files, whatever is in them."""
        self._starts.close()
        self._answers.close()
        if self._stream is not None:
            self._stream.close()


class ShardWriter:
    """Writes shards into an empty folder: `write`, then `finish`. `has_answers` says whether each
    `write` tells the answers among its ids, or all are to be learnt."""

    def __init__(
        self,
        folder: Path,
        name: str,
        tokenizer: Tokenizer,
        shard_tokens: int = SHARD_TOKENS,
        *,
        has_answers: bool = False,
    ) -> None:
        self._folder, self._name, self._tokenizer = folder, name, tokenizer
        self._has_answers = has_answers
        self._dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._splits = {
            split: _Split(folder, split, DTYPES[self._dtype], shard_tokens) for split in SPLITS
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

    def write(
        self,
        split: str,
        ids: npt.NDArray[Any],
        n_bytes: int,
        starts: Starts = (),
        answers: NewAnswers | None = None,
    ) -> None:
        """Append ids (n_tokens,) that stand for `n_bytes` UTF-8 bytes of text to a split.

        At the places `starts` among them documents begin.
        """
        assert (answers is not None) == self._has_answers
        self._splits[split].write(ids, n_bytes, starts, answers)

    def finish(self, text: dict[str, Any]) -> None:
        """Write the tokenizer and the header, with `text` (what was read) noted in it."""
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
            splits[split] = {
                "start": start,
                "stop": start + part.n_tokens,
                "bytes": part.n_bytes,
                "documents": part.n_documents,
            }
            if self._has_answers:
                splits[split] |= {
                    "answers": part.n_answers,
                    "answer_tokens": part.n_answer_tokens,
                    "answer_bytes": part.n_answer_bytes,
                }
            start += part.n_tokens
        parts = self._splits.values()
        places = {"documents": self._joined("documents", [part.starts_path for part in parts])}
        answers = self._joined("answers", [part.answers_path for part in parts])
        if self._has_answers:
            places["answers"] = answers
        else:
            (self._folder / answers["name"]).unlink()
        n_bytes = sum(part.n_bytes for part in self._splits.values())
        self._tokenizer.save(self._folder / TOKENIZER_FILE)
        sync(self._folder / TOKENIZER_FILE)
        header: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION_WITH_ANSWERS if self._has_answers else VERSION,
            "name": self._name,
            "dtype": self._dtype,
            "vocab_size": self._tokenizer.vocab_size,
            "n_tokens": start,
            "bytes_per_token": n_bytes / max(start, 1),
            "tokenizer": {"kind": self._tokenizer.kind, "hash": self._tokenizer.hash},
            "splits": splits,
            "files": files,
            **places,
            "text": text,
        }
        header["sha256"] = header_hash(header)
        path = self._folder / f"{self._name}.json"
        path.write_text(json.dumps(header, indent=1) + "\n", encoding="ascii")
        sync(path)

    def _joined(self, kind: str, parts: Sequence[Path]) -> dict[str, str]:
        """Join the splits' files of places, and return the entry of the whole in the header."""
        path = self._folder / f"{self._name}-{kind}.bin"
        with path.open("w+b") as joined:
            for part in parts:
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, joined)
                part.unlink()
            joined.seek(0)
            sha256 = hashlib.file_digest(joined, "sha256").hexdigest()
        sync(path)
        return {"name": path.name, "sha256": sha256}
