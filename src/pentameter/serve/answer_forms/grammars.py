"""Grammars of answers in a family's form, in llguidance's variant of Lark."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pentameter.data.tokenizers.chat import ids_and_texts
from pentameter.serve.answer_forms.recognizing import CALL_ID, AnswerForm

# The model chooses its tokens: `no_forcing` asks for no tokenization of ours.
_HEAD = '%llguidance {"no_forcing": true}\nTEXT: /(.|\\n)*/\nID: /[a-zA-Z0-9]{9}/\n'
_WHITE_SPACE = r"\x20|\n[\x20\t]{0,80}"
"""The white space between the signs of JSON: as programs write it, on a line or indented. Without a
bound, white space could go on for ever."""


@dataclass(frozen=True)
class AnswerGrammar:
    """Writes the grammar of answers to one prompt, of a model with this form and these special
    tokens (text → id). `prompt_end` is the end of the rendered prompt."""

    form: AnswerForm
    special_tokens: Mapping[str, int]
    prompt_end: str

    def of(self, schema: Any = None, tools: Mapping[str, Any] | None = None) -> str:
        """Return the grammar of an answer whose content is JSON by `schema`, or which calls one of
        the `tools` (name → schema of its arguments). None for either: it has no such content, or
        calls none."""
        answers = [*self._content(schema)] if schema is not None else []
        answers += [self._call(name, each) for name, each in (tools or {}).items()]
        rules = [f"answer_{number}: {each}" for number, each in enumerate(answers)]
        names = " | ".join(f"answer_{number}" for number in range(len(answers)))
        thought, more = self._thought()
        return "\n".join([_HEAD + f"start: {thought} ({names})", *more, *rules])

    def _content(self, schema: Any) -> Iterator[str]:
        content = _json(schema)
        if not self.form.has_channels:
            yield content
            return
        for header in ("", " <|constrain|>json"):
            yield f"{self._literal(f'<|channel|>final{header}<|message|>')} {content}"

    def _call(self, name: str, schema: Any) -> str:
        writing = self.form.writing
        assert writing is not None
        before = self._literal(writing.before + name + writing.between)
        return f"{before} {_json(schema)} {self._literal(writing.behind)}"

    def _thought(self) -> tuple[str, list[str]]:
        """Return what stands before the answer proper, reasoning if the family has it, and rules
        for it."""
        if self.form.has_channels:
            first = "<|channel|>analysis<|message|>"
            last = "<|end|><|start|>assistant"
        elif self.form.tags is not None:
            first, last = self.form.tags
        else:
            return "", []
        if not self.form.has_channels and self.prompt_end.rstrip().endswith(last):
            return "", []
        behind = "" if self.form.has_channels else "GAP"
        rules = ["GAP: /[ \\n]{0,4}/", self._until(last)]
        if self.form.begins_in_reasoning(self.prompt_end):
            return f"thought {behind}", rules
        return f"({self._literal(first)} thought {behind})?", rules

    def _until(self, last: str) -> str:
        """Return the rule `thought` for any text, up to `last`."""
        piece, *_ = ids_and_texts(last, self.special_tokens)
        if isinstance(piece, int):
            return f"thought: TEXT {self._literal(last)}"
        return f"thought[lazy]: TEXT {_quoted(last)}"

    def _literal(self, text: str) -> str:
        """Return a text as a grammar has it: special tokens by their ids, and any id of a call in
        the place of CALL_ID."""
        pieces = []
        for piece in ids_and_texts(text, self.special_tokens):
            if isinstance(piece, int):
                pieces.append(f"<[{piece}]>")
                continue
            texts = [
                json.dumps(each, ensure_ascii=False) if each else ""
                for each in piece.split(CALL_ID)
            ]
            pieces.append(" ID ".join(texts))
        return " ".join(pieces)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any) -> str:
    """Return the rule for JSON by a schema, without options that it may hold for llguidance."""
    known = schema if isinstance(schema, dict) else ({} if schema else {"not": {}})
    options = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}}
    return f"%json {json.dumps(known | options)}"
