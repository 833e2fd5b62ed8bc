"""Packing: values of a custom optimizer as JSON, with their tensors beside it, and back to the same
types, dtypes and placements.

A value that can be packed is None, a number, a string, a dtype, a tensor, a random generator, or a
list, tuple, set, deque or dict of such. Packed, it is itself if JSON has it, else an object whose
only key says its kind. Any other value is packed as the name of its class, only to notice that it
changed, and cannot be unpacked. If it is an array or a container of an unknown class, its content
is included.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch.nn import Parameter

from pentameter.checkpoint.format.lazy_tensors import Tensors, check_fits
from pentameter.checkpoint.format.safetensors_format import dtype_codes
from pentameter.checkpoint.state.replicas import content_hash
from pentameter.errors import ConfigError
from pentameter.parallel.local_shards import is_distributed

Held = Mapping[str, Parameter]
"""Name → parameter, for all parameters that this rank's optimizer holds."""
Tree = Any
"""A packed value: JSON."""

_DTYPES = [each for each in vars(torch).values() if isinstance(each, torch.dtype)]
_SEQUENCES: Mapping[type, str] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "size",
}
_MAPPINGS: Mapping[type, str] = {dict: "dict", OrderedDict: "ordered"}
_MADE_BY: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    kind: make for make, kind in [*_SEQUENCES.items(), *_MAPPINGS.items()]
}
_FACTORIES = {each.__name__: each for each in (dict, list, set, int, float)} | {None: None}
"""Name → factory that a packed defaultdict may have for missing keys."""
_NUMBERS = [np.dtype(each) for each in "?bhiqBHIQefd"]
_MAX_DEPTH = 100  # of values within one another


def _made_of(value: Any) -> tuple[str, Any] | None:
    """If `value` can be made again from simpler values, such as a tuple from a list, return (kind,
    simpler values), where kind is a key in `_MADE_FROM`. Return None for any other value."""
    found: tuple[str, Any] | None = None
    match value:
        case np.generic() if value.dtype in _NUMBERS:
            found = "number", (value.dtype.name, value.item())
        case np.ndarray() if value.dtype in _NUMBERS:
            found = "array", torch.from_numpy(value.copy())
        case Counter() if type(value) is Counter:
            found = "counter", dict(value)
        case defaultdict() if type(value) is defaultdict:
            names = [name for name, each in _FACTORIES.items() if each is value.default_factory]
            found = ("default", (names[0], dict(value))) if names else None
        case complex():
            found = "complex", (value.real, value.imag)
        case bytes():
            found = "bytes", value.hex()
        case random.Random() if type(value) is random.Random:
            found = "random", value.getstate()
        case np.random.Generator():
            found = "numpy", value.bit_generator.state
    return found


def _random(state: Any) -> random.Random:
    made = random.Random()
    made.setstate(state)
    return made


def _numpy_generator(state: Any) -> np.random.Generator:
    bits = getattr(np.random, state["bit_generator"])()
    bits.state = state
    return np.random.Generator(bits)


_MADE_FROM: Mapping[str, Callable[[Any], Any]] = {
    "number": lambda simpler: np.dtype(simpler[0]).type(simpler[1]),
    "array": lambda simpler: simpler.cpu().numpy(),
    "counter": Counter,
    "default": lambda simpler: defaultdict(_FACTORIES[simpler[0]], simpler[1]),
    "complex": lambda simpler: complex(*simpler),
    "bytes": bytes.fromhex,
    "random": _random,
    "numpy": _numpy_generator,
}
"""Kind → function that makes a value of this kind from the simpler values that `_made_of` returned
for it."""


