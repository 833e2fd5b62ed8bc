"""A Hugging Face GPT-2 folder as a model of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from pentameter.checkpoint.hugging_face.architecture import from_gpt2_config
from pentameter.checkpoint.hugging_face.json_files import read_json
from pentameter.checkpoint.hugging_face.tokenizer_files import read_tokenizer
from pentameter.checkpoint.hugging_face.weights import BODY, HEAD, from_gpt2, pairs
from pentameter.checkpoint.manifest import is_plain_name
from pentameter.checkpoint.safetensors_writer import LazyTensor, materialize
from pentameter.checkpoint.state_dicts import few
from pentameter.checkpoint.stored import StoredModel
from pentameter.checkpoint.tensor_reader import StoredTensors
from pentameter.config.messages import problems, shown
from pentameter.config.schema import Config, ModelConfig
from pentameter.data.corpora.registry import UNKNOWN_CORPUS
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.setting import is_gpt2
from pentameter.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

RECIPE: dict[str, Any] = {
    "optimizer": {"learning_rate": 3e-5, "betas": [0.9, 0.999], "weight_decay": 0.1},
    "schedule": {"name": "constant"},
    "train": {"steps": 200, "batch_size": 32, "micro_batch_size": 1, "eval_interval": 50},
}
"""How to go on training, in want of the settings that made the weights: a gentle fine-tuning."""

_MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # causal masks, kept by old versions


def read_hf(
    path: Path, *, tokenizer: Tokenizer | None = None, warnings: list[str] | None = None
) -> StoredModel:
    """The model in a GPT-2 folder of Hugging Face: config.json, safetensors, tokenizer files.

    Weights in fp16 and bf16 become fp32, exactly. `tokenizer` takes the place of the folder's.
    Raises ConfigError for what is not supported (another architecture, a pickle, a setting that
    GPT-2 itself does not have), CorruptError for files that are damaged or incomplete.
    """
    path = Path(path)
    warnings = [] if warnings is None else warnings
    section = from_gpt2_config(read_json(path / CONFIG), path / CONFIG)
    files = _weight_files(path)
    tokenizer = read_tokenizer(path, warnings) if tokenizer is None else tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{path} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); "
            f"`pentameter import {path} --out DIR --tokenizer gpt2` adds GPT-2's own, and then "
            "DIR can be used"
        )
    config = _config(path, section, tokenizer)
    weights = _weights(files, config.model)
    return StoredModel(path, config, tokenizer, weights, files, checkpoint=None)


def _config(path: Path, section: dict[str, Any], tokenizer: Tokenizer) -> Config:
    setting = tokenizer.kind if tokenizer.kind != "bpe" else f"bpe:{tokenizer.vocab_size}"
    tree: dict[str, Any] = {
        **RECIPE,
        "name": "fine-tuned",
        "model": section,
        "data": {
            "corpus": UNKNOWN_CORPUS,
            "tokenizer": "gpt2" if is_gpt2(tokenizer) else setting,
        },
    }
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path / CONFIG}: {'; '.join(problems(error, tree))}") from error
    vocab_size = config.model.vocab_size
    if vocab_size is None or tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"{path / CONFIG}: vocab_size={shown(vocab_size)} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} tokens; they do not belong together"
        )
    return config


def _weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors of the folder, as `transformers` chooses them."""
    if (path / WEIGHTS).is_file():
        return (path / WEIGHTS,)
    if (path / INDEX).is_file():
        places = read_json(path / INDEX).get("weight_map")
        if not (isinstance(places, dict) and places and all(map(is_plain_name, places.values()))):
            raise CorruptError(f"{path / INDEX} is malformed: its weight_map is not names → files")
        files = tuple(path / name for name in sorted(set(places.values())))
        for file in files:
            if not file.is_file():
                raise CorruptError(f"{file} is missing; {path / INDEX} names it")
        return files
    if next(path.glob("pytorch_model*.bin"), None) is not None:
        raise ConfigError(_pickle(path))
    raise ConfigError(
        f"{path} has a {CONFIG} but no weights; {WEIGHTS} is expected, or {INDEX} and its files"
    )


def _pickle(path: Path) -> str:
    """What to do about pytorch_model.bin: one command, in which the pickle cannot run code."""
    folder = str(path.resolve())
    code = (
        "import glob, torch, safetensors.torch as s; w = {}; "
        f"d = {folder!r}; "
        "[w.update(torch.load(f, map_location='cpu', weights_only=True)) "
        "for f in sorted(glob.glob(glob.escape(d) + '/pytorch_model*.bin'))]; "
        "s.save_file({k: t.clone().contiguous() for k, t in w.items()}, "
        "d + '/model.safetensors', {'format': 'pt'})"
    )
    escaped = code.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    escaped = escaped.replace("`", "\\`")
    return (
        f"{path} has its weights as a pickle (pytorch_model.bin), which can run code when it is "
        f'opened and is not read here; convert it once: python -c "{escaped}"'
    )


def _weights(files: tuple[Path, ...], model: ModelConfig) -> dict[str, LazyTensor]:
    """Our weights by name, converted when asked for; every name and shape is checked."""
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        for name, tensor in StoredTensors([file]).items():
            full = name if name == HEAD or name.startswith(BODY) else BODY + name
            if _MASKS.fullmatch(full.removeprefix(BODY)):
                continue
            if full in tensors:
                raise CorruptError(f"{file} holds {name!r} a second time")
            tensors[full] = materialize(tensor)
    where = files[0] if len(files) == 1 else files[0].parent
    _drop_tied_head(tensors, model, where)
    expected = {pair.theirs: pair.their_shape for pair in pairs(model)}
    if missing := expected.keys() - tensors.keys():
        raise CorruptError(f"{where} lacks {few(missing)}")
    if unexpected := tensors.keys() - expected.keys():
        raise CorruptError(
            f"{where} holds what a GPT-2 language model of its {CONFIG} does not have: "
            f"{few(unexpected)}"
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape or not tensors[name].is_floating_point():
            raise CorruptError(
                f"{where}: {name} is {tuple(tensors[name].shape)} of {tensors[name].dtype}, its "
                f"{CONFIG} asks for {shape} of floating-point numbers"
            )
    return from_gpt2(model, tensors, _common_dtype(tensors))


def _drop_tied_head(tensors: dict[str, torch.Tensor], model: ModelConfig, where: Path) -> None:
    """Forget a copy of the embedding that some programs save as the head's weight."""
    import torch

    embedding = tensors.get(BODY + "wte.weight")
    if not model.tied_head or HEAD not in tensors or embedding is None:
        return
    if not torch.equal(tensors.pop(HEAD), embedding):
        raise CorruptError(
            f"{where}: {HEAD} differs from {BODY}wte.weight, but {CONFIG} says that they are one "
            "(tie_word_embeddings)"
        )


def _common_dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """What holds every tensor exactly: fp32, or fp64 where any is."""
    import torch

    has_double = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    return torch.float64 if has_double else torch.float32
