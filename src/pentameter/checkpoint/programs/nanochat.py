"""nanochat's `model_NNNNNN.pt`, with the tokenizer in `tokenizer.pkl`, as it was until January
2026.

Its norms have no weights: they are ones here. It norms the embedding's output, which is a norm of
the embedding's rows. It turns queries and keys the other way round, which is the same as turning
them as here with the second half of each head's channels negated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.hugging_face.families.table import family_in
from pentameter.checkpoint.programs.program_model import (
    PlainUnpickler,
    ProgramModel,
    lazily,
    load_tensors_file,
    read_plain_pickle,
    tensors_in,
)
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.disk.atomic import read_json
from pentameter.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    import torch

LATER = re.compile(r"\w*lambdas?|value_embeds|smear_gate|ve_gate")
"""Names of tensors that nanochat has since January 2026."""
NAME = re.compile(r"model_(\d+)\.pt")
FAMILY, TOKENIZER, FIRST_TOKEN = "checkpoint/programs/nanochat.toml", "tokenizer.pkl", "<|bos|>"
OURS = {
    "sequence_len": "context_length",
    "vocab_size": "vocab_size",
    "n_layer": "n_layers",
    "n_head": "attention.n_heads",
    "n_kv_head": "attention.n_kv_heads",
    "n_embd": "d_model",
}
"""Key of GPTConfig → key of `[model]`."""
FLOAT_EPS = 2.0**-23
"""Added to a mean square by `torch.nn.functional.rms_norm` of fp32 numbers."""
ALWAYS = {
    "norm": "rmsnorm",
    "norm_eps": FLOAT_EPS,
    "positions": "rotary",
    "rope_theta": 10000.0,
    "tied_head": False,
    "attention.qk_norm": "head",
    "feed_forward.activation": "relu2",
    "logit_softcap": 15.0,
}
"""The rest of its architecture as keys of `[model]`."""
ONES = ("attn.norm", "attn.q_norm", "attn.k_norm", "mlp.norm")
"""Norms of a layer, by the names in `nanochat.toml`."""
TEMPLATE = (
    "{{ '<|bos|>' }}{% if messages[0].role == 'system' %}"
    "{% set first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}"
    "{% else %}{% set first = '' %}{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}<|assistant_start|>"
    "{% generation %}{{ message.content }}<|assistant_end|>{% endgeneration %}"
    "{% else %}<|user_start|>{{ first if loop.first else '' }}{{ message.content }}<|user_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)
"""Its conversations as a chat template: a system message begins the first user's."""


def read(path: Path, tokenizer: Tokenizer | None) -> ProgramModel:
    """Return the model in a `model_NNNNNN.pt` with its `meta_NNNNNN.json`. Raises ConfigError for a
    later form of the architecture and where no tokenizer is found, CorruptError for other
    content."""
    meta = path.with_name(path.name.replace("model_", "meta_").replace(".pt", ".json"))
    if not meta.is_file():
        raise ConfigError(f"{path}: {meta.name}, which has its sizes, is not beside it")
    sizes = read_json(meta).get("model_config")
    if not isinstance(sizes, Mapping) or (missing := OURS.keys() - sizes.keys()):
        lacks = ", ".join(sorted(missing)) if isinstance(sizes, Mapping) else "model_config"
        raise CorruptError(f"{meta} lacks {lacks}")
    tensors = tensors_in(load_tensors_file(path), path)
    later = sorted({found[0] for name in tensors if (found := LATER.search(name))})
    if later or sizes.get("window_pattern", "L").strip("L"):
        raise ConfigError(
            f"{path} is of nanochat since January 2026, with {', '.join(later) or 'windows'}, "
            "which no model here has; checkpoints from before are read"
        )
    section = ALWAYS | {ours: sizes[theirs] for theirs, ours in OURS.items()}
    V, L, H, G, D = (
        sizes[key] for key in ("vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
    )
    if any(type(each) is not int or each < 1 for each in (V, L, H, G, D)) or D % H:
        raise CorruptError(f"{meta}: {dict(sizes)} are no sizes of a model")
    return ProgramModel(
        family_in(FAMILY),
        section,
        _as_ours(tensors, V, L, D, D // H),
        _tokenizer(path) if tokenizer is None else tokenizer,
        path,
    )


def _as_ours(
    tensors: Mapping[str, torch.Tensor], V: int, L: int, D: int, K: int
) -> dict[str, torch.Tensor | LazyTensor]:
    """Return the tensors of a model with V tokens, L layers, D channels and K in a head, with rows
    that pad the vocabulary left out, so that a decoder with norms' weights computes the same."""
    import torch

    found: dict[str, torch.Tensor | LazyTensor] = dict(tensors)
    for name in ("transformer.wte.weight", "lm_head.weight"):
        if name in tensors:
            found[name] = tensors[name][:V]
    if "transformer.wte.weight" in tensors:
        found["transformer.wte.weight"] = lazily(tensors["transformer.wte.weight"][:V], _normed)
    for layer in range(L):
        for name in ("attn.c_q", "attn.c_k"):
            whole = f"transformer.h.{layer}.{name}.weight"
            if whole in tensors:
                found[whole] = lazily(tensors[whole], partial(_turned, K=K))
        for name in ONES:
            width = K if name.endswith(("q_norm", "k_norm")) else D
            found[f"transformer.h.{layer}.{name}.weight"] = torch.ones(width)
    found["transformer.norm.weight"] = torch.ones(D)
    return found


def _normed(rows: torch.Tensor, which: slice) -> torch.Tensor:
    """Return the RMS norm of each row."""
    import torch

    rows = rows.float()
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:], eps=FLOAT_EPS)