@dataclass
class Packer:
    """Turns the values that an optimizer of class `whose` keeps into packed values, which JSON can
    hold, and collects their tensors by name in `tensors`.

    A tensor in the state of a parameter (one in `held`) is named `PARAMETER.SLOT`, any other
    `.WHERE/HASH`. A tensor that occurs twice is kept once. Raises ConfigError for a tensor that
    another layout could not load.
    """

    whose: str
    held: Held
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: list[tuple[str, str]] = field(default_factory=list)
    """(Place, class name) of each value that cannot be packed."""
    _depth: int = 0  # of the value that is being packed, in the outermost one

    def __post_init__(self) -> None:
        self._known: dict[int, tuple[Tree, torch.Tensor]] = {
            id(each): ({"parameter": name}, each) for name, each in self.held.items()
        }

    def pack(self, value: Any, where: str, of: str | None = None) -> Tree:
        """Return the packed form of `value`. `where` is its place in the optimizer, for names and
        messages; `of` is the parameter to whose state it belongs, None if it belongs to none."""
        if self._depth == _MAX_DEPTH:
            self.refuse(f"{_MAX_DEPTH} values within one another", f"{where[:60]}…", of)
        self._depth += 1
        try:
            return self._packed(value, where, of)
        finally:
            self._depth -= 1

    def _packed(self, value: Any, where: str, of: str | None) -> Tree:
        match value:
            case torch.Tensor():
                if id(value) not in self._known:
                    # Keeps the tensor alive: the id of a freed one may be given to another.
                    self._known[id(value)] = self._tensor(value, where, of), value
                packed, _ = self._known[id(value)]
            case None | bool() | int() | str():
                packed = value
            case float() if not isinstance(value, np.generic):
                packed = float(value) if math.isfinite(value) else {"float": str(float(value))}
            case torch.dtype():
                packed = {"dtype": str(value).removeprefix("torch.")}
            case torch.Generator():
                state = self.pack(value.get_state(), where, of)
                packed = {"generator": {"state": state, "device": value.device.type}}
            case _ if (made := _made_of(value)) is not None:
                kind, simpler = made
                packed = {kind: self.pack(simpler, where, of)}
            case _:
                packed = self._container(value, where, of)
        return packed

    def _container(self, value: Any, where: str, of: str | None) -> Tree:
        def items(keyed: Iterable[tuple[object, Any]]) -> list[Tree]:
            return [self.pack(v, f"{where}/{k}" if where else str(k), of) for k, v in keyed]

        if (kind := _MAPPINGS.get(type(value))) is not None:
            keys = [self.pack(key, where, of) for key in value]
            return {kind: [list(pair) for pair in zip(keys, items(value.items()), strict=True)]}
        if type(value) is deque:
            return {"deque": {"items": items(enumerate(value)), "length": value.maxlen}}
        if (kind := _SEQUENCES.get(type(value))) is not None:
            ordered = sorted(value, key=repr) if kind in ("set", "frozenset") else value
            return {kind: items(enumerate(ordered))}
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        self.objects.append((where, name))
        content: Tree = None
        if isinstance(value, Mapping):
            content = self.pack(list(value.items()), where, of)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            content = self.pack(list(value), where, of)
        elif isinstance(value, np.ndarray | np.generic):
            content = repr(value.tolist())
        return {"object": name} if content is None else {"object": name, "content": content}

    def refuse(self, what: str, where: str, of: str | None) -> NoReturn:
        """Raise ConfigError, saying that the optimizer keeps `what` (a phrase) at the place
        `where`, in the state of `of` if that is given, and that it cannot be saved."""
        place = where if of is None else f"{where} for {of}"
        raise ConfigError(
            f"{self.whose} keeps {place}: {what}. A checkpoint holds numbers, texts, tensors, and "
            "lists, tuples and dicts of them, so that every layout goes on from it; tensors that "
            "processes have a part of belong into state[parameter] and have the parameter's shape"
        )

    def _tensor(self, value: torch.Tensor, where: str, of: str | None) -> Tree:
        if not is_distributed(value) and hasattr(value, "__tensor_flatten__"):
            return self._wrapper(value, where, of)
        value = value.detach().resolve_conj().resolve_neg()
        form = self._form(value, where, of)
        if str(value.dtype) not in dtype_codes() or value.layout != torch.strided or value.is_meta:
            self.refuse(f"a tensor of {value.dtype}, {value.layout}, {value.device}", where, of)
        name = f"{of or ''}.{re.sub('[.%]', lambda found: f'%{ord(found[0]):02X}', where)}"
        if of is None:  # with its content, so that ranks which compare names compare that, too
            name += f"/{int(content_hash(value).item()) & 2**64 - 1:016x}"
        if of is not None and name in self.tensors:
            self.refuse("two tensors of one name", where, of)
        self.tensors[name] = value
        beside = self._beside(of)
        is_elsewhere = beside is not None and beside.device.type != "cpu"
        on_host = value.device.type == "cpu" and (is_elsewhere or where.endswith("step"))
        return {"tensor": {"name": name, "form": form, "on_host": on_host}}

    def _beside(self, of: str | None) -> Parameter | None:
        return next(iter(self.held.values()), None) if of is None else self.held[of]

    def _form(self, value: Any, where: str, of: str | None) -> str:
        """Return how a tensor is placed: `like` its parameter (the same shape and placements),
        `replicated` on the parameter's mesh, or `whole`, a plain tensor in this process."""
        parameter: Any = None if of is None else self.held[of]
        is_cut = parameter is not None and is_distributed(parameter)
        if not is_distributed(value):
            if type(value) not in (torch.Tensor, Parameter):
                self.refuse(f"a {type(value).__qualname__}, whose content is unknown", where, of)
            if is_cut and value.ndim and value.shape != parameter.shape:
                self._refuse_shape(value, where, of)
            is_like = parameter is not None and not is_cut and value.shape == parameter.shape
            return "like" if is_like else "whole"
        if is_cut and hasattr(value.to_local(), "__tensor_flatten__"):
            kind = type(value.to_local()).__qualname__
            self.refuse(f"parts that are each a {kind}, which cannot be cut anew", where, of)
        if is_cut and value.device_mesh == parameter.device_mesh:
            if (value.shape, value.placements) == (parameter.shape, parameter.placements):
                return "like"
            if all(each.is_replicate() for each in value.placements):
                return "replicated"
        self._refuse_shape(value, where, of)

    def _refuse_shape(self, value: torch.Tensor, where: str, of: str | None) -> NoReturn:
        beside = "" if of is None else f" beside a parameter of shape {tuple(self.held[of].shape)}"
        self.refuse(
            f"a tensor of shape {tuple(value.shape)}{beside}, of which each process has a part, "
            "and nothing says how such a state is cut; set parallel.zero to 0 and parallel.tensor "
            "to 1, or use an optimizer whose state has its parameters' shapes",
            where,
            of,
        )

    def _wrapper(self, value: Any, where: str, of: str | None) -> Tree:
        """Pack a tensor subclass that consists of several tensors, such as an 8-bit tensor with its
        scales, by PyTorch's protocol for these (`__tensor_flatten__`)."""
        names, context = value.__tensor_flatten__()
        inner = {name: getattr(value, name) for name in names}
        content = {
            "class": f"{type(value).__module__}.{type(value).__qualname__}",
            "inner": self.pack(inner, where, of),
            "context": self.pack(context, where, of),
            "size": list(value.shape),
            "stride": list(value.stride()),
        }
        return {"wrapper": content}


