"""A tokenizer.model of SentencePiece, with what the files beside it say, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentameter.data.tokenizers.base import FILE_LIMIT_BYTES, End
from pentameter.data.tokenizers.published.sentencepiece_model import SentencePieceTokenizer
from pentameter.disk.atomic import read_json, storage_errors
from pentameter.errors import CorruptError

MODEL, ADDED = "tokenizer.model", "added_tokens.json"


def read_model(
    path: Path, settings: Mapping[str, Any], end: End, warnings: list[str]
) -> SentencePieceTokenizer:
    """Read the tokenizer.model at `path`. `settings`, the parsed tokenizer_config.json, and
    added_tokens.json beside it name more tokens, and which of the model's are special.

    end: (token, id) for the end of a document, each None if not known; then the model says it. A
        document begins with `bos_token`, or the model's own, unless `add_bos_token` is false.
    warnings: gets a line that names added tokens that are not special: no text becomes one.

    A space is put before each text between special tokens, unless `legacy` is false. Raises
    CorruptError for malformed files, ConfigError if sentencepiece is missing.
    """
    with storage_errors(path, "read"):
        if path.stat().st_size > FILE_LIMIT_BYTES:
            raise CorruptError(f"it has more than {FILE_LIMIT_BYTES:,} bytes")
        model = path.read_bytes()
    known = SentencePieceTokenizer(model)
    beside = path.with_name(ADDED)
    try:
        named = [
            {"content": text, "id": number, "special": True}
            for text, number in (read_json(beside) if beside.is_file() else {}).items()
        ]
        more = settings.get("added_tokens_decoder") or {}
        named += [{**token, "id": int(number)} for number, token in more.items()]
        added = {each["content"]: each for each in named if not known.has(each)}
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        raise CorruptError(f"added tokens are malformed: {error!r:.80}") from error
    if plain := [text for text, each in added.items() if not each.get("special")]:
        warnings.append(f"no text becomes the added tokens {', '.join(map(repr, plain))}")
    once = settings.get("legacy") is False
    tokenizer = SentencePieceTokenizer(model, None, added, spaces_once=once)
    token, number = end
    if (found := tokenizer.id_of(token)) is not None:
        number = found
    if number is not None and 0 <= number < tokenizer.vocab_size:
        tokenizer = SentencePieceTokenizer(model, number, added, spaces_once=once)
    if settings.get("add_bos_token", True):
        first = tokenizer.id_of(_text(settings.get("bos_token")))
        first = tokenizer.begin_of_text if first is None else first
        tokenizer.prefix = () if first is None else (first,)
    return tokenizer


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def settings_of(tokenizer: SentencePieceTokenizer) -> dict[str, Any]:
    """Return entries of tokenizer_config.json with which transformers reads the tokenizer.model,
    if it is BPE; of other models its readers give other ids, so none of them is named."""
    texts = {number: text for text, number in tokenizer.special_tokens.items()}
    uses = {"bos_token": tokenizer.begin_of_text, "eos_token": tokenizer.end_of_text}
    named = {key: texts[number] for key, number in uses.items() if number in texts}
    reader = tokenizer.reader
    return {
        **({} if reader is None else {"tokenizer_class": reader}),
        **named,
        "add_bos_token": bool(tokenizer.prefix),
        "legacy": not tokenizer.spaces_once,
        "added_tokens_decoder": {
            str(each["id"]): {"content": text, "special": True, **each}
            for text, each in tokenizer.added.items()
        },
    }