def _turned(rows: torch.Tensor, which: slice, K: int) -> torch.Tensor:
    """Return rows of a projection, those `which` are in the second half of a head's K negated."""
    import torch

    is_second = torch.arange(which.start, which.stop) % K >= K // 2
    return torch.where(is_second[:, None], -rows, rows)


class _Encoding:
    """The stand-in for `tiktoken.Encoding`: plain attributes."""


class _EncodingUnpickler(PlainUnpickler):
    """An unpickler of plain values and of tiktoken's encodings, of which it keeps the
    attributes."""

    def find_class(self, module: str, name: str) -> Any:
        return (
            _Encoding
            if (module, name) == ("tiktoken.core", "Encoding")
            else super().find_class(module, name)
        )


def _tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in the `tokenizer.pkl` beside a checkpoint, or in nanochat's `tokenizer`
    folder."""
    places = [path.parent / TOKENIZER, path.parents[2] / "tokenizer" / TOKENIZER]
    for place in places:
        if place.is_file():
            return read_encoding(place)
    raise ConfigError(
        f"{path} has no tokenizer: copy nanochat's {TOKENIZER} to {places[0]}, or give --tokenizer "
        "FILE"
    )


def read_encoding(path: Path) -> Tokenizer:
    """Return the tokenizer in a pickled `tiktoken.Encoding`, with nanochat's chat template if it
    has its tokens. Raises ConfigError for other objects, CorruptError for a damaged file."""
    match (
        vars(found)
        if isinstance(found := read_plain_pickle(path, unpickler=_EncodingUnpickler), _Encoding)
        else None
    ):
        case {
            "pat_str": str(pattern),
            "mergeable_ranks": dict(ranks),
            "special_tokens": dict(special),
        } if all(isinstance(each, bytes) and each for each in ranks):
            pass
        case _:
            raise ConfigError(f"{path} holds no tiktoken.Encoding")
    text_of = {byte: character for character, byte in BYTE_CHARACTERS.items()}
    vocab = {"".join(map(text_of.__getitem__, token)): n for token, n in ranks.items()}
    content = {
        "added_tokens": [
            {"id": n, "content": text, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for text, n in special.items()
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
                 "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                 "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False,
                    "use_regex": False},
        "model": {"type": "BPE", "vocab": vocab, "merges": _merges(ranks, text_of)},
    }  # fmt: skip
    tokenizer = LibraryTokenizer(content, special.get(FIRST_TOKEN))
    if FIRST_TOKEN in special:
        tokenizer.prefix = (special[FIRST_TOKEN],)
    if "<|assistant_end|>" in special:
        tokenizer.chat = ChatTemplate(TEMPLATE)
    return tokenizer


def _merges(ranks: Mapping[bytes, int], text_of: Mapping[int, str]) -> list[list[str]]:
    """Return the pairs of tokens that merge to one, in the order of the result's rank."""
    pairs = [
        (rank, ranks[token[:i]], ranks[token[i:]], token, i)
        for token, rank in ranks.items()
        for i in range(1, len(token))
        if token[:i] in ranks and token[i:] in ranks
    ]
    return [
        ["".join(map(text_of.__getitem__, part)) for part in (token[:i], token[i:])]
        for _, _, _, token, i in sorted(pairs)
    ]
