"""Model and optimizer state by parameter name: the content of a checkpoint, independent of
sharding.

The optimizer's tensors are named `PARAMETER.SLOT` (`token_embedding.weight.exp_avg`; a slot is one
tensor that the optimizer keeps per parameter), so a state can be read without knowing the order or
the groups in which an optimizer held its parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from pentameter.checkpoint.format.lazy_tensors import (
    LazyTensor,
    Tensors,
    check_fits,
    copy_region,
    name_differences,
)
from pentameter.errors import CorruptError, few
from pentameter.parallel.local_shards import common_region
from pentameter.processes.group.world import World

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pentameter.optim.build import AnyOptimizer

NamedParameters = Iterable[tuple[str, "nn.Parameter"]]
Held = list[tuple[str, "nn.Parameter"]]


def model_state(model: nn.Module | Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return name → tensor for a model's parameters and persistent buffers, detached but not
    copied.

    `model` may be the list of slices (pipeline stages) that this rank holds. Side effect:
    parameters that FSDP has all-gathered for a pass are replaced by this rank's shards in the
    modules.
    """
    from torch import nn

    slices = [model] if isinstance(model, nn.Module) else model
    return {name: tensor.detach() for part in slices for name, tensor in part.state_dict().items()}


def load_model_state(
    model: nn.Module | Sequence[nn.Module], tensors: Tensors, world: World | None = None
) -> None:
    """Copy `tensors` into the model, in place; names, shapes and dtypes must be the model's own.

    `model` may be sharded, or be the slices that this rank holds in a pipeline of the ranks in
    `world` (None: this process alone). Collective: each rank fills its own shards. Raises
    CorruptError, before anything is changed, saying which tensors are missing or do not fit; an
    error on one rank is raised on all.
    """
    targets = model_state(model)
    _fill("model", targets, targets, tensors, World() if world is None else world)


