"""Texts that are held to a grammar: valid by their schema whatever the model would say, with each
kind of tokenizer, and the same beside other texts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("llguidance", reason="llguidance, of the extra `serve`, is not installed")

from tiny import make_model

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.setting import gpt2_tokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError
from pentameter.generation.sampling import Floats, Sampling, choose
from pentameter.serve.answer_forms.calls import FORMS
from pentameter.serve.answer_forms.grammars import AnswerGrammar
from pentameter.serve.answer_forms.readers import ChannelReader, TaggedReader
from pentameter.serve.answer_forms.recognizing import CALL_ID, AnswerForm, Writing
from pentameter.serve.batching import Batcher
from pentameter.serve.constraints import Constraints
from pentameter.serve.continuation import Continuation, TextRequest
from pentameter.serve.passes import Slots

DATA = Path(os.environ.get("PENTAMETER_DATA_DIR", "absent"))
MIXED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "kind": {"enum": ["a", "é", 3, None]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "kind", "inner"],
    "additionalProperties": False,
    "$defs": {
        "inner": {
            "anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": {"const": 1}}}]
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "mixed": MIXED,
    "list": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 4},
    "date": {"type": "string", "format": "date"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"},
}
JSON_CHARACTERS = "".join(map(chr, range(32, 127))) + "\né"
PLAIN = AnswerForm()


def byte_fallback() -> LibraryTokenizer:
    """A tokenizer as SentencePiece's models have: `▁` is a space, and bytes are tokens, too."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁{", '{"', '":', '▁"', '"}', "▁na", "me", "na", *JSON_CHARACTERS.strip()]
    content = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number, "content": pieces[number], "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for number in range(3)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE", "vocab": {piece: n for n, piece in enumerate(dict.fromkeys(pieces))},
            "merges": [], "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True,
        },
    }  # fmt: skip
    return LibraryTokenizer(content, 2)


def library_bpe() -> LibraryTokenizer:
    trained = train_bpe(['the cat sat on the mat {} "a": 1, ' * 9], 300)
    content = json.loads(trained.to_tokenizer_json())
    return LibraryTokenizer.from_tokenizer_json(content, ("<|endoftext|>", None), [])


TOKENIZERS = {
    "bpe": lambda: train_bpe(['{"name": "the cat", "kind": null, "sizes": [1, 2]} é\n' * 9], 320),
    "char": lambda: CharTokenizer(JSON_CHARACTERS),
    "byte fallback": byte_fallback,
    "library": library_bpe,
    "gpt2": gpt2_tokenizer,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: Any) -> Tokenizer:
    if request.param == "gpt2" and not (DATA / "gpt2-bpe").is_dir():
        pytest.skip("needs PENTAMETER_DATA_DIR with gpt2-bpe")
    return TOKENIZERS[request.param]()


def grammar(tokenizer: Tokenizer, form: AnswerForm = PLAIN, end: str = "", **wanted: Any) -> Any:
    text = AnswerGrammar(form, tokenizer.special_tokens, end).of(**wanted)
    return Constraints(tokenizer).compiled(text)


@cache
def logits_of(tokenizer: Tokenizer) -> tuple[Floats, Floats]:
    """Random logits (V,), and what makes tokens that end a value likelier."""
    closing = [any(map(each.__contains__, b'"}]<')) for each in tokenizer.token_bytes or ()]
    noise = np.random.default_rng(0).normal(size=tokenizer.vocab_size) * 3
    return noise, 4.0 * np.array(closing)


def random_text(tokenizer: Tokenizer, constraint: Any, seed: int) -> str | None:
    """The text that random logits make, in which what ends a value is likelier; None if it does not
    end within 300 tokens."""
    ends = frozenset(() if tokenizer.end_of_text is None else {tokenizer.end_of_text})
    asked = TextRequest(
        np.array([0]), 300, Sampling(), seed, ends=ends, constraint=constraint, follows_text=False
    )
    continuation, text = Continuation(asked, tokenizer), ""
    random, (noise, closing) = np.random.default_rng(seed), logits_of(tokenizer)
    while continuation.finish_reason is None:
        logits = np.roll(noise, random.integers(len(noise))) + closing
        uniform = np.array([continuation.uniform])
        (token,) = choose(continuation.possible(logits)[None], asked.sampling, uniform)
        text += continuation.push(int(token), logits).text
    return text if continuation.finish_reason == "stop" else None


