"""`/v1/responses` in its plain part: text in, text out; no state is kept, and no tools."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from pentameter.serve.continuation import Piece, TextRequest
from pentameter.serve.endpoints.answers import Answer
from pentameter.serve.endpoints.chat import ChatRequest, Spoken, reader_of
from pentameter.serve.endpoints.parsing import RequestError
from pentameter.serve.endpoints.requests import Limits, TextsRequest
from pentameter.serve.endpoints.tools import Effort
from pentameter.serve.worker import Job, ServedModel

_TEXT_PARTS = ("input_text", "output_text", "text")
_AS_IN_CHATS = ("model", "temperature", "top_k", "top_p", "seed", "stop", "ignore_eos")


class Reasoning(BaseModel):
    """OpenAI's `reasoning`, of which the effort counts."""

    model_config = ConfigDict(extra="ignore", strict=True)
    effort: Effort | None = None


class ResponsesRequest(TextsRequest):
    """JSON body for /v1/responses: a text or a conversation to answer, and `instructions` before
    it."""

    prompt_field = "input"
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None

    @property
    def most_tokens(self) -> int | None:
        """Length that was asked for the answer, in tokens; None for what the context has room
        for."""
        return self.max_output_tokens

    def texts(self, served: ServedModel, limits: Limits) -> list[TextRequest]:
        """Return the requested answer. Raises RequestError as a chat does, and for what would need
        kept responses."""
        for field in ("previous_response_id", "conversation", "store"):
            if getattr(self, field):
                raise RequestError(
                    f"{field} needs responses that are kept, and this server keeps none; leave it "
                    "out, and send the whole conversation as input",
                    param=field,
                    code="unsupported_parameter",
                )
        if self.max_tokens is not None:
            raise RequestError(
                "max_tokens is no field of this request; did you mean max_output_tokens?",
                param="max_tokens",
                code="unknown_parameter",
            )
        if self.n_each != 1:
            raise RequestError(f"n={self.n_each}: a response is one text", param="n")
        if not self.input:
            raise RequestError("input is empty: give a text, or a list of messages", param="input")
        chat = ChatRequest(
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            **{field: getattr(self, field) for field in _AS_IN_CHATS},
        )
        try:
            return chat.texts(served, limits)
        except RequestError as error:
            error.param = "input" if error.param == "messages" else error.param
            raise

    def _messages(self) -> list[dict[str, Any]]:
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*opening, {"role": "user", "content": self.input}]
        said = (_message(index, item) for index, item in enumerate(self.input))
        return opening + [each for each in said if each is not None]

    def answer(self, job: Job) -> Answer:
        """Return the answer to this request, whose text is that of `job`."""
        return ResponsesAnswer(job, self)


def _message(index: int, item: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the chat's message for an item of `input`; None for one of reasoning, which the next
    answer need not see. Raises RequestError for another kind of item, or a part without text."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None
    if kind != "message":
        raise RequestError(
            f"input[{index}] is a {kind!r}; only messages can be read: tools are for "
            "/v1/chat/completions",
            param="input",
        )
    content = item.get("content")
    if isinstance(content, list):
        content = [
            {"type": "text", "text": part.get("text")}
            if isinstance(part, dict) and part.get("type") in _TEXT_PARTS
            else part
            for part in content
        ]
    return {"role": item.get("role"), "content": content}


class ResponsesAnswer(Answer):
    """The answer to a ResponsesRequest, which it repeats: one message with one text. What a model
    says while it reasons is left out; its tokens count."""

    prefix, ends_with_done = "resp_", False

    def __init__(self, job: Job, asked: ResponsesRequest) -> None:
        super().__init__(job)
        self._asked = asked
        self._spoken = Spoken(reader_of(job, has_tools=False))
        self._item_id = "msg_" + uuid.uuid4().hex
        self._n_events = 0
        self._finish_reason: str | None = None

    def openings(self) -> Iterator[dict[str, Any]]:
        """Yield that the response has begun, its message, and the text in it."""
        for name in ("created", "in_progress"):
            yield self._event(name, response=self._response("in_progress"))
        item = self._message("in_progress") | {"content": []}
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._event_of_text("content_part.added", part=self._part(""))

    def chunks(self, index: int, piece: Piece) -> Iterator[dict[str, Any]]:
        """Yield an event if `piece` adds to the text."""
        self._finish_reason = piece.finish_reason
        news = self._spoken.push(piece.text, is_whole=piece.finish_reason is not None)
        if news.get("content"):
            delta = news["content"]
            yield self._event_of_text("output_text.delta", delta=delta, logprobs=[])

    def closings(self, n_tokens: Iterable[int], *, with_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield that text, message and response are complete, the last with the token counts."""
        text = self._spoken.said.content
        yield self._event_of_text("output_text.done", text=text, logprobs=[])
        yield self._event_of_text("content_part.done", part=self._part(text))
        response = self._whole(n_tokens)
        yield self._event("output_item.done", output_index=0, item=response["output"][0])
        yield self._event(response["status"], response=response)

    def whole(self, pieces: dict[int, Piece]) -> dict[str, Any]:
        """Return the whole response. `pieces` maps 0 to its text."""
        self._spoken.push(pieces[0].text, is_whole=True)
        self._finish_reason = pieces[0].finish_reason
        return self._whole([pieces[0].n_tokens])

    def failed(self, error: RequestError) -> dict[str, Any]:
        """Return the event `error`."""
        said = {"code": error.code, "message": str(error), "param": error.param}
        return {"type": "error", **said, "sequence_number": self._n_events}

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        kind = name if name == "error" else f"response.{name}"
        event = {"type": kind, **fields, "sequence_number": self._n_events}
        self._n_events += 1
        return event

    def _event_of_text(self, name: str, **fields: Any) -> dict[str, Any]:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return self._event(name, **place, **fields)

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _message(self, status: str) -> dict[str, Any]:
        said = [self._part(self._spoken.said.content)]
        about = {"type": "message", "id": self._item_id, "status": status, "role": "assistant"}
        return {**about, "content": said}

    def _whole(self, n_tokens: Iterable[int]) -> dict[str, Any]:
        """Return the response once its text has ended, with the token counts."""
        prompts, drawn = self.counted(n_tokens)
        is_cut = self._finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return self._response(status) | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._message(status)],
            "usage": {
                "input_tokens": prompts,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": drawn,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompts + drawn,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response without output, as it is told when it begins."""
        asked, effort = self._asked, self._asked.reasoning and self._asked.reasoning.effort
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": {},
            "model": self.job.served.name,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }
