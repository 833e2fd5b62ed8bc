"""A model on disk (from a checkpoint or a Hugging Face folder), memory-mapped and read only when
accessed, and the writer for a checkpoint folder that holds a model alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.folders.opening import STATE_NAME, Checkpoint
from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.format.manifest import encode_json, seal
from pentameter.checkpoint.format.safetensors_format import plan_file
from pentameter.config.files.write import to_toml
from pentameter.config.fingerprint import config_hash
from pentameter.config.schema import Config, LoraConfig
from pentameter.data.tokenizers.base import Ends, Tokenizer
from pentameter.data.tokenizers.render_client import ends_of_answers
from pentameter.disk.atomic import refuse_existing, sha256_of, write_hashed
from pentameter.disk.lock import building

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor | LazyTensor]

_GROUP = "model"


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters (LoRA) as a run trained them, with their settings (`lora`: rank, alpha,
    targets)."""

    lora: LoraConfig
    layers: Mapping[str, tuple[torch.Tensor | LazyTensor, torch.Tensor | LazyTensor]]
    """Path to an adapted linear layer → its A (rank, inputs) and B (outputs, rank)."""


@dataclass(frozen=True)
class StoredModel:
    """A model on disk, from a checkpoint or a Hugging Face folder: its configuration, its tokenizer
    and its weights, which are read when they are accessed. A record."""

    path: Path
    config: Config
    tokenizer: Tokenizer
    weights: Weights
    """Parameter name → tensor, by pentameter's names. Shapes and dtypes are those that the
    configuration gives, with the rows that pad the vocabulary."""
    files: tuple[Path, ...]
    """The files that hold the weights."""
    checkpoint: Checkpoint | None
    """None for a Hugging Face folder."""
    adapters: Adapters | None = None
    """The adapters that the run trained, if it did; `weights` have them added."""
    base_model: str | None = None
    """The Hugging Face model it was initialized from, as a folder or a name on the hub; None if
    there was none."""

    @property
    def step(self) -> int:
        """Optimizer steps completed; 0 if the model does not record them."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @cached_property  # a template's process takes a moment to start
    def ends_of_answers(self) -> Ends:
        """The tokens and texts that end an answer of the model."""
        return ends_of_answers(self.tokenizer)

    @property
    def identity(self) -> str:
        """The sha256, in hex, over the weight files. Equal files give the same one in any folder;
        equal weights in another number of files, or in another format, give a different one."""
        total = hashlib.sha256()
        for path in self.files:
            record = self.checkpoint.manifest.record(path.name) if self.checkpoint else None
            if record is not None:  # verified when it was opened
                total.update(record.sha256.encode())
                continue
            total.update(sha256_of(path).encode())
        return total.hexdigest()


def save_model(stored: StoredModel, out: Path, config: Config | None = None) -> Path:
    """Write the checkpoint folder `out`, with the weights but no optimizer state, and return it;
    `sample`, `eval` and `train --init-from` accept it.

    It holds model.safetensors (pentameter's names), config.toml, tokenizer.json, and the files that
    make it a checkpoint: state.json and a manifest with every file's sha256. One tensor is in
    memory at a time. The folder appears whole or not at all; the same model gives the same bytes.

    `config` replaces the model's own. Raises ConfigError if `out` exists and is not an empty
    folder, StorageError if writing fails.
    """
    out = Path(out)
    refuse_existing(out)
    config = stored.config if config is None else config
    state: dict[str, Any] = {"step": stored.step, "best": None, "base_model": stored.base_model}
    small = {
        "config.toml": to_toml(config).encode(),
        "tokenizer.json": stored.tokenizer.to_bytes(),
        STATE_NAME: encode_json(state),
    }
    with building(out) as folder:
        path = folder / f"{_GROUP}.safetensors"
        seal(
            folder,
            {_GROUP: [write_hashed(path, plan_file(stored.weights).chunks())]},
            [write_hashed(folder / name, [data]) for name, data in small.items()],
            run_id=stored.identity[:32],
            step=stored.step,
            config_hash=config_hash(config),
            layout={},
        )
    return out
