"""A run's adapters in the two files that Hugging Face's PEFT opens.

adapter_model.safetensors names A and B by the module of `transformers` that they adapt;
adapter_config.json says the rank, the scale and the modules. Nothing here imports PEFT.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.hugging_face.gpt2 import Pair, pairs, to_gpt2_config
from pentameter.checkpoint.model_folder import Adapters, StoredModel
from pentameter.checkpoint.safetensors_writer import LazyTensor, materialize, plan_file
from pentameter.disk.atomic import refuse_existing, write_hashed
from pentameter.disk.lock import building
from pentameter.errors import ConfigError
from pentameter.planning.adapters import A, B, adapted_modules

if TYPE_CHECKING:
    import torch


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Before the names of the adapted model's modules."""


def export_peft(stored: StoredModel, out: Path) -> Path:
    """The folder `out`, which `peft.PeftModel.from_pretrained(base, out)` opens beside the model
    that the run began with. It appears whole or not at all.

    Raises ConfigError for a model without adapters, for one that GPT-2's architecture cannot
    express, and when `out` exists and is not an empty folder; StorageError when writing fails.
    """
    out = Path(out)
    refuse_existing(out)
    adapters = stored.adapters
    if adapters is None:
        raise ConfigError(
            f"{stored.path} has no adapters: its run trained every weight (no lora.rank); "
            "use --to hf or --to safetensors"
        )
    model = stored.config.model
    to_gpt2_config(
        model, vocab_size=model.vocab_size or 0, end_of_text=None, dtype=""
    )  # for what it refuses
    adapted = set(adapted_modules(model, adapters.lora))
    chosen = [pair for pair in pairs(model) if pair.ours.name.removesuffix(".weight") in adapted]
    weights = dict(_tensors(chosen, adapters))
    content = json.dumps(_config(chosen, adapters), indent=2) + "\n"
    with building(out) as folder:
        write_hashed(folder / WEIGHTS, plan_file(weights).chunks())
        write_hashed(folder / CONFIG, [content.encode()])
    return out


def _tensors(chosen: list[Pair], adapters: Adapters) -> Iterator[tuple[str, LazyTensor]]:
    """A and B of each module by PEFT's names. Rows of B follow their module's order."""
    for pair in chosen:
        path, theirs = pair.ours.name.removesuffix(".weight"), pair.theirs.removesuffix(".weight")
        a, b = adapters.tensors[f"{path}.{A}"], adapters.tensors[f"{path}.{B}"]
        compute = partial(_rows, pair, b)
        yield (
            f"{PREFIX}{theirs}.lora_A.weight",
            LazyTensor(tuple(a.shape), a.dtype, partial(_contiguous, a)),
        )
        yield f"{PREFIX}{theirs}.lora_B.weight", LazyTensor(tuple(b.shape), b.dtype, compute)


def _contiguous(tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    return materialize(tensor).contiguous()


def _rows(pair: Pair, tensor: torch.Tensor | LazyTensor) -> torch.Tensor:
    """B (outputs, rank) with its rows as those of their weight, which may be transposed."""
    theirs = pair.to_theirs(tensor)
    return (theirs.t() if pair.is_transposed else theirs).contiguous()


def _config(chosen: list[Pair], adapters: Adapters) -> dict[str, Any]:
    lora = adapters.lora
    # The last two names, as c_proj alone would be both the attention's and the feed-forward's.
    modules = {".".join(pair.theirs.removesuffix(".weight").split(".")[-2:]) for pair in chosen}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "fan_in_fan_out": all(pair.is_transposed for pair in chosen),
        "bias": "none",
        "modules_to_save": None,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
