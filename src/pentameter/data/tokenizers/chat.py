"""Chat templates: messages rendered to one text, in segments that a model learns or only reads.

A template is Jinja as in Hugging Face's tokenizers (`chat_template` in tokenizer_config.json, or
chat_template.jinja). As it comes with models that strangers publish, it runs in a sandbox, in a
process with limits (`render_client.py`). It sees no clock, only the date in the request to render.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from pentameter.disk.atomic import read_json, read_text
from pentameter.errors import ConfigError, CorruptError

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
NAMED_FOLDER, NAMED_SUFFIX = "additional_chat_templates", ".jinja"
"""Folder, beside TEMPLATE_FILE, and suffix of files with further templates, called by name."""
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the template for messages, and of that for messages with tools, if there is one."""
_NAME = re.compile(r"\w[\w.-]*", re.ASCII)  # a file can be called so, and lies where it should
LIMIT_BYTES = 1 << 24
"""Maximum size in bytes of a template file or tokenizer_config.json."""

CHATML = "chatml"
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% set call = call.function or call %}"
    "{{ '\n' if message.content or not loop.first }}<tool_call>\n"
    '{"name": {{ call.name | tojson }}, "arguments": {{ call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""OpenAI's ChatML, the template that `data.chat_template = "chatml"` names; with
calls of tools as Hermes and Qwen have them."""

# Noncharacters of Unicode, which no text has: marks of ours in what a template writes.
BEGIN, END, APART = "\ufdd1", "\ufdd2", "\ufdd3"
_MARK_IN_REPR = re.compile(r"(?<!\\)((?:\\\\)*)\\ufdd3")  # a backslash stands there twice
_MARKS = re.compile(f"[{BEGIN}{END}{APART}]")
_SPECIAL = re.compile(r"<\|[\w.:/-]+\|>", re.ASCII)  # as most templates write special tokens
_PLAIN = re.compile(r"[!-~]{2,}")  # reads the same in the alphabet of byte-level BPE

FIELDS = frozenset({
    "role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments",
    "parameters", "description", "properties", "required", "enum", "items", "reasoning_content",
    "text", "thinking", "reasoning", "arguments_text",
})  # fmt: skip
"""Keys of messages and tools, as OpenAI's interface has them."""

MOST_LEVELS = 490
"""Most levels of lists and objects in a message. Python's stack has 1,000 frames, and code that
counts, pickles or prints a message takes one or two for each level."""

Segment = tuple[str, bool]
"""A text, and whether a model learns to write it."""


class MarkedText(str):
    """A str in which special tokens are broken up by marks (APART, see `escaped`). Its `repr` keeps
    the marks, so that they survive where a template prints a list or an object with the text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return _MARK_IN_REPR.sub(rf"\1{APART}", super().__repr__())


class TemplateRefusalError(ConfigError):
    """Raised when a chat template fails on messages, or refuses them."""


class TemplateBoundsError(TemplateRefusalError):
    """Raised when rendering by a chat template exceeds the limit on time, memory or output."""


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template, and the texts of the special tokens that it may refer to."""

    source: str
    tokens: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Maps `bos_token`, `eos_token` and others in tokenizer_config.json to their texts."""
    origin: str = field(default="the chat template", compare=False)
    """Its name in error messages, with its file; not compared."""
    named: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Maps the names of further templates, such as `tool_use`, to their sources."""

    @classmethod
    def from_json(cls, content: Any, origin: str) -> Self:
        """Build the template from a tokenizer file's "chat" value; CorruptError if it is invalid.
        `origin` names it in messages."""
        match {"named": {}, **content} if isinstance(content, dict) else None:
            case {"template": str(source), "tokens": dict(tokens), "named": dict(named)} if all(
                isinstance(text, str) for text in [*tokens.values(), *named.values()]
            ):
                return cls(source, MappingProxyType(tokens), origin, MappingProxyType(named))
        raise CorruptError(f'"chat" is not a template and the texts of its tokens: {content!r:.80}')

    @property
    def special_texts(self) -> list[str]:
        """The special tokens for a tokenizer that is made for this template: `<|NAME|>` in its
        source, in order, then those texts in `tokens` that its source contains or refers to by key.
        Only texts of two or more visible ASCII characters are taken."""
        source = "\n".join(self.sources.values())
        known = [
            text
            for key, text in self.tokens.items()
            if text in source or re.search(rf"\b{re.escape(key)}\b", source)
        ]
        found = dict.fromkeys([*_SPECIAL.findall(source), *known])
        return [text for text in found if _PLAIN.fullmatch(text)]

    @property
    def sources(self) -> dict[str, str]:
        """Maps each template's name to its source, that for messages (`default`) first."""
        return {DEFAULT: self.source, **self.named}

    def to_json(self) -> dict[str, Any]:
        """Return the template as the "chat" value in a tokenizer file."""
        named = {"named": dict(self.named)} if self.named else {}
        return {"template": self.source, "tokens": dict(self.tokens), **named}

    def files(self) -> dict[str, bytes]:
        """Return the templates as files of a Hugging Face folder: relative path → content."""
        named = {f"{NAMED_FOLDER}/{name}{NAMED_SUFFIX}": text for name, text in self.named.items()}
        return {name: text.encode() for name, text in {TEMPLATE_FILE: self.source, **named}.items()}


