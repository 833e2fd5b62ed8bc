"""Messages and tools in OpenAI's forms, made the one form that chat templates are given.

What people read from files (`corpora/conversations.py`) and what clients send to a server becomes
the same here, before anything is rendered: null is absent, content is a text or parts of text,
reasoning has the names that templates look for, a call's arguments are an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pentameter.errors import ConfigError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first is the one that most templates read."""
ARGUMENTS_TEXT = "arguments_text"
"""Key of a function that is called: its arguments as the text that they came as, for templates that
write that."""
_SHARE_GPT = {"human": "user", "gpt": "assistant"}
_SPEAKERS = ("system", "developer", "user", "assistant")


def normalized(messages: Any) -> list[dict[str, Any]]:
    """Return a list of messages in the one form; ConfigError, which numbers the message, for what
    is none or holds parts that are not text."""
    if not isinstance(messages, list):
        raise ConfigError(f"'messages' is {type(messages).__name__}, not a list")
    return [_message(each, f"message {number}") for number, each in enumerate(messages)]


def normalized_tools(tools: Any) -> list[Any] | None:
    """Return the functions that a model may call, of a list, also one written as JSON, or one of
    such texts; None for none. Raises ConfigError for anything else."""
    found = _parsed(tools)
    if found in (None, ""):
        return None
    if not isinstance(found, list):
        raise ConfigError(f"'tools' is {type(tools).__name__}, not a list")
    return [_parsed(each) for each in found]


def normalized_variables(variables: Any) -> dict[str, Any]:
    """Return what a template is given beside messages and tools, such as `enable_thinking`, of an
    object or its JSON; none for None. Raises ConfigError for anything else."""
    found = {} if variables is None else _parsed(variables)
    if not isinstance(found, dict):
        raise ConfigError(f"'chat_template_kwargs' is {variables!r:.60}, not an object")
    return found


def _message(message: Any, name: str) -> dict[str, Any]:
    """Return one message, called `name` in errors, in the one form."""
    if isinstance(message, Mapping) and "role" not in message and "from" in message:  # ShareGPT's
        spoken = {"role": _SHARE_GPT.get(message["from"], message["from"])}
        message = {**spoken, "content": message.get("value"), **message}
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
    """Return a message's content: a list of text parts, or what it is. What a tool found may be any
    value; who speaks, speaks text."""
    speaks = role in _SPEAKERS
    if isinstance(content, list) and (speaks or all(map(_is_part, content))):
        for part in content:
            if not (
                _is_part(part) and part["type"] == "text" and isinstance(part.get("text"), str)
            ):
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
    """Return a tool call whose function has its arguments as an object, beside the text that they
    came as."""
    if not isinstance(call, Mapping):
        return call
    call = {key: value for key, value in call.items() if value is not None}
    function = call.get("function", call)
    text = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(text, str):
        return call
    arguments = _parsed(text) if text.strip() else {}
    if not isinstance(arguments, dict):  # whatever it is, it stays the model's
        return call
    known = {**function, "arguments": arguments, ARGUMENTS_TEXT: text}
    return {**call, "function": known} if "function" in call else known


def _parsed(value: Any) -> Any:
    """Return the JSON value that a text has, the text if it has none; anything else unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
