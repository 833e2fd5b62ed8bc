"""Chat completions in OpenAI's form: a conversation, translated into a text to write."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from pentameter.data.messages import normalized
from pentameter.errors import ConfigError
from pentameter.generation.prompts import encode_messages
from pentameter.serve.answers import Answer, ChatAnswer
from pentameter.serve.continuation import TextRequest
from pentameter.serve.requests import MOST_RIVALS, Limits, RequestError, TextsRequest
from pentameter.serve.worker import Job, ServedModel


class ChatRequest(TextsRequest):
    """JSON body for /v1/chat/completions: a conversation to answer. `max_completion_tokens` has
    precedence over `max_tokens`; `top_logprobs` needs `logprobs`."""

    prompt_field = "messages"
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_RIVALS)] | None = None

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
        n_tokens = self.max_completion_tokens or self.max_tokens or room
        rivals = (self.top_logprobs or 0) if self.logprobs else None
        return self.asked_texts(
            ids, n_tokens, served, limits, ends=ends, n_rivals=rivals, follows_text=False
        )

    def answer(self, job: Job) -> Answer:
        """Return the answer to this request, whose texts are those of `job`."""
        return ChatAnswer(job)
