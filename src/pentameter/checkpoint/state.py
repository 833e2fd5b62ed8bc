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

    from pentameter.optim.build import AnyOptimizer

NamedParameters = Iterable[tuple[str, "nn.Parameter"]]
Held = list[tuple[str, "nn.Parameter"]]

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
    optimizer: AnyOptimizer, named_parameters: NamedParameters
) -> dict[str, torch.Tensor]:
    """`PARAMETER.SLOT` → tensor of the optimizer's state; the tensors are its own.

    Empty before the first step, and for SGD without momentum. Raises ValueError when an optimizer
    has state for some of its parameters and none for others: such a state could not be loaded
    again. The parts of a joint optimizer may keep different slots.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for part, held in _held(optimizer, named_parameters):
        slots_of: dict[str, frozenset[str]] = {}
        for name, parameter in held:
            slots = {
                slot: value
                for slot, value in part.state.get(parameter, {}).items()
                if value is not None  # SGD keeps a None where momentum is off
            }
            for slot, value in slots.items():
                if not isinstance(value, torch.Tensor):
                    value = torch.tensor(value)  # noqa: PLW2901
                tensors[f"{name}.{slot}"] = value.detach()
            slots_of[name] = frozenset(slots)
        if len(set(slots_of.values())) > 1:
            without = [name for name, slots in slots_of.items() if not slots] or list(slots_of)
            raise ValueError(f"optimizer state is uneven; not (fully) present for: {few(without)}")
    return tensors


def load_optimizer_state(
    optimizer: AnyOptimizer,
    named_parameters: NamedParameters,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Give the optimizer copies of `tensors`, as `optimizer_state` named them.

    Raises CorruptError, before anything is changed, when a parameter lacks what others have, a
    name is not one of this optimizer's, or a shape differs.
    """
    parts = _held(optimizer, named_parameters)
    slots_of = [_slots_to_load(part, held, tensors) for part, held in parts]
    expected = [
        f"{name}.{slot}"
        for (_, held), slots in zip(parts, slots_of, strict=True)
        for name, _ in held
        for slot in slots
    ]
    _check_names("optimizer", expected, tensors.keys())

    states = []
    for (part, held), slots in zip(parts, slots_of, strict=True):
        number_of = _numbers(part)
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
        states.append(state)
    for (part, _), state in zip(parts, states, strict=True):
        groups = part.state_dict()["param_groups"]
        part.load_state_dict({"state": state, "param_groups": groups})


def _slots_to_load(
    optimizer: torch.optim.Optimizer, held: Held, tensors: Mapping[str, torch.Tensor]
) -> set[str]:
    """What `tensors` must have for each parameter that this optimizer holds."""
    own = {name for name, _ in held}
    named = (name.rpartition(".") for name in tensors)
    slots = {slot for parameter, _, slot in named if parameter in own}
    allowed = _slots(optimizer)
    if allowed is None:
        return slots
    if slots - allowed:
        raise CorruptError(
            f"the optimizer state is of another optimizer: it has {few(slots - allowed)}, "
            f"{type(optimizer).__name__} keeps {few(allowed) if allowed else 'nothing'}"
        )
    return allowed if tensors else set()


def _held(
    optimizer: AnyOptimizer, named_parameters: NamedParameters
) -> list[tuple[torch.optim.Optimizer, Held]]:
    """Each torch optimizer, and those of the named parameters that it holds.

    Raises ValueError when one of them holds a parameter that has no name.
    """
    from pentameter.optim.build import JointOptimizer

    named = list(named_parameters)
    parts = []
    for part in optimizer.parts if isinstance(optimizer, JointOptimizer) else (optimizer,):
        numbers = _numbers(part)
        held = [(name, value) for name, value in named if id(value) in numbers]
        if len({id(value) for _, value in held}) != len(numbers):
            raise ValueError(
                f"the optimizer holds {len(numbers)} parameters, only {len(held)} of them have "
                "a name"
            )
        parts.append((part, held))
    return parts


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
    if isinstance(optimizer, torch.optim.Muon):
        return {"momentum_buffer"}
    if isinstance(optimizer, torch.optim.SGD):
        return {"momentum_buffer"} if any(group["momentum"] for group in groups) else set()
    return None


def _check_names(kind: str, expected: Iterable[str], found: Iterable[str]) -> None:
    if differences := name_differences(expected, found):
        raise CorruptError(
            f"the checkpoint's {kind} tensors do not belong to this {kind}; {differences}"
        )


def _check_fits(
    name: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype | None
) -> None:
    if tensor.shape != shape or (dtype is not None and tensor.dtype != dtype):
        raise CorruptError(
            f"the checkpoint's {name} is {tuple(tensor.shape)} of {tensor.dtype}, "
            f"the configuration asks for {tuple(shape)} of {dtype or 'any dtype'}"
        )


def name_differences(expected: Iterable[str], found: Iterable[str]) -> str:
    """Which names are missing and which unexpected, in words; empty where none is."""
    missing, unexpected = set(expected) - set(found), set(found) - set(expected)
    parts = [f"missing: {few(missing)}"] if missing else []
    parts += [f"unexpected: {few(unexpected)}"] if unexpected else []
    return "; ".join(parts)


def few(names: Iterable[str]) -> str:
    """The names in order, as many as a message can bear."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _N_SHOWN} more" if len(ordered) > _N_SHOWN else ""
    return ", ".join(ordered[:_N_SHOWN]) + more