def optimizer_state(
    optimizer: AnyOptimizer, named_parameters: NamedParameters, without: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return `PARAMETER.SLOT` → tensor for the optimizer's state, detached but not copied.

    named_parameters: (name, parameter) for each parameter that the optimizer holds. without: names
    of parameters whose state is left out, because another rank saves it; "" leaves out what a
    custom optimizer keeps outside its parameters' states. The result is empty before the first
    step, and for SGD without momentum. The optimizers in a joint optimizer may keep different
    slots.

    Raises ValueError if an optimizer of a known kind has state for some parameters and none for
    others, because such a state could not be loaded again. Raises ConfigError if a custom optimizer
    keeps what cannot be saved (see `custom_optimizer.py`).
    """
    tensors: dict[str, torch.Tensor] = {}
    for part, held in _held(optimizer, named_parameters):
        if _slots(part) is None:
            from pentameter.checkpoint.state.custom_optimizer import custom_tensors

            tensors |= custom_tensors(part, dict(held), without)
            continue
        slots_of: dict[str, frozenset[str]] = {}
        for name, parameter in held:
            slots = {
                slot: value
                for slot, value in part.state.get(parameter, {}).items()
                if value is not None  # SGD keeps None while momentum is off
            }
            slots_of[name] = frozenset(slots)
            if name not in without:
                tensors |= {f"{name}.{slot}": value.detach() for slot, value in slots.items()}
        if len(set(slots_of.values())) > 1:
            without = [name for name, slots in slots_of.items() if not slots] or list(slots_of)
            raise ValueError(f"optimizer state is uneven; not (fully) present for: {few(without)}")
    return tensors


def optimizer_values(
    optimizer: AnyOptimizer, named_parameters: NamedParameters, world: World | None = None
) -> dict[str, bytes]:
    """Return file name → content for what a custom optimizer keeps besides tensors, merged over the
    ranks in `world` (None: this process alone). An optimizer of a known kind needs no file.
    Collective. Raises ConfigError if ranks have different values for the same thing, or something
    cannot be saved."""
    ((part, held), *others) = _held(optimizer, named_parameters)
    if others or _slots(part) is not None:
        return {}
    from pentameter.checkpoint.state.custom_optimizer import FILE_NAME, custom_values

    return {FILE_NAME: custom_values(part, dict(held), World() if world is None else world)}


def load_optimizer_state(
    optimizer: AnyOptimizer,
    named_parameters: NamedParameters,
    tensors: Tensors,
    world: World | None = None,
    values: bytes | None = None,
) -> None:
    """Copy `tensors`, named `PARAMETER.SLOT`, into the optimizer. `values` is the content of a
    custom optimizer's optimizer.json; None for any other, or for a checkpoint by an earlier
    version, which has no such file.

    State is sharded like its parameter. Collective: each rank in `world` (None: this process alone)
    fills its own shards. Raises CorruptError, before anything is changed, if a parameter lacks
    state that others have, a name does not belong to this optimizer, or a shape differs; an error
    on one rank is raised on all.
    """
    world = World() if world is None else world
    parts = _held(optimizer, named_parameters)
    if values is not None and len(parts) == 1 and _slots(parts[0][0]) is None:
        from pentameter.checkpoint.state.custom_optimizer import CustomLoad

        custom, named = parts[0]
        load = world.agreed(lambda: CustomLoad(custom, dict(named), tensors, values))
        _fill("optimizer", load.names, load.tensors, tensors, world)
        world.agreed(load.apply)
        return
    slots_of = world.agreed(lambda: [_slots_to_load(part, held, tensors) for part, held in parts])
    parameter_of = {
        f"{name}.{slot}": (parameter, _slots(part) is None)
        for (part, held), slots in zip(parts, slots_of, strict=True)
        for name, parameter in held
        for slot in slots[name]
    }
    new = world.agreed(
        lambda: {
            name: _empty_slot(name, parameter, tensors[name], any_shape=any_shape)
            for name, (parameter, any_shape) in parameter_of.items()
            if name in tensors
        }
    )
    _fill("optimizer", parameter_of, new, tensors, world)
    for (part, held), slots in zip(parts, slots_of, strict=True):
        numbers = _numbers(part)
        state = {
            numbers[id(parameter)]: {slot: new[f"{name}.{slot}"] for slot in sorted(slots[name])}
            for name, parameter in held
            if slots[name]
        }
        part.load_state_dict({"state": state, "param_groups": part.state_dict()["param_groups"]})


def _empty_slot(
    name: str, parameter: nn.Parameter, stored: torch.Tensor | LazyTensor, *, any_shape: bool
) -> torch.Tensor:
    """Allocate an empty tensor for one tensor in the parameter's state: sharded like the parameter,
    with the dtype of `stored`.

    A step count is allocated whole on the host; so is, with `any_shape`, a tensor whose shape is
    not the parameter's. Raises CorruptError if any other shape differs. `name` is for the message.
    """
    import torch

    is_other = any_shape and tuple(stored.shape) != tuple(parameter.shape)
    # Step counts stay on the host until the optimizer moves them.
    if is_other or name.endswith(".step"):
        return torch.empty(tuple(stored.shape), dtype=stored.dtype)
    check_fits(name, stored, parameter.shape)
    return torch.empty_like(parameter.detach(), dtype=stored.dtype)


def _fill(
    kind: str,
    names: Iterable[str],
    targets: Mapping[str, torch.Tensor],
    tensors: Tensors,
    world: World,
) -> None:
    """Copy this rank's shards from `tensors` into `targets`, name → tensor or DTensor.

    Collective. Raises CorruptError, before anything is changed, if a name that some rank expects is
    missing in `tensors`, if `tensors` has one that no rank expects, or if a shape or dtype is not
    its target's.

    `kind` (`model`, `optimizer`) is for the error message. `names` are those this rank expects.
    """

    def check() -> list[str]:
        for name, target in targets.items():
            if name in tensors:
                check_fits(name, tensors[name], target.shape, target.dtype)
        return sorted(names)

    def copy() -> None:
        for name, target in targets.items():
            local, region = common_region(target, tuple(target.shape))
            copy_region(local, tensors[name], region)

    wanted = set().union(*world.gathered(check))
    if differences := name_differences(wanted, tensors):
        raise CorruptError(
            f"the checkpoint's {kind} tensors do not belong to this {kind}; {differences}"
        )
    world.patiently(lambda _: copy(), "loading", world.activity.latest.step)


def _slots_to_load(
    optimizer: torch.optim.Optimizer, held: Held, tensors: Tensors
) -> dict[str, set[str]]:
    """Return, for each parameter that this optimizer holds, the names of the state tensors
    ("slots", such as `exp_avg`) that `tensors` must have for it: all that an optimizer of a known
    class keeps, or for an unknown class those that were saved. Raises CorruptError for a slot that
    a known class does not keep."""
    kept: dict[str, set[str]] = {name: set() for name, _ in held}
    for parameter, _, slot in (name.rpartition(".") for name in tensors):
        if parameter in kept:
            kept[parameter].add(slot)
    allowed = _slots(optimizer)
    if allowed is None:
        return kept
    slots = set().union(*kept.values())
    if slots - allowed:
        raise CorruptError(
            f"the optimizer state is of another optimizer: it has {few(slots - allowed)}, "
            f"{type(optimizer).__name__} keeps {few(allowed) if allowed else 'nothing'}"
        )
    return dict.fromkeys(kept, allowed if tensors else set())


def _held(
    optimizer: AnyOptimizer, named_parameters: NamedParameters
) -> list[tuple[torch.optim.Optimizer, Held]]:
    """Pair each torch optimizer (several in a joint one) with the (name, parameter) pairs it holds.

    Raises ValueError if one of them holds a parameter that has no name.
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
    """Map each parameter's `id()` to its number in the optimizer's state_dict: its position over
    all parameter groups."""
    parameters = [value for group in optimizer.param_groups for value in group["params"]]
    return {id(value): number for number, value in enumerate(parameters)}


def _slots(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """Return the names of the state tensors ("slots", such as `exp_avg`) that an optimizer keeps
    for each parameter once it has made a step; None for an unknown class."""
    import torch

    from pentameter.optim.expert_muon import ExpertMuon
    from pentameter.optim.plain_rules import ADAM, SGD, Muon
    from pentameter.optim.sharded_muon import ShardedMuon

    groups, kind = optimizer.param_groups, type(optimizer)  # a user's subclass may keep more
    if kind in ADAM:
        extra = {"max_exp_avg_sq"} if any(group["amsgrad"] for group in groups) else set()
        return {"step", "exp_avg", "exp_avg_sq"} | extra
    if kind in (torch.optim.Muon, Muon, ShardedMuon, ExpertMuon):
        return {"momentum_buffer"}
    if kind in (torch.optim.SGD, SGD):
        return {"momentum_buffer"} if any(group["momentum"] for group in groups) else set()
    return None
