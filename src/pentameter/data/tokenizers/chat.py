"""Chat templates: messages as one text, and which parts of it a model learns to write.

A template is Jinja as Hugging Face's tokenizers have it (`chat_template` in
tokenizer_config.json, or chat_template.jinja). It runs in a sandbox: it comes with models that
strangers publish. It sees no clock, so that the same messages give the same text on any day
(templates that want today's date have a fixed one beside it).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self

from pentameter.disk.foreign import read_json, read_text
from pentameter.errors import ConfigError, CorruptError

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
LIMIT_BYTES = 1 << 24

CHATML = "chatml"
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""OpenAI's ChatML, for a tokenizer that brings no template."""

# Noncharacters of Unicode, which no text has: marks of ours in what a template writes.
BEGIN, END, APART = "\ufdd1", "\ufdd2", "\ufdd3"
_MARKS = re.compile(f"[{BEGIN}{END}{APART}]")

Segment = tuple[str, bool]
"""A part of a document's text, and whether a model learns to write it."""


class TemplateRefusalError(ConfigError):
    """A chat template does not take these messages."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the texts of the special tokens that it may name."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """`bos_token`, `eos_token` and others of tokenizer_config.json → their texts."""

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The template in a tokenizer's file; CorruptError where it is none."""
        match content:
            case {"template": str(source), "tokens": dict(tokens)} if all(
                isinstance(text, str) for text in tokens.values()
            ):
                return cls(source, MappingProxyType(tokens))
        raise CorruptError(f'"chat" is not a template and the texts of its tokens: {content!r:.80}')

    def to_json(self) -> dict[str, Any]:
        """The template as a tokenizer's file holds it."""
        return {"template": self.source, "tokens": dict(self.tokens)}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of messages; with the beginning of an answer after it, where that is asked for.

        Parts within `{% generation %}` stand between BEGIN and END. Raises TemplateRefusalError
        where the template refuses the messages or fails, ConfigError where it is no template.
        """
        import jinja2

        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefusalError(f"the chat template refuses it: {error}") from error

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: Sequence[int],
        tools: Sequence[Any] | None = None,
    ) -> list[list[Segment]]:
        """The documents that messages become, each as its segments; errors as `render`.

        A model learns the messages numbered `answers`. Where all of a role are asked for and the
        template marks them with `{% generation %}`, its marks are taken. Otherwise an answer is
        what the text up to and with it has beyond the text before it, which ends as it does when a
        model is asked. Templates that write an earlier turn differently once a later one follows
        (Qwen3's leaves its thinking out) give a document for each answer: the text up to it, in
        which it alone is learnt, as it is when a model is asked.
        """
        whole = self.render(messages, tools)
        role = messages[answers[0]]["role"]
        if BEGIN in whole and len(answers) == sum(each["role"] == role for each in messages):
            return [_between_marks(whole)]
        spans, documents = [], []
        is_prefix = True
        for number in answers:
            text = unmarked(self.render(messages[: number + 1], tools))
            before = self._before(messages, number, tools, text)
            spans.append((before, len(text)))
            documents.append([(text[:before], False), (text[before:], True)])
            is_prefix &= unmarked(whole).startswith(text)
        return [_cut(unmarked(whole), spans)] if is_prefix else documents

    def _before(
        self,
        messages: Sequence[Mapping[str, Any]],
        number: int,
        tools: Sequence[Any] | None,
        text: str,
    ) -> int:
        """Characters of `text`, which ends with the answer of that number, that lie before it."""
        if number == 0:
            return 0
        for asks in (True, False):
            before = unmarked(self.render(messages[:number], tools, add_generation_prompt=asks))
            if text.startswith(before):
                return len(before)
        raise TemplateRefusalError(
            "the chat template rewrites what stands before an answer once the answer follows, so "
            "its beginning cannot be told; mark answers in the template with {% generation %} … "
            "{% endgeneration %}"
        )

    @cached_property
    def _compiled(self) -> Any:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error


def _generation() -> Any:
    """Jinja's extension for `{% generation %}`, made where Jinja is needed first."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """Puts what stands within the block between BEGIN and END."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            """The block as a call of `_marked`."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = nodes.CallBlock(self.call_method("_marked"), [], [], body)
            return call.set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    return Generation


def _refuse(message: object) -> NoReturn:
    """Jinja's `raise_exception`, with which templates refuse messages."""
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """Jinja's own escapes HTML, which no template here wants."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def unmarked(text: str) -> str:
    """A rendered text without the marks around what `{% generation %}` encloses."""
    return text.replace(BEGIN, "").replace(END, "")


def _between_marks(text: str) -> list[Segment]:
    """The segments of a text in which answers stand between BEGIN and END."""
    segments = []
    for part in text.split(BEGIN):
        answer, is_marked, rest = part.partition(END)
        segments += [(answer, True), (rest, False)] if is_marked else [(answer, False)]
    return [segment for segment in segments if segment[0]]


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> list[Segment]:
    segments, place = [], 0
    for start, stop in spans:
        segments += [(text[place:start], False), (text[start:stop], True)]
        place = stop
    segments.append((text[place:], False))
    return [segment for segment in segments if segment[0]]


def disarmed(value: Any, special_tokens: Mapping[str, int]) -> Any:
    """A message, and all within it, with special tokens made plain text: what somebody wrote cannot
    end a turn or begin another. `plain` undoes it.

    Raises TemplateRefusalError for a text that holds one of our marks.
    """
    if isinstance(value, Mapping):
        return {key: disarmed(each, special_tokens) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [disarmed(each, special_tokens) for each in value]
    if not isinstance(value, str):
        return value
    if found := _MARKS.search(value):
        raise TemplateRefusalError(
            f"a message holds U+{ord(found[0]):04X}, a noncharacter, which marks answers here; "
            "leave it out"
        )
    for token in special_tokens:
        if token in value:
            value = value.replace(token, token[0] + APART + token[1:])
    return value


def plain(text: str) -> str:
    """A text without the marks of `disarmed`."""
    return text.replace(APART, "")


def pieces_of(text: str, special_tokens: Mapping[str, int]) -> list[str | int]:
    """A rendered text as the ids of its special tokens, and the texts between them."""
    if not special_tokens:
        return [plain(text)] if text else []
    longest_first = sorted(special_tokens, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return [
        special_tokens[part] if number % 2 else plain(part)
        for number, part in enumerate(parts)
        if part
    ]


def read_chat_template(path: Path) -> ChatTemplate | None:
    """The chat template at a path: a folder, its tokenizer_config.json, or a Jinja file.

    None for a folder without one. chat_template.jinja goes before what tokenizer_config.json holds,
    as in transformers. Raises ConfigError for a file that is missing or has none, CorruptError for
    one that is damaged, StorageError for one that cannot be read.
    """
    if not path.is_dir():
        if path.name != SETTINGS_FILE:
            return ChatTemplate(
                read_text(path, LIMIT_BYTES), _tokens(path.with_name(SETTINGS_FILE))
            )
        if (source := _source(read_json(path, LIMIT_BYTES), path)) is None:
            raise ConfigError(f"{path} has no chat_template; name a Jinja file")
        return ChatTemplate(source, _tokens(path))
    if (path / TEMPLATE_FILE).is_file():
        return read_chat_template(path / TEMPLATE_FILE)
    settings = path / SETTINGS_FILE
    if not settings.is_file():
        return None
    source = _source(read_json(settings, LIMIT_BYTES), settings)
    return None if source is None else ChatTemplate(source, _tokens(settings))


def chosen_chat_template(setting: str) -> ChatTemplate:
    """The chat template that `data.chat_template` names; errors as `read_chat_template`."""
    if setting == CHATML:
        return ChatTemplate(CHATML_TEMPLATE)
    path = Path(setting)
    if not path.exists():
        raise ConfigError(
            f"data.chat_template={setting!r} does not exist (in {Path.cwd()}); name a Jinja file, "
            f"a {SETTINGS_FILE}, a folder that holds one, or {CHATML!r}"
        )
    if (found := read_chat_template(path)) is None:
        raise ConfigError(f"{path} holds neither {TEMPLATE_FILE} nor a {SETTINGS_FILE} with one")
    return found


def _source(settings: Mapping[str, Any], path: Path) -> str | None:
    """The template in tokenizer_config.json: a text, or the one named `default` of several."""
    match settings.get("chat_template"):
        case None:
            return None
        case str(source):
            return source
        case list(several):
            for each in several:
                match each:
                    case {"name": "default", "template": str(source)}:
                        return source
    raise CorruptError(f"{path}: chat_template is neither a text nor a list with a default")


def _tokens(path: Path) -> Mapping[str, str]:
    """The special tokens that tokenizer_config.json names; none where there is no such file."""
    settings = read_json(path, LIMIT_BYTES) if path.is_file() else {}
    tokens = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return MappingProxyType(tokens)
