"""nanoGPT's `ckpt.pt`, with the characters in `meta.pkl` or GPT-2's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pentameter.checkpoint.format.manifest import is_plain_name
from pentameter.checkpoint.hugging_face.families.table import family_in
from pentameter.checkpoint.programs.program_model import (
    ProgramModel,
    load_tensors_file,
    read_plain_pickle,
    tensors_in,
)
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.setting import GPT2, build_tokenizer
from pentameter.errors import ConfigError, CorruptError

FAMILY, NAME, CHARACTERS = "checkpoint/programs/nanogpt.toml", "ckpt.pt", "meta.pkl"
GPT2_VOCABULARY = 50257
OURS = {
    "n_layer": "n_layers",
    "n_head": "attention.n_heads",
    "n_embd": "d_model",
    "block_size": "context_length",
    "vocab_size": "vocab_size",
    "dropout": "dropout",
    "bias": "bias",
}
"""Key of GPTConfig → key of `[model]`."""
ALWAYS = {
    "norm": "layernorm",
    "positions": "learned",
    "tied_head": True,
    "residual_init_scale": True,
    "feed_forward.activation": "gelu",
}
"""The rest of nanoGPT's architecture as keys of `[model]`."""


def read(path: Path, tokenizer: Tokenizer | None) -> ProgramModel:
    """Return the model in a `ckpt.pt`. Raises ConfigError or CorruptError for any other file, and
    ConfigError if no tokenizer is found."""
    content = load_tensors_file(path)
    match content:
        case {"model_args": Mapping() as sizes, "model": Mapping() as tensors}:
            pass
        case _:
            raise ConfigError(f"{path} is no checkpoint of nanoGPT: it has no model_args and model")
    if unknown := sizes.keys() - OURS.keys():
        raise ConfigError(f"{path}: nanoGPT's GPTConfig has no {', '.join(sorted(unknown))}")
    if missing := OURS.keys() - sizes.keys() - {"dropout", "bias"}:
        raise CorruptError(f"{path}: its model_args lack {', '.join(sorted(missing))}")
    bias = sizes.get("bias", True)
    section = ALWAYS | {OURS[key]: value for key, value in sizes.items()}
    section |= {"bias": bias, "attention.qkv_bias": bias}
    section["attention.dropout"] = sizes.get("dropout", 0.0)
    found = tensors_in(tensors, path)
    head, embedding = found.pop("lm_head.weight", None), found.get("transformer.wte.weight")
    if head is not None and embedding is not None and not head.equal(embedding):
        raise CorruptError(f"{path}: lm_head.weight is not transformer.wte.weight, as in nanoGPT")
    if tokenizer is None:
        tokenizer = _tokenizer(path, content.get("config"), sizes["vocab_size"])
    return ProgramModel(family_in(FAMILY), section, found, tokenizer, path)


def _tokenizer(path: Path, config: Any, vocab_size: Any) -> Tokenizer:
    """Return the tokenizer of a checkpoint with `vocab_size` tokens: the characters in a `meta.pkl`
    beside it or in nanoGPT's `data/DATASET`, where its `config` names the data set; else
    GPT-2's."""
    places = [path.parent / CHARACTERS]
    dataset = config.get("dataset") if isinstance(config, Mapping) else None
    if is_plain_name(dataset):
        places.append(path.parent.parent / "data" / str(dataset) / CHARACTERS)
    for place in places:
        if place.is_file():
            return _characters(place)
    if isinstance(vocab_size, int) and vocab_size < GPT2_VOCABULARY:
        raise ConfigError(
            f"{path} has {vocab_size} tokens, so not GPT-2's, and there is no {CHARACTERS}: copy "
            f"the one of its data folder to {places[0]}, or give --tokenizer FILE"
        )
    return gpt2_tokenizer()


def gpt2_tokenizer() -> Tokenizer:
    """Return GPT-2's tokenizer, which both nanoGPT and llm.c train with."""
    return build_tokenizer(GPT2, lambda: iter(()))  # nothing is built of text


def _characters(path: Path) -> Tokenizer:
    """Return the tokenizer of the characters that nanoGPT's `prepare.py` wrote to `meta.pkl`."""
    match read_plain_pickle(path):
        case {"stoi": dict(ids)} if all(isinstance(each, str) for each in ids):
            tokenizer = CharTokenizer(list(ids))
            if [*map(ids.get, tokenizer.characters)] == [*range(len(ids))]:
                return tokenizer
            raise ConfigError(f"{path}: ids of characters are not in the order of their codes")
    raise ConfigError(f"{path} has no characters with their ids (stoi)")
