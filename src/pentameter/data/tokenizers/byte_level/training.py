"""Training of byte-level BPE by the `tokenizers` library, in bounded time and memory.

The library holds every different word with the places of its pairs, some hundred bytes per word and
60 per byte, and takes time quadratic in a word's length. Words of ordinary text are short and come
again; those of a genome, of Base64 or of text without spaces are neither.
"""

from __future__ import annotations

import json
import os
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby
from queue import Queue
from typing import Any

from pentameter.data.tokenizers.bpe import END_OF_TEXT, BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.byte_level.words import Words
from pentameter.data.tokenizers.chunking import batches, chunks
from pentameter.errors import ConfigError, StorageError
from pentameter.machine.child import ChildEndedError, PythonChild

MIN_FREQUENCY = 2
"""Minimum occurrences for a pair to become a token: one that occurs once teaches nothing."""
MOST_WORD_BYTES = 1 << 25
"""UTF-8 bytes of different words, and WORD_BYTES for each, from which is learned."""
WORD_BYTES = 12
WORTH_A_PROCESS_CHARACTERS = 1 << 20
"""Characters from which a process of its own learns, which Ctrl-C can end: the library hears
nothing while it computes. It takes half a second to start."""
_TRAINING_CHARACTERS = 1 << 13  # chunks of text for the library's threads
_TEXTS_WAITING = 4  # of WORTH_A_PROCESS_CHARACTERS
# A genome on one line would never end. No token worth having is longer than this; encoding splits
# nothing.
_LONG_RUN = re.compile(r"\S{1000}|\s{1000}")

Learned = tuple[list[tuple[str, str]], int]
"""The merges in the order in which they were made, and the number of words left out."""


def train_bpe(
    documents: Iterable[str],
    vocab_size: int,
    special_texts: Sequence[str] = (END_OF_TEXT,),
    warnings: list[str] | None = None,
) -> BpeTokenizer:
    """Train byte-level BPE on documents: at most `vocab_size` tokens, in GPT-2's order: the 256
    bytes, the merges as they were made, and `special_texts` (visible ASCII), at which documents
    are cut, so that no merge makes one.

    There are fewer if the text has no more pairs that occur MIN_FREQUENCY times. Once the different
    words have MOST_WORD_BYTES, words not seen before are left out, and `warnings` gets a line. The
    same documents give the same tokenizer, on any number of threads. Raises ConfigError for an
    empty text, and for a `vocab_size` that has no room for the bytes and the special tokens;
    StorageError if the process that learns from a long text cannot be started or ends early.
    """
    least = len(BYTE_CHARACTERS) + len(special_texts)
    if vocab_size < least:
        raise ConfigError(
            f"tokenizer 'bpe:{vocab_size}': the vocabulary size must be at least {least}: 256 "
            f"bytes and {', '.join(special_texts)}"
        )
    n_tokens = vocab_size - len(special_texts)  # these are added below
    pieces = _training_chunks(documents, special_texts)
    cut = batches(pieces, WORTH_A_PROCESS_CHARACTERS, len)
    first = next(cut, [])
    second = next(cut, None)
    if not any(first):
        raise ConfigError("a BPE tokenizer needs text to be trained on; this one is empty")
    if second is None:
        merges, n_left_out = learned(first, n_tokens)
    else:
        merges, n_left_out = _learned_in_a_process(chain([first, second], cut), n_tokens)
    if n_left_out and warnings is not None:
        warnings.append(
            f"the text has more than {MOST_WORD_BYTES >> 20} MiB of different words; the tokenizer "
            f"learned from these, and left out {n_left_out} later words that were new"
        )
    # Two merges may give the same token, from different parts.
    tokens = dict.fromkeys([*BYTE_CHARACTERS, *map("".join, merges), *special_texts])
    return BpeTokenizer(list(tokens), merges)


def learned(texts: Iterable[str], n_tokens: int) -> Learned:
    """Learn at most `n_tokens`, the bytes among them, from texts, on the library's threads. Return
    the merges in order, and the number of words left out."""
    import tokenizers

    library: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=n_tokens,
        min_frequency=MIN_FREQUENCY,
        initial_alphabet=list(BYTE_CHARACTERS),
        show_progress=False,
    )
    seen = SeenWords(Words(library.pre_tokenizer))
    library.train_from_iterator(seen.bounded(texts), trainer)
    merges = json.loads(library.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges], seen.n_left_out


def _learned_in_a_process(parts: Iterable[list[str]], n_tokens: int) -> Learned:
    """Return what `learned` returns for batches of texts, from a process that ends with this call.
    Raises StorageError if it cannot be started or ends early."""
    child = PythonChild(f"{__name__}:learner", str(n_tokens), task="train the tokenizer")
    try:
        for part in parts:
            child.ask(part)
        found: Learned = child.ask(None)
        return found
    except ChildEndedError as error:
        raise StorageError(f"the process that trains the tokenizer {error}; start again") from error
    finally:
        child.close()


def learner(n_tokens: str) -> Callable[[list[str] | None], Learned | None]:
    """Return the function that a child process serves: it is called with batches of texts, then
    with None, and then returns what `learned` returns for all of them."""
    waiting: Queue[list[str] | None] = Queue(_TEXTS_WAITING)
    found: list[Learned] = []

    def learn() -> None:
        try:
            texts = chain.from_iterable(iter(waiting.get, None))
            found.append(learned(texts, int(n_tokens)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the other thread may wait for room

    thread = threading.Thread(target=learn)
    thread.start()

    def take(batch: list[str] | None) -> Learned | None:
        waiting.put(batch)
        if batch is not None:
            return None
        thread.join()
        return found[0]

    return take


class SeenWords:
    """The different words of a text, up to MOST_WORD_BYTES; `split` splits text into words."""

    def __init__(self, words: Words) -> None:
        self._split, self._seen = words.split, set[str]()
        self._n_bytes = 0
        self.n_left_out = 0
        """Words left out so far."""

    def bounded(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts as they are until there are as many different words as are learned from;
        from then on, what lies between words that are new."""
        for text in texts:
            words = self._split(text)
            if self._n_bytes < MOST_WORD_BYTES:
                new = set(words).difference(self._seen)
                self._n_bytes += sum(WORD_BYTES + len(word.encode()) for word in new)
                self._seen |= new
                yield text
                continue
            for is_seen, some in groupby(words, self._seen.__contains__):
                if is_seen:
                    yield "".join(some)
                else:
                    self.n_left_out += sum(1 for _ in some)


def _training_chunks(documents: Iterable[str], special_texts: Sequence[str]) -> Iterator[str]:
    """Yield the documents in chunks for training: cut at special texts, and where a word would be
    too long."""
    # No merge makes <|endoftext|>: it is three words. Tokenizers that exist were made with it.
    marks = [re.escape(text) for text in special_texts if text != END_OF_TEXT]
    mark = re.compile("|".join(marks) or r"(?!)")
    for document in documents:
        for text in mark.split(document):
            for chunk in chunks(text, _TRAINING_CHARACTERS):
                yield from _without_long_runs(chunk)


def _without_long_runs(text: str) -> Iterator[str]:
    """Yield a text in pieces, for training alone, which takes time quadratic in a word's length. It
    is cut after 1,000 characters in a row without white space, or of white space only."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        yield text[start : run.end()]
        start = run.end()
    yield text[start:]
