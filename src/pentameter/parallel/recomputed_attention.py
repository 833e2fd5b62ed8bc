"""Attention of a CPU in compiled blocks that are computed again, without the generator's state.

PyTorch marks all of its fused attention as drawing random numbers. What is marked so and computed
again is given the generator's state of the forward pass, which a graph returns after everything
else; where parameters are divided among processes that is their DeviceMesh, and torch 2.13 then
takes the mesh for a tensor. On a CPU fused attention drops nothing, and so needs no state. On a GPU
states are inputs of a graph, and no result of it.

Importing this imports PyTorch's compiler, which takes half a second.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

MARKED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_library = torch.library.Library("pentameter", "FRAGMENT")
_library.define("recomputed_attention" + str(MARKED._schema).removeprefix(MARKED.name()))
_library.impl("recomputed_attention", MARKED, "CompositeExplicitAutograd")
torch.library.register_fake("pentameter::recomputed_attention", MARKED, lib=_library)
UNMARKED = torch.ops.pentameter.recomputed_attention.default
"""The same operation without the mark; and without a gradient, which a graph of both passes has."""
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


class WithoutGenerator(CustomGraphPass):
    """A pass over the graph of the forward and the backward pass, for `torch.compile`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replace attention that is computed again by the operation without the mark."""
        for node in graph.find_nodes(op="call_function", target=MARKED):
            if node.meta.get("recompute") in _AGAIN:
                node.target = UNMARKED

    def uuid(self) -> bytes:
        """The name of this pass in the cache of compiled graphs."""
        return get_hash_for_files((__file__,))
