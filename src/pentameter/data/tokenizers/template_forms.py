"""The forms in which a chat template takes what messages have several for, found by trying.

One template goes through a list of parts, another prints it as Python does; one writes a call's
arguments with `tojson`, for which they must be an object, another as the text that they are; and
what an answer of calls alone has for content (nothing, null or an empty text) decides in some
whether the calls are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pentameter.data.messages import ARGUMENTS_TEXT
from pentameter.data.tokenizers.chat import APART, MarkedText

QUESTION = {"role": "user", "content": "2 + 2"}
"""A message that any template takes."""
TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "-",
        "parameters": {"type": "object", "properties": {"cell": {"type": "integer"}}},
    },
}
_ANSWER = {"role": "assistant", "content": "4"}
_ARGUMENTS = {"cell": 7}
_NO_CONTENTS: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})
_LAST_VISIBLE = re.compile(r"(?<=\S)(?=\s*\Z)")

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Renders messages; returns None if the template refuses them."""


@dataclass(frozen=True)
class Forms:
    """The forms that a template writes."""

    parts: frozenset[str]
    """Roles whose list of parts it goes through; for others they are joined."""
    no_content: Mapping[str, Any]
    """The content of an answer of calls alone, as a message's entry, or none."""
    objects: bool
    """Whether it writes arguments that are an object."""
    texts: bool
    """Whether it writes arguments that are a text as they are."""


def forms_of(render: Render) -> Forms:
    """Return the forms that a template writes, of probes that `render` renders by it."""
    parts = frozenset(role for role in ("system", "user", "assistant") if _writes(render, role))
    text = json.dumps(_ARGUMENTS)
    for no_content in _NO_CONTENTS:
        objects, texts = (_called(render, no_content, each) for each in (_ARGUMENTS, text))
        is_object = "cell" in objects and "{'cell'" not in objects
        if is_object or text in texts:
            return Forms(parts, no_content, is_object, text in texts)
    return Forms(parts, _NO_CONTENTS[-1], True, True)  # it writes no calls


def _writes(render: Render, role: str) -> bool:
    """Return True if a template writes each text of parts that someone in `role` said."""
    said = [{"type": "text", "text": text} for text in ("2 + 2", "3 + 3")]
    probe: Mapping[str, Any] = {"role": role, "content": said}
    messages = {"system": [probe, QUESTION], "assistant": [QUESTION, probe]}.get(role, [probe])
    text = render(messages) or ""
    return all(part["text"] in text for part in said) and not re.search("['\"]text['\"]", text)


def _called(render: Render, no_content: Mapping[str, Any], arguments: Any) -> str:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    text = render([QUESTION, {"role": "assistant", **no_content, "tool_calls": [call]}]) or ""
    return text if "probe" in text else ""


def has_forms(message: Mapping[str, Any]) -> bool:
    """Return True if a message has what templates take in several forms."""
    return _is_list_of_parts(message.get("content")) or "tool_calls" in message


def in_forms(message: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    """Return a message, normalized and escaped, in a template's forms. Parts stay apart, so that
    none of them ends in what another begins."""
    found = dict(message)
    content: Any = found.get("content")
    if _is_list_of_parts(content):
        texts = [_apart(part["text"]) for part in content[:-1]] + [content[-1]["text"]]
        found["content"] = MarkedText("".join(texts))
        if found["role"] in forms.parts:
            found["content"] = [
                {**part, "text": text} for part, text in zip(content, texts, strict=True)
            ]
    calls = found.get("tool_calls")
    if isinstance(calls, list):
        found["tool_calls"] = [_call(each, forms) for each in calls]
        if "content" not in found:
            found |= forms.no_content
    return found


def _is_list_of_parts(content: Any) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(each, Mapping) and each.get("type") == "text" for each in content)
    )


def _apart(text: str) -> str:
    """Return a text with a mark behind its last visible character."""
    return MarkedText(_LAST_VISIBLE.sub(APART, text))


def _call(call: Any, forms: Forms) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    function = dict(function)
    text, arguments = function.pop(ARGUMENTS_TEXT, None), function.get("arguments")
    if text is not None and forms.texts:
        function["arguments"] = text
    elif isinstance(arguments, dict) and not forms.objects:
        function["arguments"] = MarkedText(json.dumps(arguments, ensure_ascii=False))
    return {**call, "function": function} if "function" in call else function
