"""Answers in OpenAI's form: the JSON that all endpoints have in common, whole or in events."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from typing import Any, ClassVar

from pentameter.serve.continuation import Piece
from pentameter.serve.endpoints.parsing import RequestError
from pentameter.serve.worker import Job


class Answer(ABC):
    """The answer to one request, whose texts are those of `job`: builds the JSON of OpenAI's
    interface from the pieces of text as they come."""

    prefix: ClassVar[str]
    """The prefix of the answer's id."""
    ends_with_done: ClassVar[bool] = True
    """Whether the last line of a stream is `[DONE]`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._id, self._created = self.prefix + uuid.uuid4().hex, int(time.time())

    @abstractmethod
    def openings(self) -> Iterator[dict[str, Any]]:
        """Yield the events with which a stream begins, before any text."""

    @abstractmethod
    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events for the text `index` and what is new of it, in `piece`."""

    @abstractmethod
    def closings(self, n_tokens: Iterable[int], *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the events with which a stream ends, with token counts if `with_usage`. n_tokens:
        number of generated tokens for each text."""

    @abstractmethod
    def whole(self, pieces: dict[int, Piece]) -> dict[str, Any]:
        """Return the whole answer. `pieces` maps each text's index to all of it."""

    def failed(self, error: RequestError) -> dict[str, Any]:
        """Return the event that ends a stream with an error."""
        return error.to_json()

    def counted(self, n_tokens: Iterable[int]) -> tuple[int, int]:
        """Return the numbers of prompt tokens and of generated ones. A prompt with several answers
        counts once. n_tokens: number of generated tokens for each text."""
        prompts = sum(len(t.asked.prompt) for t in self.job.texts if t.asked.sample == 0)
        return prompts, sum(n_tokens)


class ChoicesAnswer(Answer):
    """An answer that is a list of choices, one for each text."""

    kind: ClassVar[str]
    """The word in the field `object` of a whole answer."""
    kind_of_chunk: ClassVar[str]
    """That of a streamed event."""

    def openings(self) -> Iterator[dict[str, Any]]:
        """Yield the events with which a stream begins, before any text."""
        yield from ()

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield the events for the choice `index` and the new text in `piece`."""
        if piece.text or piece.chances or piece.finish_reason:
            yield self._chunk(index, piece, self.added(index, piece))

    def closings(self, n_tokens: Iterable[int], *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the events with which a stream ends: one with the token counts if `with_usage`. See
        `_usage`."""
        if with_usage:
            yield self._shell([], self.kind_of_chunk) | {"usage": self._usage(n_tokens)}

    def whole(self, pieces: dict[int, Piece]) -> dict[str, Any]:
        """Return the whole answer. `pieces` maps each choice's index to its complete text."""
        choices = [
            self._choice(index, piece, self.said(index, piece))
            for index, piece in sorted(pieces.items())
        ]
        usage = self._usage(piece.n_tokens for piece in pieces.values())
        return self._shell(choices, self.kind) | {"usage": usage}

    @abstractmethod
    def added(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the fields with what `piece` adds to the choice `index`, for a streamed event."""

    @abstractmethod
    def said(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the fields with the text of the choice `index`, of which `piece` is the whole."""

    @abstractmethod
    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return the probabilities of a piece's tokens."""

    def finish_reason(self, index: int, piece: Piece) -> str | None:
        """Return why the choice `index` ends with `piece`; None if it does not."""
        return piece.finish_reason

    def _chunk(self, index: int, piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
        return self._shell([self._choice(index, piece, said)], self.kind_of_chunk)

    def _choice(self, index: int, piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
        is_asked = self.job.texts[index].asked.n_rivals is not None
        logprobs = self.logprobs(piece) if is_asked else None
        choice = {"index": index, **said, "finish_reason": self.finish_reason(index, piece)}
        return choice | {"logprobs": logprobs}

    def _shell(self, choices: list[dict[str, Any]], kind: str) -> dict[str, Any]:
        """Return the JSON object that carries `choices`, an answer or an event by its `kind`."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self.job.served.name,
            "system_fingerprint": _fingerprint(),
            "choices": choices,
        }

    def _usage(self, n_tokens: Iterable[int]) -> dict[str, int]:
        """Return the token counts of prompt, completion and both; see `counted`."""
        prompts, drawn = self.counted(n_tokens)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": drawn,
            "total_tokens": prompts + drawn,
        }


@cache
def _fingerprint() -> str:  # looked up on disk
    return f"pentameter-{metadata.version('pentameter')}-torch-{metadata.version('torch')}"
