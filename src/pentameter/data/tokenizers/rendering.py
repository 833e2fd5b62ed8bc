"""Rendering chat templates in a separate process, with limits on time, memory and output.

A template is a program that comes with a model from strangers. Jinja's sandbox keeps it from the
machine, but not from looping, doubling a string or recursing without end. So a clean interpreter
runs it: the kernel refuses memory beyond `MEMORY_BYTES`, and ends the process once one rendering
has used its seconds of processor time.

`Rendering` is this process's side; `renderer` runs in the other process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, NoReturn, Self

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.chat import (
    BEGIN,
    END,
    ChatTemplate,
    Segment,
    TemplateBoundsError,
    TemplateRefusalError,
    ids_and_texts,
    without_marks,
)
from pentameter.errors import ConfigError, StorageError
from pentameter.machine.child import ChildEndedError, PythonChild

SECONDS, SECONDS_PER_MILLION = 1.0, 1.0
"""Seconds of processor time for one rendering: a constant, and more for each million characters of
messages. Today's templates take a tenth of a millisecond for a short conversation."""

MEMORY_BYTES = 1 << 30
"""Maximum address space of the rendering process, which starts with about 50 MB."""

OUTPUT_CHARACTERS, OUTPUT_PER_CHARACTER = 1 << 20, 16
"""Maximum characters that one rendering may write: a constant, and more for each character of
messages."""

_ANSWER = "2 + 2 = 4"

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

    @cached_property
    def n_characters(self) -> int:
        """Approximate size: characters in all texts, plus 8 for each other value."""
        return n_characters_of(self.messages) + n_characters_of(self.tools)


Documents = list[list[Segment]]
"""The documents that a list of messages becomes, each a list of segments: (text, whether a model
learns it)."""


class Rendering:
    """A context manager that starts a process which renders `template`, and ends it on exit;
    StorageError if it cannot be started.

    Methods raise TemplateRefusalError if the template fails, ConfigError if it is not valid Jinja,
    both with its origin in the message. If it exceeds its limits, they raise TemplateBoundsError,
    which is a TemplateRefusalError.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            silence = stack.enter_context(Path(os.devnull).open("wb"))
            try:
                self._child = PythonChild(f"{__name__}:renderer", output=silence)
            except OSError as error:
                raise StorageError(
                    f"cannot start {sys.executable} to render {self._template.origin}: "
                    f"{error.strerror}; start again when fewer processes run"
                ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._child.close()

    def text(self, asked: RenderRequest) -> str:
        """Return the messages in `asked` rendered to text; the output of a `{% generation %}` block
        is between BEGIN and END."""
        (found,) = self._ask("text", [asked])
        if isinstance(found, TemplateRefusalError):
            raise found
        return str(found)

    def documents(self, asked: Sequence[RenderRequest]) -> list[Documents | TemplateRefusalError]:
        """Render several lists of messages; return, for each, its documents, or, if the template
        refuses it, the TemplateRefusalError, which is not raised.

        The messages numbered `targets`, the answers, are learned. If they are all messages with
        their role and the template marks answers with `{% generation %}`, its marks decide the
        segments. Otherwise an answer begins after the text rendered for the messages before it,
        with the generation prompt if that fits. A template that writes an earlier turn differently
        once a later one follows (Qwen3's leaves its thinking out) gives one document per answer:
        the text up to it, in which it alone is learned.
        """
        return self._ask("documents", asked)

    def _ask(self, what: str, asked: Sequence[RenderRequest]) -> list[Any]:
        """Have the process render all requests, to texts (`what` is "text") or to documents
        ("documents"). Errors have the template's origin in their messages. Raises ConfigError for
        an invalid template, TemplateBoundsError if the process is ended by its limits."""
        template = self._template
        try:
            found: list[Any] = self._child.ask(
                (what, template.source, dict(template.tokens), asked)
            )
        except ConfigError as error:
            raise self._named(error) from error
        except ChildEndedError as error:
            why = f"ends the process that runs it, which {error}"
            if error.code == -signal.SIGPROF:
                why = f"takes more than {SECONDS:g} s of processor time"
            raise self._named(TemplateBoundsError(f"{why}; {REMEDY}")) from error
        return [self._named(each) if isinstance(each, ConfigError) else each for each in found]

    def _named(self, error: ConfigError) -> ConfigError:
        """Return the same error with the template's origin in its message."""
        return type(error)(f"{self._template.origin} {error}")


def render(template: ChatTemplate, asked: RenderRequest) -> str:
    """Return messages rendered to text by a process started for this call. Raises
    TemplateRefusalError if the template fails, refuses the messages or exceeds its limits, and
    ConfigError if it is not valid Jinja."""
    with Rendering(template) as rendering:
        return rendering.text(asked)


def ends_of_answers(
    tokenizer: Tokenizer, render_by: Callable[[RenderRequest], str] | None = None
) -> frozenset[int]:
    """Return the ids that end an answer: the special tokens that the tokenizer's chat template
    writes behind one, or all special tokens if it writes none there, and the end of text.

    `render_by` renders by that template; None starts a process for it.
    """
    special = tokenizer.special_tokens
    ids: set[int] = set()
    if tokenizer.chat is not None:
        said = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": _ANSWER}]
        with suppress(TemplateRefusalError):  # it expects other messages
            text = (render_by or partial(render, tokenizer.chat))(RenderRequest(said))
            _, found, behind = without_marks(text).rpartition(_ANSWER)
            pieces = ids_and_texts(behind, special) if found else []
            ids = {piece for piece in pieces if isinstance(piece, int)}
    ids = ids or {*special.values()}
    return frozenset(ids if tokenizer.end_of_text is None else {*ids, tokenizer.end_of_text})


def check_template(template: ChatTemplate) -> None:
    """Raise ConfigError for a template that is not Jinja, or exceeds its limits on two short
    messages.

    A template that refuses these messages itself passes: it may expect others.
    """
    said = [{"role": role, "content": "2 + 2"} for role in ("user", "assistant")]
    with Rendering(template) as rendering:
        for found in rendering.documents([RenderRequest(said, targets=[1])]):
            if isinstance(found, TemplateBoundsError):
                raise found


# -- in the child -------------------------------------------------------------------------------


def renderer() -> Callable[[tuple[str, str, dict[str, str], Sequence[RenderRequest]]], list[Any]]:
    """Limit this process's memory to MEMORY_BYTES; return the function that answers its requests,
    each ("text" or "documents", the template's source, its special tokens' texts, the messages to
    render)."""
    with suppress(ValueError, OSError):  # macOS knows no such bound
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        least = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(MEMORY_BYTES, most)
        resource.setrlimit(resource.RLIMIT_AS, (least, most))
    return _answer


def _answer(request: tuple[str, str, dict[str, str], Sequence[RenderRequest]]) -> list[Any]:
    """Render each list of messages to a text or to documents, by the request's first value ("text"
    or "documents"). Return the results in order; if the template refuses a list, its error takes
    the result's place.

    Raises ConfigError for an invalid template.
    """
    what, source, tokens, several = request
    found: list[Any] = []
    for asked in several:
        one = _Rendered(_compiled(source), tokens, asked)
        try:
            found.append(one.text() if what == "text" else one.documents())
        except TemplateRefusalError as error:
            found.append(error)
        except MemoryError:
            found.append(_memory_is_full())
    return found


@lru_cache(maxsize=1)
def _compiled(source: str) -> Any:
    """Compile a template's source; ConfigError if it is not valid Jinja."""
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
            return environment.from_string(source)
    except MemoryError as error:
        raise _memory_is_full() from error
    # A break outside of a loop is a SyntaxError of the Python that Jinja writes.
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"is not valid Jinja: {_reason(error)}; {REMEDY}") from error


