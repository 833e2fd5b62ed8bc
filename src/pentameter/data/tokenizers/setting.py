"""The setting `data.tokenizer`: which tokenizer to load, to download or to train on text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pentameter.data.tokenizers.base import FILE_LIMIT_BYTES, FORMAT, VERSION, Content, Tokenizer
from pentameter.data.tokenizers.bpe import (
    END_OF_TEXT,
    BpeTokenizer,
    parse_merge,
)
from pentameter.data.tokenizers.byte_level.training import MIN_FREQUENCY, train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.published.sentencepiece_model import SentencePieceTokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.disk.atomic import read_json
from pentameter.disk.cache import known_files, local_file, public_file
from pentameter.errors import ConfigError, CorruptError

KINDS: Sequence[type[Tokenizer]] = (
    *(CharTokenizer, WordTokenizer, BpeTokenizer, SentencePieceTokenizer, LibraryTokenizer),
)
"""The classes, in the order in which they try to read a tokenizer.json; the last reads any."""

GPT2 = "gpt2"
GPT2_TOKENS = 50_257
GPT2_HASH = "808ae9c8c2c1400b2711ca17eb863029c2a0ad4eb730c161cdadd5af710a0a6d"
"""`Tokenizer.hash` by which GPT-2's tokenizer is recognized, whichever file it is in."""

MIN_BPE_TOKENS = 257  # 256 bytes and <|endoftext|>
MAX_BPE_TOKENS = 1 << 20


def bpe_vocab_size(setting: str) -> int | None:
    """Return the vocabulary size in the setting `bpe:VOCAB_SIZE`; None for a `data.tokenizer` of
    another kind. Raises ConfigError for a size out of range (`bpe:100`), or none (`bpe`)."""
    if setting != "bpe" and not setting.startswith("bpe:"):
        return None
    number = re.fullmatch(r"bpe:([0-9]{1,9})", setting)
    if number is None:
        raise ConfigError(f"tokenizer {setting!r} names no vocabulary size; write it as bpe:8192")
    size = int(number[1])
    if not MIN_BPE_TOKENS <= size <= MAX_BPE_TOKENS:
        raise ConfigError(
            f"tokenizer {setting!r}: the vocabulary size must be at least {MIN_BPE_TOKENS} "
            f"(256 bytes and {END_OF_TEXT}) and at most {MAX_BPE_TOKENS}"
        )
    return size


def is_made_from_text(setting: str) -> bool:
    """Return True for `char`, `word` and `bpe:N`, whose vocabulary is made from the corpus's text;
    False for `gpt2` and for the path to a tokenizer file."""
    return setting in {"char", "word"} or setting.startswith("bpe:")


def special_texts_of(tokenizer: str | Tokenizer, chat: ChatTemplate | None) -> list[str]:
    """Return the texts of the special tokens of `tokenizer`. If it is still a setting, they are
    those that the tokenizer made from it will get: for `bpe:N`, `<|endoftext|>` and the special
    tokens in the chat template `chat`; none for `char` and `word`."""
    if isinstance(tokenizer, Tokenizer):
        return list(tokenizer.special_tokens)
    if bpe_vocab_size(tokenizer) is None:
        return []
    return list(dict.fromkeys([END_OF_TEXT, *(chat.special_texts if chat else ())]))


def chosen_tokenizer(setting: str | Tokenizer) -> str | Tokenizer:
    """Return the tokenizer that a setting names (`gpt2`, downloaded unless cached, or a tokenizer
    file). A tokenizer is returned unchanged, and so is a setting for one that is made from text
    (`char`, `word`, `bpe:N`).

    Raises ConfigError for an impossible setting or a missing file, CorruptError or StorageError for
    a file that cannot be loaded.
    """
    if not isinstance(setting, str) or bpe_vocab_size(setting) or is_made_from_text(setting):
        return setting
    return build_tokenizer(setting, lambda: iter(()))


def build_tokenizer(
    setting: str,
    documents: Callable[[], Iterator[str]],
    *,
    special_texts: Sequence[str] = (END_OF_TEXT,),
    warnings: list[str] | None = None,
) -> Tokenizer:
    """Make or load the tokenizer that a `data.tokenizer` setting asks for: `char`, `word` and
    `bpe:VOCAB_SIZE` are made from the documents; `gpt2` is downloaded unless cached; anything else
    is the path to a tokenizer file.

    `documents` is called to start a pass over the text: whole documents, or chunks as
    `chunking.chunks` makes them. It is not called if nothing is made from text. The same documents
    give the same tokenizer. A `bpe` gets `special_texts` as special tokens; one whose text has too
    few pairs for its size is smaller, and adds a line to `warnings`.

    Raises ConfigError (a wrong size, a missing file, text without content), CorruptError (a damaged
    file), StorageError (GPT-2's files are neither cached nor to be had).
    """
    size = bpe_vocab_size(setting)
    if setting == "char":
        return CharTokenizer("".join(sorted(set().union(*documents()))))
    if setting == "word":
        return WordTokenizer.from_documents(documents())
    if setting == GPT2:
        return gpt2_tokenizer()
    if size is None:
        return load_tokenizer(setting)
    tokenizer = train_bpe(documents(), size, special_texts, warnings)
    if tokenizer.vocab_size < size and warnings is not None:
        warnings.append(
            f"tokenizer {setting!r}: the text has pairs for {tokenizer.vocab_size} tokens only "
            f"(each must occur {MIN_FREQUENCY} times); the vocabulary has that many"
        )
    return tokenizer


