"""A pair of contexts for `torch.utils.checkpoint`: a block's first pass keeps the results of some
operations, and its second pass gets them, whatever else runs in either.

PyTorch's own pair (`create_selective_checkpoint_contexts`) counts every operation, and refuses one
more in the second pass. Among them are those of FSDP's hooks, which a unit within the block runs
where its state says so: that depends on what was prefetched, and on the micro-batch before. Only
PyTorch's pair can be compiled; FSDP's hooks cannot be, so that blocks with units run eagerly.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy

Results = dict[Any, deque[Any]]
"""Results that are kept, by operation, in the order in which it ran."""


def contexts_that_keep(
    policy: Callable[..., CheckpointPolicy],
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a block's first and second forward pass; `policy` says of which
    operations results are kept. The second pass must run these in the same order."""
    results: Results = defaultdict(deque)
    return _Keeping(policy, results), _Giving(results)


class _Keeping(TorchDispatchMode):
    """Keeps the results of operations that a policy names."""

    def __init__(self, policy: Callable[..., CheckpointPolicy], results: Results) -> None:
        super().__init__()
        self._policy, self._results = policy, results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and keep its result, without what autograd will attach to it."""
        result = func(*args, **(kwargs or {}))
        if self._policy(None, func) is CheckpointPolicy.MUST_SAVE:
            self._results[func].append(tree_map(_detached, result))
        return result


class _Giving(TorchDispatchMode):
    """Returns results that were kept instead of computing them again."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operation's next kept result, or run it if none is kept of its kind."""
        if func in self._results:
            return self._results[func].popleft()
        return func(*args, **(kwargs or {}))


def _detached(result: Any) -> Any:
    """Return a tensor without its history, and anything else as it is."""
    return result.detach() if isinstance(result, Tensor) else result
