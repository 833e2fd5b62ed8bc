"""Functions that open the model which the command line calls MODEL: on disk, or loaded ready to
run.

`opening.py` selects a run's checkpoint; `pentameter.checkpoint.hugging_face` reads a Hugging Face
folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.checkpoint.folders.opening import Check, Checkpoint, check_content, find_model
from pentameter.checkpoint.format.lazy_tensors import LazyTensor, check_weights, copy_region
from pentameter.config.choices import LoadedPrecision
from pentameter.config.schema import Config, LoraConfig
from pentameter.config.urls import given_path
from pentameter.errors import ConfigError, PentameterError
from pentameter.planning.adapters import A, B, TableOf, training_table

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pentameter.checkpoint.folders.model_folder import Adapters, StoredModel, Weights
    from pentameter.checkpoint.format.tensor_reader import StoredTensors
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
    precision: LoadedPrecision = "weights",
    warnings: list[str] | None = None,
) -> LoadedModel:
    """Load the model in `path` as a whole, in evaluation mode, on `device`. `path` is a run folder
    (its best checkpoint is taken, else its last), a checkpoint folder, a Hugging Face folder or
    `hf://OWNER/NAME`.

    With `precision` "weights", those from a checkpoint keep the dtype they were saved with, and
    half-precision ones from a Hugging Face folder become fp32. Else they are rounded to the dtype
    in which that precision multiplies (`bf16`: bfloat16); `auto` is the one that training on
    `device` takes, and `tf32` has PyTorch multiply so in the whole process.

    `warnings` gets a line for each damaged checkpoint that was skipped, and for anything left out.
    Raises ConfigError if `path` is no model folder or has an unsupported architecture, or if
    `device` lacks the precision; CorruptError if nothing in it is intact.

    `model` is the argument that `Trainer` was given when a custom model was trained: a function
    that builds the module, or a ModelSource. None loads the built-in GPT. Raises ConfigError if it
    is given for a built-in model, or missing for a custom one.
    """
    import torch

    from pentameter.machine.choices import choose_precision
    from pentameter.parallel.precision import arithmetic, set_matmul_precision
    from pentameter.parallel.sources.custom_model import model_source

    source = model_source(model)
    stored = open_model(path, warnings=warnings, table_of=source.table_of)
    weights = stored.weights
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.dtype.is_floating_point}
    dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
    if precision != "weights":
        chosen, _ = choose_precision(precision, torch.device(device), key="precision")
        dtype = arithmetic(chosen).products
        set_matmul_precision(None, chosen)
    module = source.build_whole(stored.config, dtype, torch.device(device))
    targets = module.state_dict()
    if source.table_of is None:  # only now are its names and shapes known
        fits = {name: (target.shape, target.dtype) for name, target in targets.items()}
        check_weights(weights, fits, stored.path)
    for name, target in targets.items():
        copy_region(target, weights[name])
    return LoadedModel(module.eval(), stored.tokenizer, stored.config, stored.checkpoint)


def open_model(
    path: Path | str,
    *,
    warnings: list[str] | None = None,
    table_of: TableOf | None = training_table,
    check: Check = check_content,
) -> StoredModel:
    """Open the model in `path` on disk, as a StoredModel: the same model that `load_model` loads,
    but its weights are memory-mapped and not read yet. LoRA adapters are added to the weights that
    they adapt, at access.

    table_of: function that returns, for a configuration, the table of parameters that its run
        saves; None if a custom model is expected.
    check: verifies the files of each checkpoint that is considered.
    warnings: gets a line for each damaged checkpoint that was skipped, and for anything left out.

    If training removes the checkpoint after it was found, the next one is taken. Raises ConfigError
    if the folder holds a custom model and the built-in one is expected, or vice versa; CorruptError
    if no checkpoint in it is intact.
    """
    from pentameter.checkpoint.hugging_face.hub import local_model

    warnings = [] if warnings is None else warnings
    path = local_model(Path(given_path(str(path))), warnings)
    while (checkpoint := find_model(path, warnings, check)) is not None:
        try:
            weights = checkpoint.tensors("model")  # mapped: readable even if the folder goes
            return _stored_model(checkpoint, weights, table_of)
        except PentameterError:
            if checkpoint.path.is_dir():
                raise
    if table_of is None:
        raise ConfigError(f"{path} is a Hugging Face folder; load it without `model`")
    from pentameter.checkpoint.hugging_face.folder import read_hf

    return read_hf(path, warnings=warnings)


def _stored_model(
    checkpoint: Checkpoint, weights: StoredTensors, table_of: TableOf | None
) -> StoredModel:
    """Return the StoredModel for a checkpoint and its memory-mapped `weights`. LoRA adapters are
    added to the weights that they adapt, and the returned configuration has no adapters. `table_of`
    returns the built-in model's parameters for a configuration; None expects a custom model.

    Raises ConfigError if a custom model is opened as the built-in one, or vice versa; CorruptError
    unless a built-in model's tensors have exactly the names and shapes that its configuration
    gives, adapters included.
    """
    from pentameter.checkpoint.folders.model_folder import StoredModel
    from pentameter.config.files.load import load_config
    from pentameter.data.tokenizers.setting import load_tokenizer

    path, built_by = checkpoint.path, checkpoint.state.get("built_by")
    config = load_config(path / "config.toml")
    tokenizer = load_tokenizer(path / "tokenizer.json")
    if table_of is None and built_by is None:
        raise ConfigError(f"{path} holds the built-in model; load it without `model`")
    if table_of is not None and built_by is not None:
        raise ConfigError(
            f"{path} holds the weights of a module that {built_by} built, which is no part of "
            "pentameter: pm.load_model(path, model=…) loads it in Python, with that function"
        )
    if table_of is not None:
        check_weights(weights, {spec.name: (spec.shape, None) for spec in table_of(config)}, path)
    merged, adapters = _with_adapters_added(weights, config.lora)
    base = checkpoint.state.get("base_model")
    return StoredModel(
        path,
        config if adapters is None else config.model_copy(update={"lora": LoraConfig()}),
        tokenizer,
        merged,
        tuple(path / name for name in checkpoint.manifest.groups["model"]),
        checkpoint,
        adapters,
        base if isinstance(base, str) else None,
    )


def _with_adapters_added(weights: Weights, lora: LoraConfig) -> tuple[Weights, Adapters | None]:
    """Return the weights with a run's adapters merged into them, and the adapters by themselves. A
    merged weight is W + factor · B A (W the frozen weight, B and A its adapter), computed at
    access. If the run trained no adapters, the weights are unchanged and the second result is
    None."""
    from pentameter.checkpoint.folders.model_folder import Adapters

    if lora.rank is None:
        return weights, None
    # For a custom model, only the names tell which layers are adapted.
    paths = [name.removesuffix(f".{A}") for name in weights if name.endswith(f".{A}")]
    merged = dict(weights)
    layers = {path: (merged.pop(f"{path}.{A}"), merged.pop(f"{path}.{B}")) for path in paths}
    for path, (a, b) in layers.items():
        weight = merged[f"{path}.weight"]
        add = partial(_add, weight, a, b, lora.factor)
        merged[f"{path}.weight"] = LazyTensor(tuple(weight.shape), weight.dtype, add)
    return merged, Adapters(lora, layers)


def _add(
    weight: torch.Tensor | LazyTensor,
    a: torch.Tensor | LazyTensor,
    b: torch.Tensor | LazyTensor,
    factor: float,
    target: torch.Tensor,
    region: tuple[slice, ...],
) -> None:
    """Fill `target` with one region of W + factor · B A. W (m, n) is the weight, A (rank, n) and B
    (m, rank) are its adapter; `region` has the rows and columns of the result. Computed in fp32 or
    higher and rounded to W's dtype."""
    import torch

    rows, columns = region
    every = slice(0, a.shape[0])
    dtype = torch.promote_types(weight.dtype, torch.float32)
    product = b[rows, every].to(dtype) @ a[every, columns].to(dtype)
    target.copy_((weight[region].to(dtype) + factor * product).to(weight.dtype))
