"""Forms of conversations: which one a record has, by its keys, and the messages in it.

The forms are rows of `forms.toml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from pentameter.config.tables import packaged_table
from pentameter.data.corpora.records.rows import BadRowError
from pentameter.data.messages import of_json
from pentameter.errors import ConfigError, did_you_mean, listed

AUTO, TEXT = "auto", "text"
"""Values of `data.form` beside the forms' names: chosen by the records' keys; documents."""
_USUAL_RANK = 2
_CALL = "call"
"""The role, in the table, of a message that calls functions."""
_TOOLS = ("tools", "functions", "chat_template_kwargs")
"""Keys beside a form's own that `corpora/conversations.py` reads."""


@dataclass(frozen=True)
class Form:
    """A form of conversations, a row of `forms.toml`; see its head."""

    name: str
    said: str
    """The form's name in messages: "Alpaca's form"."""
    keys: frozenset[str]
    """Keys that a record of this form has."""
    optional: frozenset[str] = frozenset()
    """Keys that it may have, too."""
    rank: int = _USUAL_RANK
    messages: str | None = None
    """The key of a list of messages; None where a question is asked and answered."""
    asked: Sequence[str] = ()
    """Keys of a question's parts."""
    answer: str = ""
    history: str = ""
    """The key of earlier questions and answers, a list of pairs; "" if there is none."""
    is_plain: bool = False
    """True if texts stay without a chat template."""
    refused: str = ""
    """The way out for records that are recognized and not read; "" for those that are."""

    @property
    def shown(self) -> str:
        """The keys, in a row of a table for people, with those that may be absent in brackets."""
        parts = [self.messages] if self.messages else [*self.asked, self.answer]
        parts = [f"[{key}]" if key in self.optional else key for key in parts]
        return listed([*parts, *([f"[{self.history}]"] if self.history else [])])


@cache
def _table() -> Mapping[str, Any]:
    return packaged_table("data/corpora/records/forms.toml")


@cache
def forms() -> Mapping[str, Form]:
    """Return the forms by name."""
    return {name: _form(name, row) for name, row in _table()["forms"].items()}


def _form(name: str, row: Mapping[str, Any]) -> Form:
    asked = row.get("asked", [])
    optional = [key[:-1] for key in asked if key.endswith("?")]
    needed = [key for key in asked if not key.endswith("?")]
    named = [row[key] for key in ("list", "answer") if key in row]
    return Form(
        name,
        row["said"],
        frozenset(row.get("keys") or [*needed, *named]),
        frozenset([*optional, *([row["history"]] if "history" in row else [])]),
        row.get("rank", _USUAL_RANK),
        row.get("list"),
        tuple(key.removesuffix("?") for key in asked),
        row.get("answer", ""),
        row.get("history", ""),
        row.get("is_plain", False),
        row.get("refused", ""),
    )


@cache
def record_fields() -> Sequence[str]:
    """Return the keys that all forms have, those to read from a table's columns."""
    keys = [key for form in forms().values() for key in sorted(form.keys | form.optional)]
    beside = _table()["beside"]
    return tuple(dict.fromkeys([*keys, *beside["system"], *beside["judged"], *_TOOLS]))


def check_form(name: str) -> None:
    """Raise ConfigError unless `name` is a value of `data.form`."""
    known = [AUTO, TEXT, *(form.name for form in forms().values() if not form.refused)]
    if name not in known:
        raise ConfigError(
            f"data.form={name!r} is no form of records{did_you_mean(name, known)}; known: "
            f"{listed(known)}"
        )


def forms_read(text_field: str) -> str:
    """Return a table of the forms that are read, for messages, each with its keys on a line;
    `text_field` is the field of documents."""
    rows = {TEXT: f"{text_field} (data.text_field)"}
    rows |= {form.name: form.shown for form in forms().values() if not form.refused}
    width = max(map(len, rows))
    return "\n".join(f"  {name:{width}}  {keys}" for name, keys in rows.items())


