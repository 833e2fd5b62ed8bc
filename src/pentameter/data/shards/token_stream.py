"""A token stream: the token shards of a text that is still being tokenized, read as one split.

    DIR/part-00000/   shards (`format.py`): val, test and the first tokens of train
    DIR/part-00001/   shards with the next tokens of train; and so on, each larger than the last
    DIR/end.json      {"parts": 12}, once the text has ended

Part ends follow from the text and the settings alone, and so does each token's position in the
stream. A part's folder is renamed into place once all its files are written, so it is never seen
unfinished. Its header records, as its text, a hash of the stream's origin and the place in the text
from which the next part continues. `prepare/token_stream_writer.py` writes parts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from pentameter.data.progress import Progress, no_progress
from pentameter.data.shards.dataset import Dataset, TokenSequence, TokenSplit
from pentameter.data.shards.format import read_header
from pentameter.data.shards.opening import open_shards
from pentameter.disk.atomic import read_json, sha256_of_json
from pentameter.errors import CorruptError

BLOCK_TOKENS = 1 << 22
"""Tokens per block within which `data.order = "streamed"` permutes a text: the first step waits for
one block, and larger ones mix a text better."""
END_FILE, PART_NAME = "end.json", "part"
_HASHED = ("tokenizer", "splits", "files", "documents")  # what a part's header says of its tokens


def part_header(folder: Path, number: int) -> Path:
    """Return the path of the header of part `number`, counted from 0. A token stream is text
    tokenized in parts, each a data set in a folder of its own below `folder`."""
    return folder / f"{PART_NAME}-{number:05d}" / f"{PART_NAME}.json"


def is_token_stream(folder: Path) -> bool:
    """Return whether a folder has the first part of a token stream."""
    return part_header(folder, 0).exists()


def n_tokens_of(header: Path) -> int:
    """Return how many training tokens a part has, given its header's path."""
    train = read_header(header)["splits"]["train"]
    return int(train["stop"]) - int(train["start"])


def n_parts_of(folder: Path) -> int | None:
    """Return how many parts a token stream has in the end; None while its text is still being
    tokenized. Raises CorruptError if end.json is damaged."""
    path = folder / END_FILE
    if not path.exists():
        return None
    n_parts = read_json(path).get("parts")
    if not isinstance(n_parts, int) or n_parts < 1:
        raise CorruptError(f"{path} is damaged: parts={n_parts!r}; delete {folder} and start again")
    return n_parts


