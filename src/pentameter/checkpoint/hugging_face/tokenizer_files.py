"""Tokenizers written to the files that `transformers` opens, and read from such files.

Each tokenizer class writes and reads its own tokenizer.json; the files around it are here.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.bpe import END_OF_TEXT, BpeTokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import read_chat_template
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.setting import GPT2, KINDS, is_gpt2, load_tokenizer
from pentameter.disk.atomic import read_json, read_text
from pentameter.errors import ConfigError, CorruptError, PentameterError

VOCABULARY, MERGES, WHOLE = "vocab.json", "merges.txt", "tokenizer.json"
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"


def tokenizer_files(tokenizer: Tokenizer, context_length: int) -> dict[str, bytes]:
    """Return name → content for the files that `transformers.AutoTokenizer` reads; empty for a word
    tokenizer, which they cannot express. `context_length` (tokens) becomes `model_max_length`.

    BPE gives GPT-2's tokenizer, in its old files and its new one. Characters give a tokenizer with
    one token per character, which refuses an unknown character. A library tokenizer gives its own
    content.
    """
    whole = tokenizer.to_tokenizer_json()
    if whole is None:
        return {}
    chat, end_of_text = tokenizer.chat, tokenizer.end_of_text
    files: dict[str, bytes] = {}
    settings: dict[str, Any] = {
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special: dict[str, str] = {}
    match tokenizer:
        case LibraryTokenizer():
            if end_of_text is not None:
                special["eos_token"] = tokenizer.token(end_of_text) or ""
            if chat is not None:
                special |= chat.tokens
        case BpeTokenizer():
            if end_of_text is not None:
                special = {f"{use}_token": END_OF_TEXT for use in ("bos", "eos", "unk")}
            if chat is not None:  # the template names its tokens
                known = tokenizer.special_tokens
                special |= {key: text for key, text in chat.tokens.items() if text in known}
            added = {token.pop("id"): token for token in json.loads(whole)["added_tokens"]}
            settings |= {
                "tokenizer_class": "GPT2Tokenizer",
                "add_prefix_space": False,
                "added_tokens_decoder": added,
            }
            merges = ["#version: 0.2", *map(" ".join, tokenizer.merges)]
            files[VOCABULARY] = _json(dict(tokenizer.vocabulary))
            files[MERGES] = "".join(f"{line}\n" for line in merges).encode()
        case CharTokenizer():
            chat = None
    files |= {WHOLE: whole, SETTINGS: _json({**settings, **special}), SPECIAL: _json(special)}
    return files if chat is None else {**files, **chat.files()}


def _json(content: Any) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def read_tokenizer(folder: Path, warnings: list[str], end_of_text: Any = None) -> Tokenizer | None:
    """Read the tokenizer from `folder`: tokenizer.json, else vocab.json and merges.txt; None if
    there are none.

    GPT-2's kind and pentameter's characters become pentameter's classes: tokens that were added to
    the vocabulary keep their ids, but no text becomes one, and a line in `warnings` names them. Any
    other tokenizer.json is used unchanged; a document then ends with `eos_token` in
    tokenizer_config.json, else with `end_of_text`, config.json's value for `eos_token_id` (an id,
    or a list whose first id counts). Raises ConfigError for old files that are not GPT-2's kind,
    CorruptError for a malformed file.
    """
    settings = _read_if_there(folder / SETTINGS)
    if (path := folder / WHOLE).is_file():
        content = read_json(path)
    elif (path := folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        if settings.get("add_prefix_space"):
            raise ConfigError(
                f"{folder / SETTINGS}: add_prefix_space=true is not GPT-2's; give another "
                "tokenizer: `import … --tokenizer gpt2`, or a file"
            )
        lines = read_text(folder / MERGES).split("\n")
        merges = [line for line in lines[lines[0].startswith("#version") :] if line]
        added = _read_if_there(folder / "added_tokens.json")
        content = {  # as GPT-2's tokenizer.json says it
            "model": {"vocab": read_json(path), "merges": merges},
            "pre_tokenizer": {"type": "ByteLevel"},
            "added_tokens": [{"content": text, "id": number} for text, number in added.items()],
        }
    else:
        return None
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    number = end_of_text[0] if isinstance(end_of_text, list) and end_of_text else end_of_text
    end = token if isinstance(token, str) else None, number if type(number) is int else None
    said: list[str] = []
    try:
        model = content.get("model")
        if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
            raise CorruptError("it has no model.vocab")
        found = (kind.from_tokenizer_json(content, end, said) for kind in KINDS)
        tokenizer = next(each for each in found if each is not None)
    except (ConfigError, CorruptError) as error:
        raise CorruptError(f"{path}: {error}") from error
    warnings += [f"{path}: {sentence}" for sentence in said]
    tokenizer.chat = read_chat_template(folder, settings)
    return tokenizer


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def gpt2_beside(setting: str, *models: Path | None) -> Tokenizer | None:
    """Return GPT-2's tokenizer from the first of `models` (a run, checkpoint or Hugging Face
    folder; None is skipped) that holds it.

    Returns None if `setting` (`data.tokenizer`) is not `gpt2`, or no folder holds it: only then
    OpenAI's own files are needed. Damage is ignored in this search; opening the model reports it.
    """
    for model in models:
        if setting != GPT2 or model is None:
            continue
        is_hugging_face = (model / "config.json").is_file()
        for path in (model / WHOLE, *sorted(model.glob(f"checkpoints/*/{WHOLE}"))):
            with suppress(PentameterError):
                found = read_tokenizer(model, []) if is_hugging_face else load_tokenizer(path)
                if found is not None and is_gpt2(found):
                    return found
    return None
