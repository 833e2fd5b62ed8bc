"""Writes token shards, split by split or interleaved, and can go on where it was killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from pentameter.data.shards.shards import (
    DTYPES,
    FORMAT,
    PLACE,
    SPLITS,
    TOKENIZER_FILE,
    VERSION,
    header_hash,
)
from pentameter.data.tokenizers.tokenizer import Tokenizer
from pentameter.disk.storage import sync

SHARD_TOKENS = 1 << 28  # half a GiB of uint16
JOURNAL = "journal.json"


class _Split:
    """One split as it grows: files of tokens, a file of document starts, and their counts."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self._folder, self._name, self._dtype = folder, name, dtype
        self._shard_tokens = shard_tokens
        self.files: list[tuple[int, str]] = []  # tokens and sha256 of each full one
        self.n_tokens = self.n_bytes = self.n_documents = 0
        self._in_file = 0
        self._stream: BinaryIO | None = None
        self._hasher = hashlib.sha256()
        self._new_starts: list[int] = []

    def path(self, number: int) -> Path:
        """Where a file of tokens lies until its final name is known."""
        return self._folder / f"{self._name}-{number:05d}.tokens"

    @property
    def starts_path(self) -> Path:
        """Where the starts of documents lie."""
        return self._folder / f"{self._name}.documents"

    def start_document(self) -> None:
        """The next token is the first of a document."""
        self._new_starts.append(self.n_tokens)
        self.n_documents += 1

    def write(self, ids: npt.NDArray[Any], n_bytes: int) -> None:
        """Append ids (n_tokens,)."""
        self.n_tokens += len(ids)
        self.n_bytes += n_bytes
        while len(ids):
            if self._stream is None:
                self._stream = self.path(len(self.files)).open("xb")
                self._hasher, self._in_file = hashlib.sha256(), 0
            part = ids[: self._shard_tokens - self._in_file]
            data = np.ascontiguousarray(part, dtype=self._dtype).data
            self._stream.write(data)
            self._hasher.update(data)
            self._in_file += len(part)
            ids = ids[len(part) :]
            if self._in_file == self._shard_tokens:
                self._close_file()

    def flush(self) -> None:
        """Bring all that was written to the disk."""
        with self.starts_path.open("ab") as stream:
            stream.write(np.array(self._new_starts, dtype=PLACE).data)
        sync(self.starts_path)
        self._new_starts = []
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())

    def finish(self) -> None:
        """Flush, and close the last file."""
        self.flush()
        self._close_file()

    def close(self) -> None:
        """Let go of the open file."""
        if self._stream is not None:
            self._stream.close()

    def state(self) -> dict[str, Any]:
        """What `restore` needs; true of the disk after `flush`."""
        return {
            "files": self.files,
            "in_file": 0 if self._stream is None else self._in_file,
            "tokens": self.n_tokens,
            "bytes": self.n_bytes,
            "documents": self.n_documents,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state: cut off whatever was written after it.

        Raises OSError or ValueError where the files hold less than it says.
        """
        self.files = [(tokens, sha256) for tokens, sha256 in state["files"]]
        self.n_tokens, self.n_bytes = state["tokens"], state["bytes"]
        self.n_documents, self._in_file = state["documents"], state["in_file"]
        for number, (n_tokens, _) in enumerate(self.files):
            _shorten(self.path(number), n_tokens * self._dtype.itemsize)
        _shorten(self.starts_path, self.n_documents * PLACE.itemsize)
        known = len(self.files) + bool(self._in_file)
        for path in self._folder.glob(f"{self._name}-*.tokens"):
            if path not in {self.path(number) for number in range(known)}:
                path.unlink()
        if self._in_file:
            path = self.path(len(self.files))
            _shorten(path, self._in_file * self._dtype.itemsize)
            with path.open("rb") as stream:
                self._hasher = hashlib.file_digest(stream, "sha256")
            self._stream = path.open("ab")

    def _close_file(self) -> None:
        if self._stream is None:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._stream = None
        self.files.append((self._in_file, self._hasher.hexdigest()))


class ShardWriter:
    """Writes shards into a folder: `start_document` and `write`, in any order, then `finish`.

    `note` makes what was written so far outlast this process: the next writer on the same folder
    begins there, and finds the progress in `noted`.
    """

    def __init__(
        self, folder: Path, name: str, tokenizer: Tokenizer, shard_tokens: int = SHARD_TOKENS
    ) -> None:
        self._folder, self._name, self._tokenizer = folder, name, tokenizer
        self._dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
        self._shard_tokens = shard_tokens
        self._splits = self._new_splits()
        self.noted: dict[str, Any] = {}
        try:
            self._restore()
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            self._begin_anew()  # a power loss, or another hand, damaged what was noted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for split in self._splits.values():
            split.close()

    @property
    def n_tokens(self) -> int:
        """Tokens written so far, by earlier processes too."""
        return sum(split.n_tokens for split in self._splits.values())

    def start_document(self, split: str) -> None:
        """The next token written to this split is the first of a document."""
        self._splits[split].start_document()

    def write(self, split: str, ids: npt.NDArray[Any], n_bytes: int) -> None:
        """Append ids (n_tokens,) that stand for `n_bytes` UTF-8 bytes of text to a split."""
        self._splits[split].write(ids, n_bytes)

    def note(self, progress: dict[str, Any]) -> None:
        """Make what was written so far, and `progress`, outlast this process."""
        for split in self._splits.values():
            split.flush()
        state = {split: part.state() for split, part in self._splits.items()}
        temporary = self._folder / f"{JOURNAL}.tmp"
        content = {"noted": progress, "tokenizer": self._tokenizer.hash, "splits": state}
        temporary.write_text(json.dumps(content), encoding="ascii")
        sync(temporary)
        temporary.replace(self._folder / JOURNAL)
        sync(self._folder)

    def finish(self, text: dict[str, Any]) -> None:
        """Write the tokenizer and the header, with `text` (what was read) noted in it."""
        for split in self._splits.values():
            split.finish()
        (self._folder / JOURNAL).unlink(missing_ok=True)  # from here on there is no going back
        files: list[dict[str, Any]] = []
        for split in self._splits.values():
            for number, (n_tokens, sha256) in enumerate(split.files):
                name = f"{self._name}-{len(files):05d}.bin"
                split.path(number).rename(self._folder / name)
                files.append({"name": name, "tokens": n_tokens, "sha256": sha256})
        n_tokens = self.n_tokens
        start, splits = 0, {}
        for name, split in self._splits.items():
            splits[name] = {
                "start": start,
                "stop": start + split.n_tokens,
                "bytes": split.n_bytes,
                "documents": split.n_documents,
            }
            start += split.n_tokens
        header: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": self._name,
            "dtype": self._dtype,
            "vocab_size": self._tokenizer.vocab_size,
            "n_tokens": n_tokens,
            "bytes_per_token": sum(s.n_bytes for s in self._splits.values()) / max(n_tokens, 1),
            "tokenizer": {"kind": self._tokenizer.kind, "hash": self._tokenizer.hash},
            "splits": splits,
            "files": files,
            "documents": self._join_documents(),
            "text": text,
        }
        header["sha256"] = header_hash(header)
        self._tokenizer.save(self._folder / TOKENIZER_FILE)
        path = self._folder / f"{self._name}.json"
        path.write_text(json.dumps(header, indent=1) + "\n", encoding="ascii")
        sync(self._folder / TOKENIZER_FILE)
        sync(path)

    def _join_documents(self) -> dict[str, str]:
        """The splits' starts of documents become one file; its name and hash."""
        path = self._folder / f"{self._name}-documents.bin"
        with path.open("wb") as joined:
            for split in self._splits.values():
                with split.starts_path.open("rb") as stream:
                    shutil.copyfileobj(stream, joined)
                split.starts_path.unlink()
        sync(path)
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"name": path.name, "sha256": sha256}

    def _restore(self) -> None:
        """Go on from what an earlier process noted in this folder, if one did.

        Raises whatever comes of a journal or files that are damaged.
        """
        try:
            journal = json.loads((self._folder / JOURNAL).read_text(encoding="ascii"))
        except FileNotFoundError:
            return
        if journal["tokenizer"] != self._tokenizer.hash:
            raise ValueError("what was noted is of another tokenizer")
        for name, split in self._splits.items():
            split.restore(journal["splits"][name])
        self.noted = dict(journal["noted"])

    def _begin_anew(self) -> None:
        """Remove everything but the tokenizer, which is not this class's."""
        for split in self._splits.values():
            split.close()
        for path in self._folder.iterdir():
            if path.name != TOKENIZER_FILE:
                path.unlink()
        self._splits, self.noted = self._new_splits(), {}

    def _new_splits(self) -> dict[str, _Split]:
        dtype = DTYPES[self._dtype]
        return {name: _Split(self._folder, name, dtype, self._shard_tokens) for name in SPLITS}


def _shorten(path: Path, n_bytes: int) -> None:
    """Cut a file after its first `n_bytes`; ValueError where it has fewer."""
    if path.stat().st_size < n_bytes:
        raise ValueError(f"{path} has fewer than {n_bytes} bytes")
    os.truncate(path, n_bytes)
