"""Chat completions in OpenAI's form: a conversation, translated into a text to write."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from pentameter.data.messages import normalized
from pentameter.data.tokenizers.base import NO_ENDS, Ends
from pentameter.errors import ConfigError
from pentameter.generation.prompts import encode_messages
from pentameter.generation.sampling import Tokens
from pentameter.serve.answer_forms.said import Reads, Said
from pentameter.serve.constraints import Constraint
from pentameter.serve.continuation import Piece, TextRequest
from pentameter.serve.endpoints.answers import Answer, ChoicesAnswer
from pentameter.serve.endpoints.parsing import RequestError
from pentameter.serve.endpoints.requests import MOST_RIVALS, Limits, TextsRequest
from pentameter.serve.endpoints.tools import (
    TOOLS_NOT_SHOWN,
    Effort,
    NamedTool,
    ResponseFormat,
    Tool,
    constraint,
    obstacle_to_tools,
    template_variables,
)
from pentameter.serve.worker import Job, ServedModel


class ChatRequest(TextsRequest):
    """JSON body for /v1/chat/completions: a conversation to answer. `max_completion_tokens` has
    precedence over `max_tokens`; `top_logprobs` needs `logprobs`. `chat_template_kwargs` is not
    OpenAI's: further variables of the chat template."""

    prompt_field = "messages"
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
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
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice is given without tools", param="tool_choice")
        if self.must_call and (obstacle := obstacle_to_tools(served)) is not None:
            raise RequestError(
                f"{obstacle}, and tool_choice asks for a call; leave both out, or name a template "
                "that writes tools with data.chat_template",
                param="tools",
            )
        tools = [
            each.model_dump(exclude_unset=True, exclude_none=True)
            for each in self.shown_tools(served)
        ]
        variables = template_variables(
            tokenizer.chat, self.chat_template_kwargs, self.reasoning_effort
        )
        try:
            ids = encode_messages(
                tokenizer, normalized(self.messages), served.render, tools or None, variables
            )
        except ConfigError as error:
            raise RequestError(str(error), param="messages") from error
        held_to = self._constraint(ids, served)
        ends = NO_ENDS if self.ignore_eos else served.ends_of_answers
        if held_to is not None:  # which ends the text, and may let a stop text stand within it
            ends = Ends(ends.tokens)
        room = min(max(1, served.context_length - len(ids) + 1), limits.max_tokens)
        n_tokens = min(self.most_tokens or room, room)
        rivals = (self.top_logprobs or 0) if self.logprobs else None
        return self.asked_texts(
            ids,
            n_tokens,
            served,
            limits,
            ends=ends,
            n_rivals=rivals,
            constraint=held_to,
            follows_text=False,
        )

    def _constraint(self, ids: Tokens, served: ServedModel) -> Constraint | None:
        """Return the grammar to which the answer to a prompt with token ids (n,) is held; None if
        any text may be one. Raises RequestError if it cannot be."""
        schema = None
        if self.response_format is not None:
            schema = self.response_format.schema_of_content()
        tools = self.shown_tools(served)
        return constraint(served, end_of_prompt(served, ids), schema, tools, self.tool_choice)

    def answer(self, job: Job) -> Answer:
        """Return the answer to this request, whose texts are those of `job`."""
        return ChatAnswer(job, has_tools=bool(self.shown_tools(job.served)))

    def headers(self, served: ServedModel) -> dict[str, str]:
        """Return the header that says why tools are not shown, if the template cannot."""
        obstacle = obstacle_to_tools(served) if self.tools else None
        if obstacle is None or self.tool_choice == "none":
            return {}
        return {TOOLS_NOT_SHOWN: obstacle.encode("ascii", "replace").decode()}

    @property
    def must_call(self) -> bool:
        """Whether the answer has to call a tool."""
        return bool(self.tools) and self.tool_choice not in (None, "none", "auto")

    def shown_tools(self, served: ServedModel) -> Sequence[Tool]:
        """Return the tools that the model sees: none with the choice "none", nor where its template
        cannot show them. An answer without a call is one that the choice "auto" allows, and some
        clients offer tools with every message."""
        hidden = self.tool_choice == "none" or obstacle_to_tools(served) is not None
        return [] if hidden else self.tools or []


_PROMPT_END = 32


def end_of_prompt(served: ServedModel, ids: Tokens) -> str:
    """Return the end of a prompt with token ids (n,), which shows whether its answer begins within
    reasoning."""
    return served.tokenizer.decode(ids[-_PROMPT_END:])


class Spoken:
    """One choice of a chat's answer while it is written: what its text says, by a reader."""

    def __init__(self, reader: Reads) -> None:
        self._reader, self._text = reader, ""
        self.said = Said()

    def push(self, text: str, *, is_whole: bool) -> dict[str, Any]:
        """Append a text, the last one if `is_whole`, and return what is new in OpenAI's form, as in
        a `delta`: new content, reasoning and calls, each only if there is any."""
        self._text += text
        before, self.said = self.said, self._reader.read(self._text, is_whole=is_whole)
        news: dict[str, Any] = {
            "content": self.said.content[len(before.content) :],
            "reasoning_content": self.said.reasoning[len(before.reasoning) :],
            "tool_calls": [
                {
                    "index": index,
                    "id": each.id or uuid.uuid4().hex[:9],  # as long as Mistral's templates want it
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.arguments},
                }
                for index, each in enumerate(self.said.calls)
                if index >= len(before.calls)
            ],
        }
        return {key: value for key, value in news.items() if value}


def reader_of(job: Job, *, has_tools: bool) -> Reads:
    """Return what reads the answers of `job`, and their calls of tools if `has_tools`."""
    end = end_of_prompt(job.served, job.texts[0].asked.prompt)
    return job.served.answer_form.reader(end, has_tools=has_tools)


class ChatAnswer(ChoicesAnswer):
    """The answer to a ChatRequest. has_tools: whether calls of tools are told from content."""

    prefix, kind, kind_of_chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, *, has_tools: bool) -> None:
        super().__init__(job)
        reader = reader_of(job, has_tools=has_tools)
        self._choices = [Spoken(reader) for _ in job.texts]

    def openings(self) -> Iterator[dict[str, Any]]:
        """Yield for each choice the event that gives the role `assistant`."""
        for index in range(len(self.job.texts)):
            opening = {"delta": {"role": "assistant", "content": ""}}
            yield self._chunk(index, Piece(), opening)

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield an event if `piece` adds something; see Answer."""
        added = self.added(index, piece)
        if added["delta"] or piece.chances or piece.finish_reason:
            yield self._chunk(index, piece, added)

    def added(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return what is new as a `delta`; see Answer."""
        is_whole = piece.finish_reason is not None
        return {"delta": self._choices[index].push(piece.text, is_whole=is_whole)}

    def said(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the whole text as a message; see Answer."""
        news = self._choices[index].push(piece.text, is_whole=True)
        calls = news.get("tool_calls", [])
        for each in calls:
            del each["index"]
        content = news.pop("content", None if calls else "")
        return {"message": {"role": "assistant", "content": content} | news}

    def finish_reason(self, index: int, piece: Piece) -> str | None:
        """Return `tool_calls` for a whole answer that calls tools; see Answer."""
        has_called = bool(self._choices[index].said.calls)
        return "tool_calls" if has_called and piece.finish_reason == "stop" else piece.finish_reason

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