def gpt2_tokenizer() -> BpeTokenizer:
    """Load GPT-2's tokenizer, 50,257 tokens with `<|endoftext|>` last, from the cache or by
    download.

    Raises StorageError if its two files are neither cached nor can be downloaded.
    """
    vocabulary = json.loads(public_file(known_files()["gpt2-vocabulary"]).read_bytes())
    lines = public_file(known_files()["gpt2-merges"]).read_text(encoding="utf-8").split("\n")
    # The first line names a version, the last is empty.
    return BpeTokenizer.from_vocabulary(vocabulary, [parse_merge(line) for line in lines[1:-1]])


def is_gpt2(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer is GPT-2's, which `data.tokenizer = "gpt2"` names."""
    return tokenizer.hash == GPT2_HASH


def gpt2_is_cached() -> bool:
    """Return True if `gpt2_tokenizer` needs no download."""
    return all(local_file(known_files()[name]) for name in ("gpt2-vocabulary", "gpt2-merges"))


def known_vocab_size(setting: str) -> int | None:
    """Return the vocabulary size for a `data.tokenizer` that needs neither text nor download:
    50,257 for `gpt2`, or that of a tokenizer file, which is read. None for `char`, `word` and
    `bpe:N`: they are made from text, `bpe:N` with at most N tokens.

    Raises ConfigError, CorruptError or StorageError if a setting or file is invalid.
    """
    if setting == GPT2:
        return GPT2_TOKENS
    if bpe_vocab_size(setting) or is_made_from_text(setting):
        return None
    return load_tokenizer(setting).vocab_size


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Load the tokenizer saved in a JSON file, whatever its kind.

    Raises ConfigError if there is no such file, StorageError if it cannot be read, CorruptError if
    it is not one of this library's tokenizers, is damaged, or disagrees with its own hash.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"tokenizer file {path} does not exist; write char, word, gpt2, bpe:VOCAB_SIZE "
            "(such as bpe:8192), or a tokenizer file"
        )
    try:
        content = read_json(path, FILE_LIMIT_BYTES)
    except CorruptError as error:
        raise CorruptError(f"{path} is not a tokenizer: {error}") from error
    if content.get("format") != FORMAT:
        hint = "; `pentameter import` reads the tokenizer.json of a Hugging Face folder"
        raise CorruptError(
            f'{path} is not a tokenizer: its "format" is not {FORMAT!r}'
            f"{hint if 'model' in content else ''}"
        )
    kinds = {kind.kind: kind for kind in KINDS}
    version, kind = content.get("version"), content.get("kind")
    if version != VERSION or not isinstance(kind, str) or kind not in kinds:
        raise CorruptError(
            f"{path}: version {version!r}, kind {kind!r} is not known to this version; expected "
            f"version {VERSION}, kind {', '.join(kinds)}"
        )
    try:
        tokenizer = kinds[kind].from_content(content)
        if (chat := content.get("chat")) is not None:
            tokenizer.chat = ChatTemplate.from_json(chat, f"the chat template of {path}")
        _read_optional(tokenizer, content)
    except (ConfigError, CorruptError) as error:
        raise CorruptError(f"{path}: {error}") from error
    if content.get("sha256") != tokenizer.hash:
        raise CorruptError(
            f"{path} is damaged or was edited: its sha256 field says {content.get('sha256')!r}, "
            f"its content gives {tokenizer.hash!r}; make it anew"
        )
    return tokenizer


def _read_optional(tokenizer: Tokenizer, content: Content) -> None:
    """Set the prefix, the opening and the published files that a tokenizer file's parsed JSON has,
    if it has any; CorruptError if they are invalid."""
    published = content.get("published", {})
    if not isinstance(published, dict) or not all(isinstance(t, str) for t in published.values()):
        raise CorruptError(f'"published" is not texts by name: {published!r:.80}')
    tokenizer.published = published
    tokenizer.prefix = _read_ids(content, "prefix", tokenizer.vocab_size)
    tokenizer.opening = _read_ids(content, "opening", tokenizer.vocab_size)


def _read_ids(content: Content, key: str, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids at `key`, none if it is absent; CorruptError for anything else."""
    ids = content.get(key, [])
    if isinstance(ids, list) and all(type(each) is int and 0 <= each < vocab_size for each in ids):
        return tuple(ids)
    raise CorruptError(f'"{key}" is not a list of token ids: {ids!r:.80}')
