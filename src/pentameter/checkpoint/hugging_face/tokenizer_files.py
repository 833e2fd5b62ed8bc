"""Functions that write tokenizers to the files that `transformers` opens, and read them from such
files.

Each tokenizer class writes and reads its own tokenizer.json; the files around it are here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pentameter.checkpoint.hugging_face.sentencepiece_files import (
    ADDED,
    MODEL,
    read_model,
    settings_of,
)
from pentameter.data.tokenizers.base import GENERATION, End, Ends, Tokenizer
from pentameter.data.tokenizers.bpe import END_OF_TEXT, BpeTokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import TEMPLATE_FILE, default_source, read_chat_template
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.published.sentencepiece_model import SentencePieceTokenizer
from pentameter.data.tokenizers.setting import GPT2, KINDS, is_gpt2, load_tokenizer
from pentameter.disk.atomic import read_json, read_text
from pentameter.errors import ConfigError, CorruptError, PentameterError

VOCABULARY, MERGES, WHOLE = "vocab.json", "merges.txt", "tokenizer.json"
SETTINGS, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
CONFIG = "config.json"


def tokenizer_files(tokenizer: Tokenizer, context_length: int) -> dict[str, bytes]:
    """Return file name → content for the files that `transformers.AutoTokenizer` reads; empty for a
    word tokenizer, which they cannot express. `context_length` (tokens) becomes `model_max_length`.

    A BPE tokenizer becomes GPT-2's, in the old files and the new one. A character tokenizer becomes
    one with a token per character, which refuses unknown characters. A library tokenizer and a
    model of SentencePiece keep their own content. Files that were published with the tokenizer are
    returned unchanged, except that a chat template which was replaced since is written as it is
    now.
    """
    whole = tokenizer.to_tokenizer_json()
    chat = tokenizer.chat if has_their_chat(tokenizer) else None
    end_of_text = tokenizer.end_of_text
    files: dict[str, bytes] = {}
    settings: dict[str, Any] = {
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    special: dict[str, str] = {}
    if whole is not None:
        files[WHOLE] = whole
    elif not isinstance(tokenizer, SentencePieceTokenizer):
        return {}
    match tokenizer:
        case LibraryTokenizer():
            if end_of_text is not None:
                special["eos_token"] = tokenizer.token(end_of_text) or ""
            if chat is not None:
                special |= chat.tokens
        case BpeTokenizer():
            old, special = _gpt2_files(tokenizer, files[WHOLE], settings)
            files |= old
        case SentencePieceTokenizer():
            files[MODEL] = tokenizer.model
            del settings["tokenizer_class"]
            settings |= settings_of(tokenizer)
            if chat is not None:
                special |= chat.tokens
    files |= {SETTINGS: _json({**settings, **special}), SPECIAL: _json(special)}
    if SETTINGS in tokenizer.published:
        del files[SPECIAL]
        kept = (SETTINGS, SPECIAL)
        files |= {name: text.encode() for name, text in tokenizer.published.items() if name in kept}
        theirs = json.loads(tokenizer.published[SETTINGS])
        if not has_published_chat(tokenizer):
            theirs.pop("chat_template", None)
            files[SETTINGS] = _json({**theirs, **(chat.tokens if chat else {})})
        elif "chat_template" in theirs:
            return files
    return files if chat is None else {**files, **chat.files()}


def _gpt2_files(
    tokenizer: BpeTokenizer, whole: bytes, settings: dict[str, Any]
) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return (files, special tokens by their use): vocab.json and merges.txt of a BPE tokenizer,
    whose tokenizer.json is `whole`. `settings`, those of tokenizer_config.json, become GPT-2's."""
    special, chat = dict[str, str](), tokenizer.chat
    if tokenizer.end_of_text is not None:
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
    files = {
        VOCABULARY: _json(dict(tokenizer.vocabulary)),
        MERGES: "".join(f"{line}\n" for line in merges).encode(),
    }
    return files, special


def has_their_chat(tokenizer: Tokenizer) -> bool:
    """Return True if the files of an exported tokenizer have its chat template: not if its tokens
    are characters, none of which is one of a template's."""
    return tokenizer.chat is not None and not isinstance(tokenizer, CharTokenizer)


def has_published_chat(tokenizer: Tokenizer) -> bool:
    """Return True if the tokenizer's chat template is the one that it was published with, or if it
    has none and was published without."""
    published = tokenizer.published
    settings = json.loads(published.get(SETTINGS, "{}"))
    source = published.get(TEMPLATE_FILE, default_source(settings, Path(SETTINGS)))
    return source == (None if tokenizer.chat is None else tokenizer.chat.source)


