"""The process that renders chat templates, within limits on time, memory and output.

A template is a program that comes with a model from strangers. Jinja's sandbox keeps it from the
machine, but not from looping, doubling a string or recursing without end. So a clean interpreter
runs it: the kernel refuses memory beyond `MEMORY_BYTES`, and ends the process once one rendering
has used its seconds of processor time.

This file is all that the interpreter loads beside Jinja, and NumPy is not among it: OpenBLAS takes
41 MB of address space for each core as it is loaded, which would be most of the limit on a machine
with 22 of them.
"""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from pentameter.data.tokenizers.chat import (
    APART,
    BEGIN,
    DEFAULT,
    END,
    TOOL_USE,
    Segment,
    TemplateBoundsError,
    TemplateRefusalError,
    without_marks,
)
from pentameter.data.tokenizers.template_forms import (
    QUESTION,
    TOOL,
    Forms,
    forms_of,
    has_forms,
    in_forms,
)
from pentameter.errors import ConfigError

SECONDS, SECONDS_PER_MILLION = 1.0, 1.0
"""Seconds of processor time for one rendering: a constant, and more for each million characters of
messages. Today's templates take a tenth of a millisecond for a short conversation."""

MEMORY_BYTES = 1 << 30
"""Maximum address space of the rendering process, which starts with about 50 MB."""

OUTPUT_CHARACTERS, OUTPUT_PER_CHARACTER = 1 << 20, 16
"""Maximum characters that one rendering may write: a constant, and more for each character of
messages."""

LONGEST_REASON = 300
"""Maximum characters quoted from a template's reason for refusing messages."""

REMEDY = "mend it, remove it, or name another with data.chat_template (a Jinja file, or 'chatml')"


@dataclass(frozen=True)
class RenderRequest:
    """One request: messages (dicts with role and content) to render. `tools` are the functions that
    the model may call, as chat templates take them; None for none."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None
    targets: Sequence[int] = ()
    """Indices of the messages that a model learns to write."""
    add_generation_prompt: bool = False
    """Whether the text ends with the beginning of an answer."""
    date: str | None = None
    """The day that templates see as today's, YYYY-MM-DD, at midnight; None for the present
    moment."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of a template by name, such as `enable_thinking`."""

    @property
    def template(self) -> str:
        """Name of the chat template by which to render this request, where a model has several:
        "tool_use" if there are tools, as transformers chooses."""
        return DEFAULT if self.tools is None else TOOL_USE

    @cached_property
    def n_characters(self) -> int:
        """Approximate size: characters in all texts, plus 8 for each other value."""
        return n_characters_of([self.messages, self.tools, self.variables])


Documents = list[list[Segment]]
"""The documents that a list of messages becomes, each a list of segments: (text, whether a model
learns it)."""


Question = tuple[str, dict[str, str], dict[str, str], Sequence[RenderRequest]]
"""A request to the rendering process: what to return ("text" or "documents"), the templates'
sources by name, the texts of special tokens by key, and the messages to render."""


def renderer() -> Callable[[Question], list[Any]]:
    """Limit this process's memory to MEMORY_BYTES, and return the function that the process serves:
    it answers one question, a list of messages to render."""
    with suppress(ValueError, OSError):  # macOS knows no such bound: the parent minds it
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        least = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
        resource.setrlimit(resource.RLIMIT_AS, (least, most))
    return _answer


def _answer(question: Question) -> list[Any]:
    """Render each list of messages to a text or to documents, by the question's first value ("text"
    or "documents"). Return the results in order; if the template refuses a list, its error takes
    the result's place.

    Raises ConfigError for an invalid template.
    """
    what, sources, tokens, several = question
    found: list[Any] = []
    for asked in several:
        source = sources.get(asked.template, sources[DEFAULT])
        compiled = _compiled(source)
        try:
            one = _Rendered(*compiled, tokens, _in_forms(asked, source, tokens))
            found.append(one.text() if what == "text" else one.documents())
        except TemplateRefusalError as error:
            found.append(error)
        except MemoryError:
            found.append(memory_is_full())
        except RecursionError as error:  # of json, beside the template
            found.append(TemplateRefusalError(f"refuses it: {_reason(error)}"))
    return found


def _in_forms(asked: RenderRequest, source: str, tokens: Mapping[str, str]) -> RenderRequest:
    """Return a request whose messages have the forms that the template with this `source` expects,
    such as tool arguments as an object or as text."""
    if not any(map(has_forms, asked.messages)):
        return asked
    forms = _forms(source, tuple(tokens.items()), asked.tools is not None)
    return replace(asked, messages=[in_forms(message, forms) for message in asked.messages])


