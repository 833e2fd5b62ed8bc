"""A custom model's outline, from which planning works: its parameters' names and shapes, the user's
declarations about sub-modules, and FLOPs that are counted as it runs on `meta`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.flop_counter import FlopCounterMode

from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.parallel.sources.custom_call import gives
from pentameter.planning.adapters import targeted, with_adapters
from pentameter.planning.architecture import Axis, Init, ParameterSpec
from pentameter.planning.outline import ModelOutline


def custom_outline(
    config: Config,
    built_by: str,
    whole: nn.Module,
    slice_of: Callable[[range], nn.Module] | None,
    blocks: Sequence[str],
    styles: Mapping[str, ParallelStyle] | None,
) -> ModelOutline:
    """Return the outline (parameters, and how they may be sharded) for a custom module. `whole` is
    the full module on `meta`, and `built_by` names its build function for messages.

    `slice_of` returns the slice for a layer range, None if the user has no `slice` function;
    `styles` maps paths to tensor-parallel styles, None without a `tensor_table`. `blocks` are paths
    (with `*`) to the sub-modules that count as layers; () means none. Raises ConfigError for a
    module without parameters, for a path that matches no sub-module, and, once a slice is asked
    for, for one with parameters that the full module lacks or has in another shape.
    """
    table = tuple(_table(whole, blocks, styles or {}))
    shapes = {spec.name: spec.shape for spec in table}
    if not shapes:
        raise ConfigError(f"the module that {built_by} builds has no parameters to train")
    flops = _flops_per_token(whole, config)
    if config.lora.rank is not None:
        adapted_weights = {f"{path}.weight" for path in _adapted(whole, blocks, config, built_by)}
        n_before, adapted = len(table), [s for s in table if s.name in adapted_weights]
        table = with_adapters(table, adapted, config.lora.rank)
        n_added = sum(spec.n_elements for spec in table[n_before:])
        # A frozen weight has no gradient.
        flops = None if flops is None else flops * 2 // 3 + 6 * n_added
    names = frozenset(spec.name for spec in table)

    def names_of(layers: range) -> frozenset[str]:
        if slice_of is None:
            return names
        layer_slice = slice_of(layers)
        own = {name: tuple(p.shape) for name, p in layer_slice.named_parameters()}
        for name, shape in own.items():
            if shapes.get(name) != shape:
                there = f"has {shapes[name]}" if name in shapes else "does not have"
                raise ConfigError(
                    f"the slice of layers {layers.start}–{layers.stop - 1} has {name} of shape "
                    f"{shape}, which the whole module that {built_by} builds {there}; give a "
                    "parameter the name that `named_parameters()` of the whole module says"
                )
        return frozenset(own) | {
            name for name in names.difference(shapes) if f"{name.rpartition('.')[0]}.weight" in own
        }

    enabled_by = {"tensor": styles, "pipeline": slice_of}
    return ModelOutline(
        table,
        names_of,
        flops,
        built_by=built_by,
        divided_by=frozenset(name for name, how in enabled_by.items() if how is not None),
        recomputes=bool(blocks),
        gives_logits=gives(whole) != "loss",
    )


def _table(
    whole: nn.Module, blocks: Sequence[str], styles: Mapping[str, ParallelStyle]
) -> Iterator[ParameterSpec]:
    """Yield a spec for each parameter in `whole`. Its layer is the position of its block among the
    sub-modules that match `blocks`, None outside; it decays if it is a matrix; `styles` (path →
    tensor-parallel style) say which axis is sharded. Raises ConfigError for a path that matches no
    sub-module."""
    layers = dict(enumerate(_matching(whole, blocks, "blocks")))
    dimensions: dict[str, int] = {}
    for path, style in styles.items():
        for name, module in _matching(whole, [path], "tensor_table").items():
            dimensions |= {
                f"{name}.{own}": d for own, d in _sharded_dimensions(module, style).items()
            }
    for name, parameter in whole.named_parameters():
        axes: list[Axis] = ["embed"] * parameter.ndim
        if name in dimensions:
            axes[dimensions[name]] = "mlp"
        layer = next((n for n, path in layers.items() if name.startswith(f"{path}.")), None)
        yield ParameterSpec(
            name,
            tuple(parameter.shape),
            tuple(axes),
            Init("own"),
            decay=parameter.ndim > 1,
            layer=layer,
            sums_over=("time",),
        )


def _adapted(whole: nn.Module, blocks: Sequence[str], config: Config, built_by: str) -> list[str]:
    """Return the paths of the linear layers within the sub-modules at `blocks` to which [lora] adds
    adapters. The output layer of `torch.nn.MultiheadAttention` is left out: that module reads the
    layer's weight and never calls it. Raises ConfigError, naming the build function `built_by`, if
    there are no linear layers."""
    attentions = (each for each in whole.modules() if isinstance(each, nn.MultiheadAttention))
    uncalled = {each.out_proj for each in attentions}
    linear = [
        f"{path}.{name}".removesuffix(".")
        for path, block in _matching(whole, blocks, "blocks").items()
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and module not in uncalled
    ]
    if not linear:
        raise ConfigError(
            f"lora.rank={config.lora.rank} adapts the torch.nn.Linear layers within `blocks`, "
            f"and the module that {built_by} builds has none there; give pm.OwnModel "
            "`blocks`, like 'blocks.*', or leave [lora] out"
        )
    return targeted(list(dict.fromkeys(linear)), config.lora)


def _flops_per_token(whole: nn.Module, config: Config) -> int | None:
    """Return FLOPs per trained token: three times the forward pass's matmuls on `meta`, since each
    matmul has two gradients. None if the module cannot run on `meta`, or has no matmuls that are
    counted."""
    tokens = torch.zeros((1, config.model.context_length), dtype=torch.int64, device="meta")
    was_training = whole.training
    whole.eval()
    try:
        with (
            torch.no_grad(),
            warnings.catch_warnings(action="ignore"),  # raised by modules that take no tokens
            FlopCounterMode(display=False) as counter,
        ):
            whole(tokens, tokens) if gives(whole) == "loss" else whole(tokens)
    except Exception:  # a run can do without this figure; a bug will show in training
        return None
    finally:
        whole.train(was_training)
    return round(3 * counter.get_total_flops() / config.model.context_length) or None


def modules_at(module: nn.Module, path: str) -> dict[str, nn.Module]:
    """Return name → sub-module for each whose name matches `path`, component by component; a
    component may be a pattern such as `*`."""
    patterns = path.split(".")
    found = {}
    for name, child in module.named_modules():
        names = name.split(".")
        if name and len(names) == len(patterns) and all(map(fnmatchcase, names, patterns)):
            found[name] = child
    return found


def _matching(whole: nn.Module, paths: Sequence[str], key: str) -> dict[str, nn.Module]:
    """Return name → sub-module of `whole` for all that match any of `paths`. Raises ConfigError for
    a path that matches none; `key` is the option's name in the message
    (`blocks`, `tensor_table`)."""
    found: dict[str, nn.Module] = {}
    for path in paths:
        matches = modules_at(whole, path)
        if not matches:
            known = ", ".join(name for name, _ in whole.named_children())
            raise ConfigError(f"`{key}`: no sub-module is at {path!r}; at the top are {known}")
        found |= matches
    return found


def _sharded_dimensions(module: nn.Module, style: ParallelStyle) -> dict[str, int]:
    """Return, for each parameter of `module` that a tensor-parallel style shards, the tensor
    dimension that it shards. {} for a style that is not PyTorch's own: what it does is not known,
    and its parameters are counted as replicated."""
    columns = isinstance(style, ColwiseParallel)
    if not columns and not isinstance(style, RowwiseParallel):
        return {}
    if isinstance(module, nn.Embedding):
        return {"weight": 1 if columns else 0}
    return {"weight": 0, "bias": 0} if columns else {"weight": 1}
