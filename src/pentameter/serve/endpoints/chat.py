"""Chat completions in OpenAI's form: a conversation, translated into a text to write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from pentameter.data.messages import normalized
from pentameter.errors import ConfigError
from pentameter.generation.prompts import encode_messages
from pentameter.serve.continuation import Piece, TextRequest
from pentameter.serve.endpoints.answers import Answer
from pentameter.serve.endpoints.parsing import RequestError
from pentameter.serve.endpoints.requests import MOST_RIVALS, Limits, TextsRequest
from pentameter.serve.worker import Job, ServedModel


class ChatRequest(TextsRequest):
    """JSON body for /v1/chat/completions: a conversation to answer. `max_completion_tokens` has
    precedence over `max_tokens`; `top_logprobs` needs `logprobs`."""

    prompt_field = "messages"
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_RIVALS)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Length that was asked for the answer, in tokens; None for what the context has room
        for."""
        return self.max_completion_tokens or self.max_tokens

    def texts(self, served: ServedModel, limits: Limits) -> list[TextRequest]:
        """Return the `n` requested answers. Raises RequestError beyond the limits, if the tokenizer
        has no chat template, or for messages that the template refuses."""
        tokenizer = served.tokenizer
        if tokenizer.chat is None:
            raise RequestError(
                f"the tokenizer of {served.name} ({tokenizer.kind}) has no chat template; ask "
                "/v1/completions, with the prompt as the model knows it",
                param="messages",
            )
        if self.n_each > limits.texts:
            raise RequestError(
                f"n={self.n_each} is more than {limits.texts}, a request's most", param="n"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs is given without logprobs: true", param="top_logprobs")
        try:
            ids = encode_messages(tokenizer, normalized(self.messages), served.render)
        except ConfigError as error:
            raise RequestError(str(error), param="messages") from error
        ends = frozenset[int]() if self.ignore_eos else served.ends_of_answers
        room = min(max(1, served.context_length - len(ids) + 1), limits.max_tokens)
        n_tokens = min(self.most_tokens or room, room)
        rivals = (self.top_logprobs or 0) if self.logprobs else None
        return self.asked_texts(
            ids, n_tokens, served, limits, ends=ends, n_rivals=rivals, follows_text=False
        )

    def answer(self, job: Job) -> Answer:
        """Return the answer to this request, whose texts are those of `job`."""
        return ChatAnswer(job)


class ChatAnswer(Answer):
    """The answer to a ChatRequest."""

    prefix, kind, kind_of_chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def openings(self) -> Iterator[dict[str, Any]]:
        """Yield for each choice the event that gives the role `assistant`."""
        for index in range(len(self.job.texts)):
            opening = {"delta": {"role": "assistant", "content": ""}}
            yield self._chunk(index, Piece(), opening)

    def added(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the new text as a `delta`; see Answer."""
        return {"delta": {"content": piece.text} if piece.text else {}}

    def said(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the whole text as a message; see Answer."""
        return {"message": {"role": "assistant", "content": piece.text}}

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return one object for each token; see Answer."""
        content = [
            _token(each.text, each.logprob)
            | {"top_logprobs": [_token(*rival) for rival in each.rivals]}
            for each in piece.chances
        ]
        return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    whole = "\N{REPLACEMENT CHARACTER}" not in text  # else it is a part of a character
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}
