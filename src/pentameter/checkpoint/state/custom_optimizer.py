"""The state of a custom optimizer (a class from the user's code) in a checkpoint: tensors by name,
and all other values in optimizer.json. A resumed run computes the same bits as one that was never
interrupted.

Saved are the state of each parameter, and whatever the optimizer changed in its parameter groups
and in its attributes since it was constructed. The same holds for optimizers that it has as
attributes. Values from the construction are not saved: on resuming, the user's code constructs the
optimizer again. Learning rates are not saved either: they are set before every step. Attributes
that are objects of other classes, and no containers, are not saved.

An object that all parameter groups have in common is one object again after loading; tensors that
are merely equal stay separate. What is saved must be equal on all ranks that hold a parameter, or
no other layout could load it. ConfigError refuses what differs, and values that cannot be saved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from pentameter.checkpoint.format.lazy_tensors import Tensors
from pentameter.checkpoint.format.manifest import decode_versioned, encode_json, well_formed
from pentameter.checkpoint.state.packed_values import (
    Held,
    Packer,
    Tree,
    Unpacker,
    is_helper,
    tensor_names,
)
from pentameter.errors import ConfigError, CorruptError, few
from pentameter.processes.group.world import World

FILE_NAME = "optimizer.json"

_VERSION = 1
_WHERE = f"the checkpoint's {FILE_NAME}"
_NOTE = "_pentameter_as_made"


@dataclass(frozen=True)
class _Noted:
    """A value that a custom optimizer had when it was constructed, in packed form (`tree`). If it
    held tensors, or objects that cannot be packed, `is_plain` is False, and the value cannot be
    made again from `tree`."""

    tree: Tree
    is_plain: bool


@dataclass(frozen=True)
class _AsMade:
    """All values that a custom optimizer had when it was constructed: those of each parameter
    group, by key, and its attributes, by name. Later changes are found by comparing with them."""

    groups: list[dict[str, _Noted]]
    attributes: dict[str, _Noted]

    def of_group(self, number: int) -> Mapping[str, _Noted] | None:
        """Return the values that the parameter group with this index had when the optimizer was
        constructed, by key; None if the group was added later."""
        return self.groups[number] if number < len(self.groups) else None


def note_as_made(optimizer: Optimizer, held: Held) -> None:
    """Record, in an attribute of a newly constructed custom optimizer, all values that it has now,
    so that later changes can be recognised. `held` maps names to its parameters."""
    for _, part in _parts(optimizer):
        groups = [
            {key: _noted(value, held) for key, value in _settings(group).items()}
            for group in part.param_groups
        ]
        attributes = {name: _noted(value, held) for name, value in _attributes(part).items()}
        setattr(part, _NOTE, _AsMade(groups, attributes))


def _noted(value: Any, held: Held) -> _Noted:
    packer = Packer("", held)
    try:
        tree = packer.pack(value, "")
    except ConfigError:  # a tensor that cannot be kept, as its first save will say
        return _Noted(object(), is_plain=False)
    if packer.tensors:
        return _Noted(object(), is_plain=False)
    return _Noted(tree, is_plain=not packer.objects)


def custom_tensors(
    optimizer: Optimizer, held: Held, without: Collection[str]
) -> dict[str, torch.Tensor]:
    """Return name → tensor for all tensors that a custom optimizer keeps, detached but not copied.
    The states of the parameters named in `without` are left out. If `without` contains "", tensors
    that belong to no parameter's state are left out, too."""
    _, tensors = _packed(optimizer, held)
    return {name: each for name, each in tensors.items() if _parameter_of(name) not in without}


