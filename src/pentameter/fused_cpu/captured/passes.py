"""A step's passes as operations that are captured once and then replayed, as a CUDA graph replays
kernels: Python, autograd and `malloc` take a fifth of a small step on a CPU, and its other threads
wait meanwhile.

While a function runs for the first time, the operations below autograd are noted, PyTorch's and the
C++ kernels', and where their tensors lie, in memory of the graph's own. A replay runs them again on
the same memory. Nothing is derived anew, so the results have the same bits.
"""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pentameter.fused_cpu.captured.matmul_parts import in_parts
from pentameter.fused_cpu.captured.native_calls import NativeCalls
from pentameter.fused_cpu.native import NativeCall, telling
from pentameter.model.compiled import CaptureError, capturing
from pentameter.tree import Tree, leaves, map_leaves

ALIGNMENT = 64  # bytes: a line of a cache
CHUNK = 256 * 2**20  # bytes; those that are never written to take no memory

Operation = tuple[Callable[..., object], Sequence[Any], Mapping[str, Any]]
"""Type of an operation to replay: the function, its arguments, and those by name."""


class CapturedPasses:
    """Forward and backward passes: a function of tensors that leaves gradients in the `.grad` of a
    module's parameters, called like the function itself. The first call captures its operations,
    later ones replay them.

    The result lies where the next call writes its own. A call captures anew if tensors have other
    shapes, or the module's lie elsewhere, than in the call before. The function itself runs where a
    replay would differ from it: where there are gradients to add to, where somebody still holds one
    of an earlier call, as a hook or an optimizer may, for a profiler, which is to see more than
    operations, and always if it cannot be captured.
    """

    def __init__(self, function: Callable[..., Tensor], module: nn.Module) -> None:
        self._function = function
        self._module = module
        self._graph: _Graph | None = None
        self._kind: object = None
        self._can_capture = True

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        """Return the function's result for these arguments."""
        parameters, buffers = list(self._module.parameters()), list(self._module.buffers())
        adds = any(each.grad is not None for each in parameters)
        if adds or not self._can_capture or torch.autograd._profiler_enabled():
            return self._function(*arguments)
        kind = [None if x is None else (x.shape, x.dtype) for x in arguments]
        places = [(x.data_ptr(), x.requires_grad) for x in (*parameters, *buffers)]
        if self._graph is not None and self._kind == (kind, places):
            if self._graph.is_held:
                return self._function(*arguments)
            return self._graph.replay(arguments)
        self._graph, self._kind = None, (kind, places)  # there is memory for one
        before = [each.clone() for each in buffers]
        try:
            self._graph = _Graph(self._function, arguments, parameters)
        except CaptureError:
            self._can_capture = False
            for parameter in parameters:
                parameter.grad = None
            for buffer, values in zip(buffers, before, strict=True):
                buffer.copy_(values)
            return self._function(*arguments)
        return self._graph.result


class _Graph:
    """The operations of one call of a function, its result, and the gradients that it has left in
    the parameters' `.grad`. Raises CaptureError if the function cannot be captured."""

    def __init__(
        self,
        function: Callable[..., Tensor],
        arguments: Sequence[Tensor | None],
        parameters: Sequence[nn.Parameter],
    ) -> None:
        self._arguments = [None if x is None else x.clone() for x in arguments]
        self._parameters = parameters
        capture = _Capture()
        with capturing(), telling(capture.note_call), capture:
            self.result = function(*self._arguments)
        # After the capture: what lasts, made in its midst, would keep the heap from shrinking.
        self._operations = _together(map(_in_parts, capture.operations))
        self._outside = capture.outside
        self._memory, self._gradients = capture.memory, [each.grad for each in parameters]
        self._regions = [None if x is None else self._memory.region(x) for x in self._gradients]
        self._chunks_of_gradients = {each.of for each in self._regions if each is not None}
        self._hand_out()

    def replay(self, arguments: Sequence[Tensor | None]) -> Tensor:
        """Run the operations again, for arguments of the same shapes, and return the result."""
        for own, x in zip(self._arguments, arguments, strict=True):
            if own is not None and x is not None:
                own.copy_(x)
        with torch.no_grad():
            for run, given, named in self._operations:
                run(*given, **named)
        self._hand_out()
        return self.result

    @property
    def is_held(self) -> bool:
        """Whether gradients that were left in `.grad`, or views of them, are still held."""
        return any(each() is not None for each in self._handed_out)

    def _hand_out(self) -> None:
        """Leave the gradients in the parameters' `.grad`, as tensors over new arrays of the same
        memory: these live as long as anything holds one of the tensors."""
        arrays = self._memory.arrays()
        self._handed_out = [weakref.ref(each) for each in arrays]
        chunks = [torch.from_numpy(each) for each in arrays]
        typed = {(n, dtype): chunks[n].view(dtype) for n, dtype in self._chunks_of_gradients}
        each = zip(self._parameters, self._gradients, self._regions, strict=True)
        for parameter, own, region in each:
            parameter.grad = own if region is None else typed[region.of].as_strided(*region.where)


