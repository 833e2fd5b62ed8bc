"""Rendering chat templates in a separate process, whose limits `renderer.py` sets."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from pentameter.data.tokenizers.base import Ends, Tokenizer
from pentameter.data.tokenizers.chat import (
    ChatTemplate,
    TemplateBoundsError,
    TemplateRefusalError,
    ids_and_texts,
    without_marks,
)
from pentameter.data.tokenizers.renderer import (
    MEMORY_BYTES,
    REMEDY,
    SECONDS,
    Documents,
    RenderRequest,
    memory_is_full,
    renderer,
)
from pentameter.data.tokenizers.template_forms import QUESTION
from pentameter.disk.macos import MemoryBound
from pentameter.errors import ConfigError
from pentameter.machine.child import ChildEndedError, PythonChild

_ANSWER = "2 + 2 = 4"


class Rendering:
    """Context manager that starts a process which renders `template`, and ends it on exit. Raises
    StorageError if it cannot be started.

    Methods raise TemplateRefusalError if the template fails or refuses messages, its subclass
    TemplateBoundsError if it exceeds its limits, and ConfigError if it is not valid Jinja. Messages
    name the template's origin.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    def __enter__(self) -> Self:
        task = f"render {self._template.origin}"
        with Path(os.devnull).open("wb") as silence:
            self._child = PythonChild(f"{renderer.__module__}:renderer", output=silence, task=task)
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
        """Render several lists of messages. Return for each its documents; if the template refuses
        it, the TemplateRefusalError instead, which is not raised.

        Messages numbered in `targets`, the answers, are learned. If they are all messages of their
        role, and the template marks answers with `{% generation %}`, its marks decide the segments.
        Otherwise an answer begins after the text rendered for the messages before it, with the
        generation prompt if that fits. Some templates write an earlier turn differently once a
        later one follows (Qwen3's leaves its thinking out). They give one document per answer: the
        text up to it, in which it alone is learned.
        """
        return self._ask("documents", asked)

    def _ask(self, what: str, asked: Sequence[RenderRequest]) -> list[Any]:
        """Have the child process render all requests: to texts if `what` is "text", to documents if
        it is "documents". Error messages name the template's origin. Raises ConfigError for an
        invalid template, TemplateBoundsError if the process is ended by its limits."""
        template, bound = self._template, MemoryBound(self._child.pid, MEMORY_BYTES)
        try:
            with bound:
                found: list[Any] = self._child.ask(
                    (what, template.sources, dict(template.tokens), asked)
                )
        except ConfigError as error:
            raise self._named(error) from error
        except RecursionError as error:  # of pickle, which has sent nothing
            refused = TemplateRefusalError("cannot be given messages that are nested so deep")
            raise self._named(refused) from error
        except ChildEndedError as error:
            why = f"ends the process that runs it, which {error}"
            if error.code == -signal.SIGPROF:
                why = f"takes more than {SECONDS:g} s of processor time"
            if bound.is_exceeded:
                raise self._named(memory_is_full()) from error
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
) -> Ends:
    """Return the tokens and texts that end an answer in the tokenizer's chat template. Tokens:
    the special tokens after a plain answer (all special tokens if there are none), the last special
    token after an answer that calls a tool, and the end of text. Texts: the one after a plain
    answer, without the white space around it, if no special token is there, as the tokenizer lacks
    them.

    render_by: renders a request by that template; None starts a process for it.
    """
    chat, special = tokenizer.chat, tokenizer.special_tokens
    plain, called, mark = list[int](), list[int](), ""
    with ExitStack() as stack:
        if chat is not None:
            render_by = render_by or stack.enter_context(Rendering(chat)).text
            answer = {"content": _ANSWER}
            behind = _behind(answer, render_by)
            plain = _ids(behind, special)
            # What is not written there before the next question, too, asks for an answer.
            if not plain and _behind(answer, render_by, QUESTION).startswith(behind):
                mark = behind.strip()
            function = {"name": "add", "arguments": {"sum": _ANSWER}}
            call = {"id": "abcdefghi", "type": "function", "function": function}
            called = _ids(_behind({"tool_calls": [call]}, render_by), special)
    ids = tokenizer.end_ids.union(plain or special.values(), called[-1:])
    return Ends(ids, (mark,) if mark else ())


def _behind(
    answer: Mapping[str, Any],
    render_by: Callable[[RenderRequest], str],
    *later: Mapping[str, Any],
) -> str:
    """Return the text that a template writes after _ANSWER, which the message `answer` contains,
    without white space at its end; empty if it refuses the messages, which the `later` ones
    end."""
    messages = [QUESTION, {"role": "assistant", **answer}, *later]
    with suppress(TemplateRefusalError):  # it expects other messages
        text = without_marks(render_by(RenderRequest(messages)))
        _, found, behind = text.rpartition(_ANSWER)
        return behind.rstrip() if found else ""
    return ""


def _ids(text: str, special: Mapping[str, int]) -> list[int]:
    """Return the ids of the special tokens in a text that a template wrote."""
    return [piece for piece in ids_and_texts(text, special) if isinstance(piece, int)]


def prompt_of_answers(render_by: Callable[[RenderRequest], str], asked: RenderRequest) -> str:
    """Return the generation prompt: what a template adds to the text of `asked` to ask for an
    answer. Empty if it adds nothing, or refuses the messages. render_by: renders a request by that
    template."""
    try:
        plain = without_marks(render_by(asked))
        prompted = without_marks(render_by(replace(asked, add_generation_prompt=True)))
    except ConfigError:
        return ""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(plain, prompted, strict=False))
    return prompted[sum(1 for _ in same) :]


def prompt_remark(template: ChatTemplate, prompt: str, what: str) -> str:
    """Return a warning that a template asks for answers with `prompt`, and writes answers without
    it. `what` names those answers in the sentence."""
    return (
        f"{template.origin} asks for an answer with {prompt!r}, and writes {what} without: a model "
        "tuned on such answers is asked with what stood before none of them; put it into the "
        "answers, if the template keeps it there, or name another with data.chat_template"
    )


def unlike_its_prompt(
    template: ChatTemplate, render_by: Callable[[RenderRequest], str]
) -> str | None:
    """Return a warning if a template asks for an answer with a text that it does not write before a
    plain answer, so that a model would never have learned to answer after it. None if it does write
    it, or refuses the messages of this test."""
    prompt = prompt_of_answers(render_by, RenderRequest([QUESTION]))
    with suppress(ConfigError):
        answered = RenderRequest([QUESTION, {"role": "assistant", "content": _ANSWER}])
        if prompt not in without_marks(render_by(answered)):
            return prompt_remark(template, prompt, "a plain one")
    return None


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