@lru_cache(maxsize=2)
def _compiled(source: str) -> tuple[Any, bool]:
    """Compile a template's source. Return the template, and whether it writes each turn of a loop
    independently of the others (`_keeps_no_state`). Raises ConfigError if the source is not valid
    Jinja."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    try:
        with _seconds(SECONDS):
            return environment.from_string(source), _keeps_no_state(environment.parse(source))
    except MemoryError as error:
        raise memory_is_full() from error
    # A break outside of a loop is a SyntaxError of the Python that Jinja writes.
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"is not valid Jinja: {_reason(error)}; {REMEDY}") from error


@lru_cache(maxsize=4)
def _forms(source: str, tokens: Sequence[tuple[str, str]], has_tools: bool) -> Forms:
    """Return the forms of messages that a template with this source expects, found by rendering
    probes, with tools or without. `tokens` are (key, text) pairs of special tokens."""

    def render(messages: Sequence[Mapping[str, Any]]) -> str | None:
        asked = RenderRequest(messages, [TOOL] if has_tools else None)
        with suppress(TemplateRefusalError):
            return without_marks(_Rendered(*_compiled(source), dict(tokens), asked).text())
        return None

    return forms_of(render)


def _keeps_no_state(tree: Any) -> bool:
    """Return whether a parsed template (a Jinja syntax tree) uses nothing by which one turn of a
    loop could depend on another: no `namespace`, `cycler` or `joiner`, of `loop` only what looks
    back, no `batch` or `slice`, and no loop with `else`."""
    from jinja2 import nodes

    looks_back = {
        id(each.node)
        for each in tree.find_all(nodes.Getattr)
        if each.attr in ("index", "index0", "first", "previtem")
    }
    stateful = any(
        each.name in ("namespace", "cycler", "joiner")
        or (each.name == "loop" and id(each) not in looks_back)
        for each in tree.find_all(nodes.Name)
    )
    ahead = any(each.name in ("batch", "slice") for each in tree.find_all(nodes.Filter))
    return not (stateful or ahead or any(each.else_ for each in tree.find_all(nodes.For)))


@dataclass
class _Reading:
    """Record of which messages a chat template has read while it writes a text, kept by
    `_Watched`."""

    n_written: int = 0
    """Characters that the template has written so far; `_render` counts them."""
    ends: list[int] = field(default_factory=list)
    """For each message that the template has asked for, and for the end of the list, the characters
    that it had written by then."""
    is_in_order: bool = True
    """Whether all messages so far were asked for in order."""

    def refused(self) -> TypeError:
        """Record that the template read a message in an order that is not allowed, and return the
        error to raise."""
        self.is_in_order = False
        return TypeError("this template reads messages out of order")


class _Watched:
    """A list of messages for a template, which records in `reading` when each one is read.

    A template may go through the list once, from index `first` on, and look again at messages that
    it has read and at the first. Anything else raises the TypeError of `_Reading.refused`. If a
    template keeps to that, and keeps no state, then with fewer messages it would write the same
    text up to where it reads the next one; so one rendering shows where each message begins.
    """

    def __init__(
        self, messages: Sequence[Mapping[str, Any]], reading: _Reading, first: int = 0
    ) -> None:
        self._messages, self._reading, self._first = messages, reading, first

    def __bool__(self) -> bool:
        if self._first:
            raise self._reading.refused()
        return True

    def __len__(self) -> int:
        raise self._reading.refused()

    def __getitem__(self, index: Any) -> Any:
        n_read = len(self._reading.ends)
        match index:
            case slice(start=int(first), stop=None, step=None) if n_read == 0 and first >= 0:
                return _Watched(self._messages, self._reading, self._first + first)
            case int() if index >= 0 and index + self._first < max(1, n_read):
                return self._messages[index + self._first]
        raise self._reading.refused()

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        reading = self._reading
        if reading.ends:
            raise reading.refused()
        reading.ends += [reading.n_written] * self._first
        for message in self._messages[self._first :]:
            reading.ends.append(reading.n_written)
            yield message
        reading.ends.append(reading.n_written)


@dataclass(frozen=True)
class _Rendered:
    """Renders one request, `asked`, by its compiled chat template; `tokens` maps the keys of
    special tokens to their texts. Each call of a method renders anew."""

    template: Any
    keeps_no_state: bool
    tokens: Mapping[str, str]
    asked: RenderRequest

    def text(self) -> str:
        """Render all messages to text."""
        return self._render(self.asked.messages, asks=self.asked.add_generation_prompt)

    def documents(self) -> Documents:
        """Return the messages as documents in segments (text, whether a model learns it). It is one
        document if the template marks all answers, or never rewrites an earlier turn; else one
        document per answer."""
        messages, targets = self.asked.messages, self.asked.targets
        whole = self.text()
        role = messages[targets[0]]["role"]
        if BEGIN in whole and len(targets) == sum(each["role"] == role for each in messages):
            return [_between_marks(whole)]
        if (found := self._spans_at_once(whole)) is not None:
            return [_segments(whole, found)]
        whole = without_marks(whole)
        spans, texts = [], []
        for number in targets:
            text = without_marks(self._render(messages[: number + 1]))
            spans.append((self._before(number, text), len(text)))
            texts.append(whole if whole.startswith(text) else text)  # whose text is the same so far
        if all(text is whole for text in texts):
            return [_segments(whole, spans)]
        return [
            [(text[:before], False), (text[before:end], True)]
            for text, (before, end) in zip(texts, spans, strict=True)
        ]

    def _spans_at_once(self, whole: str) -> list[tuple[int, int]] | None:
        """Return the span (start, stop) of each answer in `whole`, the text of all messages, from
        two renderings in place of two per answer. None if that cannot be relied on, as the template
        may write earlier messages otherwise once later ones follow."""
        messages, targets = self.asked.messages, self.asked.targets
        if not self.keeps_no_state or BEGIN in whole:
            return None
        reading = _Reading()
        try:
            again = self._render(messages, reading=reading)
            prompted = self._render(messages, asks=True)
        except TemplateRefusalError:
            return None
        ends = reading.ends
        if not reading.is_in_order or len(ends) != len(messages) + 1 or again != whole:
            return None
        rest, prompt = whole[ends[-1] :], prompted[ends[-1] :]
        spans = []
        for number in targets:
            turn = whole[ends[number] : ends[number + 1]] + rest
            fitting = [each for each in (prompt, rest) if turn.startswith(each)]
            if not fitting or not whole.startswith(rest, ends[number + 1]):
                return None
            start = ends[number] + len(fitting[0])
            if number == 0:
                start = self._before(0, whole[: ends[1]] + rest)
            spans.append((start, ends[number + 1] + len(rest)))
        for number, (start, end) in {targets[0]: spans[0], targets[-1]: spans[-1]}.items():
            text = self._render(messages[: number + 1])
            if text != whole[:end] or self._before(number, text) != start:
                return None
        return spans if prompted.startswith(whole[: ends[-1]]) else None

    def _before(self, number: int, text: str) -> int:
        """Return the index in `text` at which its last message begins, the answer number `number`.
        Raises TemplateRefusalError if the template writes the messages before the answer
        differently when the answer follows."""
        found = self._before_all(text) if number == 0 else self._length(number, text)
        if found is None:
            raise TemplateRefusalError(
                "rewrites what stands before an answer once the answer follows, so its beginning "
                "cannot be told; mark answers in the template with {% generation %} … "
                "{% endgeneration %}"
            )
        return found

    def _length(self, number: int, text: str) -> int | None:
        """Return how many characters of `text` are taken by the first `number` messages. If `text`
        goes on with the generation prompt, with which an answer begins, that is included. None if
        `text` does not begin with these messages."""
        for asks in (True, False):
            before = without_marks(self._render(self.asked.messages[:number], asks=asks))
            if text.startswith(before):
                return len(before)
        return None

    def _before_all(self, text: str) -> int:
        """Return the index in `text` at which the answer begins if it is the only message, that is,
        the length of what the template writes before any message. To find it, the answer is also
        rendered after a question."""
        answer = self.asked.messages[0]
        asked = _Rendered(
            self.template,
            self.keeps_no_state,
            self.tokens,
            replace(self.asked, messages=[QUESTION, answer]),
        )
        with suppress(TemplateRefusalError):
            whole = without_marks(asked.text())
            behind = whole[asked._length(1, whole) or len(whole) :]
            if behind and text.endswith(behind):
                return len(text) - len(behind)
        with suppress(TemplateRefusalError):
            if found := self._length(0, text):
                return found
        with suppress(TemplateRefusalError):
            plain, prompted = (asked._render([QUESTION], asks=asks) for asks in (False, True))
            prompt = without_marks(prompted).removeprefix(without_marks(plain))
            if prompt in text:
                return text.index(prompt) + len(prompt)
        content = answer.get("content")
        return max(0, text.find(content)) if isinstance(content, str) else 0

    def _strftime_now(self, format: str) -> str:  # as transformers names it
        """Return the request's date by the strftime `format`: the function with which templates ask
        for today."""
        day = self.asked.date
        moment = datetime.fromisoformat(day) if day else datetime.now()
        return moment.strftime(format)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        asks: bool = False,
        reading: _Reading | None = None,
    ) -> str:
        """Return `messages` rendered to text, marks included; with `asks`, followed by the
        beginning of an answer. `reading` records how the template reads them.

        Raises TemplateBoundsError for too long an output or too little memory, TemplateRefusalError
        for any error in the template. If it takes too much processor time, the process ends.
        """
        n_characters = self.asked.n_characters
        longest = OUTPUT_CHARACTERS + OUTPUT_PER_CHARACTER * n_characters
        values: dict[str, Any] = {
            "documents": None,
            **self.tokens,
            **self.asked.variables,
            "tools": self.asked.tools,
            "add_generation_prompt": asks,
            "strftime_now": self._strftime_now,
        }
        values["messages"] = messages if reading is None else _Watched(messages, reading)
        reading = reading or _Reading()
        written: list[str] = []
        try:
            with _seconds(SECONDS + SECONDS_PER_MILLION * n_characters / 1e6):
                for chunk in self.template.generate(values):
                    written.append(chunk)
                    reading.n_written += len(chunk)
                    if reading.n_written > longest:
                        raise TemplateBoundsError(
                            f"writes more than {longest:,} characters for {n_characters:,} of "
                            f"messages; {REMEDY}"
                        )
                return "".join(written)
        except MemoryError as error:
            raise memory_is_full() from error
        except TemplateRefusalError:
            raise
        except Exception as error:  # a template can raise any that Python has
            raise TemplateRefusalError(f"refuses it: {_reason(error)}") from error


def memory_is_full() -> TemplateBoundsError:
    """Build the error for a template that takes more than MEMORY_BYTES."""
    return TemplateBoundsError(f"takes more than {MEMORY_BYTES >> 20:,} MiB of memory; {REMEDY}")


def _reason(error: BaseException) -> str:
    """Return an error's message, truncated to LONGEST_REASON characters; its type's name if it has
    none."""
    return f"{error}"[:LONGEST_REASON] or type(error).__name__


@contextmanager
def _seconds(seconds: float) -> Iterator[None]:
    """Context manager that ends this process, by SIGPROF, if its block uses more than `seconds` of
    processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _generation() -> Any:
    """Return the Jinja extension class for `{% generation %}`; imports Jinja only when called."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """Puts a `{% generation %}` block's output between BEGIN and END."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            """Parse a block into a call to `_marked`."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = nodes.CallBlock(self.call_method("_marked"), [], [], body)
            return call.set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    return Generation


