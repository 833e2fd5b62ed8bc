"""Messages and tools from files and clients, normalized to the one form that chat templates get.

OpenAI's interface and files allow several forms. In the normalized one, null values are absent,
content is a text or a list of text parts, reasoning stands under every name that templates look
for, and a call's arguments are an object. Records in files (`corpora/conversations.py`) and
requests to a server are normalized alike, before anything is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pentameter.errors import ConfigError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first is the one that most templates read."""
ARGUMENTS_TEXT = "arguments_text"
"""Key that `normalized` adds to a called function whose arguments came as text: that text, for
templates that write arguments unchanged."""
_SPEAKERS = ("system", "developer", "user", "assistant")


def normalized(messages: Any) -> list[dict[str, Any]]:
    """Return a conversation's messages in one form, whichever of the usual forms they came in: see
    the head of this file. Raises ConfigError, with the message's number, for something that is no
    message, and for content parts that are not text."""
    if not isinstance(messages, list):
        raise ConfigError(f"'messages' is {type(messages).__name__}, not a list")
    return [_message(each, f"message {number}") for number, each in enumerate(messages)]


def normalized_tools(tools: Any) -> list[Any] | None:
    """Return the functions that a model may call as a list; None if there are none. `tools` is a
    list, its JSON, or a list of JSON texts. Raises ConfigError for anything else."""
    found = of_json(tools)
    if found in (None, ""):
        return None
    if not isinstance(found, list):
        raise ConfigError(f"'tools' is {type(tools).__name__}, not a list")
    return [of_json(each) for each in found]


def normalized_variables(variables: Any) -> dict[str, Any]:
    """Return further variables for a chat template, such as `enable_thinking`, as a dict.
    `variables` is an object, its JSON, or None, which gives {}. Raises ConfigError for anything
    else."""
    found = {} if variables is None else of_json(variables)
    if not isinstance(found, dict):
        raise ConfigError(f"'chat_template_kwargs' is {variables!r:.60}, not an object")
    return found


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return one message in the normalized form. `name` is what error messages call it."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{name} is {message!r:.60}, not an object with a 'role'")
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in REASONING if key in found), None)
    if reasoning is not None:  # as in transformers
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    if "function_call" in found:  # the older form
        call = {"type": "function", "function": found.pop("function_call")}
        found.setdefault("tool_calls", [call])
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = [_call(each) for each in calls] if isinstance(calls, list) else calls
    if "content" not in found and "refusal" in found:
        found["content"] = found["refusal"]
    if "content" in found:
        found["content"] = _content(found["content"], found["role"], name)
    if calls and found.get("content") == "":
        del found["content"]
    elif not calls:
        found.setdefault("content", "")
    return found


def _content(content: Any, role: str, name: str) -> Any:
    """Return a message's content: text parts as a list, anything else unchanged. Roles in _SPEAKERS
    have text only, else ConfigError; a tool's result may be any JSON value."""
    speaks = role in _SPEAKERS
    if isinstance(content, list) and (speaks or all(map(_is_part, content))):
        for part in content:
            is_text = _is_part(part) and part["type"] == "text"
            if not is_text or not isinstance(part.get("text"), str):
                raise ConfigError(
                    f"{name} has a part {part!r:.60}; only parts of text can be read, "
                    '{"type": "text", "text": …}: leave it out, or describe it in text'
                )
        return [{key: each for key, each in p.items() if each is not None} for p in content] or ""
    if speaks and (isinstance(content, bool) or not isinstance(content, str | int | float)):
        raise ConfigError(
            f"{name} has content of type {type(content).__name__}; write a text, or a list of parts"
        )
    return content


def _is_part(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("type"), str)


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as a JSON object, and with the text in which they came
    under the key ARGUMENTS_TEXT. A call whose arguments are no JSON object is returned
    unchanged."""
    if not isinstance(call, Mapping):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(text, str):
        return call
    arguments = of_json(text) if text.strip() else {}
    if not isinstance(arguments, dict):  # whatever it is, it stays the model's
        return call
    known = {**function, "arguments": arguments, ARGUMENTS_TEXT: text}
    return {**call, "function": known} if "function" in call else known


def of_json(value: Any) -> Any:
    """Return the value that a text of JSON stands for; the text itself if it is no JSON, and any
    other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
