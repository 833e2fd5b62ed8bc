"""Requests in OpenAI's form: the fields and limits of all, and completions, translated into texts
to write."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pentameter.config.tables import packaged_table
from pentameter.errors import ConfigError, did_you_mean, lone_surrogate, printable
from pentameter.generation.prompts import encode_prompt
from pentameter.generation.sampling import Sampling, Tokens
from pentameter.serve.answers import Answer, CompletionAnswer
from pentameter.serve.continuation import TextRequest
from pentameter.serve.worker import Job, ServedModel

LONGEST_STOP, MOST_STOPS = 256, 16
MOST_RIVALS = 20
COMPLETION_TOKENS = 16
"""OpenAI's default for a completion's `max_tokens`."""


@cache
def other_fields() -> dict[str, Any]:
    """Return OpenAI's fields that this server does not have, by `other_fields.toml`: `ignored`, a
    list of those that change nothing, and `neutral`, field → values beside null that ask for
    nothing, and so are accepted."""
    return packaged_table("serve/other_fields.toml")


class RequestError(Exception):
    """A refused request: message, HTTP status, and OpenAI's `param` and `code`. Message and `param`
    may quote the request; characters that UTF-8 cannot encode are written as escapes."""

    def __init__(
        self, message: str, status: int = 400, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(printable(message, keep="\n\t"))
        self.param = None if param is None else printable(param)
        self.status, self.code = status, code

    def to_json(self) -> dict[str, Any]:
        """Return the error as OpenAI's response body."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        said = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": said}


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
    `ignore_eos` no special token ends a text."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 1.0
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
        ignored, neutral = other_fields()["ignored"], other_fields()["neutral"]
        known = [*cls.model_fields, *ignored, *neutral]
        kept = {}
        for key, value in values.items():
            if key in neutral and key not in cls.model_fields:
                if value not in (*neutral[key], None):
                    raise RequestError(
                        f"{key} is not supported here; leave it out",
                        param=key,
                        code="unsupported_parameter",
                    )
            elif key not in known:
                hint = did_you_mean(key, known)
                message = f"{printable(key)[:80]} is no field of this request{hint}"
                raise RequestError(message, param=key[:80], code="unknown_parameter")
            elif key not in ignored and (value is not None or cls.model_fields[key].is_required()):
                kept[key] = value
        return kept

    @property
    def n_each(self) -> int:
        """Number of texts for each prompt."""
        return self.n or 1

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
        self, ids: Tokens, max_tokens: int, served: ServedModel, limits: Limits, **fields: Any
    ) -> list[TextRequest]:
        """Return the `n` texts requested for one prompt with token ids (n_tokens,); `fields` are
        passed on to TextRequest. Raises RequestError if the prompt or max_tokens is too long."""
        if len(ids) > served.context_length:
            raise RequestError(
                f"the prompt has {len(ids):,} tokens; {served.name} sees at most "
                f"{served.context_length:,}: shorten it",
                param=self.prompt_field,
                code="context_length_exceeded",
            )
        if max_tokens > limits.max_tokens:
            raise RequestError(
                f"max_tokens={max_tokens:,} is more than {limits.max_tokens:,}, this server's "
                "most; ask for less, and go on from the answer",
                param="max_tokens",
            )
        temperature = 1.0 if self.temperature is None else self.temperature
        sampling = Sampling(temperature, self.top_k, self.top_p)
        fields |= {"stop": self.stops(), "seed": self.seed or 0}
        return [
            TextRequest(ids, max_tokens, sampling, sample=sample, **fields)
            for sample in range(self.n_each)
        ]


class CompletionRequest(TextsRequest):
    """JSON body for /v1/completions: one or more prompts, each a text or token ids; `logprobs` is
    the number of likeliest tokens to report, None for no probabilities."""

    prompt_field = "prompt"
    prompt: str | list[str] | list[int] | list[list[int]] = ""
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
        ends = frozenset[int]()
        if tokenizer.end_of_text is not None and not self.ignore_eos:
            ends = frozenset({tokenizer.end_of_text})
        found = []
        for prompt in prompts:
            found += self.asked_texts(
                _encoded(prompt, served),
                self.max_tokens or COMPLETION_TOKENS,
                served,
                limits,
                ends=ends,
                n_rivals=self.logprobs,
                follows_text=bool(len(prompt)),
            )
        return found

    def answer(self, job: Job) -> Answer:
        """Return the answer to this request, whose texts are those of `job`."""
        return CompletionAnswer(job)


_Kind = TypeVar("_Kind", bound=BaseModel)


def parsed(kind: type[_Kind], body: Any) -> _Kind:
    """Return a JSON body parsed as `kind`. Raises RequestError, naming the field, if it is
    invalid."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        # For a value that may be of several types, there is an error for each type. The innermost
        # one is for the type that the value has.
        first = max(
            error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"])
        )
        field = str(first["loc"][0]) if first["loc"] else None
        where = f"{_path_of(first['loc'])}: " if field else ""
        raise RequestError(f"{where}{first['msg']}", param=field) from error


def _path_of(parts: Sequence[str | int]) -> str:
    """Return a field's path in a body, such as `messages[0].content[1].type`. `parts` is the path
    as pydantic reports it; the words with which it tells alternative types apart (`str`,
    `list[ContentPart]`) are left out."""
    kinds = {"str", "int", "float", "bool"}
    names = [part for part in parts if isinstance(part, int) or part not in kinds]
    names = [part for part in names if isinstance(part, int) or part.isidentifier()]
    spelled = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in names)
    return "".join(spelled).removeprefix(".")


def body_of(text: bytes) -> Any:
    """Return a request's body, parsed from JSON. Raises RequestError if it is not JSON, or if the
    name of a field, at any depth, cannot be encoded in UTF-8."""
    try:
        return json.loads(text, object_pairs_hook=_with_names)
    except (ValueError, RecursionError) as error:  # of json, or of UTF-8
        raise RequestError(f"the body is not JSON: {error}") from error


def _with_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, _ in pairs:
        if lone_surrogate(name) is not None:
            said = f"{printable(name)[:80]} is no field's name: it has half a surrogate pair"
            raise RequestError(said, param=name[:80])
    return dict(pairs)


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