def form_of(keys: Iterable[str], chosen: str, where: str) -> Form | None:
    """Return the form that a record has; None if it has none.

    keys: the record's keys that have values. chosen: `data.form`, a form's name or AUTO.

    Raises BadRowError, at `where`, if two forms fit, or if one that is not read does.
    """
    found = _fitting(_known_keys().intersection(keys), chosen)
    if len(found) > 1:
        raise BadRowError(
            f"{where} fits {len(found)} forms: "
            + "; ".join(f"{form.name} ({form.shown})" for form in found)
            + f"; name the one that is meant with --data.form {found[0].name} (in prepare --form)"
        )
    if found and found[0].refused:
        raise BadRowError(f"{where} holds {found[0].said}: {found[0].refused}")
    return found[0] if found else None


def missing_key(keys: Iterable[str], chosen: str) -> str:
    """Return, in words, the key without which a record has no form: "'output' (Alpaca's form)", of
    several forms with "or" between them; "" if more than one key is missing for every form.

    keys: the record's keys that have values. chosen: `data.form`, a form's name or AUTO.
    """
    present = _known_keys().intersection(keys)
    near = [
        form
        for form in forms().values()
        if not form.refused and chosen in (AUTO, form.name)
        if len(form.keys - present) == 1 and form.keys & present
    ]
    n_known = [len((form.keys | form.optional) & present) for form in near]
    return " or ".join(
        f"{min(form.keys - present)!r} ({form.said})"
        for form, n in zip(near, n_known, strict=True)
        if n == max(n_known)
    )


@cache
def _known_keys() -> frozenset[str]:
    return frozenset().union(*(form.keys | form.optional for form in forms().values()))


@lru_cache(1024)
def _fitting(keys: frozenset[str], chosen: str) -> Sequence[Form]:
    """Return the forms that fit a record with these `keys`, each as well as the others."""
    named = forms().values() if chosen == AUTO else [forms()[chosen]]
    fitting = [form for form in named if form.keys <= keys]
    best = [form for form in fitting if form.rank == min(each.rank for each in fitting)]
    return [
        form
        for form in best
        if not any(form.keys < each.keys | each.optional for each in best if each is not form)
    ]


def judgement_in(record: Mapping[str, Any]) -> str | None:
    """Return the key in a record that says whether its answer is good; None if there is none."""
    return next(
        (key for key in _table()["beside"]["judged"] if type(record.get(key)) is bool), None
    )


def messages_of(record: Mapping[str, Any], form: Form) -> tuple[list[Any], int]:
    """Return the messages in a record under OpenAI's names, and how many of the first are a prompt,
    which is never learned. Raises ConfigError for what is no list of messages, a role that is not
    known, and a question or an answer that is no text."""
    n_given = 0
    if form.messages is not None:
        said = _listed_messages(record, form.messages)
    elif form.is_plain:
        said = _listed_messages(record, form.asked[0])
        n_given = len(said)
        said += _listed_messages(record, form.answer)
    else:
        said = _asked_and_answered(record, form)
    system = _system(record)
    if system and said and isinstance(said[0], dict) and said[0].get("role") == "system":
        if said[0].get("content") != system:
            raise ConfigError(
                f"two system messages, {system!r:.40} beside the conversation and "
                f"{said[0].get('content')!r:.40} in it; remove one of them"
            )
        system = ""
    if not system:
        return said, n_given
    return [{"role": "system", "content": system}, *said], n_given + 1


def _listed_messages(record: Mapping[str, Any], key: str) -> list[Any]:
    """Return the messages in the list at `key`, or in the JSON of one. Raises ConfigError for
    anything else."""
    found = of_json(record[key])
    if not isinstance(found, list):
        raise ConfigError(f"{key!r} is {type(found).__name__} {found!r:.40}, not a list")
    return [_message(each, number) for number, each in enumerate(found)]


