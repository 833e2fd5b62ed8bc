"""Records that describe an architecture: parameters, activations, operations.

`planning/sub_layers/` lists those in each sub-layer, and `planning/gpt.py` in the whole model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pentameter.config.schema import ModelConfig

Axis = Literal[
    "vocab", "position", "embed", "heads", "kv_heads", "head", "mlp", "experts", "expert_mlp",
    "shared_mlp", "router", "latent", "time", "context", "message", "routed", "received", "rank",
]  # fmt: skip
"""The logical axis along a dimension of a parameter or an activation.

`heads`: all heads' channels, head by head; H·K in the attention output, or (H, 3, K) flattened in
the fused query, key and value projection. `kv_heads`: the same for keys and values that several
queries share, (G, 2, K) flattened. `head`: the channels in one head. `experts`: the experts in a
layer; `expert_mlp`: an expert's inner width, and `shared_mlp` that of the experts that every token
takes; `router`: a router's numbers per token; `latent`: those from which latent attention computes
keys and values, or queries. `time`: the residual stream's tokens, which can be processed
independently. `context`: all tokens in a sequence, as the matmuls around attention read them.
`message`: the residual stream's tokens as pipeline stages send them. `routed`: the tokens that a
rank sends to experts; `received`: those whose rows its experts get, the mean over ranks. `rank`:
the inner dimension between an adapter's two matrices.
`AXIS_DIMENSIONS` in `planning/layouts/sharding.py` says which mesh dimensions shard each axis.
"""

ActivationType = Literal["weights", "stream", "products", "softmax", "float32", "bool"]
"""An activation's dtype: `weights`, `stream` (the residual stream's), `products` (matmul inputs'),
`softmax` (the weights', but at least float32), or a fixed one."""

Role = Literal[
    "token_embedding", "position_embedding", "norm", "head_norm", "sinks", "column_parallel",
    "row_parallel", "head",
]  # fmt: skip
"""The part that an operation's module has in tensor parallelism. A `column_parallel` linear maps
the residual stream to an inner width (heads, or the feed-forward width), which is sharded. A
`row_parallel` linear maps that width back; its partial results are summed into the stream.
`head_norm` normalizes queries or keys; `sinks` gives each head its sink (a score beside the keys'
that takes part in the softmax and adds no value)."""
INNER_AXES = frozenset({"heads", "kv_heads", "mlp", "expert_mlp", "shared_mlp"})
"""Axes between a sub-layer's two matrices, invisible outside that sub-layer."""
IGNORED_TARGET = -1
"""A target id that the loss skips: padding, and tokens that the loss mask excludes."""

OperationKind = Literal[
    "look_up", "norm", "product", "rotation", "sinks", "attention", "activation", "dropout", "head"
]


@dataclass(frozen=True)
class Init:
    """A parameter's initial values: the kind of distribution, and `scale`, the standard deviation
    for `normal` or the bound ±scale for `uniform`. The kind `own` keeps the values that the
    parameter's module sets itself. A frozen record."""

    kind: Literal["normal", "uniform", "zeros", "ones", "own"]
    scale: float = 0.0


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the model before any sharding, a frozen record. `axes` names the logical
    axis along each dimension in `shape`; `layer` is its block's index, None outside the blocks.
    `decay` says whether weight decay applies: to matrices, as in GPT-2."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    init: Init
    decay: bool
    layer: int | None = None
    is_trained: bool = True
    is_state: bool = False
    """Whether it is training state without a gradient, such as the tokens' fractions that a router
    balances by. It then counts as no weight."""
    n_chosen: int | None = None
    """Experts (entries along the first dimension) that one token is multiplied with; None for
    all."""
    sums_over: tuple[Axis, ...] = ("context",)
    """Activation axes over which the parameter's gradient is a sum, besides the parameter's own
    axes. If such an axis is sharded and the parameter is not, each rank computes a partial sum."""

    @property
    def n_elements(self) -> int:
        """The parameter's element count."""
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a matrix, or one for each expert; else it is a bias or a norm's
        weight."""
        return len(self.shape) - ("experts" in self.axes) == 2

    @property
    def n_active(self) -> int:
        """Number of elements that take part for one token: all, except in experts, of which a token
        goes only to some."""
        if self.n_chosen is None:
            return self.n_elements
        return self.n_chosen * math.prod(self.shape[1:])

    @property
    def is_block_matrix(self) -> bool:
        """Whether the parameter is a 2-D matrix within a block, but not a router's, which has no
        weight decay."""
        return self.layer is not None and len(self.shape) == 2 and self.decay

    @property
    def is_orthogonalized(self) -> bool:
        """Whether Muon updates the parameter: a matrix within a block, or one for each expert, but
        no router's, and no gate's of a single row."""
        is_in_block = self.layer is not None and self.is_matrix and self.decay
        return is_in_block and "router" not in self.axes


@dataclass(frozen=True)
class ActivationTensor:
    """Description of an activation for one sequence, as costs are counted from it: its shape
    (tokens, numbers per token), the logical axis along each dimension, and its dtype."""

    name: str
    shape: tuple[int, int]
    axes: tuple[Axis, Axis]
    dtype: ActivationType


CollectiveKind = Literal[
    "gather", "sum", "mean_squares", "softmax", "attend", "dispatch", "combine", "tokens"
]


@dataclass(frozen=True)
class Collective:
    """Communication that an operation causes along each mesh dimension that shards `axis`; `tensor`
    is the activation that is sent.

    `gather`: the operation needs all tokens of the input `tensor`, whose gradient is then a partial
    sum on each rank. `sum`: the result `tensor` is a partial sum on each rank. `mean_squares`: a
    norm sums `tensor`, numbers per token, over ranks. `softmax`: a loss over the logits `tensor`.
    `attend`: attention needs the keys and values for all tokens. `dispatch`:
    each token's rows are sent to the ranks that hold its experts; `combine`: their results are sent
    back; `tokens`: ranks with the same tokens shard these among themselves for that.
    """

    kind: CollectiveKind
    axis: Axis
    tensor: ActivationTensor


@dataclass(frozen=True)
class Operation:
    """One operation in the forward pass, a frozen record from which costs are counted: the tensors
    that it reads, computes and saves, its parameters and its communication. `head` is the last
    matmul and the loss together, because its logits may be computed in chunks. Additions and
    reshapes cost next to nothing and are left out."""

    name: str
    kind: OperationKind
    layer: int | None
    """The index of its block; None outside the blocks."""
    reads: tuple[ActivationTensor, ...]
    result: ActivationTensor
    parameters: tuple[ParameterSpec, ...] = ()
    contracts: Axis | None = None
    """The axis that a matmul sums over. If this axis is sharded, the result is a partial sum."""
    saves: tuple[ActivationTensor, ...] = ()
    """Tensors saved for the backward pass, besides parameters."""
    saves_by_blocks: tuple[ActivationTensor, ...] = ()
    """Tensors that attention saves instead of `saves`, if its kernel works block by block and never
    materializes the attention weights."""
    collectives: tuple[Collective, ...] = ()
    token_products: int = 0
    """Multiplications between activations (queries · keys, weights · values), per token in a full
    context."""
    reads_gradient: bool = True
    """Whether the backward pass computes the gradient for this operation's result."""
    gives_gradient: bool = True
    """Whether the backward pass also computes the gradients for its inputs. It does not if nothing
    before the operation is trained."""

    @property
    def role(self) -> Role | None:
        """The operation's Role in tensor parallelism. None if it has no parameters, or if every
        rank multiplies its own tokens with unsharded matrices, as in a router or in experts."""
        if not self.parameters:
            return None
        match self.kind:
            case "head" | "sinks" as role:
                return role
            case "look_up":
                is_table = "vocab" in self.parameters[0].axes
                return "token_embedding" if is_table else "position_embedding"
            case "product" if "time" in self.parameters[0].sums_over:
                return None  # every rank multiplies its own tokens of the stream
            case "norm":
                return "head_norm" if self.result.axes[1] in INNER_AXES else "norm"
            case _:
                return "row_parallel" if self.contracts in INNER_AXES else "column_parallel"

    @property
    def is_trained(self) -> bool:
        """Whether any parameter is trained, so that the backward pass computes its gradient."""
        return any(spec.is_trained for spec in self.parameters)

    @property
    def weight_products(self) -> int:
        """Multiplications per token with elements of its matrices; 0 for a look-up."""
        if self.kind == "look_up":
            return 0
        return sum(spec.n_active for spec in self.parameters if spec.is_matrix)


def residual_stream(
    model: ModelConfig, name: str, dtype: ActivationType = "stream"
) -> ActivationTensor:
    """Return an ActivationTensor called `name` for the residual stream, (T, D) per sequence."""
    shape = (model.context_length, model.d_model)
    return ActivationTensor(name, shape, ("time", "embed"), dtype)
