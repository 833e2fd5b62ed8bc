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
        self.watches = True
        """Whether `most` is kept up."""
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._sizes: dict[int, int] = {}
        """Bytes of each when an operation last took or returned it."""

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
        body = BODIES.get(func.name().partition("::")[2])
        if func.namespace == "pentameter" and body is not None:
            with self:
                result = body(*args)
        else:
            result = func(*args, **(kwargs or {}))
        if self._sees_more((args, result)) and self.watches:  # adding all up takes long
            self.most = max(self.most, self.now)
        return result

    def _sees_more(self, found: Any) -> bool:
        """Take in the storages of tensors; True if one is new or has another size."""
        if isinstance(found, (tuple, list)):
            return sum(self._sees_more(each) for each in found) > 0  # of all: `any` would stop
        if not isinstance(found, Tensor) or found.device.type == "meta":
            return False
        storage = found.untyped_storage()
        number, size = id(storage), storage.nbytes()
        if number not in self._storages:
            self._storages[number] = weakref.ref(storage, lambda _: self._forget(number))
        is_more, self._sizes[number] = self._sizes.get(number) != size, size
        return is_more

    def _forget(self, number: int) -> None:
        self._storages.pop(number, None)
        self._sizes.pop(number, None)
