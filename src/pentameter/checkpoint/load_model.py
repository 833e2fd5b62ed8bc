"""Models given as MODEL on the command line: opened on disk, or loaded so that they run.

`best.py` says which checkpoint is meant; `pentameter.checkpoint.hugging_face` reads a Hugging Face
folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.best import find_model, is_hugging_face
from pentameter.checkpoint.opening import Checkpoint
from pentameter.checkpoint.state_dicts import load_model_state
from pentameter.errors import ConfigError, PentameterError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pentameter.checkpoint.model_folder import StoredModel
    from pentameter.config.schema import Config
    from pentameter.data.tokenizers.base import Tokenizer
    from pentameter.parallel.sources.custom_model import Build
    from pentameter.parallel.sources.model_source import ModelSource


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with its tokenizer, configuration and checkpoint."""

    model: nn.Module
    """The built-in GPT, or the custom model that was trained instead."""
    tokenizer: Tokenizer
    config: Config
    checkpoint: Checkpoint | None
    """None for a Hugging Face folder."""

    @property
    def step(self) -> int:
        """Optimizer steps completed; 0 if the model does not record them."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def load_model(
    path: Path | str,
    *,
    model: Build | ModelSource | None = None,
    device: torch.device | str = "cpu",
    warnings: list[str] | None = None,
) -> LoadedModel:
    """Load a model from a run folder (its best checkpoint, else its last), a checkpoint folder, or
    a Hugging Face folder.

    Weights from a checkpoint keep the dtype they were saved with; half-precision weights from a
    Hugging Face folder become fp32. Anything passed over or left out adds a line to `warnings`.
    Raises whatever `find_model` and `read_hf` raise.

    `model` is the argument that `Trainer` was given when a custom model was trained. Raises
    ConfigError if it is given for a built-in model, or missing for a custom one.
    """
    import torch

    from pentameter.model.gpt import GPT
    from pentameter.parallel.sources.custom_model import OwnModel, model_source

    source = model_source(model)
    stored = open_model(path, warnings=warnings, is_own=isinstance(source, OwnModel))
    dtypes = {tensor.dtype for tensor in stored.weights.values() if tensor.dtype.is_floating_point}
    built: nn.Module
    if isinstance(source, OwnModel):
        built = source.built(stored.config)
        built = (built.double() if torch.float64 in dtypes else built.float()).to(device)
    else:
        with torch.device("meta"):  # no memory, no random numbers for weights soon to be replaced
            built = GPT(stored.config.model)
        if len(dtypes) == 1:
            built.to(dtypes.pop())
        built.to_empty(device=device)
    load_model_state(built, stored.weights)
    return LoadedModel(built.eval(), stored.tokenizer, stored.config, stored.checkpoint)


def open_model(
    path: Path | str, *, warnings: list[str] | None = None, is_own: bool = False
) -> StoredModel:
    """Open on disk the model that `load_model` loads: its weights are memory-mapped, and weights
    that the run adapted have their adapters added.

    If training removes a checkpoint after it was found, the next one is taken. Raises ConfigError
    unless `is_own` is true for a custom model and false for a built-in one.
    """
    from pentameter.checkpoint.hugging_face.folder import read_hf
    from pentameter.checkpoint.hugging_face.hub import local_model
    from pentameter.checkpoint.model_folder import StoredModel, check_weights, with_adapters_added
    from pentameter.config.load import load_config
    from pentameter.data.tokenizers.setting import load_tokenizer

    path = local_model(Path(path), [] if warnings is None else warnings)
    if is_hugging_face(path):
        if is_own:
            raise ConfigError(f"{path} is a Hugging Face folder; load it without `model`")
        return read_hf(path, warnings=warnings)
    while True:
        checkpoint = find_model(path, warnings)
        folder = checkpoint.path
        try:
            config = load_config(folder / "config.toml")
            tokenizer = load_tokenizer(folder / "tokenizer.json")
            weights = checkpoint.tensors("model")  # mapped: stay readable even if the folder goes
        except PentameterError:
            if folder.is_dir():
                raise
            continue
        _check_kind(folder, checkpoint.state.get("built_by"), is_own=is_own)
        if not is_own:
            check_weights(config, weights, folder)
        files = tuple(folder / name for name in checkpoint.manifest.groups["model"])
        base = checkpoint.state.get("base_model")
        base = base if isinstance(base, str) else None
        stored = StoredModel(folder, config, tokenizer, weights, files, checkpoint, base_model=base)
        return with_adapters_added(stored)


def _check_kind(path: Path, built_by: Any, *, is_own: bool) -> None:
    """Raise ConfigError if a custom model is loaded as the built-in one, or vice versa; `built_by`
    is the entry in the checkpoint's state."""
    if is_own and built_by is None:
        raise ConfigError(f"{path} holds the built-in model; load it without `model`")
    if not is_own and built_by is not None:
        raise ConfigError(
            f"{path} holds the weights of a module that {built_by} built, which is no part of "
            "pentameter: pm.load_model(path, model=…) loads it in Python, with that function"
        )