def _message(message: Any, number: int) -> Any:
    """Return a message with role and content under OpenAI's names, and the role in OpenAI's word
    for it; what is no message as it is. Raises ConfigError for a role that is not known, unless it
    stands under OpenAI's name: a template may know it."""
    if not isinstance(message, dict) or _is_openais(message):
        return message
    table, found, ours = _table(), dict(message), dict[str, Any]()
    for key, names in table["message"].items():
        name = next((name for name in names if message.get(name) is not None), None)
        if name is not None:
            ours[key] = found.pop(name)
    if not isinstance(role := ours.get("role"), str):
        return message
    ours |= _of_parts(ours.get("content"), number)
    known = _roles().get(role.lower())
    if known is None and "role" not in message:
        raise ConfigError(
            f"message {number} is from {role!r:.40}, not from one of {listed(_roles())}"
        )
    if known == _CALL:
        return {**found, "role": "assistant", "tool_calls": _calls(ours.get("content"), number)}
    return {**found, **ours, "role": known or role}


def _of_parts(content: Any, number: int) -> dict[str, Any]:
    """Return the keys of a message whose content is a list of parts with values (LLaMA-Factory's
    later form); {} for any other content. Raises ConfigError for a part that is no text."""
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and "value" in part and "text" not in part for part in content
    ):
        return {}
    found: dict[str, list[Any]] = {"content": []}
    for part in content:
        key = _table()["parts"].get(part.get("type"))
        if key is None:
            raise ConfigError(
                f"message {number} has a part of type {part.get('type')!r:.20}, which is no text; "
                f"read are {listed(_table()['parts'])}"
            )
        found.setdefault(key, []).append(_text(part["value"], f"a part of message {number}"))
    return {
        key: [call for each in values for call in _calls(each, number)]
        if key == "tool_calls"
        else "".join(values)
        for key, values in found.items()
    }


def _is_openais(message: Mapping[str, Any]) -> bool:
    """Return whether a message has OpenAI's names and roles already, as most do."""
    role = message.get("role")
    return (
        isinstance(role, str)
        and _roles().get(role) == role
        and _other_names().isdisjoint(message)
        and not isinstance(message.get("content"), list)
    )


@cache
def _other_names() -> frozenset[str]:
    """Return the names that keys of a message have beside OpenAI's."""
    return frozenset(name for names in _table()["message"].values() for name in names[1:])


@cache
def _roles() -> Mapping[str, str]:
    """Return OpenAI's word for each role, by the names that it has, in small letters."""
    roles = _table()["roles"]
    return {name: role for role, names in roles.items() for name in names}


def _calls(content: Any, number: int) -> list[Any]:
    """Return the tool calls that a message of calls has as its content. Raises ConfigError if it
    has none."""
    found = of_json(content)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, Mapping) and "name" in call for call in calls):
        raise ConfigError(
            f"message {number} is a call, and {content!r:.40} is no JSON of a function's name and "
            "arguments"
        )
    return [{"type": "function", "function": call} for call in calls]


def _asked_and_answered(record: Mapping[str, Any], form: Form) -> list[dict[str, str]]:
    """Return a question and its answer as messages, with the earlier ones before them. Raises
    ConfigError for one that is no text, and for an empty answer."""
    history = of_json(record.get(form.history) or [])
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise ConfigError(f"{form.history!r} is {history!r:.40}, not a list of pairs")
    turns = [(f"{form.history!r}", *pair) for pair in history]
    parts = [_text(record[key], f"{key!r}") for key in form.asked if record.get(key) is not None]
    question = "\n".join(part for part in parts if part)
    if not _text(answer := record[form.answer], f"{form.answer!r}"):
        raise ConfigError(f"{form.answer!r} is empty; there is nothing to learn")
    said = []
    for name, asked, answered in [*turns, (f"{form.answer!r}", question, answer)]:
        said.append({"role": "user", "content": _text(asked, name)})
        said.append({"role": "assistant", "content": _text(answered, name)})
    return said


def _system(record: Mapping[str, Any]) -> str:
    """Return the system message that stands beside a conversation; "" if there is none. Raises
    ConfigError for one that is no text."""
    for key in _table()["beside"]["system"]:
        if record.get(key):
            return _text(record[key], f"{key!r}")
    return ""


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {type(value).__name__} {value!r:.40}, not a text")
    return value