def their_token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `bos_token_id`, `eos_token_id` and `pad_token_id` for config.json: the published ones
    if there are any, else the tokenizer's prefix and end of text."""
    if CONFIG in tokenizer.published:
        found: dict[str, Any] = json.loads(tokenizer.published[CONFIG])
        return found
    end = tokenizer.end_of_text
    # Written even if None: an absent key would mean the family's own default.
    first = tokenizer.prefix[0] if tokenizer.prefix else end
    return {"bos_token_id": first, "eos_token_id": end, "pad_token_id": None}


def generation_config(
    tokenizer: Tokenizer,
    ends: Ends,
    token_ids: Mapping[str, Any],
    context_length: int,
    temperature: float = 1,
) -> bytes:
    """Return the content of generation_config.json: the published one, else one made from
    config.json's `token_ids`, the most tokens of a text (`context_length`) and the temperature at
    which the run drew its samples, if that is not 1 (0: the likeliest token is taken).

    `bos_token_id`, from which `generate` begins a text without a prompt, is the tokenizer's opening
    if it has one. `eos_token_id` also gets the tokens of `ends`, those that end an answer in the
    chat template. If the tokenizer was published with that template, they are added to the
    published ids, unless all special tokens end answers, as then the published ids know better. In
    any other case they replace the ids.
    """
    content = tokenizer.published_generation
    ids = {key: token_ids[key] for key in ("bos_token_id", "eos_token_id") if key in token_ids}
    is_published = content is not None
    if content is None:
        if tokenizer.opening:
            ids["bos_token_id"] = tokenizer.opening[-1]
        content = _new_generation(ids, context_length, temperature)
    said = content.get("eos_token_id")
    known = {each for each in (said if isinstance(said, list) else [said]) if type(each) is int}
    ids_of_ends = set() if tokenizer.chat is None else set(ends.tokens)
    if CONFIG in tokenizer.published and has_published_chat(tokenizer):
        # If all special tokens end answers, the template writes none: the published ids are better.
        writes_none = ids_of_ends >= {*tokenizer.special_tokens.values()}
        ids_of_ends = known if writes_none else ids_of_ends | known
        if is_published and ids_of_ends == known:
            return tokenizer.published[GENERATION].encode()
    if ids_of_ends and ids_of_ends != known:
        content["eos_token_id"] = sorted(ids_of_ends)
    return _json(content)


def _new_generation(
    ids: Mapping[str, Any], context_length: int, temperature: float
) -> dict[str, Any]:
    """Return the settings for generation of a model that came with none; the arguments are those of
    `generation_config`. The end of text pads, too."""
    content = {**ids, "pad_token_id": ids.get("eos_token_id"), "max_length": context_length}
    if temperature != 1:
        content["do_sample"] = temperature > 0
    return content if temperature in (0, 1) else {**content, "temperature": temperature}


def _json(content: Any) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def read_tokenizer(
    folder: Path, warnings: list[str], config: Mapping[str, Any] = MappingProxyType({})
) -> Tokenizer | None:
    """Read the tokenizer from `folder`: tokenizer.json, else vocab.json and merges.txt, else
    tokenizer.model; None if there are none.

    GPT-2's kind and pentameter's characters become pentameter's classes: tokens that were added to
    the vocabulary keep their ids, but no text becomes one, and a line in `warnings` names them. Any
    other tokenizer.json is used unchanged; a document then ends with `eos_token` in
    tokenizer_config.json, else with the `eos_token_id` of config.json (`config`: an id, or a list
    whose first id counts). Documents begin as `tokenizer(text)` does in transformers. Raises
    ConfigError for old files that are not GPT-2's kind, CorruptError for a malformed file.
    """
    settings = _read_if_there(folder / SETTINGS)
    number = config.get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    end = _text(settings.get("eos_token")), number if type(number) is int else None
    said: list[str] = []
    path, content = _tokenizer_json(folder, settings)
    try:
        if content is not None:
            tokenizer = _of_json(content, end, said)
        elif (path := folder / MODEL).is_file():
            tokenizer = read_model(path, settings, end, said)
        else:
            return None
    except CorruptError as error:
        raise CorruptError(f"{path}: {error}") from error
    warnings += [f"{path}: {sentence}" for sentence in said]
    tokenizer.chat = read_chat_template(folder, settings)
    kept = (SETTINGS, SPECIAL, GENERATION, TEMPLATE_FILE)
    tokenizer.published = {
        name: read_text(folder / name) for name in kept if (folder / name).is_file()
    }
    if config:
        ids = {key: value for key, value in config.items() if key.endswith("_token_id")}
        tokenizer.published[CONFIG] = json.dumps(ids)
    tokenizer.opening = _opening(tokenizer)
    return tokenizer


