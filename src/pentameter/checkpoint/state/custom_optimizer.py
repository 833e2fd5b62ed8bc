"""The state of a custom optimizer, so that it goes on to the bit: tensors by name, and everything
else in a checkpoint's optimizer.json.

Kept are the state of each parameter, what the optimizer has changed in its parameter groups, and
what it has changed in attributes of its own, all since it was made; and the same of optimizers that
it holds. What it was made with is the user's code's to say. Learning rates are left out: they are
set before every step. Attributes that are objects of other classes, and no containers, are
taken for helpers of the code. What is one object in all groups comes back as one, and equal tensors
of several groups as several. What is kept must be the same on all ranks that hold a parameter, else
no layout could go on from it; that, and a value that cannot be kept, is refused with ConfigError.
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

from pentameter.checkpoint.format.lazy_tensors import Tensors, few
from pentameter.checkpoint.format.manifest import decode_versioned, encode_json, well_formed
from pentameter.checkpoint.state.packed_values import (
    Held,
    Packer,
    Tree,
    Unpacker,
    is_helper,
    tensor_names,
)
from pentameter.errors import ConfigError, CorruptError
from pentameter.processes.group.world import World

FILE_NAME = "optimizer.json"

_VERSION = 1
_WHERE = f"the checkpoint's {FILE_NAME}"
_NOTE = "_pentameter_as_made"


@dataclass(frozen=True)
class _Noted:
    """A value that an optimizer was made with. One with tensors or objects in it is not `plain`:
    it cannot be made again from its `tree`."""

    tree: Tree
    is_plain: bool


@dataclass(frozen=True)
class _AsMade:
    """The values with which an optimizer was made, in each of its groups and in its attributes."""

    groups: list[dict[str, _Noted]]
    attributes: dict[str, _Noted]

    def of_group(self, number: int) -> Mapping[str, _Noted] | None:
        """Return the values of a group; None for one that was added later."""
        return self.groups[number] if number < len(self.groups) else None


def note_as_made(optimizer: Optimizer, held: Held) -> None:
    """Note what a custom optimizer has been made with, in an attribute of it, so that what it
    changes from now on can be told. `held` has its parameters by name."""
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
    optimizer: Optimizer, held: Held, without: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return name → tensor for all that a custom optimizer keeps, detached but not copied, but not
    those of the parameters in `without`, nor with "" in it those outside parameters' states."""
    _, tensors = _packed(optimizer, held)
    return {name: each for name, each in tensors.items() if _parameter_of(name) not in without}


def custom_values(optimizer: Optimizer, held: Held, world: World) -> bytes:
    """Return the content of optimizer.json: everything that a custom optimizer keeps beside the
    tensors, of all ranks together, the same on each. Collective."""
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
    """Add another rank's parameters to `into`. Raises ConfigError if both say different things of
    what they have in common."""
    differing = [] if into["outside"] == other["outside"] else ["tensors outside of states"]
    for path in into["optimizers"].keys() | other["optimizers"].keys():
        ours, theirs = (each["optimizers"].get(path, {}) for each in (into, other))
        for key in ("attributes", "shared"):
            if ours.get(key) != theirs.get(key):
                differing.append(f"{path}{key}")
        parameters = ours.get("parameters", {})
        # Where all parameters of a stage are in one group, nothing is common there.
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
    """Return everything that this rank's optimizer keeps, packed, and its tensors by name."""
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
    """Return what `part` keeps, packed; `path` says where the outermost optimizer holds it."""

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
    """Return the settings that are one object in all groups, of several, that have them."""
    ids: dict[str, list[int]] = {}
    for group in groups:
        for key, value in _settings(group).items():
            ids.setdefault(key, []).append(id(value))
    return sorted(key for key, each in ids.items() if len(each) > len(set(each)) == 1)


def _has_changed(value: Any, before: _Noted | None, packer: Packer, where: str) -> bool:
    """Return True if the value at `where` is to be saved: it has tensors, or is not what it was
    `before`, None for a new one. An object of another class is not."""
    alone = Packer(packer.whose, packer.held)
    tree = alone.pack(value, where)
    if is_helper(tree):
        return False
    # In words, as 1, 1.0 and True are equal, and 0.0 and -0.0.
    return bool(alone.tensors) or before is None or repr(before.tree) != repr(tree)


def _parts(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizer, with the path "", and all that it holds in its attributes, or in lists
    or dicts there, each with its path."""
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
    """Return the values in a parameter group that are the optimizer's own."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _attributes(part: Optimizer) -> dict[str, Any]:
    """Return the attributes that a class has added to those of every optimizer."""
    return {name: value for name, value in vars(part).items() if name not in _of_every_optimizer()}


@cache
def _of_every_optimizer() -> frozenset[str]:
    plain = torch.optim.SGD([Parameter(torch.zeros(1))], lr=0.1)
    return frozenset(vars(plain)) | {_NOTE, "_opt_called"}


def _parameter_of(name: str) -> str:
    """Return the parameter in whose state a tensor is, "" for none."""
    return name.rpartition(".")[0]


class CustomLoad:
    """The loading of a custom optimizer's state: made, its `tensors` are allocated; once they are
    filled from `stored`, `apply` puts them and all other values where they were. What the optimizer
    has changed, and the checkpoint does not have, becomes what it was made with.

    optimizer: the optimizer, as the user's function makes it. held: its parameters by name.
    stored: the checkpoint's tensors. data: the content of its optimizer.json.

    Raises ConfigError if this optimizer or layout cannot go on from it, CorruptError for data of
    another form.
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
        """The tensors that the values on this rank have."""
        return self._unpacker.names

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The tensors that the checkpoint stores, to be filled."""
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
        """Give the optimizer the checkpoint's values, with the filled tensors."""
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
        """Have the `values` of a group be unpacked with tensors of their own: equal ones of several
        groups are stored once. `taken` has the names of those that another group was given."""
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
        """Put the `saved` values into a group or an object's attributes; what else has changed in
        what is `present` becomes what it was `before`, None if that is not known. What is `common`
        to several groups is made once: setting → packed value, as text → value."""
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
