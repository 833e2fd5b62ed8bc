"""A device like Apple's GPU, simulated on the CPU: no float64, and no copy that widens on its way.

Its tensors are subclasses that claim the device `mps` and hold a tensor of the CPU; a dispatch mode
runs every operation on what they hold. What torch's MPS refuses raises TypeError, as in torch 2.13
(2.14.0 left the result unwritten instead): a tensor of float64 on the device, and a copy to the
host that converts to float64 on its way. A tensor of the CPU with dimensions beside one of the
device is refused, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

MPS = torch.device("mps", 0)
_INSIDE = torch.device("meta")  # what autograd takes without the library of a device
_COPIES = ("aten::_to_copy", "aten::copy_")
_NO_FLOAT64 = "Cannot convert a MPS Tensor to float64: the MPS framework doesn't support it"


class OnDevice(torch.Tensor):
    """A tensor that says it is on `mps`; `held` is on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        if held.dtype == torch.float64:
            raise TypeError(_NO_FLOAT64)
        with torch.inference_mode(False):  # which may hand on views of what was made outside
            new = torch.Tensor._make_wrapper_subclass(
                cls, held.size(), held.stride(), held.storage_offset(),
                dtype=held.dtype, layout=held.layout, device=_INSIDE,
            )  # fmt: skip
        new.held = held
        return new

    @property
    def device(self) -> torch.device:
        return MPS

    @property
    def is_meta(self) -> bool:
        return False

    def __repr__(self) -> str:  # pytest shows operands of what failed
        return f"OnDevice({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Makes what is created with `device="mps"`, for which no argument is on the device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    operands, _ = tree_flatten((args, kwargs))
    tensors = [each for each in operands if isinstance(each, torch.Tensor)]
    there = [each for each in tensors if isinstance(each, OnDevice)]
    name = function._schema.name
    if there and name == "aten::to":  # in inference mode autograd has not taken it apart before
        return function.decompose(*args, **kwargs)
    asked = kwargs.get("device")
    target = "cpu" if asked is None else torch.device(asked).type
    goes = bool(there) if asked is None else (target == "mps" or bool(there and target == "meta"))
    if there and name in _COPIES:
        _check_copy(name, args, kwargs, goes)
        goes = isinstance(args[0], OnDevice) if name == "aten::copy_" else goes
    elif there and any(each.dim() for each in tensors if not isinstance(each, OnDevice)):
        raise RuntimeError(f"{function}: tensors of the CPU and of mps")
    if goes and kwargs.get("dtype") == torch.float64:
        raise TypeError(_NO_FLOAT64)
    wrappers = {id(each.held): each for each in there}
    args, kwargs = tree_map(lambda x: x.held if isinstance(x, OnDevice) else x, (args, kwargs))
    if asked is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = function(*args, **kwargs)
    if not goes:
        copied = name == "aten::_to_copy" and there
        return result.clone() if copied and result is args[0] else result

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, OnDevice):
            return value
        return wrappers.get(id(value)) if id(value) in wrappers else OnDevice(value)

    return tree_map(wrapped, result)


def _check_copy(name: str, args: Any, kwargs: dict[str, Any], goes: bool) -> None:
    """Refuse a copy from the device to the host that widens to float64 on its way."""
    source, new = args[0], kwargs.get("dtype")
    if name == "aten::copy_":
        source, new, goes = args[1], args[0].dtype, isinstance(args[0], OnDevice)
    if isinstance(source, OnDevice) and not goes and new == torch.float64:
        raise TypeError(_NO_FLOAT64)


@contextmanager
def simulated_mps() -> Iterator[None]:
    """Context manager: while the block runs, torch has the device `mps`."""
    real_to, real_tensor = torch.Tensor.to, torch.tensor

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Before it dispatches, `Tensor.to` starts the device, which this torch has not.
        named = [*args, *kwargs.values()]
        devices = [x for x in named if isinstance(x, str | torch.device)]
        if not devices or torch.device(devices[0]).type != "mps":
            return real_to(tensor, *args, **kwargs)
        dtype = next((x for x in named if isinstance(x, torch.dtype)), tensor.dtype)
        if tensor.device.type == "mps" and dtype == tensor.dtype and not kwargs.get("copy"):
            return tensor
        return torch.ops.aten._to_copy(tensor, dtype=dtype, device=MPS)

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made = real_tensor(data, **kwargs)
        return made if device is None else made.to(device)

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, **ungrouped: Any
    ) -> torch.Tensor:
        # The kernels make masks of their own, where the modes do not see them.
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        if is_causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=MPS).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        return torch.softmax(scores, -1) @ v

    with pytest.MonkeyPatch.context() as patch, _Mode():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        patch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
        yield