@dataclass
class Unpacker:
    """Turns packed values back into values, in three steps: call `allocate` for all of them, fill
    `tensors` from `stored`, then call `unpack` for each. A malformed packed value raises
    LookupError, TypeError, ValueError or AttributeError."""

    held: Held
    stored: Tensors
    names: set[str] = field(default_factory=set)
    """Names of all tensors that the values hold."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Name → allocated tensor, for those that `stored` has."""

    def allocate(self, tree: Tree, of: str | None = None) -> None:
        """Allocate the tensors in a packed value. `of` is the parameter to whose state it belongs,
        None if it belongs to none. Raises CorruptError if a tensor that must have its parameter's
        shape has another."""
        for leaf in _leaves(tree):
            name = leaf["name"]
            self.names.add(name)
            if name in self.stored and name not in self.tensors:
                self.tensors[name] = self._empty(leaf, of)

    def _empty(self, leaf: Mapping[str, Any], of: str | None) -> torch.Tensor:
        name, form = leaf["name"], leaf["form"]
        stored = self.stored[name]
        shape, dtype = tuple(stored.shape), stored.dtype
        beside: Any = next(iter(self.held.values())) if of is None else self.held[of]
        if form == "like":
            check_fits(name, stored, beside.shape)
            if is_distributed(beside) or not leaf["on_host"]:
                return torch.empty_like(beside.detach(), dtype=dtype)
        device = "cpu" if leaf["on_host"] else beside.device
        empty = torch.empty(shape, dtype=dtype, device=device)
        if form == "replicated" and is_distributed(beside):
            from torch.distributed.tensor import DTensor, Replicate

            mesh = beside.device_mesh
            return DTensor.from_local(empty, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return empty

    def unpack(self, tree: Tree) -> Any:
        """Return the value that `Packer.pack` turned into `tree`, with the tensors in `tensors`."""
        if not isinstance(tree, dict):
            return tree
        ((kind, content),) = tree.items()
        value: Any
        match kind:
            case "tensor":
                value = self.tensors[content["name"]]
            case "parameter":
                value = self.held[content]
            case "float":
                value = float(content)
            case "dtype":
                value = {str(each): each for each in _DTYPES}[f"torch.{content}"]
            case "generator":
                value = torch.Generator(content["device"])
                value.set_state(self.unpack(content["state"]).cpu())
            case _ if kind in _MADE_FROM:
                value = _MADE_FROM[kind](self.unpack(content))
            case "dict" | "ordered":
                value = _MADE_BY[kind]((self.unpack(k), self.unpack(v)) for k, v in content)
            case "deque":
                value = deque(map(self.unpack, content["items"]), content["length"])
            case "wrapper":
                value = self._wrapper(content)
            case _:
                value = _MADE_BY[kind](map(self.unpack, content))
        return value

    def _wrapper(self, content: Mapping[str, Any]) -> Any:
        inner, context = self.unpack(content["inner"]), self.unpack(content["context"])
        make: Any = _wrapper_class(content["class"])
        size, stride = torch.Size(content["size"]), tuple(content["stride"])
        return make.__tensor_unflatten__(inner, context, size, stride)


def is_helper(tree: Tree) -> bool:
    """Return True if a packed value holds only the name of a class, since an object of that class
    could not be packed."""
    return isinstance(tree, dict) and tree.keys() == {"object"}


def tensor_names(tree: Tree) -> Iterator[str]:
    """Yield the names of the tensors in a packed value."""
    return (leaf["name"] for leaf in _leaves(tree))


def _leaves(tree: Tree) -> Iterator[Mapping[str, Any]]:
    """Yield the record of each tensor in a packed value: its `name`, `form` and `on_host`."""
    if isinstance(tree, dict) and "tensor" in tree:
        yield tree["tensor"]
    elif isinstance(tree, dict | list):
        for each in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(each)


def _wrapper_class(name: str) -> type:
    """Return the tensor subclass with this qualified name. Only classes that are imported already
    are found, so that a checkpoint never causes an import; for any other name, raises
    ConfigError."""
    kinds: list[type] = [torch.Tensor]
    for kind in kinds:
        if f"{kind.__module__}.{kind.__qualname__}" == name and kind is not torch.Tensor:
            return kind
        kinds += kind.__subclasses__()
    raise ConfigError(
        f"the checkpoint's optimizer keeps tensors of the class {name}, which is not imported; "
        "give Trainer the optimizer that has them"
    )
