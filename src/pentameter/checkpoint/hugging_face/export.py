"""A model of ours as a folder that `transformers` opens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pentameter.checkpoint.hugging_face.architecture import to_gpt2_config
from pentameter.checkpoint.hugging_face.reading import CONFIG, WEIGHTS
from pentameter.checkpoint.hugging_face.tokenizer_files import tokenizer_files
from pentameter.checkpoint.hugging_face.weights import to_gpt2
from pentameter.checkpoint.safetensors_writer import plan_file
from pentameter.checkpoint.stored import StoredModel
from pentameter.disk.atomic import building, refuse_existing, write_hashed


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    n_bytes: int
    notes: tuple[str, ...]
    """What the folder lacks, and why; one line each."""


def export_hf(stored: StoredModel, out: Path) -> Exported:
    """The folder `out`, which `transformers.GPT2LMHeadModel.from_pretrained` opens.

    It holds config.json, generation_config.json, model.safetensors and the tokenizer's files.
    The logits are the model's own: tensors are renamed, transposed and reordered, rows that pad
    the vocabulary are dropped, biases that the model does not have are zero. One tensor is in
    memory at a time. The folder appears whole or not at all.

    Raises ConfigError for a model that GPT-2's architecture cannot express, and when `out` exists
    and is not an empty folder; StorageError when writing fails.
    """
    out = Path(out)
    refuse_existing(out)
    model, tokenizer = stored.config.model, stored.tokenizer
    weights = to_gpt2(model, stored.weights)
    vocab_size = model.vocab_size or tokenizer.vocab_size
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config = to_gpt2_config(
        model, vocab_size=vocab_size, end_of_text=tokenizer.end_of_text, dtype=dtype
    )
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    of_tokenizer = tokenizer_files(tokenizer, model.context_length)
    small = {
        CONFIG: _json(config),
        "generation_config.json": _json({"_from_model_config": True, **generation}),
        **of_tokenizer,
    }
    with building(out) as folder:
        records = [write_hashed(folder / WEIGHTS, plan_file(weights).chunks())]
        records += [write_hashed(folder / name, [data]) for name, data in small.items()]
    notes = () if of_tokenizer else (_no_tokenizer(tokenizer.kind),)
    return Exported(out, sum(record.n_bytes for record in records), notes)


def _no_tokenizer(kind: str) -> str:
    return (
        f"the tokenizer ({kind}) is left out: GPT-2's tokenizer files cannot express it; encode "
        "and decode with pentameter"
    )


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