def _refuse(message: object) -> NoReturn:
    """Raise Jinja's TemplateError: the function `raise_exception`, by which templates refuse
    messages."""
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON: the filter `tojson` for templates. Its arguments are those of
    transformers' filter, in that order; unlike Jinja's, it escapes no HTML."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    # The mark in an escaped special token stays one: it is taken out of the rendered text.
    foreign = re.compile(rf"[^\x00-\x7f{APART}]")
    return foreign.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def n_characters_of(value: Any) -> int:
    """Return a JSON value's approximate size: the characters in its texts and keys, plus 8 for
    every other value."""
    n_characters, left = 0, [value]
    while left:  # rather than a call for each level, of which there may be many
        value = left.pop()
        if isinstance(value, str):
            n_characters += len(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, Sequence):
            left += value
        else:
            n_characters += 8
    return n_characters


def _between_marks(text: str) -> list[Segment]:
    """Split a rendered text into segments; text between BEGIN and END is learned."""
    segments = []
    for marked in text.split(BEGIN):
        answer, is_marked, rest = marked.partition(END)
        segments += [(answer, True), (rest, False)] if is_marked else [(answer, False)]
    return [segment for segment in segments if segment[0]]


def _segments(text: str, spans: Sequence[tuple[int, int]]) -> list[Segment]:
    """Split a text into segments: the `spans`, in order as (start, stop) in characters, are
    learned, the text between them is not. Empty segments are left out."""
    segments, end = [], 0
    for start, stop in spans:
        segments += [(text[end:start], False), (text[start:stop], True)]
        end = stop
    segments.append((text[end:], False))
    return [segment for segment in segments if segment[0]]
