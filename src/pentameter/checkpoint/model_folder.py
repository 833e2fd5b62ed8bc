"""A model as it lies on disk: its weights are mapped, not loaded, until somebody asks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.manifest import encode_json, seal
from pentameter.checkpoint.opening import STATE_NAME, Checkpoint
from pentameter.checkpoint.safetensors_writer import LazyTensor, plan_file
from pentameter.checkpoint.state_dicts import name_differences
from pentameter.config.fingerprint import config_hash
from pentameter.config.schema import Config
from pentameter.config.write import to_toml
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.disk.atomic import refuse_existing, storage_errors, write_hashed
from pentameter.disk.lock import building
from pentameter.errors import CorruptError
from pentameter.planning.architecture import parameter_table

if TYPE_CHECKING:
    import torch

    Weights = Mapping[str, torch.Tensor | LazyTensor]

_GROUP = "model"


@dataclass(frozen=True)
class StoredModel:
    """A checkpoint's model, or a Hugging Face folder read as one."""

    path: Path
    config: Config
    tokenizer: Tokenizer
    weights: Weights
    """By our parameter names; shapes and dtypes are the configuration's, vocabulary padding too."""
    files: tuple[Path, ...]
    """Where the weights lie."""
    checkpoint: Checkpoint | None
    """None of a Hugging Face folder."""

    @property
    def step(self) -> int:
        """Optimizer steps completed; 0 where nobody counted."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def identity(self) -> str:
        """sha256, in hex, of the weights' files: the same weights, wherever they lie."""
        total = hashlib.sha256()
        for path in self.files:
            record = self.checkpoint.manifest.record(path.name) if self.checkpoint else None
            if record is not None:  # verified when it was opened
                total.update(record.sha256.encode())
                continue
            with storage_errors(path, "read"), path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").hexdigest().encode())
        return total.hexdigest()


def check_weights(config: Config, weights: Weights, where: Path) -> None:
    """Raise CorruptError unless the weights are those of the configuration's parameter table."""
    expected = {spec.name: spec.shape for spec in parameter_table(config.model)}
    if differences := name_differences(expected, weights):
        raise CorruptError(f"{where}: its tensors are not its configuration's; {differences}")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise CorruptError(
                f"{where}: {name} is {tuple(weights[name].shape)}, its configuration says {shape}"
            )


def save_model(stored: StoredModel, out: Path, config: Config | None = None) -> Path:
    """The checkpoint folder `out`, made of a model alone: `sample`, `eval`, `train` take it.

    It holds model.safetensors (our names), config.toml, tokenizer.json, and what makes it a
    checkpoint: state.json and a manifest with every file's sha256. One tensor is in memory at a
    time. The folder appears whole or not at all; the same model gives the same bytes.

    `config` takes the place of the model's own. Raises ConfigError when `out` exists and is not
    an empty folder, StorageError when writing fails.
    """
    out = Path(out)
    refuse_existing(out)
    config = stored.config if config is None else config
    state: dict[str, Any] = {"step": stored.step, "best": None}
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
            small,
            run_id=stored.identity[:32],
            step=stored.step,
            config_hash=config_hash(config),
            layout={},
        )
    return out