def _opening(tokenizer: Tokenizer) -> Sequence[int]:
    """Return the opening that `generation_config` wrote: a `bos_token_id` that is text; empty if
    there is none."""
    begins: Any = (tokenizer.published_generation or {}).get("bos_token_id")
    marks = {*tokenizer.added_ids, *tokenizer.prefix, tokenizer.end_of_text}
    is_text = type(begins) is int and 0 <= begins < tokenizer.vocab_size and begins not in marks
    return (begins,) if is_text else ()


def _tokenizer_json(
    folder: Path, settings: Mapping[str, Any]
) -> tuple[Path, dict[str, Any] | None]:
    """Return (path, parsed content) of a folder's tokenizer.json, or of vocab.json with the content
    that it and merges.txt would have as one; the content is None if there are none. `settings` is
    the parsed tokenizer_config.json."""
    if (path := folder / WHOLE).is_file():
        return path, read_json(path)
    if not ((path := folder / VOCABULARY).is_file() and (folder / MERGES).is_file()):
        return path, None
    if settings.get("add_prefix_space"):
        raise ConfigError(
            f"{folder / SETTINGS}: add_prefix_space=true is not GPT-2's; give another "
            "tokenizer: `import … --tokenizer gpt2`, or a file"
        )
    lines = read_text(folder / MERGES).split("\n")
    merges = [line for line in lines[lines[0].startswith("#version") :] if line]
    added = _read_if_there(folder / ADDED)
    vocab, first = read_json(path), _text(settings.get("bos_token")) or ""
    begins = settings.get("add_bos_token") and first in vocab
    return path, {  # as GPT-2's tokenizer.json says it
        "model": {"vocab": vocab, "merges": merges},
        "post_processor": begins and {"type": "BertProcessing", "cls": [first, vocab[first]]},
        "pre_tokenizer": {"type": "ByteLevel"},
        "added_tokens": [{"content": text, "id": number} for text, number in added.items()],
    }


def _of_json(content: dict[str, Any], end: End, warnings: list[str]) -> Tokenizer:
    """Return the tokenizer of a parsed tokenizer.json, with its prefix; `end` and `warnings` are as
    for `Tokenizer.from_tokenizer_json`. Raises CorruptError if it is malformed."""
    model = content.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        raise CorruptError("it has no model.vocab")
    try:
        found = (kind.from_tokenizer_json(content, end, warnings) for kind in KINDS)
        tokenizer = next(each for each in found if each is not None)
    except ConfigError as error:
        raise CorruptError(str(error)) from error
    tokenizer.prefix = tuple(_prefix(content, tokenizer))
    return tokenizer


def _prefix(content: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the ids that `tokenizer(text)` puts before a text in transformers. They come from the
    post-processor in tokenizer.json (`content`), whatever tokenizer_config.json says. Raises
    CorruptError if that is malformed, or for an id outside the vocabulary."""
    try:
        ids = _ids_before(content.get("post_processor"))
    except (TypeError, LookupError) as error:
        raise CorruptError(f"its post_processor is malformed: {error!r}") from error
    if not all(type(each) is int and 0 <= each < tokenizer.vocab_size for each in ids):
        raise CorruptError(f"its post_processor begins texts with {ids!r:.80}, no ids of tokens")
    return ids


def _text(token: Any) -> str | None:
    """Return the text of a token as tokenizer_config.json describes it; None if it is not the
    description of a token."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _ids_before(processor: Any) -> list[Any]:
    """Return the ids that a tokenizer puts before a text. `processor` is the post-processor in a
    parsed tokenizer.json."""
    match processor:
        case {"type": "Sequence", "processors": list(within)}:  # the last is the outermost
            return [each for step in reversed(within) for each in _ids_before(step)]
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(tokens)}:
            found = itertools.takewhile(lambda piece: "SpecialToken" in piece, pieces)
            return [each for piece in found for each in tokens[piece["SpecialToken"]["id"]]["ids"]]
        case {"type": "BertProcessing" | "RobertaProcessing", "cls": [_, number]}:
            return [number]
    return []


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
        is_hugging_face = (model / CONFIG).is_file()
        for path in (model / WHOLE, *sorted(model.glob(f"checkpoints/*/{WHOLE}"))):
            with suppress(PentameterError):
                if is_hugging_face:
                    found = read_tokenizer(model, [], read_json(model / CONFIG))
                else:
                    found = load_tokenizer(path)
                if found is not None and is_gpt2(found):
                    return found
    return None
