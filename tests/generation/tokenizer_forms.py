"""Tokenizers in the forms that published models have, each small enough to draw any ids from."""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pentameter.data.tokenizers.library import LibraryTokenizer

UNKNOWN, BEGIN, END = "<unk>", "<s>", "</s>"
SCHEMES = ("prepend", "first", "always", "never")
_PIECES = ["▁", "a", "b", "é", ".", "▁a", "▁b", "ab", "▁ab", "▁▁"]
_MERGES = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b"), ("▁", "▁")]


def sentencepiece(scheme: str) -> dict[str, Any]:
    """Return the tokenizer.json of a SentencePiece model with a token for each byte, by where it
    puts a space before a text: a normalizer does (`prepend`), or a pre-tokenizer does, at the
    text's beginning (`first`), behind special tokens, too (`always`), or never."""
    vocab = {text: n for n, text in enumerate([UNKNOWN, BEGIN, END])}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    # The id before the first piece is no token, as where a vocabulary was padded.
    vocab |= {text: 260 + n for n, text in enumerate(_PIECES)}
    model = models.BPE(vocab, _MERGES, unk_token=UNKNOWN, fuse_unk=True, byte_fallback=True)
    library: Any = tokenizers.Tokenizer(model)
    spaces = decoders.Replace("▁", " ")
    tail = [decoders.ByteFallback(), decoders.Fuse()]
    strip = decoders.Strip(" ", 1, 0)
    if scheme == "prepend":  # Llama 2, Mistral
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        library.decoder = decoders.Sequence([spaces, *tail, strip])
    else:
        space = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        library.pre_tokenizer = space
        steps = {
            "first": [spaces, *tail, strip],
            "always": [decoders.ByteFallback(), decoders.Metaspace("▁", "always", False)],
            "never": [spaces, *tail],  # Gemma
        }
        library.decoder = decoders.Sequence(steps[scheme])
    library.add_special_tokens([UNKNOWN, BEGIN, END])
    content: dict[str, Any] = json.loads(library.to_str())
    return content


def byte_level() -> dict[str, Any]:
    """Return the tokenizer.json of a byte-level BPE like Llama 3's, which knows few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ġ", "a"), ("ð", "Ł")]  # the last: two of an emoji's four bytes
    texts = [*alphabet, *map("".join, merges)]
    library: Any = tokenizers.Tokenizer(models.BPE({t: n for n, t in enumerate(texts)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([BEGIN, END])
    content: dict[str, Any] = json.loads(library.to_str())
    return content


def word_piece() -> dict[str, Any]:
    """Return the tokenizer.json of a WordPiece like BERT's, which joins words with spaces and takes
    some away again."""
    texts = [UNKNOWN, "a", "ab", "##b", "##ab", ".", "'", "n", "t", "##'", "é"]
    vocab = {text: n for n, text in enumerate(texts)}
    library: Any = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=UNKNOWN))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece("##", cleanup=True)
    library.add_special_tokens([UNKNOWN, BEGIN, END])
    content: dict[str, Any] = json.loads(library.to_str())
    return content


FORMS: dict[str, LibraryTokenizer] = {
    **{scheme: LibraryTokenizer(sentencepiece(scheme), 2) for scheme in SCHEMES},
    "byte-level": LibraryTokenizer(byte_level(), None),
    "word-piece": LibraryTokenizer(word_piece(), None),
}
"""A tokenizer of each form, by its name."""
