"""Tokenizers written to the files that `transformers` opens, and read from such files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.bpe import BYTE_CHARACTERS, END_OF_TEXT, BpeTokenizer, parse_merge
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import TEMPLATE_FILE, ChatTemplate, read_chat_template
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.setting import GPT2, is_gpt2, load_tokenizer
from pentameter.disk.atomic import read_json, read_text
from pentameter.errors import ConfigError, CorruptError, PentameterError, printable

VOCABULARY, MERGES, WHOLE = "vocab.json", "merges.txt", "tokenizer.json"
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"

_ANY_CHARACTER = r"[\s\S]"


def tokenizer_files(tokenizer: Tokenizer, context_length: int) -> dict[str, bytes]:
    """Map name → content for the files that `transformers.AutoTokenizer` reads; empty for a word
    tokenizer.

    BPE gives GPT-2's tokenizer, in its old files and its new one. Characters give a tokenizer with
    one token per character, which refuses an unknown character.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as TheirTokenizer

    settings: dict[str, Any] = {
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if isinstance(tokenizer, CharTokenizer):
        ranks = {character: number for number, character in enumerate(tokenizer.characters)}
        # No such token exists: an unknown character is an error there as it is in pentameter.
        whole = TheirTokenizer(models.WordLevel(ranks, unk_token="[UNK]"))
        whole.pre_tokenizer = pre_tokenizers.Split(Regex(_ANY_CHARACTER), "isolated")
        whole.decoder = decoders.Fuse()
        return _files(whole.to_str(pretty=True).encode(), settings, {}, None)
    if isinstance(tokenizer, LibraryTokenizer):
        special = {} if tokenizer.chat is None else dict(tokenizer.chat.tokens)
        if tokenizer.end_of_text is not None:
            special = {"eos_token": tokenizer.token(tokenizer.end_of_text) or "", **special}
        return _files(_json(tokenizer.content), settings, special, tokenizer.chat)
    if not isinstance(tokenizer, BpeTokenizer):
        return {}
    vocabulary = dict(tokenizer.vocabulary)
    whole = TheirTokenizer(models.BPE(vocabulary, list(tokenizer.merges)))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    whole.decoder = decoders.ByteLevel()
    special = {}
    if tokenizer.end_of_text is not None:
        whole.add_special_tokens([AddedToken(END_OF_TEXT, normalized=False, special=True)])
        special = {f"{use}_token": END_OF_TEXT for use in ("bos", "eos", "unk")}
    if tokenizer.chat is not None:  # the template names its tokens; each stays one token there too
        tokens = tokenizer.special_tokens
        whole.add_special_tokens([AddedToken(token, normalized=False) for token in tokens])
        special |= {key: text for key, text in tokenizer.chat.tokens.items() if text in tokens}
    added = {token.pop("id"): token for token in json.loads(whole.to_str())["added_tokens"]}
    settings |= {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "added_tokens_decoder": added,
    }
    merges = ["#version: 0.2", *map(" ".join, tokenizer.merges)]
    return {
        VOCABULARY: _json(vocabulary),
        MERGES: "".join(f"{line}\n" for line in merges).encode(),
        **_files(whole.to_str(pretty=True).encode(), settings, special, tokenizer.chat),
    }


def _files(
    whole: bytes, settings: dict[str, Any], special: dict[str, str], chat: ChatTemplate | None
) -> dict[str, bytes]:
    """Map name → content for the files that every kind has, and the chat template if there is
    one."""
    template = {} if chat is None else {TEMPLATE_FILE: chat.source.encode()}
    return {
        WHOLE: whole,
        SETTINGS: _json({**settings, **special}),
        SPECIAL: _json(special),
        **template,
    }


def _json(content: Any) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def read_tokenizer(folder: Path, warnings: list[str]) -> Tokenizer | None:
    """Read the tokenizer from `folder`: tokenizer.json, else vocab.json and merges.txt; None if
    there are none.

    GPT-2's kind and pentameter's characters become pentameter's classes: tokens that were added to
    the vocabulary keep their ids, but no text becomes one, and a line in `warnings` names them. Any
    other tokenizer.json is used unchanged. Raises ConfigError for old files that are not GPT-2's
    kind, CorruptError for a malformed file.
    """
    tokenizer = _read_files(folder, warnings)
    if tokenizer is not None:
        tokenizer.chat = read_chat_template(folder)
    return tokenizer


def _read_files(folder: Path, warnings: list[str]) -> Tokenizer | None:
    settings = _read_if_there(folder / SETTINGS)
    if (path := folder / WHOLE).is_file():
        content = read_json(path)
        return _read_whole(content, path, warnings) or _as_it_is(content, settings, folder)
    path = folder / VOCABULARY
    if not (path.is_file() and (folder / MERGES).is_file()):
        return None
    if settings.get("add_prefix_space"):
        raise ConfigError(f"{folder / SETTINGS}: add_prefix_space=true {_NOT_GPT2}")
    vocabulary = dict(read_json(path))
    lines = read_text(folder / MERGES).split("\n")
    lines = [line for line in lines[lines[0].startswith("#version") :] if line]
    _add(vocabulary, _read_if_there(folder / "added_tokens.json"), path, warnings)
    return _bpe(vocabulary, lines, path)


_NOT_GPT2 = "is not GPT-2's; give another tokenizer: `import … --tokenizer gpt2`, or a file"


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _as_it_is(
    content: dict[str, Any], settings: Mapping[str, Any], folder: Path
) -> LibraryTokenizer:
    """Take a tokenizer.json unchanged. A document ends with `eos_token` in tokenizer_config.json,
    else with `eos_token_id` in config.json, the first if there are several."""
    try:
        tokenizer = LibraryTokenizer(content, None)
    except ConfigError as error:
        raise CorruptError(f"{folder / WHOLE}: {error}") from error
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    end = tokenizer.token_id(token) if isinstance(token, str) else None
    if end is None:
        found = _read_if_there(folder / "config.json").get("eos_token_id")
        found = found[0] if isinstance(found, list) and found else found
        end = found if type(found) is int and 0 <= found < tokenizer.vocab_size else None
    tokenizer.end_of_text = end
    return tokenizer


def _read_whole(content: Mapping[str, Any], path: Path, warnings: list[str]) -> Tokenizer | None:
    """Read GPT-2's kind of tokenizer, or characters; None for another kind."""
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        raise CorruptError(f"{path} is malformed: it has no model.vocab")
    pre_tokenizer = content.get("pre_tokenizer")
    of_each_character = {
        "type": "Split",
        "pattern": {"Regex": _ANY_CHARACTER},
        "behavior": "Isolated",
        "invert": False,
    }
    if model.get("type") == "WordLevel" and pre_tokenizer == of_each_character:
        return _characters(vocabulary, path)
    is_bytes = (
        isinstance(pre_tokenizer, dict)
        and pre_tokenizer.get("type") == "ByteLevel"
        and not pre_tokenizer.get("add_prefix_space")
        and pre_tokenizer.get("use_regex", True)
    )
    plain = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    is_as_gpt2s = (
        model.get("type", "BPE") == "BPE"
        and is_bytes
        and not content.get("normalizer")
        and not any(model.get(key) for key in plain)
    )
    if not is_as_gpt2s:
        return None
    merges = model.get("merges")
    if not isinstance(merges, list):
        raise CorruptError(f"{path} is malformed: it has no model.merges")
    added = content.get("added_tokens") or []
    try:
        named = {token["content"]: token["id"] for token in added}
    except (TypeError, LookupError) as error:
        raise CorruptError(f"{path} is malformed: added_tokens: {error!r}") from error
    vocabulary = dict(vocabulary)
    _add(vocabulary, named, path, warnings)
    return _bpe(vocabulary, merges, path)


def _add(
    vocabulary: dict[str, Any], added: Mapping[str, Any], path: Path, warnings: list[str]
) -> None:
    """Append to the vocabulary those added tokens whose ids follow it without a gap.

    Raises CorruptError for one that is not text with a whole number.
    """
    for text, number in added.items():
        if not isinstance(text, str) or type(number) is not int:
            raise CorruptError(
                f"{path}: the added token {text!r:.80} has the id {number!r:.80}; "
                "it must be text, and its id a whole number"
            )
    unknown = [token for token, number in added.items() if vocabulary.get(token) != number]
    by_id = {added[token]: token for token in unknown if BYTE_CHARACTERS.keys() >= set(token)}
    while (token := by_id.get(len(vocabulary))) is not None and token not in vocabulary:
        vocabulary[token] = len(vocabulary)
    others = [token for token in unknown if token != END_OF_TEXT]
    if others:
        named = ", ".join(map(printable, others[:5])) + (" …" if len(others) > 5 else "")
        warnings.append(f"{path}: text never becomes one of the added tokens {named}")


def _bpe(vocabulary: Mapping[str, Any], merges: list[Any], path: Path) -> BpeTokenizer:
    try:
        pairs = [_merge(number, merge) for number, merge in enumerate(merges)]
        return BpeTokenizer.from_vocabulary(vocabulary, pairs)
    except (ConfigError, CorruptError) as error:
        raise CorruptError(f"{path}: {error}") from error


def _merge(number: int, merge: Any) -> tuple[str, str]:
    """Parse a merge into its two tokens: "left right" in old files, ["left", "right"] in new
    ones."""
    match merge:
        case str():
            return parse_merge(merge)
        case [str(left), str(right)]:
            return left, right
    raise CorruptError(f"merge {number} is {merge!r:.80}, not two tokens")


def _characters(vocabulary: Mapping[str, Any], path: Path) -> CharTokenizer:
    try:
        tokenizer = CharTokenizer(list(vocabulary))
    except ConfigError as error:
        raise CorruptError(f"{path}: {error}") from error
    if {character: n for n, character in enumerate(tokenizer.characters)} != vocabulary:
        raise CorruptError(f"{path}: the ids of its characters are not their ranks")
    return tokenizer


def gpt2_beside(setting: str, *models: Path | None) -> Tokenizer | None:
    """Find GPT-2's tokenizer in the folder of a run, a checkpoint or a Hugging Face model.

    None if `setting` (`data.tokenizer`) does not ask for it, or no folder holds it: only then
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