@dataclass(frozen=True)
class _Rendered:
    """One request (`asked`), rendered by a compiled template with the special tokens' texts
    (`tokens`)."""

    template: Any
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
        spans, documents = [], []
        is_prefix = True
        for number in targets:
            text = without_marks(self._render(messages[: number + 1]))
            before = self._before(number, text)
            spans.append((before, len(text)))
            documents.append([(text[:before], False), (text[before:], True)])
            is_prefix &= without_marks(whole).startswith(text)
        return [_segments(without_marks(whole), spans)] if is_prefix else documents

    def _before(self, number: int, text: str) -> int:
        """Return the number of characters in `text` before its last message, the answer with index
        `number`. Raises TemplateRefusalError if the template writes the messages before it
        differently once it follows."""
        if number == 0:
            return 0
        for asks in (True, False):
            before = without_marks(self._render(self.asked.messages[:number], asks=asks))
            if text.startswith(before):
                return len(before)
        raise TemplateRefusalError(
            "rewrites what stands before an answer once the answer follows, so its beginning "
            "cannot be told; mark answers in the template with {% generation %} … "
            "{% endgeneration %}"
        )

    def _render(self, messages: Sequence[Mapping[str, Any]], *, asks: bool = False) -> str:
        """Return `messages` rendered to text, marks included; with `asks`, followed by the
        beginning of an answer.

        Raises TemplateBoundsError for too long an output or too little memory, TemplateRefusalError
        for any error in the template. If it takes too much processor time, the process ends.
        """
        n_characters = self.asked.n_characters
        longest = OUTPUT_CHARACTERS + OUTPUT_PER_CHARACTER * n_characters
        values = {"tools": self.asked.tools, "documents": None, "add_generation_prompt": asks}
        written: list[str] = []
        n_written = 0
        try:
            with _seconds(SECONDS + SECONDS_PER_MILLION * n_characters / 1e6):
                for chunk in self.template.generate(messages=messages, **values, **self.tokens):
                    written.append(chunk)
                    n_written += len(chunk)
                    if n_written > longest:
                        raise TemplateBoundsError(
                            f"writes more than {longest:,} characters for {n_characters:,} of "
                            f"messages; {REMEDY}"
                        )
                return "".join(written)
        except MemoryError as error:
            raise _memory_is_full() from error
        except TemplateRefusalError:
            raise
        except Exception as error:  # a template can raise any that Python has
            raise TemplateRefusalError(f"refuses it: {_reason(error)}") from error


def _memory_is_full() -> TemplateBoundsError:
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
    """Raise Jinja's TemplateError: the `raise_exception` that templates refuse messages with."""
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Return a value as JSON: the filter `tojson` in templates, which, unlike Jinja's, escapes no
    HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def n_characters_of(value: Any) -> int:
    """Return a JSON value's approximate size: the characters in its texts and keys, plus 8 for
    every other value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + n_characters_of(each) for key, each in value.items())
    if isinstance(value, Sequence):
        return sum(map(n_characters_of, value))
    return 8


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
