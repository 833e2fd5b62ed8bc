"""Model and optimizer state by parameter name: what a checkpoint holds, whoever shards it.

The optimizer's tensors are named `PARAMETER.SLOT` (`blocks.0.mlp.up.weight.exp_avg`), so a state
can be read without knowing in which order, or in which groups, an optimizer held its parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pentameter.errors import CorruptError

if TYPE_CHECKING:
    import torch
    from torch import nn

NamedParameters = Iterable[tuple[str, "nn.Parameter"]]

_N_SHOWN = 5


def model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name → tensor of a model's parameters and persistent buffers; the tensors are its own."""
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def load_model_state(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy `tensors` into the model, in place; names, shapes and dtypes must be the model's own.

    Raises CorruptError, before anything is changed, saying what is missing or does not fit.
    """
    own = model.state_dict()
    _check_names("model", own.keys(), tensors.keys())
    for name, tensor in tensors.items():
        _check_fits(name, tensor, own[name].shape, own[name].dtype)
    model.load_state_dict(dict(tensors), strict=True)


def optimizer_state(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters
) -> dict[str, torch.Tensor]:
    """`PARAMETER.SLOT` → tensor of the optimizer's state; the tensors are its own.

    Empty before the first step, and for SGD without momentum. Raises ValueError when some
    parameters have state and others none: such a state could not be loaded again.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    slots_of: dict[str, frozenset[str]] = {}
    for name, parameter in _held(optimizer, named_parameters):
        slots = {
            slot: value
            for slot, value in optimizer.state.get(parameter, {}).items()
            if value is not None  # SGD keeps a None where momentum is off
        }
        for slot, value in slots.items():
            if not isinstance(value, torch.Tensor):
                value = torch.tensor(value)  # noqa: PLW2901
            tensors[f"{name}.{slot}"] = value.detach()
        slots_of[name] = frozenset(slots)
    if len(set(slots_of.values())) > 1:
        without = [name for name, slots in slots_of.items() if not slots] or list(slots_of)
        raise ValueError(f"optimizer state is uneven; not (fully) present for: {_few(without)}")
    return tensors


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Give the optimizer copies of `tensors`, as `optimizer_state` named them.

    Raises CorruptError, before anything is changed, when a parameter lacks what others have, a
    name is not one of this optimizer's, or a shape differs.
    """
    held = _held(optimizer, named_parameters)
    slots = {name.rpartition(".")[2] for name in tensors}
    allowed = _slots(optimizer)
    if allowed is not None and slots - allowed:
        raise CorruptError(
            f"the optimizer state is of another optimizer: it has {_few(slots - allowed)}, "
            f"{type(optimizer).__name__} keeps {_few(allowed) if allowed else 'nothing'}"
        )
    if allowed and tensors:
        slots = set(allowed)
    expected = [f"{name}.{slot}" for name, _ in held for slot in slots]
    _check_names("optimizer", expected, tensors.keys())

    saved = optimizer.state_dict()
    number_of = _numbers(optimizer)
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, parameter in held:
        values = {slot: tensors[f"{name}.{slot}"] for slot in sorted(slots)}
        for slot, value in values.items():
            if slot != "step":
                _check_fits(f"{name}.{slot}", value, parameter.shape, None)
        # Copied: the tensors may be mapped from a file, the optimizer writes in place.
        if values:
            state[number_of[id(parameter)]] = {
                slot: value.clone() for slot, value in values.items()
            }
    optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})


def _held(
    optimizer: torch.optim.Optimizer, named_parameters: NamedParameters
) -> list[tuple[str, nn.Parameter]]:
    """The named parameters that the optimizer holds; ValueError when one it holds has no name."""
    numbers = _numbers(optimizer)
    held = [(name, value) for name, value in named_parameters if id(value) in numbers]
    if len({id(value) for _, value in held}) != len(numbers):
        raise ValueError(
            f"the optimizer holds {len(numbers)} parameters, only {len(held)} of them have a name"
        )
    return held


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """id of a parameter → its number in the optimizer's state_dict: counted through the groups."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    return {id(value): number for number, value in enumerate(parameters)}


def _slots(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """What the optimizer keeps per parameter once it has stepped; None for an unknown kind."""
    import torch

    groups = optimizer.param_groups
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        extra = {"max_exp_avg_sq"} if any(group["amsgrad"] for group in groups) else set()
        return {"step", "exp_avg", "exp_avg_sq"} | extra
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if any(group["momentum"] for group in groups) else set()
    return None


def _check_names(kind: str, expected: Iterable[str], found: Iterable[str]) -> None:
    missing, unexpected = set(expected) - set(found), set(found) - set(expected)
    if missing or unexpected:
        parts = [f"missing: {_few(missing)}"] if missing else []
        parts += [f"unexpected: {_few(unexpected)}"] if unexpected else []
        raise CorruptError(
            f"the checkpoint's {kind} tensors do not belong to this {kind}; " + "; ".join(parts)
        )


def _check_fits(
    name: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype | None
) -> None:
    if tensor.shape != shape or (dtype is not None and tensor.dtype != dtype):
        raise CorruptError(
            f"the checkpoint's {name} is {tuple(tensor.shape)} of {tensor.dtype}, "
            f"the configuration asks for {tuple(shape)} of {dtype or 'any dtype'}"
        )


def _few(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _N_SHOWN} more" if len(ordered) > _N_SHOWN else ""
    return ", ".join(ordered[:_N_SHOWN]) + more
