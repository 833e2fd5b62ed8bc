"""`/v1/completions`: prompts that a model continues."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from pydantic import Field

from pentameter.data.tokenizers.base import NO_ENDS, Ends
from pentameter.errors import ConfigError
from pentameter.generation.prompts import encode_prompt
from pentameter.generation.sampling import Tokens
from pentameter.serve.continuation import Piece, TextRequest
from pentameter.serve.endpoints.answers import Answer, ChoicesAnswer
from pentameter.serve.endpoints.parsing import RequestError
from pentameter.serve.endpoints.requests import MOST_RIVALS, Limits, TextsRequest
from pentameter.serve.worker import Job, ServedModel

COMPLETION_TOKENS = 16
"""OpenAI's default for a completion's `max_tokens`."""


class CompletionRequest(TextsRequest):
    """JSON body for /v1/completions: one or more prompts, each a text or token ids, shown before
    the text with `echo`; `logprobs` is the number of likeliest tokens to report, None for no
    probabilities."""

    prompt_field = "prompt"
    prompt: str | list[str] | list[int] | list[list[int]] = ""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_RIVALS)] | None = None

    def texts(self, served: ServedModel, limits: Limits) -> list[TextRequest]:
        """Return the requested texts, `n` for each prompt in turn. Raises RequestError beyond the
        limits, or for a prompt that cannot be encoded."""
        tokenizer = served.tokenizer
        prompts: list[Any]
        match self.prompt:
            case str() | [int(), *_]:
                prompts = [self.prompt]
            case several:
                prompts = list(several)
        if not 1 <= len(prompts) * self.n_each <= limits.texts:
            raise RequestError(
                f"prompt and n ask for {len(prompts)} × {self.n_each} texts; a request may have "
                f"1 to {limits.texts}",
                param="n" if self.n_each > 1 else "prompt",
            )
        n_tokens = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if n_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens=0 writes nothing; with echo: true it shows the prompt",
                param="max_tokens",
            )
        ends = NO_ENDS if self.ignore_eos else Ends(tokenizer.end_ids)
        found = []
        for prompt in prompts:
            ids = _encoded(prompt, served)
            n_given = len(tokenizer.prefix) if isinstance(prompt, str) else 0
            found += self.asked_texts(
                ids,
                n_tokens,
                served,
                limits,
                ends=ends,
                n_rivals=self.logprobs,
                echo_from=(n_given if len(prompt) else len(ids)) if self.echo else None,
                follows_text=bool(len(prompt)),
            )
        return found

    def answer(self, job: Job) -> Answer:
        """Return the answer to this request, whose texts are those of `job`."""
        return CompletionAnswer(job)


class CompletionAnswer(ChoicesAnswer):
    """The answer to a CompletionRequest."""

    prefix, kind, kind_of_chunk = "cmpl-", "text_completion", "text_completion"

    def added(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the new text; see Answer."""
        return {"text": piece.text}

    def said(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the whole text; see Answer."""
        return {"text": piece.text}

    def logprobs(self, piece: Piece) -> dict[str, Any]:
        """Return the tokens, their probabilities and rivals as lists; see Answer."""
        return {
            "tokens": [each.text for each in piece.chances],
            "token_logprobs": [None if t.is_first else t.logprob for t in piece.chances],
            # If several tokens have one text, the likeliest counts.
            "top_logprobs": [
                None if t.is_first else dict(reversed(t.rivals)) for t in piece.chances
            ],
            "text_offset": [each.offset for each in piece.chances],
        }


def _encoded(prompt: str | list[int], served: ServedModel) -> Tokens:
    """Return token ids (n,) for a prompt, a string or ids. Raises RequestError if the tokenizer
    refuses it."""
    try:
        if isinstance(prompt, str):
            return encode_prompt(served.tokenizer, prompt)
        served.tokenizer.decode(prompt)  # refuses ids outside the vocabulary
        return np.array(prompt, dtype=np.int64) if prompt else encode_prompt(served.tokenizer, "")
    except (ConfigError, OverflowError) as error:
        raise RequestError(str(error), param="prompt") from error