def without_marks(text: str) -> str:
    """Return a rendered text without the marks (BEGIN, END) around `{% generation %}` blocks."""
    return text.replace(BEGIN, "").replace(END, "")


def escaped(value: Any, special_tokens: Collection[str], n_levels: int = 0) -> Any:
    """Return a copy of a message or any JSON value with each special token (a text in
    `special_tokens`) broken up: a mark, APART, follows its first character, in texts and in keys.
    Then nothing that a person wrote becomes a special token, or ends a turn. `unescaped` removes
    the marks. Keys in FIELDS, by which templates look values up, stay as they are.

    Raises TemplateRefusalError for a text with one of the noncharacters that serve as marks here,
    and for more than MOST_LEVELS levels of nesting, counted from `n_levels`.
    """
    if isinstance(value, str):
        return _escaped_text(value, special_tokens)
    if not isinstance(value, Mapping | Sequence):
        return value
    if n_levels == MOST_LEVELS:
        raise TemplateRefusalError(
            f"a message is nested more than {MOST_LEVELS} levels deep; write what is within as text"
        )
    if isinstance(value, Mapping):
        found = {}
        for key, each in value.items():  # a comprehension would take a second frame for each level
            name = key if key in FIELDS else _escaped_text(key, special_tokens)
            found[name] = escaped(each, special_tokens, n_levels + 1)
        return found
    items = []
    for each in value:
        items.append(escaped(each, special_tokens, n_levels + 1))
    return items


def _escaped_text(text: str, special_tokens: Collection[str]) -> str:
    """Return `text` with a mark (APART) after the first character of each special token in it, also
    of those that overlap, so that none of them is read as a special token. Raises
    TemplateRefusalError if the text contains a mark already."""
    if found := _MARKS.search(text):
        raise TemplateRefusalError(
            f"a message holds U+{ord(found[0]):04X}, a noncharacter, which marks answers here; "
            "leave it out"
        )
    if held := [token for token in special_tokens if token in text]:
        starts = rf"(?s)(?=(?:{'|'.join(map(re.escape, held))}))."
        return MarkedText(re.sub(starts, rf"\g<0>{APART}", text))
    return text


def unescaped(text: str) -> str:
    """Return a text without the marks that `escaped` put into special tokens."""
    return text.replace(APART, "")


def ids_and_texts(text: str, special_tokens: Mapping[str, int]) -> list[str | int]:
    """Split a text that a chat template wrote at its special tokens: return a list with each
    special token's id and each text between them, in order. Marks of escaped special tokens are
    removed from the texts. `special_tokens` maps a token's text to its id."""
    if not special_tokens:
        return [unescaped(text)] if text else []
    longest_first = sorted(special_tokens, key=len, reverse=True)
    # Within a token of one character no mark can stand.
    tokens = [re.escape(token) + f"(?!{APART})" * (len(token) == 1) for token in longest_first]
    texts = re.split(f"({'|'.join(tokens)})", text)
    return [
        special_tokens[text] if number % 2 else unescaped(text)
        for number, text in enumerate(texts)
        if text
    ]