def test_the_bytes_of_tokens_are_what_they_decode_to(tokenizer: Tokenizer) -> None:
    found = tokenizer.token_bytes
    assert found is not None
    assert len(found) == tokenizer.vocab_size
    special = {*tokenizer.special_tokens.values(), tokenizer.end_of_text} - {None}
    assert {number for number, each in enumerate(found) if not each} == special
    random = np.random.default_rng(1)
    for _ in range(200):
        ids = [int(n) for n in random.integers(tokenizer.vocab_size, size=8) if n not in special]
        joined = b"".join(found[number] for number in ids)
        try:
            text = joined.decode()
        except UnicodeDecodeError:
            continue
        assert tokenizer.decode(ids) in (text, text.removeprefix(" "))


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answer_is_valid_by_its_schema(tokenizer: Tokenizer, name: str) -> None:
    constraint = grammar(tokenizer, schema=SCHEMAS[name])
    texts = [random_text(tokenizer, constraint, seed) for seed in range(8)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 3
    assert len({*ended}) > 1
    for text in ended:
        value = json.loads(text)
        jsonschema.validate(value, SCHEMAS[name])
    assert texts[3] == random_text(tokenizer, constraint, 3)  # no other text has changed it


def test_reasoning_may_come_before(tokenizer: Tokenizer) -> None:
    tags = ("<think>", "</think>")
    form = AnswerForm(tags)
    schema = {"type": "boolean"}
    for end, begins in (("", False), ("<think>\n", True)):
        constraint = grammar(tokenizer, form, end, schema=schema)
        for text, is_possible in (
            ("true", not begins),
            ("<think>Yes {}</think>\n\nfalse", True),
            ("Yes, <th</think>true", begins),
            ("<think></think> 1", False),
        ):
            assert follows(tokenizer, constraint, text) == is_possible, (text, begins)
    closed = grammar(tokenizer, form, "<think></think>\n\n", schema=schema)
    assert not follows(tokenizer, closed, "<think>")


def follows(tokenizer: Tokenizer, constraint: Any, text: str) -> bool:
    """Whether the grammar lets the tokens of a text follow each other, and the text end."""
    state, ends = constraint.begin(), [tokenizer.vocab_size - 1]
    for token in tokenizer.encode(text).tolist():
        try:
            if not state.allowed([])[token]:
                return False
        except ConfigError:
            return False
        state.push(token)
    return bool(state.is_complete or state.allowed(ends)[ends[0]])


HERMES, MISTRAL, LLAMA = FORMS
WRITINGS: Mapping[str, AnswerForm] = {
    "Hermes": AnswerForm(
        None, False, HERMES,
        Writing('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    ),
    "Mistral": AnswerForm(
        None, False, MISTRAL,
        Writing('[TOOL_CALLS][{"name": "', '", "arguments": ', f', "id": "{CALL_ID}"}}]'),
    ),
    "Llama": AnswerForm(None, False, LLAMA, Writing('{"name": "', '", "parameters": ', "}")),
    "gpt-oss": AnswerForm(
        None, True, None,
        Writing("<|channel|>commentary to=functions.", " json<|message|>", "<|call|>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITINGS)
def test_a_call_that_is_demanded_is_read_and_valid(tokenizer: Tokenizer, name: str) -> None:
    form = WRITINGS[name]
    tools: dict[str, Any] = {"alpha": MIXED, "beta.2": {"type": "object"}}
    constraint = grammar(tokenizer, form, tools=tools)
    reader = ChannelReader(True) if form.has_channels else TaggedReader(None, form.calls)
    names = []
    for seed in range(8):
        text = random_text(tokenizer, constraint, seed)
        if text is None:
            continue
        said = reader.read(text, is_whole=True)
        assert not said.content
        (call,) = said.calls
        jsonschema.validate(json.loads(call.arguments), tools[call.name])
        names.append(call.name)
        if name == "Mistral":
            assert len(call.id or "") == 9
    assert len(names) >= 2


def test_a_schema_that_is_not_known_is_refused() -> None:
    tokenizer = CharTokenizer(JSON_CHARACTERS)
    for schema, said in (
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "http://127.0.0.1/x"}, "not present in a registry"),
        (False, "Unimplemented keys"),
    ):
        with pytest.raises(ConfigError, match=said.replace("[", r"\[").replace("]", r"\]")):
            grammar(tokenizer, schema=schema)
    loose = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(ConfigError, match="uniqueItems"):
        grammar(tokenizer, schema=loose)


def test_a_vocabulary_that_lacks_a_character_ends_with_an_error() -> None:
    tokenizer = CharTokenizer('{}":a ')
    state = grammar(tokenizer, schema={"type": "array"}).begin()
    with pytest.raises(ConfigError, match="no token that could follow"):
        state.allowed([])


def test_tokens_that_depend_on_their_neighbours_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer \(word\) decodes tokens by their neighbours"):
        Constraints(WordTokenizer(["<unk>", "a"]))
    bare = byte_fallback().content | {"decoder": None}
    assert LibraryTokenizer(bare, None).token_bytes is None


def test_texts_do_not_change_each_other() -> None:
    tokenizer = CharTokenizer(JSON_CHARACTERS)
    slots = Slots(make_model(vocab_size=tokenizer.vocab_size), tokenizer.vocab_size, 4)
    constraint = grammar(tokenizer, schema=MIXED)
    other = grammar(tokenizer, schema={"type": "array", "items": {"type": "integer"}})
    asked = [
        TextRequest(np.array([1, 2, 3]), 40, seed=seed, constraint=each)
        for seed, each in ((1, constraint), (2, constraint), (3, None), (4, other), (1, other))
    ]

    def written(requests: list[TextRequest]) -> list[tuple[str, str | None]]:
        batcher, texts = Batcher(slots), [Continuation(each, tokenizer) for each in requests]
        found = dict.fromkeys(texts, "")
        for each in texts:
            batcher.add(each)
        while not batcher.is_idle:
            for text, piece in batcher.step():
                assert piece.error is None
                found[text] += piece.text
        return [(found[each], each.finish_reason) for each in texts]

    together = written(asked)
    assert together == [written([each])[0] for each in asked]
    assert "stop" in {reason for _, reason in together}


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    said = r"constrained decoding needs a package .*llguidance.*pip install 'pentameter\[serve\]'"
    with pytest.raises(ConfigError, match=said):
        Constraints(CharTokenizer("ab"))
