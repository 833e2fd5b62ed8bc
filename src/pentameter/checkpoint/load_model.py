"""MODEL on the command line, a folder: as it is stored on disk, or loaded so that it runs.

A run folder stands for its best checkpoint, else its last. A Hugging Face folder is told apart
here, and read by `pentameter.checkpoint.hugging_face`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.manifest import MANIFEST_NAME
from pentameter.checkpoint.opening import (
    Checkpoint,
    find_checkpoint,
    list_checkpoints,
    open_checkpoint,
    read_own_manifest,
    read_state,
)
from pentameter.checkpoint.state_dicts import load_model_state
from pentameter.errors import ConfigError, CorruptError, PentameterError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pentameter.checkpoint.model_folder import StoredModel
    from pentameter.config.schema import Config
    from pentameter.data.tokenizers.base import Tokenizer
    from pentameter.parallel.model_source import ModelSource
    from pentameter.parallel.own_model import Build


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, and what belongs to it."""

    model: nn.Module
    """The built-in GPT, or the module that was trained in its place."""
    tokenizer: Tokenizer
    config: Config
    checkpoint: Checkpoint | None
    """None of a Hugging Face folder."""

    @property
    def step(self) -> int:
        """Optimizer steps completed; 0 where nobody counted."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def load_model(
    path: Path | str,
    *,
    model: Build | ModelSource | None = None,
    device: torch.device | str = "cpu",
    warnings: list[str] | None = None,
) -> LoadedModel:
    """The model of MODEL: a run folder (its best checkpoint, else its last), a checkpoint folder,
    or a Hugging Face folder.

    A checkpoint's weights have the dtype they were saved with; half-precision ones of a Hugging
    Face folder become fp32. Raises what `find_model` and `read_hf` raise; what was passed over or
    left out adds a line to `warnings`.

    `model` is what `Trainer` was given where a module of one's own was trained. Raises ConfigError
    where it was not, and is here, or the other way round.
    """
    import torch

    from pentameter.model.gpt import GPT
    from pentameter.parallel.own_model import OwnModel, model_source

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
    """The model that `load_model` loads, still on disk: its weights are mapped, and those that a
    run's adapters adapt have what they add.

    Where training removes a checkpoint after it was found, the next one is taken. Raises
    ConfigError unless the model is a module of somebody's own exactly where `is_own` says so.
    """
    from pentameter.checkpoint.hugging_face.folder import read_hf
    from pentameter.checkpoint.model_folder import StoredModel, check_weights, with_adapters_added
    from pentameter.config.load import load_config
    from pentameter.data.tokenizers.setting import load_tokenizer

    path = Path(path)
    if is_hugging_face(path):
        if is_own:
            raise ConfigError(f"{path} is a Hugging Face folder; load it without `model`")
        return read_hf(path, warnings=warnings)
    while True:
        checkpoint = find_model(path, warnings)
        here = checkpoint.path
        try:
            config = load_config(here / "config.toml")
            tokenizer = load_tokenizer(here / "tokenizer.json")
            weights = checkpoint.tensors("model")  # which stay readable from now on
        except PentameterError:
            if here.is_dir():
                raise
            continue
        _check_kind(here, checkpoint.state.get("built_by"), is_own=is_own)
        if not is_own:
            check_weights(config, weights, here)
        files = tuple(here / name for name in checkpoint.manifest.groups["model"])
        base = checkpoint.state.get("base_model")
        stored = StoredModel(here, config, tokenizer, weights, files, checkpoint)
        return with_adapters_added(
            replace(stored, base_model=base if isinstance(base, str) else None)
        )


def _check_kind(path: Path, built_by: Any, *, is_own: bool) -> None:
    """Raise ConfigError where somebody's own module is loaded as the built-in one, or the other way
    round; `built_by` is what its checkpoint says of it."""
    if is_own and built_by is None:
        raise ConfigError(f"{path} holds the built-in model; load it without `model`")
    if not is_own and built_by is not None:
        raise ConfigError(
            f"{path} holds the weights of a module that {built_by} built, which is no part of "
            "pentameter: pm.load_model(path, model=…) loads it in Python, with that function"
        )


def is_hugging_face(path: Path) -> bool:
    """Whether `path` is a model folder of Hugging Face, of whatever architecture."""
    ours = (path / MANIFEST_NAME, path / "checkpoints")
    return (path / "config.json").is_file() and not any(map(os.path.lexists, ours))


def find_model(path: Path, warnings: list[str] | None = None) -> Checkpoint:
    """The verified checkpoint that `path` means: a checkpoint folder, or a run folder's best.

    The best step is the one the newest checkpoint records in state.json (`best.step`). When it is
    not there, or damaged, the last checkpoint stands in, and `warnings` gets a line for what is
    damaged. Raises ConfigError saying what was found when `path` is neither, CorruptError when
    no checkpoint is whole.
    """
    path = Path(path)
    warnings = [] if warnings is None else warnings
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise ConfigError(
            f"{path} {found}; give a run folder (runs/NAME), a checkpoint folder or a Hugging Face "
            "folder"
        )
    if (path / MANIFEST_NAME).exists() or (path / MANIFEST_NAME).is_symlink():
        return open_checkpoint(path)
    folder = path / "checkpoints"
    if not folder.is_dir():
        raise ConfigError(_describe(path))
    best = _best(folder)
    if best is not None:
        with suppress(CorruptError):
            checkpoint = find_checkpoint(
                folder, lambda _, manifest: (manifest.run_id, manifest.step) == best, warnings
            )
            if checkpoint is not None:
                return checkpoint
    checkpoint = find_checkpoint(folder, lambda _, manifest: True, warnings)
    if checkpoint is None:
        raise ConfigError(
            f"{path} is a run without a checkpoint yet; wait for its first, or train further"
        )
    return checkpoint


def _best(folder: Path) -> tuple[str, int] | None:
    """Run id and best step as the newest checkpoint that can say so has it."""
    for candidate in list_checkpoints(folder):
        with suppress(CorruptError):
            manifest = read_own_manifest(candidate.path)
            best = read_state(candidate.path, manifest).get("best")
            if isinstance(best, dict) and isinstance(best.get("step"), int):
                return manifest.run_id, best["step"]
    return None


def _describe(path: Path) -> str:
    if is_hugging_face(path):
        return f"{path} is a Hugging Face folder, in which there is no checkpoint; use load_model"
    names = sorted(entry.name for entry in path.iterdir())
    found = ", ".join(names[:5]) + (" …" if len(names) > 5 else "") if names else "nothing"
    return (
        f"{path} is neither a run folder (it has no checkpoints/) nor a checkpoint folder (it has "
        f"no {MANIFEST_NAME}) nor a Hugging Face folder (it has no config.json); found there: "
        f"{found}"
    )