class _Capture(TorchDispatchMode):
    """Context manager that notes the operations within it, and has their results lie in memory of
    its own. What it notes does not hold that memory: once nothing else holds a tensor, a later one
    takes its place, as `malloc` would give it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation | NativeCall] = []
        self.outside: list[Tensor] = []
        """Tensors that operations read and that lie elsewhere, such as weights: they must stay."""
        self.memory = _Memory()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports its compiler to keep this class out of compiled code

    def note_call(self, call: NativeCall, arguments: Sequence[Any]) -> None:
        """Note the call of a C++ kernel, with its `arguments` as they were given."""
        self.operations.append(call)
        self._keep_outside(arguments)

    def __torch_dispatch__(
        self,
        operation: Any,
        types: Sequence[type],
        given: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation of PyTorch's, and note it unless it makes a view or takes memory. Raises
        CaptureError if it makes a number of a tensor, on which other operations may depend."""
        named = named or {}
        result = operation(*given, **named)
        tensors = self._keep_outside([*given, *named.values()])
        given, named = map_leaves(self._not_holding, (list(given), dict(named)))
        if operation._schema.is_mutable:
            self.operations.append((operation, given, named))
            return result
        if not all(isinstance(x, Tensor) for x in leaves(result)):
            if tensors:
                raise CaptureError(f"{operation} makes a number of a tensor")
            return result
        held = {x.untyped_storage().data_ptr() for x in tensors}
        if any(x.untyped_storage().data_ptr() in held for x in leaves(result)):
            return result
        own = map_leaves(self.memory.take_like, result)
        if not str(operation).startswith(("aten.empty", "aten.new_empty")):
            _copy(own, result)
            to = map_leaves(self._not_holding, own)
            if operation in _MATMULS:
                self.operations.append((_MATMULS[operation], given, {"out": to}))
            else:
                self.operations.append((_run_into, (to, operation, given, named), {}))
        return own

    def _keep_outside(self, arguments: Sequence[Any]) -> list[Tensor]:
        """Keep the tensors among an operation's arguments that lie elsewhere. Return all."""
        tensors = [x for x in leaves(list(arguments)) if isinstance(x, Tensor)]
        self.outside += [x for x in tensors if self.memory.alias(x) is None]
        return tensors

    def _not_holding(self, x: Any) -> Any:
        """Return a tensor of the graph's memory as one that does not hold its place; anything else
        as it is."""
        if not isinstance(x, Tensor):
            return x
        alias = self.memory.alias(x)
        return x.detach() if alias is None else alias


_MATMULS = {torch.ops.aten.mm.default: torch.mm, torch.ops.aten.bmm.default: torch.bmm}
"""Maps an operation to the function that writes its result to `out`: for nearly all that a step
calls of PyTorch's. The results of the others, which are small, are copied."""


def _in_parts(operation: Operation | NativeCall) -> Operation | NativeCall:
    """Return a matmul as one in parts, where that can be, and another operation as it is."""
    if isinstance(operation, NativeCall) or operation[0] not in _MATMULS.values():
        return operation
    return in_parts(operation[2]["out"], *operation[1]) or operation


