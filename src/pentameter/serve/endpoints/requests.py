"""The content of a request for texts: the fields that all endpoints have, and limits."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pentameter.config.tables import packaged_table
from pentameter.data.tokenizers.base import Ends
from pentameter.errors import did_you_mean, printable
from pentameter.generation.sampling import Tokens
from pentameter.serve.continuation import TextRequest
from pentameter.serve.endpoints.answers import Answer
from pentameter.serve.endpoints.parsing import RequestError
from pentameter.serve.worker import Job, ServedModel

LONGEST_STOP, MOST_STOPS = 256, 16
MOST_RIVALS = 20


@cache
def other_fields() -> dict[str, Any]:
    """Return OpenAI's fields that this server does not have, by `other_fields.toml`: `ignored`, a
    list of those that change nothing, and `neutral`, field → values beside null that ask for
    nothing, and so are accepted. Under `absent`, it names values of fields that it does have, with
    which other servers' clients leave them out."""
    return packaged_table("serve/other_fields.toml")


@dataclass(frozen=True)
class Limits:
    """The most that one request to the server may ask for: tokens and texts, the seconds it may
    take, and the bytes of its body."""

    max_tokens: int
    """Largest number of new tokens in a text."""
    seconds: float
    """Longest time in seconds for a request, including its wait in the queue."""
    body_bytes: int
    texts: int = 16
    """Largest number of texts: prompts times `n`."""


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool | None = False


class TextsRequest(BaseModel, ABC):
    """Base class of the requests for texts: the fields that completions and chat completions have
    in common, as in OpenAI's API, and two more. `top_k` keeps only the k likeliest tokens; with
    `ignore_eos` no special token ends a text. Without `temperature`, `top_k` or `top_p` the
    model's own take its place (`usual_sampling`)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = 1
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = 0
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    prompt_field: ClassVar[str]
    """The field that holds what is continued or answered, which an error names."""

    @abstractmethod
    def texts(self, served: ServedModel, limits: Limits) -> list[TextRequest]:
        """Return the requested texts. Raises RequestError beyond the limits, and for a prompt that
        cannot be encoded."""

    @abstractmethod
    def answer(self, job: Job) -> Answer:
        """Return the answer to this request, whose texts are those of `job`."""

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: Any) -> Any:
        """Pydantic validator: return the body's fields without those that have no effect. These are
        those that are ignored, fields that are null, and unsupported ones with a value that asks
        for nothing. Raises RequestError for an unknown field, or an unsupported one with
        another value."""
        if not isinstance(values, dict):
            raise RequestError("the body is not a JSON object")
        others = other_fields()
        ignored, neutral, absent = others["ignored"], others["neutral"], others["absent"]
        known = [*cls.model_fields, *ignored, *neutral]
        kept: dict[str, Any] = {}
        for key, value in values.items():
            if key in neutral and key not in cls.model_fields:
                if value not in (*neutral[key], None):
                    given = printable(json.dumps(value))[:80]
                    raise RequestError(
                        f"{key}={given} is not supported here; leave it out",
                        param=key,
                        code="unsupported_parameter",
                    )
            elif key not in known:
                hint = did_you_mean(key, known)
                message = f"{printable(key)[:80]} is no field of this request{hint}"
                raise RequestError(message, param=key[:80], code="unknown_parameter")
            elif value in absent.get(key, ()):
                kept[key] = None
            elif key in cls.model_fields and not (
                value is None and not cls.model_fields[key].is_required()
            ):
                kept[key] = value
        return kept

    @property
    def n_each(self) -> int:
        """Number of texts for each prompt."""
        return self.n or 1

    @property
    def most_tokens(self) -> int | None:
        """Length that was asked for each text, in tokens; None if the server is to choose."""
        return self.max_tokens

    def headers(self, served: ServedModel) -> dict[str, str]:
        """Return the headers of the response that say what of the request `served` cannot do."""
        return {}

    @property
    def asks_for_usage(self) -> bool:
        """True if a stream is to end with token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def stops(self) -> tuple[str, ...]:
        """Return the strings that end a text. Raises RequestError if they are too many or too
        long."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MOST_STOPS or not all(0 < len(each) <= LONGEST_STOP for each in stops):
            raise RequestError(
                f"stop takes at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters",
                param="stop",
            )
        return stops

    def asked_texts(
        self,
        ids: Tokens,
        max_tokens: int,
        served: ServedModel,
        limits: Limits,
        *,
        ends: Ends,
        **fields: Any,
    ) -> list[TextRequest]:
        """Return the `n` texts requested for one prompt with token ids (n_tokens,), with the
        server's most tokens at most. They end at `ends` or the request's own stop texts; `fields`
        are passed on to TextRequest. Raises RequestError if the prompt is too long."""
        if len(ids) > served.context_length:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens; {served.name} sees at most "
                f"{served.context_length:,}: shorten it",
                param=self.prompt_field,
                code="context_length_exceeded",
            )
        n_tokens = min(max_tokens, limits.max_tokens)
        given = {"temperature", "top_k", "top_p"} & self.model_fields_set
        sampling = replace(served.sampling, **{key: getattr(self, key) for key in given})
        fields |= {"ends": ends.tokens, "seed": self.seed or 0}
        fields["stop"] = (*self.stops(), *ends.texts)
        return [
            TextRequest(ids, n_tokens, sampling, sample=sample, **fields)
            for sample in range(self.n_each)
        ]