def custom_values(optimizer: Optimizer, held: Held, world: World) -> bytes:
    """Return the content of optimizer.json: all values that a custom optimizer keeps except
    tensors, merged over all ranks. The result is the same on each rank. Collective."""
    packed, tensors = world.agreed(lambda: _packed(optimizer, held))
    packed["outside"] = sorted(name for name in tensors if not _parameter_of(name))
    text = encode_json(packed)
    digest = blake2b(text, digest_size=16).digest()
    is_first = world.all_gather(digest).index(digest) == world.rank
    found = [each for each in world.all_gather(packed if is_first else None) if each is not None]
    merged: dict[str, Any] = {"format_version": _VERSION, **found[0]}
    for other in found[1:]:  # of other stages, in a pipeline
        _merge(merged, other, type(optimizer).__name__)
    return encode_json(merged)


def _merge(into: dict[str, Any], other: Mapping[str, Any], whose: str) -> None:
    """Add the packed values of another rank, `other`, to those in `into`, in place. Raises
    ConfigError, naming the optimizer's class `whose`, if the ranks have different values for the
    same parameter or attribute."""
    differing = [] if into["outside"] == other["outside"] else ["tensors outside of states"]
    for path in into["optimizers"].keys() | other["optimizers"].keys():
        ours, theirs = (each["optimizers"].get(path, {}) for each in (into, other))
        for key in ("attributes", "shared"):
            if ours.get(key) != theirs.get(key):
                differing.append(f"{path}{key}")
        parameters = ours.get("parameters", {})
        # A stage whose parameters are all in one group cannot tell which settings are common.
        ours["common"] = sorted({*ours.get("common", []), *theirs.get("common", [])})
        for name, each in theirs.get("parameters", {}).items():
            if parameters.setdefault(name, each) != each:
                differing.append(f"{path}{name}")
    if differing:
        raise ConfigError(
            f"{whose} keeps other values on one process than on another, so that no checkpoint can "
            f"hold them: {few(differing)}. It is to keep the same numbers on every process, and "
            "tensors in state[parameter]; or train in a layout that does not split the model"
        )


def _packed(optimizer: Optimizer, held: Held) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return all that this rank's optimizer keeps, as packed values, and its tensors by name."""
    packer = Packer(type(optimizer).__name__, held)
    seen: set[int] = set()
    packed = {}
    for path, part in _parts(optimizer):
        state = {} if id(part.state) in seen else part.state  # several may have one state
        seen.add(id(part.state))
        packed[path] = _packed_part(part, path, state, packer)
    return {"optimizers": packed}, packer.tensors


def _packed_part(
    part: Optimizer, path: str, state: Mapping[Any, Any], packer: Packer
) -> dict[str, Tree]:
    """Return all that `part` keeps, as packed values. `part` is the optimizer itself or one that it
    holds in the attribute `path`; `state` is its `Optimizer.state`."""

    def kept(value: Any, where: str, of: str | None = None) -> Tree:
        n_objects = len(packer.objects)
        tree = packer.pack(value, where, of)
        if len(packer.objects) > n_objects:
            place, name = packer.objects[-1]
            packer.refuse(f"a {name}", place, of)
        return tree

    def changed(values: Mapping[str, Any], before: Mapping[str, _Noted], where: str) -> Tree:
        return {
            key: kept(value, f"{where}{key}")
            for key, value in values.items()
            if _has_changed(value, before.get(key), packer, f"{where}{key}")
        }

    names = {id(parameter): name for name, parameter in packer.held.items()}
    made: _AsMade | None = getattr(part, _NOTE, None)
    parameters: dict[str, Tree] = {}
    for number, group in enumerate(part.param_groups):
        before = {} if made is None else made.of_group(number) or {}
        values = changed(_settings(group), before, f"{path}param_groups/")
        for parameter in group["params"]:
            if id(parameter) not in names:
                packer.refuse("parameters that are not the model's", f"{path}param_groups", None)
            name = names[id(parameter)]
            slots = state.get(parameter)
            own = None if slots is None else kept(slots, path.rstrip("/"), name)
            parameters[name] = {"state": own, "group": values}
    others = {key: each for key, each in state.items() if id(key) not in names}
    if any(isinstance(key, torch.Tensor) for key in others):
        packer.refuse("state of parameters that are not the model's", f"{path}state", None)
    attributes = {} if made is None else changed(_attributes(part), made.attributes, path)
    return {
        "parameters": parameters,
        "shared": kept(others, f"{path}state"),
        "attributes": attributes,
        "common": _common(part.param_groups),
    }