def _together(operations: Iterable[Operation | NativeCall]) -> list[Operation]:
    """Return the operations with C++ calls that follow one another as one of them."""
    found: list[Operation] = []
    calls: list[NativeCall] = []
    for each in operations:
        if isinstance(each, NativeCall):
            calls.append(each)
            continue
        if calls:
            found.append((NativeCalls(calls), (), {}))
            calls = []
        found.append(each)
    return [*found, (NativeCalls(calls), (), {})] if calls else found


def _run_into(to: Tree, operation: Any, given: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Run an operation, and write its results to the tensors `to`."""
    _copy(to, operation(*given, **named))


def _copy(to: Tree, results: Tree) -> None:
    for own, x in zip(leaves(to), leaves(results), strict=True):
        own.copy_(x)


class _Region(NamedTuple):
    """The region of a tensor in a memory: the number of its chunk, which is seen as numbers of a
    dtype, and the shape, the strides and the first number there."""

    of: tuple[int, torch.dtype]
    where: tuple[torch.Size, tuple[int, ...], int]


class _Memory:
    """Memory of a graph's own. A tensor takes the first place that is large enough, and gives it
    back when nothing holds the tensor any more."""

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._free: list[tuple[int, int]] = []
        """(address, bytes) of the free places, by address, none beside another."""

    def take_like(self, x: Tensor) -> Tensor:
        """Return a tensor of x's shape, strides and dtype. What is in it means nothing."""
        n_bytes = -(-max(1, x.untyped_storage().nbytes()) // ALIGNMENT) * ALIGNMENT
        place = self._take(n_bytes)
        # PyTorch holds the array as long as a tensor's storage lives.
        weakref.finalize(place, self._give_back, place.ctypes.data, n_bytes).atexit = False
        return torch.from_numpy(place).view(x.dtype).as_strided(x.shape, x.stride())

    def alias(self, x: Tensor) -> Tensor | None:
        """Return a tensor that lies where x does without holding the place; None if x lies
        elsewhere."""
        if (region := self.region(x)) is None:
            return None
        number, dtype = region.of
        return self._chunks[number].view(dtype).as_strided(*region.where)

    def region(self, x: Tensor) -> _Region | None:
        """Return the region of a tensor in this memory; None if it lies elsewhere."""
        for number, chunk in enumerate(self._chunks):
            offset = x.data_ptr() - chunk.data_ptr()
            if 0 <= offset < len(chunk):
                return _Region((number, x.dtype), (x.shape, x.stride(), offset // x.itemsize))
        return None

    def arrays(self) -> list[np.ndarray]:
        """Return a new array over each chunk of the memory."""
        return [chunk.numpy()[:] for chunk in self._chunks]

    def _take(self, n_bytes: int) -> np.ndarray:
        index = next((i for i, (_, n_free) in enumerate(self._free) if n_free >= n_bytes), None)
        if index is None:
            size = max(n_bytes, CHUNK, sum(map(len, self._chunks)))  # few, as no tensor lies in two
            self._chunks.append(torch.empty(size, dtype=torch.uint8))
            self._give_back(self._chunks[-1].data_ptr(), size)
            return self._take(n_bytes)
        address, n_free = self._free.pop(index)
        if n_free > n_bytes:
            self._free.insert(index, (address + n_bytes, n_free - n_bytes))
        chunk = next(each for each in self._chunks if 0 <= address - each.data_ptr() < len(each))
        first = address - chunk.data_ptr()
        return chunk.numpy()[first : first + n_bytes]

    def _give_back(self, address: int, n_bytes: int) -> None:
        """Make a place free, in one with the free places beside it."""
        i = bisect(self._free, (address, n_bytes))
        if i < len(self._free) and self._free[i][0] == address + n_bytes:
            n_bytes += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == address:
            i -= 1
            address, n_before = self._free.pop(i)
            n_bytes += n_before
        self._free.insert(i, (address, n_bytes))