def tokens_for(n_rows: int, context_length: int) -> int:
    """Return how many tokens of a text must be there before the first `n_rows` rows of a streamed
    order can be read: the tokens of whole blocks (about BLOCK_TOKENS each), as each is permuted as
    a whole, and one more, the last target."""
    block = max(BLOCK_TOKENS // context_length, 1) * context_length
    return -(-n_rows * context_length // block) * block + 1


class Source:
    """Base class of the objects that make more tokens for a `TokenStream`, or wait until another
    process has. This base class does neither: its stream has only the parts that are in `folder`
    already."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self, n_tokens: int) -> None:
        """Start to tokenize more text in the background until `n_tokens` training tokens exist;
        return at once. This base class tokenizes nothing, so here it does nothing."""

    def wait(self, n_tokens: int) -> None:
        """Sleep for a moment, in a loop of the caller that waits until `n_tokens` training tokens
        exist. Raises CorruptError if no process makes them, or the error with which making them
        failed."""
        raise CorruptError(
            f"{self._folder} lacks some of the first {n_tokens:,} tokens. The command that trained "
            "on them prepares them again from the same text"
        )

    def close(self) -> None:
        """Stop writing parts."""


class TokenStream(TokenSequence):
    """The training tokens of a text that may still be being tokenized: those in the parts that are
    written into `folder` so far. `up_to` waits for more.

    The constructor opens all parts that are there, and waits for the first one.

    source: writes the parts, or waits for another process that does.
    verify: whether to check each part's hashes, with calls to `progress`.
    """

    def __init__(self, folder: Path, source: Source, *, verify: bool, progress: Progress) -> None:
        self.source = source
        self._folder, self._verify, self._progress = folder, verify, progress
        self._parts: list[Dataset] = []
        super().__init__((), 0, 0)
        while not self._open_next():
            source.wait(1)
        while self._open_next():  # what an earlier run left
            pass

    @property
    def first(self) -> Dataset:
        """The first part's data set, which has the val and test splits."""
        return self._parts[0]

    @property
    def hash(self) -> str:
        """The sha256, in hex, over everything that decides the stream's tokens: text, tokenizer,
        settings."""
        return str(self.first.header["text"]["stream"])

    @property
    def is_whole(self) -> bool:
        """Whether all of the text is tokenized and all parts are open, so that no token will be
        added."""
        return n_parts_of(self._folder) == len(self._parts)

    def prepare(self, n_tokens: int) -> None:
        """Start tokenizing text in the background until there are `n_tokens` training tokens;
        return at once."""
        self.source.prepare(n_tokens)

    def close(self) -> None:
        """Stop tokenizing in the background."""
        self.source.close()

    def up_to(self, n_tokens: int) -> int:
        """Wait until `n_tokens` training tokens are written or the text has ended. Return how many
        of the first `n_tokens` exist then. Raises the error with which writing failed."""
        while len(self) < n_tokens and not self.is_whole:
            if not self._open_next():
                self.source.wait(n_tokens)
                self.waiting()
        return super().up_to(n_tokens)

    def hash_of(self, n_tokens: int) -> str:
        """Return the sha256, in hex, over the parts that hold the first `n_tokens`, after waiting
        for these. Text that is added later does not change it."""
        n_tokens = self.up_to(n_tokens)
        hashes = []
        for part in self._parts:
            # Independent of the text's name and place.
            hashes.append(sha256_of_json({key: part.header[key] for key in _HASHED}))
            n_tokens -= part.split("train").n_tokens
            if n_tokens <= 0:
                break
        return hashlib.sha256("".join(hashes).encode()).hexdigest()

    def split(self) -> TokenSplit:
        """Return the training split. Its tokens grow while the text is tokenized; its documents and
        its size in bytes are those of the parts that are open when this is called."""
        starts, n_tokens, n_bytes = [], 0, 0
        for part in self._parts:
            train = part.split("train")
            # A part's first document may have begun in the part before.
            first = int(bool(part.header["text"]["continues"]))
            starts.append(np.asarray(train.document_starts[first:], np.int64) + n_tokens)
            n_tokens, n_bytes = n_tokens + train.n_tokens, n_bytes + train.n_bytes
        beginning = self.first.split("train")
        return TokenSplit("train", self, n_bytes, np.concatenate(starts), beginning=beginning)

    def _open_next(self) -> bool:
        """Open the next part and append its tokens; return False if it is not written yet. Raises
        CorruptError for damage."""
        path = part_header(self._folder, len(self._parts))
        if not path.exists():
            return False
        tokenizer = self.first.tokenizer if self._parts else None
        try:
            part = open_shards(
                path, verify=self._verify, progress=self._progress, tokenizer=tokenizer
            )
            if self._parts and part.header["text"].get("stream") != self.hash:
                raise CorruptError(f"{path} is of another text than the parts before it")
        except CorruptError as error:
            raise CorruptError(
                f"{error} (it is a cache: delete {self._folder} and start again)"
            ) from error
        self._parts.append(part)
        tokens = part.split("train").tokens
        for array in tokens.arrays() if len(tokens) else ():
            self._append(array)
        return True


def open_token_stream(
    folder: Path, source: Source, *, verify: bool = True, progress: Progress = no_progress
) -> Dataset:
    """Open the token stream in a folder as a Dataset. Waits for its first part, which `source`
    writes, or another process for which `source` waits.

    `verify` checks each part's hashes. Raises CorruptError for any damage, and the errors with
    which `source` fails.
    """
    stream = TokenStream(folder, source, verify=verify, progress=progress)
    splits = {**stream.first.splits, "train": stream.split()}
    return Dataset(stream.first.tokenizer, stream.hash, splits, (folder.absolute(),))