def _common(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that several parameter groups have with one and the same object as value; a
    change of that object changes all of these groups."""
    ids: dict[str, list[int]] = {}
    for group in groups:
        for key, value in _settings(group).items():
            ids.setdefault(key, []).append(id(value))
    return sorted(key for key, each in ids.items() if len(each) > len(set(each)) == 1)


def _has_changed(value: Any, before: _Noted | None, packer: Packer, where: str) -> bool:
    """Return True if a value that a custom optimizer keeps must be saved: it holds tensors, or
    differs from what it was when the optimizer was constructed. False for an object of a class that
    cannot be packed.

    before: the value then; None if it did not exist.
    packer: turns the value into packed form, to compare.
    where: the value's place in the optimizer, for messages.
    """
    alone = Packer(packer.whose, packer.held)
    tree = alone.pack(value, where)
    if is_helper(tree):
        return False
    # As text, because 1, 1.0 and True are equal, and so are 0.0 and -0.0.
    return bool(alone.tensors) or before is None or repr(before.tree) != repr(tree)


def _parts(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield (path, optimizer) for the optimizer itself, with the path "", and for every optimizer
    that it holds in an attribute, or in a list, tuple or dict in an attribute."""
    pending = [("", optimizer)]
    seen: set[int] = set()
    while pending:
        path, part = pending.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        for name, value in _attributes(part).items():
            several: Mapping[Any, Any] = {}
            if isinstance(value, dict):
                several = value
            elif isinstance(value, list | tuple):
                several = dict(enumerate(value))
            held = {name: value} | {f"{name}/{key}": each for key, each in several.items()}
            pending += [
                (f"{path}{where}/", each)
                for where, each in held.items()
                if isinstance(each, Optimizer)
            ]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a parameter group, without its parameters and its learning rate."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _attributes(part: Optimizer) -> dict[str, Any]:
    """Return the attributes that an optimizer has beyond those of `torch.optim.Optimizer`."""
    return {name: value for name, value in vars(part).items() if name not in _of_every_optimizer()}


@cache
def _of_every_optimizer() -> frozenset[str]:
    plain = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1)
    return frozenset(vars(plain)) | {_NOTE, "_opt_called"}


def _parameter_of(name: str) -> str:
    """Return the name of the parameter to which a saved tensor of the optimizer's state belongs,
    from the tensor's `name` (PARAMETER.SLOT); "" if it belongs to none."""
    return name.rpartition(".")[0]


