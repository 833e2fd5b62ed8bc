"""Continuous batching: texts start and end between two model passes, and never change each other.

Each step first reads prompts in pieces, up to a number of tokens, then writes one token for every
other text in one pass. Other texts affect only the speed of a text. Its content depends on its own
request alone (see `passes.py`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from pentameter.errors import ConfigError, CorruptError
from pentameter.generation.loop import window_tokens
from pentameter.generation.sampling import Floats, choose
from pentameter.serve.chances import check_finite
from pentameter.serve.continuation import Continuation, Piece
from pentameter.serve.passes import PIECE_TOKENS, Slots, n_read_in_pieces, passed_tokens


@dataclass(eq=False)
class _Writing:
    """A text that is being generated and has a slot in the cache. `window` has the ids of the
    tokens that the model sees; the keys and values of its first `n_cached` tokens are in the slot
    already."""

    continuation: Continuation
    slot: int
    window: list[int]
    n_cached: int = 0
    n_in_pieces: int = 0
    """Number of first tokens of the window that are read in pieces; the others are read singly."""
    n_used: int = 0
    """Number of the slot's positions that were written, and must be cleared for the next text."""

    @property
    def n_to_read(self) -> int:
        """Number of prompt tokens that the model has still to read, in pieces of several tokens,
        before it can write."""
        return max(0, self.n_in_pieces - self.n_cached)


class Batcher:
    """Queue and scheduler for the texts that one model is to generate. Each text gets a cache slot
    when one is free, and each call of `step` adds one token to every text that has one, in a common
    forward pass. `slots` holds the cache and runs the model. Not thread-safe."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._free = list(range(slots.n_slots))
        self._waiting: deque[Continuation] = deque()
        self._writing: dict[Continuation, _Writing] = {}

    @property
    def is_idle(self) -> bool:
        """True if no text is queued or has a cache slot, so that `step` would do nothing."""
        return not self._waiting and not self._writing

    def add(self, continuation: Continuation) -> None:
        """Queue a text, behind those that wait for a slot; `step` gives it one."""
        self._waiting.append(continuation)

    def cancel(self, continuation: Continuation) -> None:
        """Drop a text and free its slot; does nothing if it has ended."""
        if continuation in self._writing:
            self._release(continuation)
        elif continuation in self._waiting:
            self._waiting.remove(continuation)

    def step(self) -> list[tuple[Continuation, Piece]]:
        """Give free slots to queued texts, read up to PIECE_TOKENS prompt tokens, and write one
        token for each text whose prompt is read. Return (text, newly written Piece) for each that
        got a token or failed."""
        while self._free and self._waiting:
            continuation = self._waiting.popleft()
            writing = _Writing(continuation, heappop(self._free), [])
            self._writing[continuation] = writing
            self._see(writing)
        logits: dict[Continuation, Floats] = {}
        budget = PIECE_TOKENS
        for each in list(self._writing.values()):  # in the order in which they came
            while each.n_to_read and budget > 0:
                n = min(PIECE_TOKENS, each.n_to_read)
                tokens = each.window[each.n_cached : each.n_cached + n]
                echo, length = each.continuation.echo, len(each.window)
                if echo is not None and echo.needs_logits:
                    last, of_tokens = self._slots.read_with_all(
                        each.slot, tokens, each.n_cached, length
                    )
                    echo.read(of_tokens)
                else:
                    last = self._slots.read(each.slot, tokens, each.n_cached, length)
                self._count(each, n)
                budget -= passed_tokens(n)
                if each.n_cached == len(each.window):
                    logits[each.continuation] = last
        ready = [
            each
            for each in self._writing.values()
            if not each.n_to_read and each.continuation not in logits
        ]
        if ready:
            rows = {
                each.slot: (each.window[each.n_cached], each.n_cached, len(each.window))
                for each in ready
            }
            found = self._slots.write(rows)
            for each in ready:
                self._count(each, 1)
                echo = each.continuation.echo
                if echo is not None and echo.needs_logits:
                    echo.read(found[each.slot][None])
                if each.n_cached == len(each.window):
                    logits[each.continuation] = found[each.slot]
        return self._draw(logits)

    def _see(self, each: _Writing) -> None:
        """Update the window of tokens that the model sees of a text: append the last token. If the
        text has outgrown the window, begin the window further on, with nothing of it in the cache;
        so it is, too, where rotary frequencies change with the length."""
        prompt, written = each.continuation.asked.prompt, each.continuation.tokens
        n_seen = window_tokens(len(prompt) + len(written), self._slots.context_length)
        is_anew = self._slots.begins_anew_at(n_seen)
        if each.window and n_seen == len(each.window) + 1 and not is_anew:
            each.window.append(written[-1])
            return
        text = [*prompt.tolist(), *written]
        each.window, each.n_cached = text[len(text) - n_seen :], 0
        each.n_in_pieces = n_read_in_pieces(n_seen)

    def _count(self, each: _Writing, n_tokens: int) -> None:
        each.n_cached += n_tokens
        each.n_used = max(each.n_used, each.n_cached)

    def _draw(self, logits: dict[Continuation, Floats]) -> list[tuple[Continuation, Piece]]:
        """Sample each text's next token from its logits (V,), V the vocabulary size. A text with
        non-finite logits, or which no token may follow, gets an error."""
        pieces: list[tuple[Continuation, Piece]] = []
        groups: dict[object, list[Continuation]] = {}
        possible: dict[Continuation, Floats] = {}
        for continuation, of_text in logits.items():
            try:
                check_finite(of_text)
                possible[continuation] = continuation.possible(of_text)
            except (CorruptError, ConfigError) as error:
                self._release(continuation)
                failed = Piece(n_tokens=len(continuation.tokens), error=error)
                pieces.append((continuation, failed))
                continue
            if not continuation.asked.max_tokens:
                self._release(continuation)
                pieces.append((continuation, continuation.finish()))
            else:
                groups.setdefault(continuation.asked.sampling, []).append(continuation)
        for group in groups.values():
            uniforms = np.array([continuation.uniform for continuation in group])
            rows = np.stack([possible[continuation] for continuation in group])
            tokens = choose(rows, group[0].asked.sampling, uniforms)
            for continuation, token in zip(group, tokens.tolist(), strict=True):
                piece = continuation.push(token, logits[continuation])
                if piece.finish_reason:
                    self._release(continuation)
                else:
                    self._see(self._writing[continuation])
                pieces.append((continuation, piece))
        return pieces

    def _release(self, continuation: Continuation) -> None:
        writing = self._writing.pop(continuation)
        self._slots.clear(writing.slot, writing.n_used + PIECE_TOKENS)
        heappush(self._free, writing.slot)
