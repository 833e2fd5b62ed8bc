"""CPU attention in compiled blocks that are recomputed, without the generator's state.

PyTorch marks all its fused attention as drawing random numbers. When such an operation is
recomputed, it gets the generator state from the forward pass, which a graph returns after all other
outputs. If parameters are sharded, the last output is their DeviceMesh, and torch 2.13 then takes
the mesh for a tensor. Fused attention on a CPU drops nothing, and so needs no state. On a GPU the
states are graph inputs, and never outputs.

Importing this module imports PyTorch's compiler, which takes half a second.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from pentameter.parallel.context.block_kernels import CPU_FORWARD

MARKED = CPU_FORWARD.default
_library = torch.library.Library("pentameter", "FRAGMENT")
_library.define("recomputed_attention" + str(MARKED._schema).removeprefix(MARKED.name()))
_library.impl("recomputed_attention", MARKED, "CompositeExplicitAutograd")
torch.library.register_fake("pentameter::recomputed_attention", MARKED, lib=_library)
UNMARKED = torch.ops.pentameter.recomputed_attention.default
"""CPU attention without PyTorch's mark that it draws random numbers. It has no gradient, which the
joint forward-backward graph already contains."""
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class WithoutGenerator(CustomGraphPass):
    """A `torch.compile` pass over the joint forward-backward graph, after which recomputed CPU
    attention needs no generator state."""

    def __call__(self, graph: fx.Graph) -> None:
        """Change `graph` in place: replace each attention that is recomputed in the backward pass,
        and marked so, by the same operation without the mark, which needs no state of the random
        generator."""
        for node in graph.find_nodes(op="call_function", target=MARKED):
            if node.meta.get("recompute") in _AGAIN:
                node.target = UNMARKED

    def uuid(self) -> bytes:
        """Return this pass's key in the cache of compiled graphs."""
        return get_hash_for_files((__file__,))