class CustomLoad:
    """Loads a custom optimizer's state from a checkpoint, in three steps: constructing this object
    allocates `tensors`; the caller fills them from `stored`; `apply` gives them and all other
    values to the optimizer. A value that the optimizer has changed since its construction, and that
    the checkpoint lacks, is set back.

    optimizer: as the user's function constructed it. held: its parameters by name. stored: the
    checkpoint's tensors. data: the content of its optimizer.json.

    Raises ConfigError if the state does not fit this optimizer or layout, CorruptError for
    malformed data.
    """

    def __init__(self, optimizer: Optimizer, held: Held, stored: Tensors, data: bytes) -> None:
        self._parts = dict(_parts(optimizer))
        self._unpacker = Unpacker(held, stored)
        self._held, self._whose = held, type(optimizer).__name__
        with well_formed(_WHERE):
            found = decode_versioned(data, FILE_NAME, _VERSION)["optimizers"]
            self._records: dict[str, Any] = {path: found[path] for path in found}
            if found.keys() != self._parts.keys():
                raise ConfigError(
                    f"the checkpoint's optimizer is not {self._whose}: it keeps states in "
                    f"{few(found)!r}, and this one in {few(self._parts)!r}; give Trainer the same "
                    "optimizer="
                )
            for path, record in found.items():
                self._allocate(path, record)

    @property
    def names(self) -> set[str]:
        """Names of all tensors that this rank's values hold."""
        return self._unpacker.names

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Name → allocated tensor, to be filled by the caller, for those of `names` that the
        checkpoint has."""
        return self._unpacker.tensors

    def _allocate(self, path: str, record: Mapping[str, Any]) -> None:
        part, parameters = self._parts[path], record["parameters"]
        names = {id(each): name for name, each in self._held.items()}
        for group in part.param_groups:
            own = [names[id(each)] for each in group["params"]]
            absent = set(own) - parameters.keys()
            if absent:
                raise CorruptError(f"the checkpoint's {FILE_NAME} does not have {few(absent)}")
            if any(parameters[name]["group"] != parameters[own[0]]["group"] for name in own):
                raise ConfigError(
                    f"{self._whose} kept other numbers for some parameters of a group than for "
                    f"others ({few(own)}), as they were on other processes, and now they are on "
                    "one; go on in the layout that saved them"
                )
            for name in own:
                self._unpacker.allocate(parameters[name]["state"], name)
                self._unpacker.allocate(list(parameters[name]["group"].values()))
        self._unpacker.allocate(record["shared"])
        self._unpacker.allocate(list(record["attributes"].values()))

    def apply(self) -> None:
        """Give the optimizer the checkpoint's values and the filled tensors."""
        unpack = self._unpacker.unpack
        names = {id(each): name for name, each in self._held.items()}
        for part in self._parts.values():
            part.state.clear()
        for path, part in self._parts.items():
            record, made = self._records[path], getattr(part, _NOTE, None)
            with well_formed(_WHERE):
                common: dict[str, dict[str, Any]] = {key: {} for key in record.get("common", ())}
                every, taken = dict(self._unpacker.tensors), set[str]()
                for number, group in enumerate(part.param_groups):
                    own = [names[id(each)] for each in group["params"]]
                    before = None if made is None else made.of_group(number)
                    values = record["parameters"][own[0]]["group"] if own else {}
                    self._part_from(taken, [values[key] for key in values if key not in common])
                    self._restore(group, _settings(group), values, before, common)
                    for parameter, name in zip(group["params"], own, strict=True):
                        state = record["parameters"][name]["state"]
                        if state is not None:
                            part.state[parameter] = unpack(state)
                self._unpacker.tensors.update(every)
                part.state.update(unpack(record["shared"]))
                if made is not None:
                    attributes = _attributes(part)
                    self._restore(vars(part), attributes, record["attributes"], made.attributes)

    def _part_from(self, taken: set[str], values: Tree) -> None:
        """Before the packed `values` of a parameter group are unpacked, clone those of their
        tensors that an earlier group was given (names in `taken`), so that the groups do not share
        them: a checkpoint stores equal tensors once."""
        tensors = self._unpacker.tensors
        for name in set(tensor_names(values)):
            if name in taken:
                tensors[name] = tensors[name].clone()
            taken.add(name)

    def _restore(
        self,
        into: dict[str, Any],
        present: Mapping[str, Any],
        saved: Mapping[str, Tree],
        before: Mapping[str, _Noted] | None,
        common: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        """Put `saved` values into `into`, a parameter group or an object's attributes.

        present: the values that it has now. One that is not in `saved` and has changed since the
        construction is set back to what it was `before`; one that did not exist then is deleted.
        Nothing is set back if `before` is None. common: keys whose value all groups have in common
        → values made so far, by their packed text; such a value is unpacked once and given to all.
        """
        packer, unpack = Packer(self._whose, self._held), self._unpacker.unpack
        values = dict(saved)
        for key, value in present.items():
            if key in saved or before is None:
                continue
            noted = before.get(key)
            if not _has_changed(value, noted, packer, key):
                continue
            if noted is None:
                del into[key]
            elif noted.is_plain:
                values[key] = noted.tree
        for key, tree in values.items():
            made = {} if common is None else common.get(key, {})
            text = repr(tree)
            if text not in made:
                made[text] = unpack(tree)
            into[key] = made[text]
