"""How much memory the tensors of this process take, moment by moment, on any device.

Exact where a process's resident memory is not: that has libraries in it, and what an allocator
keeps. It stands on PyTorch's dispatch and counts the storage of every tensor that an operation
takes or returns, until the storage is freed. It does not see what operations allocate inside
themselves, nor what the transport of messages does.
"""

from __future__ import annotations

import weakref
from typing import Any

from ledger import BODIES
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode  # documented by this path


class LiveBytes(TorchDispatchMode):
    """Within its `with`, the bytes of all storages that are alive, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    @property
    def now(self) -> int:
        """Bytes that are alive. (A storage may change its size, as `fully_shard`'s do.)"""
        alive = (storage() for storage in list(self._storages.values()))
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and look at the storages of its tensors."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes again as what a DTensor makes of it
        if func.namespace == "pentameter":
            with self:
                result = BODIES[func.name().partition("::")[2]](*args)
        else:
            result = func(*args, **(kwargs or {}))
        self._see((args, result))
        self.most = max(self.most, self.now)
        return result

    def _see(self, found: Any) -> None:
        if isinstance(found, (tuple, list)):
            for each in found:
                self._see(each)
        elif isinstance(found, Tensor) and found.device.type != "meta":
            storage = found.untyped_storage()
            number = id(storage)
            if number not in self._storages:
                self._storages[number] = weakref.ref(
                    storage, lambda _: self._storages.pop(number, None)
                )