def read_chat_template(
    path: Path, settings: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """Read the chat template at a path: a folder, its tokenizer_config.json, or a Jinja file.
    `settings` is the parsed tokenizer_config.json there, which gives special tokens; None to read
    it here, if it exists.

    Returns None for a folder without a template. In a folder, as in transformers,
    chat_template.jinja, and those in additional_chat_templates, have precedence over
    tokenizer_config.json. Raises ConfigError for a file that is missing, or a tokenizer_config.json
    without a template; CorruptError for a damaged one, StorageError for one that cannot be read.
    """
    is_folder = path.is_dir()
    beside = path / SETTINGS_FILE if is_folder else path.with_name(SETTINGS_FILE)
    if settings is None:
        settings = read_json(beside, LIMIT_BYTES) if beside.is_file() or beside == path else {}
    file = path / TEMPLATE_FILE if is_folder else path
    if file == beside or (is_folder and not file.is_file()):
        origin, sources = f"the chat template of {beside}", _sources(settings, beside)
    else:
        origin, sources = f"the chat template {file}", {DEFAULT: read_text(file, LIMIT_BYTES)}
    if is_folder:
        for each in sorted((path / NAMED_FOLDER).glob(f"*{NAMED_SUFFIX}")):
            sources[each.name.removesuffix(NAMED_SUFFIX)] = read_text(each, LIMIT_BYTES)
    elif not sources:
        raise ConfigError(f"{path} has no chat_template; name a Jinja file")
    source = sources.pop(DEFAULT, None)
    if source is None:
        if sources:
            raise CorruptError(f"{path} has the chat templates {sorted(sources)}, but no default")
        return None
    named = {name: text for name, text in sources.items() if _NAME.fullmatch(name)}
    return ChatTemplate(source, _tokens(settings), origin, MappingProxyType(named))


def chosen_chat_template(setting: str) -> ChatTemplate:
    """Return the chat template that `data.chat_template` names: "chatml", or a path. Raises
    ConfigError if it does not exist or has no template, CorruptError or StorageError if it cannot
    be read."""
    if setting == CHATML:
        return ChatTemplate(CHATML_TEMPLATE, origin=f"the chat template {CHATML!r}")
    path = Path(setting)
    if not path.exists():
        raise ConfigError(
            f"data.chat_template={setting!r} does not exist (in {Path.cwd()}); name a Jinja file, "
            f"a {SETTINGS_FILE}, a folder that holds one, or {CHATML!r}"
        )
    if (found := read_chat_template(path)) is None:
        raise ConfigError(f"{path} holds neither {TEMPLATE_FILE} nor a {SETTINGS_FILE} with one")
    return found


def default_source(settings: Mapping[str, Any], path: Path) -> str | None:
    """Return the source of the default template in `settings`, a parsed tokenizer_config.json; None
    if it has no template. `path` names the file in messages. Raises CorruptError if there are
    several templates and no default."""
    return _sources(settings, path).get(DEFAULT)


def _sources(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return name → source for the templates in a parsed tokenizer_config.json, read from `path`; a
    single template is called `default`, and {} means that it has none. Raises CorruptError unless
    `chat_template` is absent, a text, or a list of named templates with a `default`."""
    match settings.get("chat_template"):
        case None:
            return {}
        case str(source):
            return {DEFAULT: source}
        case list(several):
            found = {}
            for each in several:
                match each:
                    case {"name": str(name), "template": str(source)}:
                        found[name] = source
            if DEFAULT in found:
                return found
    raise CorruptError(f"{path}: chat_template is neither a text nor a list with a default")


def _tokens(settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Return key → text for the special tokens (`bos_token` and other keys in `_token`) in a parsed
    tokenizer_config.json."""
    tokens = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return MappingProxyType(tokens)
