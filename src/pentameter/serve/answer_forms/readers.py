"""Readers of answers: what a family writes, told apart as reasoning, content and calls of tools."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pentameter.generation.stop_texts import n_begun
from pentameter.serve.answer_forms.calls import CallForm
from pentameter.serve.answer_forms.said import Call, Said, settled

Tags = tuple[str, str]
"""The texts with which reasoning begins and ends."""
REASONING_TAGS: tuple[Tags, ...] = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)


@dataclass(frozen=True)
class TaggedReader:
    """Reads answers that may begin with reasoning between tags, and may hold calls of tools."""

    tags: Tags | None = None
    """The tags of reasoning; None if there is none."""
    calls: CallForm | None = None
    """The form of calls; None if they are content."""
    is_reasoning: bool = False
    """Whether the prompt ends with the first tag, so that the answer begins within reasoning."""

    def read(self, text: str, *, is_whole: bool) -> Said:
        """Return what `text` says; see `Reads`."""
        reasoning, rest = self._reasoning(text, is_whole=is_whole)
        if rest is None:
            return Said("", reasoning)
        if self.calls is None:
            return Said(rest, reasoning)
        said = self.calls.read(rest, is_whole=is_whole)
        return Said(said.content, reasoning, said.calls)

    def _reasoning(self, text: str, *, is_whole: bool) -> tuple[str, str | None]:
        """Return the reasoning in `text`, and what follows it; None while nothing follows."""
        if self.tags is None:
            return "", text
        first, last = self.tags
        body = text
        if not self.is_reasoning or text.lstrip().startswith(first):
            begun = text.lstrip()
            if not is_whole and first.startswith(begun):
                return "", None
            if not begun.startswith(first):
                return "", text
            body = begun[len(first) :]
        elif not is_whole and first.startswith(text.lstrip()):
            return "", None
        at = body.find(last)
        if at < 0:
            return settled(body, [last], is_whole=is_whole).strip(), None
        return body[:at].strip(), body[at + len(last) :].lstrip()


_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


@dataclass(frozen=True)
class ChannelReader:
    """Reads answers in channels, as gpt-oss writes them (harmony): `analysis` is reasoning, a
    message to a recipient is a call, and any other is content."""

    has_calls: bool = False
    """Whether messages to recipients are calls; if not, they are content."""

    def read(self, text: str, *, is_whole: bool) -> Said:
        """Return what `text` says; see `Reads`."""
        content, reasoning, calls, start = list[str](), list[str](), list[Call](), 0
        if "<|" not in text:  # an answer without a channel
            return Said(text if is_whole else "")
        while (at := text.find(_MESSAGE, start)) >= 0:
            header, body = text[start:at], at + len(_MESSAGE)
            ends = [(end, each) for each in _ENDS if (end := text.find(each, body)) >= 0]
            end, mark = min(ends, default=(len(text), ""))
            said = text[body:end]
            recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
            if recipient and self.has_calls:
                if mark or is_whole:
                    calls.append(Call(recipient[1], said.strip()))
            else:
                if not mark and not is_whole:
                    said = said[: len(said) - n_begun(said, _ENDS)]
                is_analysis = channel is not None and channel[1] == "analysis"
                (reasoning if is_analysis else content).append(said)
            start = end + len(mark)
        return Said("".join(content), "\n".join(reasoning), calls)
