"""Recognizes what a model's family writes in answers, by what its chat template writes.

A template writes the messages of a conversation, calls of tools among them, as the model learned to
write them. So a call is rendered, and the form that reads it back is the family's form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pentameter.data.tokenizers.chat import ChatTemplate, without_marks
from pentameter.data.tokenizers.renderer import RenderRequest
from pentameter.data.tokenizers.template_forms import QUESTION, TOOL
from pentameter.errors import ConfigError
from pentameter.serve.answer_forms.calls import FORMS, CallForm
from pentameter.serve.answer_forms.readers import (
    REASONING_TAGS,
    ChannelReader,
    TaggedReader,
    Tags,
)
from pentameter.serve.answer_forms.said import Call, Reads

CALL_ID = "abcdefghi"
_NAME = str(TOOL["function"]["name"])  # type: ignore[index]
_FUNCTION = {"name": _NAME, "arguments": {"cell": 7}}
_CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": CALL_ID, "type": "function", "function": _FUNCTION}],
}
_ARGUMENTS = re.compile(r'\{\s*"cell":\s*7\s*\}')
_CHANNELS = ("<|channel|>", "<|message|>")
_TO_RECIPIENT = re.compile(r"(?:<\|channel\|>\w+)? ?to=(?:functions\.)?" + re.escape(_NAME))

Render = Callable[[RenderRequest], str]
"""Renders a request by the model's chat template; ConfigError if it refuses the messages."""


@dataclass(frozen=True)
class Writing:
    """How a template writes a call: what stands before the function's name, between it and the
    arguments, and behind them, up to the end of the answer. CALL_ID stands for the call's id."""

    before: str
    between: str
    behind: str


@dataclass(frozen=True)
class AnswerForm:
    """The parts of answers by a model's family beside content."""

    tags: Tags | None = None
    """The tags of reasoning; None if its template knows none."""
    has_channels: bool = False
    """Whether answers are in channels, as gpt-oss writes them."""
    calls: CallForm | None = None
    """The form of calls, None in channels or if no form is recognized."""
    writing: Writing | None = None
    """How the template writes a call; None if it is in no form that is known."""
    shows_tools: bool = False
    """Whether the template shows a model the tools that it may call."""

    def described(self) -> str:
        """Return what was recognized, for a line that is printed; empty if nothing was."""
        calls = "gpt-oss" if self.has_channels else self.calls.name if self.calls else None
        known = {
            "tools": calls if self.shows_tools and self.writing else None,
            "reasoning": "analysis" if self.has_channels else self.tags and self.tags[0],
        }
        found = ", ".join(f"{name} {value}" for name, value in known.items() if value)
        return f" ({found})" if found else ""

    def reader(self, prompt: str, *, has_tools: bool) -> Reads:
        """Return what reads the answer to a rendered `prompt`, of which the end is enough; calls
        are told from content if `has_tools`."""
        if self.has_channels:
            return ChannelReader(has_tools)
        calls = self.calls if has_tools else None
        return TaggedReader(self.tags, calls, self.begins_in_reasoning(prompt))

    def begins_in_reasoning(self, prompt: str) -> bool:
        """Return whether an answer to `prompt` begins within reasoning."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags[0])


def recognized(chat: ChatTemplate, render_by: Render, ends: Sequence[str]) -> AnswerForm:
    """Return the form of answers in which a chat template writes them. render_by: renders by this
    template. ends: texts that end an answer, special tokens among them."""
    source = "\n".join(chat.sources.values())
    has_channels = all(each in source for each in _CHANNELS)
    tags = next((each for each in REASONING_TAGS if each[1] in source), None)
    tags = None if has_channels else tags
    shows_tools, calling = False, ""
    with suppress(ConfigError):
        shows_tools = _NAME in render_by(RenderRequest([QUESTION], [TOOL]))
        calling = without_marks(render_by(RenderRequest([QUESTION, _CALLING], [TOOL])))
    *_, found = [None, *_ARGUMENTS.finditer(calling)]
    if found is None:
        return AnswerForm(tags, has_channels, shows_tools=shows_tools)
    span = found.span()
    if has_channels:
        starts = [each.start() for each in _TO_RECIPIENT.finditer(calling, 0, span[0])]
        if starts and _reads(ChannelReader(True), calling[starts[-1] :]):
            writing = _writing(calling[starts[-1] :], ends)
            return AnswerForm(None, True, None, writing, shows_tools)
        return AnswerForm(None, True, shows_tools=shows_tools)
    for form in FORMS:
        start = max(calling.rfind(opening or "{", 0, span[0]) for opening in form.openings)
        text = calling[start:] if start >= 0 else ""
        if _reads(form, _without_end(text, ends)):
            return AnswerForm(tags, False, form, _writing(text, ends), shows_tools)
    return AnswerForm(tags, shows_tools=shows_tools)


def _reads(reader: Reads, text: str) -> bool:
    """Return whether a reader finds in `text` the call that was rendered, and nothing else."""
    said = reader.read(text, is_whole=True)
    call = Call(_NAME, '{"cell": 7}')
    known = [[call], [Call(call.name, call.arguments, CALL_ID)]]
    return not said.content.strip() and any(
        [Call(each.name, each.arguments.replace(" ", "").replace(":", ": "), each.id)
         for each in said.calls] == calls
        for calls in known
    )  # fmt: skip


def _without_end(text: str, ends: Sequence[str]) -> str:
    """Return a rendered answer without what ends it."""
    places = [at for each in ends if (at := text.find(each)) >= 0]
    return text[: min(places, default=len(text))].rstrip()


def _writing(text: str, ends: Sequence[str]) -> Writing | None:
    """Return how `text`, a call rendered by a template, is written."""
    before, _, rest = _without_end(text, ends).partition(_NAME)
    found: Any = _ARGUMENTS.search(rest)
    return Writing(before, rest[: found.start()], rest[found.end() :])
