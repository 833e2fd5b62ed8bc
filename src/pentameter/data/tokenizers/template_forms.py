"""Finds the forms in which a chat template expects parts of messages, by rendering probes.

Templates differ. One loops over a list of text parts, another prints the list as Python does. One
writes a tool call's arguments with `tojson`, so they must be an object, another expects them as
text. For an answer that only calls tools, some templates write the calls only if its content is
absent, others if it is null or empty.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pentameter.data.messages import ARGUMENTS_TEXT
from pentameter.data.tokenizers.chat import APART, MarkedText

QUESTION = {"role": "user", "content": "2 + 2"}
"""A message that any template takes."""
_PARAMETERS = {"type": "object", "properties": {"cell": {"type": "integer"}}}
_PROBE = {"name": "probe", "description": "-", "parameters": _PARAMETERS}
TOOL = {"type": "function", "function": _PROBE}
_ANSWER = {"role": "assistant", "content": "4"}
_ARGUMENTS = {"cell": 7}
_RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "probe", "content": "4"}
_NO_CONTENTS: tuple[dict[str, Any], ...] = ({}, {"content": None}, {"content": ""})
_LAST_VISIBLE = re.compile(r"(?<=\S)(?=\s*\Z)")

Render = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Renders messages; returns None if the template refuses them."""


@dataclass(frozen=True)
class Forms:
    """The forms of a message that one chat template expects, among the usual ones: content as a
    text or as a list of parts, a call's arguments as an object or as text."""

    parts: frozenset[str]
    """Roles whose content the template takes as a list of parts; for other roles parts are joined
    to one text."""
    no_content: Mapping[str, Any]
    """The entry for the content of an answer that only calls tools: {}, {"content": None} or
    {"content": ""}."""
    objects: bool
    """Whether the template writes a call's arguments correctly if they are an object."""
    texts: bool
    """Whether the template writes a call's arguments unchanged if they are a text."""


def forms_of(render: Render) -> Forms:
    """Return the forms that a template expects, found from probe messages that `render` renders by
    it."""
    parts = frozenset(role for role in ("system", "user", "assistant") if _writes(render, role))
    text = json.dumps(_ARGUMENTS)
    # Some templates read an answer's content only once something follows it.
    for behind, no_content in product(((_RESULT,), ()), _NO_CONTENTS):
        objects, texts = (_called(render, no_content, each, behind) for each in (_ARGUMENTS, text))
        is_object = "cell" in objects and "{'cell'" not in objects
        if is_object or text in texts:
            return Forms(parts, no_content, is_object, text in texts)
    return Forms(parts, _NO_CONTENTS[-1], True, True)  # it writes no calls


def _writes(render: Render, role: str) -> bool:
    """Return whether a template writes the texts in a message by `role` whose content is a list of
    parts, and does not print the list itself."""
    said = [{"type": "text", "text": text} for text in ("2 + 2", "3 + 3")]
    probe: Mapping[str, Any] = {"role": role, "content": said}
    messages = {"system": [probe, QUESTION], "assistant": [QUESTION, probe]}.get(role, [probe])
    text = render(messages) or ""
    return all(part["text"] in text for part in said) and not re.search("['\"]text['\"]", text)


def _called(
    render: Render,
    no_content: Mapping[str, Any],
    arguments: Any,
    behind: Sequence[Mapping[str, Any]],
) -> str:
    """Return a call of a tool as a template writes it, with the messages `behind` it; empty if it
    writes none."""
    function = {"name": "probe", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    answer = {"role": "assistant", **no_content, "tool_calls": [call]}
    text = render([QUESTION, answer, *behind]) or ""
    return text if "probe" in text else ""


def has_forms(message: Mapping[str, Any]) -> bool:
    """Return whether a message has content or calls that templates expect in different forms."""
    return _is_list_of_parts(message.get("content")) or "tool_calls" in message


def in_forms(message: Mapping[str, Any], forms: Forms) -> dict[str, Any]:
    """Return a message, normalized and escaped, in the forms that a template expects. Each text
    part but the last ends in a mark, so that no special token arises where two parts meet."""
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
    """Return a text with a mark (APART) after its last visible character, so that no special token
    arises where the next text begins."""
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
