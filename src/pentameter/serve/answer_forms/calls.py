"""The forms in which families write calls of tools between, or in place of, their content.

A form is a row of FORMS. What a model's family writes is recognized by its chat template: the form
that reads the template's own writing of a call is the family's (`recognizing.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pentameter.serve.answer_forms.said import (
    Call,
    IncompleteError,
    MalformedError,
    Said,
    after_space,
    call_of,
    read_json,
    settled,
)

ReadCalls = Callable[[str, int], tuple[list[Call], int]]
"""Reads the calls in a text at an index, behind the form's opening. Returns them and the index
behind them. Raises IncompleteError or MalformedError."""


@dataclass(frozen=True)
class CallForm:
    """A form in which models write calls of tools."""

    name: str
    openings: Sequence[str]
    """The texts with which a call, or a list of calls, begins."""
    read_calls: ReadCalls
    closing: str = ""
    """The text that may follow a call, and is no content."""
    only_first: bool = False
    """Whether calls are all of an answer: one is recognized at its beginning and behind another,
    and nowhere else."""

    def read(self, text: str, *, is_whole: bool) -> Said:
        """Return what a text without reasoning says: content and calls. White space beside calls is
        left out. See `Reads`."""
        content, calls, start, look = "", list[Call](), 0, 0
        while True:
            at, opening = self._next(text, look)
            if at < 0:
                part = settled(text[start:], self.openings, is_whole=is_whole)
                break
            try:
                found, end = self.read_calls(text, at + len(opening))
            except IncompleteError:
                part = text[start:] if is_whole else text[start:at].rstrip()
                break
            except MalformedError:
                look = at + len(opening) if not self.only_first else len(text)
                continue
            content = _joined(content, text[start:at].rstrip(), calls)
            calls += found
            start = look = self._behind(text, end)
        return Said(_joined(content, part, calls), calls=calls)

    def _next(self, text: str, start: int) -> tuple[int, str]:
        """Return where the next call may begin in `text` from `start` on, and its opening; -1 if
        none does."""
        if self.only_first:
            at = after_space(text, start)
            fitting = (each for each in self.openings if text.startswith(each, at))
            opening = next(fitting, None) if at < len(text) else None
            return (-1, "") if opening is None else (at, opening)
        places = [(at, each) for each in self.openings if (at := text.find(each, start)) >= 0]
        return min(places, default=(-1, ""))

    def _behind(self, text: str, end: int) -> int:
        """Return the index behind a call that ends at `end`, and behind its closing text, or what
        there is of it."""
        at = after_space(text, end)
        if text.startswith(self.closing, at):
            return at + len(self.closing)
        return len(text) if self.closing.startswith(text[at:]) else end


def _joined(content: str, part: str, calls: Sequence[Call]) -> str:
    """Return content with a further part of it; the part's outer white space is left out if it
    follows `calls`."""
    if not calls:
        return content + part
    part = part.strip()
    return f"{content}\n{part}" if content and part else content + part


def _tagged(text: str, start: int) -> tuple[list[Call], int]:
    """Read the calls of Hermes and Qwen: an object with name and arguments."""
    value, end = read_json(text, start, dict)
    return [call_of(value, "arguments")], end


_NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]([\w-]+))?(?:\[ARGS\])?")


def _mistral(text: str, start: int) -> tuple[list[Call], int]:
    """Read the calls of Mistral: a list of objects, or a name and an object of arguments."""
    if after_space(text, start) == len(text):
        raise IncompleteError
    if text[after_space(text, start)] == "[":
        values, end = read_json(text, start, list)
        if not values:
            raise MalformedError
        return [call_of(each, "arguments") for each in values], end
    named = _NAMED.match(text, start)
    if named is None:
        raise MalformedError
    if "{" not in text[named.end() :]:
        if re.fullmatch(r"[\w\[\]\s]*", text[named.end() :]):  # of a marker that has begun
            raise IncompleteError
        raise MalformedError
    value, end = read_json(text, named.end(), dict)
    return [Call(named[1], json.dumps(value, ensure_ascii=False), named[2])], end


def _llama(text: str, start: int) -> tuple[list[Call], int]:
    """Read a call of Llama 3: an object with name and parameters."""
    value, end = read_json(text, start, dict)
    key = next((each for each in ("parameters", "arguments") if each in value), None)
    if key is None:  # an object that is an answer
        raise MalformedError
    return [call_of(value, key)], end


_VALUE = r'"(?:[^"\\]|\\.)*"|[\w.+-]+'
_ARGUMENT = re.compile(rf"(\w+)\s*=\s*({_VALUE})", re.DOTALL)
_ONE = rf"\w+\s*=\s*(?:{_VALUE})"
_IN_PYTHON = re.compile(rf"\s*(\w+)\.call\(\s*((?:{_ONE}(?:\s*,\s*{_ONE})*)?)\s*\)", re.DOTALL)


def _llama_tagged(text: str, start: int) -> tuple[list[Call], int]:
    """Read what Llama 3 writes behind its tag: an object, or a call as in Python for its own tools,
    `brave_search.call(query="…")`."""
    if (at := after_space(text, start)) == len(text):
        raise IncompleteError
    if text[at] == "{":
        return _llama(text, at)
    if (found := _IN_PYTHON.match(text, at)) is None:
        raise IncompleteError
    try:
        known = {name: json.loads(value) for name, value in _ARGUMENT.findall(found[2])}
    except ValueError as error:
        raise MalformedError from error
    return [Call(found[1], json.dumps(known, ensure_ascii=False))], found.end()


LLAMA_TAG = "<|python_tag|>"


def _llama_any(text: str, start: int) -> tuple[list[Call], int]:
    """Read a call of Llama 3, with its tag or without."""
    if text.startswith(LLAMA_TAG, start):
        return _llama_tagged(text, start + len(LLAMA_TAG))
    if LLAMA_TAG.startswith(text[start:]):
        raise IncompleteError
    return _llama(text, start)


FORMS = (
    CallForm("Hermes", ("<tool_call>",), _tagged, closing="</tool_call>"),
    CallForm("Mistral", ("[TOOL_CALLS]",), _mistral),
    CallForm("Llama 3", ("",), _llama_any, closing=";", only_first=True),
)
