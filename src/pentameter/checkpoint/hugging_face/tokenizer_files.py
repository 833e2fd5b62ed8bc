"""Tokenizers written to the files that `transformers` opens, and read from such files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
    """Return name → content for the files that `transformers.AutoTokenizer` reads; empty for a word
    tokenizer, which they cannot express. `context_length` (tokens) becomes `model_max_length`.

    BPE gives GPT-2's tokenizer, in its old files and its new one. Characters give a tokenizer with
    one token per character, which refuses an unknown character. A library tokenizer gives its own
    content.
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
    """Return name → content for the files that every kind has: tokenizer.json (`whole`), settings
    and special tokens (use → token), and the chat template if there is one."""
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
    settings, config = _read_if_there(folder / SETTINGS), _read_if_there(folder / "config.json")
    merges: list[str] = []
    added: dict[str, Any] = {}
    if is_whole := (path := folder / WHOLE).is_file():
        content = read_json(path)
    elif (path := folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        if settings.get("add_prefix_space"):
            raise ConfigError(
                f"{folder / SETTINGS}: add_prefix_space=true is not GPT-2's; give another "
                "tokenizer: `import … --tokenizer gpt2`, or a file"
            )
        content, lines = read_json(path), read_text(folder / MERGES).split("\n")
        merges = [line for line in lines[lines[0].startswith("#version") :] if line]
        added = _read_if_there(folder / "added_tokens.json")
    else:
        return None
    said: list[str] = []
    tokenizer: Tokenizer
    try:
        if is_whole:
            tokenizer = _from_whole(content, settings, config, said)
        else:
            tokenizer = _bpe(content, added, merges, said)
    except (ConfigError, CorruptError) as error:
        raise CorruptError(f"{path}: {error}") from error
    warnings += [f"{path}: {sentence}" for sentence in said]
    tokenizer.chat = read_chat_template(folder)
    return tokenizer


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _from_whole(
    content: dict[str, Any],
    settings: Mapping[str, Any],
    config: Mapping[str, Any],
    warnings: list[str],
) -> Tokenizer:
    """Build a tokenizer from tokenizer.json: GPT-2's kind and characters as pentameter's classes,
    any other unchanged. In the latter, a document ends with `eos_token` in tokenizer_config.json,
    else with `eos_token_id` in config.json, the first if there are several. `warnings` gets a line
    for added tokens that text never becomes."""
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    vocabulary = model.get("vocab")
    if not isinstance(vocabulary, dict):
        raise CorruptError("it has no model.vocab")
    pre_tokenizer = content.get("pre_tokenizer")
    of_each_character = {
        "type": "Split",
        "pattern": {"Regex": _ANY_CHARACTER},
        "behavior": "Isolated",
        "invert": False,
    }
    if model.get("type") == "WordLevel" and pre_tokenizer == of_each_character:
        characters = CharTokenizer(list(vocabulary))
        if {character: n for n, character in enumerate(characters.characters)} != vocabulary:
            raise CorruptError("the ids of its characters are not their ranks")
        return characters
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
    if is_as_gpt2s:
        merges = model.get("merges")
        if not isinstance(merges, list):
            raise CorruptError("it has no model.merges")
        try:
            added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
        except (TypeError, LookupError) as error:
            raise CorruptError(f"added_tokens: {error!r}") from error
        return _bpe(vocabulary, added, merges, warnings)
    tokenizer = LibraryTokenizer(content, None)
    token = settings.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    end = tokenizer.token_id(token) if isinstance(token, str) else None
    if end is None:
        found = config.get("eos_token_id")
        found = found[0] if isinstance(found, list) and found else found
        end = found if type(found) is int and 0 <= found < tokenizer.vocab_size else None
    tokenizer.end_of_text = end
    return tokenizer


def _bpe(
    vocabulary: Mapping[str, Any],
    added: Mapping[str, Any],
    merges: Sequence[Any],
    warnings: list[str],
) -> BpeTokenizer:
    """Build a tokenizer like GPT-2's from its vocabulary (token → id), the tokens added to it (text
    → id) and its merges ("left right" in old files, ["left", "right"] in new ones). Byte-level
    added tokens whose ids follow without a gap join the vocabulary; a line in `warnings` names the
    others."""
    for text, number in added.items():
        if not isinstance(text, str) or type(number) is not int:
            raise CorruptError(
                f"the added token {text!r:.80} has the id {number!r:.80}; "
                "it must be text, and its id a whole number"
            )
    whole = dict(vocabulary)
    unknown = [token for token, number in added.items() if whole.get(token) != number]
    by_id = {added[token]: token for token in unknown if BYTE_CHARACTERS.keys() >= set(token)}
    while (token := by_id.get(len(whole))) is not None and token not in whole:
        whole[token] = len(whole)
    if others := [token for token in unknown if token != END_OF_TEXT]:
        named = ", ".join(map(printable, others[:5])) + (" …" if len(others) > 5 else "")
        warnings.append(f"text never becomes one of the added tokens {named}")
    pairs = []
    for number, merge in enumerate(merges):
        match merge:
            case str():
                pairs.append(parse_merge(merge))
            case [str(left), str(right)]:
                pairs.append((left, right))
            case _:
                raise CorruptError(f"merge {number} is {merge!r:.80}, not two tokens")
    return BpeTokenizer.from_vocabulary(whole, pairs)


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
