"""Ring attention: keys and values travel round a ring of ranks, overlapped with attention to the
block at hand.

After Liu et al. 2023 ("Ring attention with blockwise transformers for near-infinite context"). A
rank has the queries, keys and values for some chunks of the sequence. In every step it attends to
one rank's keys and values and passes them on; block outputs are merged by their log-sum-exps, so
that no rank ever holds attention weights for more than a block. In the backward pass keys and
values go round once more, together with their gradients.

The forward and backward passes are PyTorch custom operations (`torch.library`), which a compiled
model calls as they are.

A block is the attention of some of this rank's queries to some of the keys that it holds in a step:
a rectangle of the sequence's T × T attention matrix.

Shapes: B batch rows, H heads, G key and value heads, K head size (never keys); T this rank's
tokens, C tokens in a chunk; Q queries and S keys in a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pentameter.model.attention.dot_product import (
    ALL_KEYS,
    DotProductAttention,
    Weighting,
    cuda_capability,
    for_each_head,
)
from pentameter.model.dropout import WeightsDropout
from pentameter.parallel.context.block_kernels import BlockKernel, block_kernel, over_query_heads
from pentameter.parallel.mesh import group_named
from pentameter.parallel.waits import Arriving, pass_on

TILE = 1024
"""Largest number of queries, and of keys, in a block whose attention weights are materialized."""


class RingAttention(DotProductAttention):
    """Causal attention for context parallelism in ring mode, a DotProductAttention: each rank of a
    group has some chunks of the sequence, and keys and values travel around the ring.

    `chunk_starts` are the positions at which chunks start, rank after rank; all chunks have the
    same size. Without a group, one rank has all chunks and communicates nothing, as in a trial. On
    a GPU, `fused_dtype` is the dtype in which PyTorch's fused attention computes each block, None
    to materialize its weights; on a CPU it is always fused.
    """

    equal_widths = True

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        chunk_starts: list[int],
        fused_dtype: torch.dtype | None = None,
    ) -> None:
        self._group_name = "" if group is None else group.group_name
        self._starts, self._fused_dtype = chunk_starts, fused_dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: Weighting = ALL_KEYS) -> Tensor:
        """Return the attention output (B, H, T, K) for q (B, H, T, K), k and v (B, G, T, K).
        `how.positions` are ignored, as `chunk_starts` determines them. Collective."""
        dropout = how.dropout or (None, 0.0, 0, 0)
        fused = q.device.type == "cpu" or q.dtype is self._fused_dtype
        ring = (self._starts, how.window or 0, self._group_name, fused)
        out, _ = ring_attention(q, k, v, how.sinks, *dropout, *ring)
        return out


class _Block(NamedTuple):
    """One rectangle of the attention matrix: Q queries and S keys, by their slices in the rank's
    local tokens and by the position in the sequence of the first of each. A query sees the keys at
    or before its own position that its window reaches."""

    queries: slice
    keys: slice
    first_query: int
    first_key: int
    window: int
    """Number of tokens that a query sees, itself included; 0 for no window."""

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the positions in the sequence of the queries (Q,) and the keys (S,)."""
        sides = ((self.first_query, self.queries), (self.first_key, self.keys))
        query, key = (
            torch.arange(first, first + each.stop - each.start, device=device)
            for first, each in sides
        )
        return query, key

    @property
    def is_causal(self) -> bool:
        """Whether the block is on the diagonal: queries see no keys after their own."""
        return self.first_query == self.first_key

    def hidden(self, device: torch.device) -> Tensor | None:
        """Return the mask, bool (Q, S), true where a query does not see a key; None if every query
        sees every key."""
        last_query = self.first_query + self.queries.stop - self.queries.start - 1
        reaches_back = not self.window or last_query - self.first_key < self.window
        if reaches_back and not self.is_causal:
            return None
        query, key = self.positions(device)
        after = key > query[:, None]
        return after if reaches_back else after | (key <= query[:, None] - self.window)


def attend_around(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    row_keys: Tensor | None,
    p: float,
    head_offset: int,
    context_length: int,
    chunk_starts: list[int],
    window: int,
    group_name: str,
    fused: bool,
) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, H, T, K) and the scores' log-sum-exps (B, H, T) for q
    (B, H, T, K), k and v (B, G, T, K), T being this rank's tokens. Collective over the group.

    `sinks` (H,) are each head's score for one more key, whose value is 0; None for none.

    `row_keys`, int32 (B, 2), `p` (drop rate), `head_offset` (first local head's number) and
    `context_length` describe attention dropout; without keys there is none. `chunk_starts` are the
    positions at which chunks start, rank after rank. `window` is how many tokens a query sees, 0
    for all. `fused` permits PyTorch's fused attention.
    """
    dropout = _dropout(row_keys, p, head_offset, context_length)
    ring = _Ring(group_name, chunk_starts, window)
    kernel = _kernel(q, dropout, window, fused=fused)
    out = torch.zeros(q.shape, dtype=_precise(q), device=q.device)
    sums = torch.full(q.shape[:3], float("-inf"), dtype=out.dtype, device=q.device)
    if sinks is not None:  # as if a block of one key, with the value 0, were merged already
        sums.copy_(sinks[:, None])
    travelling = torch.stack((k, v))
    for step in range(ring.size):
        arriving = ring.pass_on(travelling) if step < ring.size - 1 else None
        keys, values = travelling
        for block in ring.blocks(step, q.shape[2], explicit=kernel is None):
            block_qkv = (q[:, :, block.queries], keys[:, :, block.keys], values[:, :, block.keys])
            _merge(out, sums, block.queries, *_attend_block(*block_qkv, block, kernel, dropout))
        if arriving is not None:
            travelling = arriving.wait()
    return out.to(q.dtype), sums


def differentiate_around(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    row_keys: Tensor | None,
    p: float,
    head_offset: int,
    context_length: int,
    chunk_starts: list[int],
    window: int,
    group_name: str,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients for q (B, H, T, K), k and v (B, G, T, K), given `grad`, the gradient for
    the output `out` (B, H, T, K), and its log-sum-exps `sums` (B, H, T). Collective over the group.

    `row_keys`, int32 (B, 2), `p` (drop rate), `head_offset` (first local head's number) and
    `context_length` describe attention dropout; without keys there is none. `chunk_starts` are the
    positions at which chunks start, rank after rank. `window` is how many tokens a query sees, 0
    for all. `fused` permits PyTorch's fused attention.

    The gradients for keys and values travel one step behind them, and each rank adds its
    contribution; the rank that owns them adds its own at the end.
    """
    dropout = _dropout(row_keys, p, head_offset, context_length)
    ring = _Ring(group_name, chunk_starts, window)
    kernel = _kernel(q, dropout, window, fused=fused)
    q_grad = torch.zeros(q.shape, dtype=_precise(q), device=q.device)
    travelling = torch.stack((k, v))
    own_grads = torch.empty(0)
    arriving_grads: Arriving | None = None
    for step in range(ring.size):
        arriving = ring.pass_on(travelling) if step < ring.size - 1 else None
        keys, values = travelling
        added = torch.zeros(travelling.shape, dtype=q_grad.dtype, device=q.device)
        for block in ring.blocks(step, q.shape[2], explicit=kernel is None):
            grads = _differentiate_block(
                grad[:, :, block.queries],
                q[:, :, block.queries],
                out[:, :, block.queries],
                sums[:, :, block.queries],
                keys[:, :, block.keys],
                values[:, :, block.keys],
                block,
                kernel,
                dropout,
            )
            q_grad[:, :, block.queries] += grads[0]
            added[0, :, :, block.keys] += grads[1]
            added[1, :, :, block.keys] += grads[2]
        if step == 0:
            own_grads = added
        else:
            if arriving_grads is not None:
                added += arriving_grads.wait()
            arriving_grads = ring.pass_on(added)
        if arriving is not None:
            travelling = arriving.wait()
    if arriving_grads is not None:
        own_grads += arriving_grads.wait()
    k_grad, v_grad = own_grads.to(q.dtype)
    return q_grad.to(q.dtype), k_grad.clone(), v_grad.clone()


ring_attention = torch.library.custom_op(
    "pentameter::ring_attention", attend_around, mutates_args=()
)
ring_attention_backward = torch.library.custom_op(
    "pentameter::ring_attention_backward", differentiate_around, mutates_args=()
)


@ring_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        q.shape[:3], dtype=_precise(q)
    )


@ring_attention_backward.register_fake
def _(_: Tensor, *qkv: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in qkv[:3])


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, row_keys, *rest = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, row_keys)
    ctx.rest = rest


def _backward(ctx: Any, grad: Tensor, _sums_grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients for q (B, H, T, K), k and v (B, G, T, K) and the sinks (H,), and None
    for the other arguments."""
    q, k, v, sinks, out, sums, row_keys = ctx.saved_tensors
    grads = ring_attention_backward(grad, q, k, v, out, sums, row_keys, *ctx.rest)
    sinks_grad: Tensor | None = None
    if sinks is not None:  # that of a score whose weight is exp(sink - sum), and whose value is 0
        means = (grad.to(sums.dtype) * out).sum(-1)
        sinks_grad = -((sinks[:, None] - sums).exp() * means).sum((0, 2)).to(sinks.dtype)
    return (*grads, sinks_grad, None, *(None for _ in ctx.rest))


ring_attention.register_autograd(_backward, setup_context=_keep_for_backward)


class _Ring:
    """The schedule of one rank's ring: which blocks it computes in which step. The group's name is
    empty for a ring of one. `chunk_starts` are the positions at which the sequence's chunks start,
    rank after rank; `window` is how many tokens a query sees, 0 for all."""

    def __init__(self, group_name: str, chunk_starts: Sequence[int], window: int) -> None:
        self._window = window
        self._group = group_named(group_name) if group_name else None
        self.size, self._rank = 1, 0
        if self._group is not None:
            self.size, self._rank = self._group.size(), self._group.rank()
        n_chunks = len(chunk_starts) // self.size
        self._starts = [
            chunk_starts[rank * n_chunks : (rank + 1) * n_chunks] for rank in range(self.size)
        ]

    def pass_on(self, tensor: Tensor) -> Arriving:
        """Start to send a tensor to the next rank in the ring, and to receive one of the same shape
        from the previous rank. Return the exchange under way. Collective."""
        assert self._group is not None
        return pass_on(tensor, self._group)

    def blocks(self, step: int, n_tokens: int, *, explicit: bool) -> Iterator[_Block]:
        """Yield the blocks between this rank's `n_tokens` queries and the keys that it holds at
        `step`: those of the rank `step` places before it in the ring. Blocks whose keys no query
        sees are left out. Blocks are whole chunks, or tiles up to TILE tokens if `explicit`, that
        is, if attention weights are materialized."""
        queries = self._starts[self._rank]
        keys = self._starts[(self._rank - step) % self.size]
        size = n_tokens // len(queries)
        tile = min(size, TILE) if explicit else size
        for first_query, query_slice in _tiles(queries, size, tile):
            for first_key, key_slice in _tiles(keys, size, tile):
                last_key = first_key + key_slice.stop - key_slice.start - 1
                is_near = not self._window or first_query - last_key < self._window
                if first_key <= first_query and is_near:
                    yield _Block(query_slice, key_slice, first_query, first_key, self._window)


def _tiles(starts: Sequence[int], size: int, tile: int) -> Iterator[tuple[int, slice]]:
    """Yield (first position, slice) for each tile, the slice being into the rank's local tokens.
    Tiles have up to `tile` tokens, and cover chunks of `size` tokens that start at the positions
    `starts`."""
    for number, start in enumerate(starts):
        for offset in range(0, size, tile):
            n_tokens = min(tile, size - offset)
            first = number * size + offset
            yield start + offset, slice(first, first + n_tokens)


def _merge(out: Tensor, sums: Tensor, queries: slice, added: Tensor, added_sums: Tensor) -> None:
    """Merge another block's result into the running one, in place. `added` (B, H, Q, K) is that
    block's output and `added_sums` (B, H, Q) its log-sum-exps; `out` (B, H, T, K) and `sums`
    (B, H, T) are the running output and log-sum-exps, of which the slice `queries` changes."""
    old = sums[:, :, queries]
    new = torch.logaddexp(old, added_sums.to(old.dtype))
    finite = new.clamp(min=torch.finfo(new.dtype).min)  # a query that has seen no key yet: -inf
    weight_old, weight_added = (old - finite).exp(), (added_sums - finite).exp()
    mixed = out[:, :, queries] * weight_old[..., None] + added * weight_added[..., None]
    out[:, :, queries] = mixed
    sums[:, :, queries] = new


def _kernel(
    q: Tensor, dropout: WeightsDropout | None, window: int, *, fused: bool
) -> BlockKernel | None:
    """Return the fused attention for blocks of queries q (B, H, T, K); None if attention weights
    must be materialized: with dropout, with a window, unless `fused`, or for want of one."""
    if dropout is not None or window > 0 or not fused:
        return None
    return block_kernel(q.device.type, cuda_capability(q.device), q.dtype, q.shape[-1])


def _attend_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: _Block,
    kernel: BlockKernel | None,
    dropout: WeightsDropout | None,
) -> tuple[Tensor, Tensor]:
    """Return a block's attention output (B, H, Q, K) and its scores' log-sum-exps (B, H, Q), for
    queries q (B, H, Q, K), and keys k and values v (B, G, S, K); K is the head size. `block` says
    where in the sequence they are, which decides what a query sees. The output is normalized over
    this block's keys alone; `_merge` combines blocks by the log-sum-exps. `dropout` drops attention
    weights after the normalization, so that the log-sum-exps include the dropped ones; None drops
    none. Without a `kernel` the weights are materialized."""
    with torch.autocast(q.device.type, enabled=False):
        if kernel is not None:
            return kernel.attend(q, k, v, block.is_causal)
        k, v = for_each_head(k, q), for_each_head(v, q)
        scores = _scores(q, k, block)
        sums = scores.logsumexp(-1)
        weights = _weights(scores, sums)
        if dropout is not None:
            weights = dropout(weights, *block.positions(q.device))
        return weights.to(v.dtype) @ v, sums


def _differentiate_block(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    sums: Tensor,
    k: Tensor,
    v: Tensor,
    block: _Block,
    kernel: BlockKernel | None,
    dropout: WeightsDropout | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's contributions to the gradients for q (B, H, Q, K), k and v (B, G, S, K),
    given `grad`, the gradient for the output (B, H, Q, K); K is the head size.

    `out` (B, H, Q, K) and the log-sum-exps `sums` (B, H, Q) are those of these queries over the
    full context, not the block alone: an attention weight is exp(score - sum) in any block.
    `dropout` is the forward pass's, whose mask is computed again; so is `kernel`.
    """
    n_kv_heads = k.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        if kernel is not None:
            return kernel.differentiate(grad, q, k, v, out, sums, block.is_causal)
        k, v = for_each_head(k, q), for_each_head(v, q)
        weights = _weights(_scores(q, k, block), sums)
        weight_grads = (grad @ v.transpose(-2, -1)).to(weights.dtype)
        left = weights
        if dropout is not None:
            positions = block.positions(q.device)
            left, weight_grads = dropout(weights, *positions), dropout(weight_grads, *positions)
        mean = (grad.to(weights.dtype) * out).sum(-1, keepdim=True)
        score_grads = (weights * (weight_grads - mean)).to(q.dtype)
        scale = q.shape[-1] ** -0.5
        return (
            score_grads @ k * scale,
            over_query_heads(score_grads.transpose(-2, -1) @ q * scale, n_kv_heads),
            over_query_heads(left.to(grad.dtype).transpose(-2, -1) @ grad, n_kv_heads),
        )


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """Return the attention weights exp(score - sum) for scores (B, H, Q, S) and log-sum-exps `sums`
    (B, H, Q); 0 for a query that sees no key at all."""
    return (scores - sums.clamp(min=torch.finfo(sums.dtype).min)[..., None]).exp()


def _scores(q: Tensor, k: Tensor, block: _Block) -> Tensor:
    """Return the scores (B, H, Q, S) for q (B, H, Q, K) and k (B, H, S, K); -inf if a query does
    not see a key."""
    scores = ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).to(_precise(q))
    hidden = block.hidden(q.device)
    return scores if hidden is None else scores.masked_fill(hidden, float("-inf"))


def _precise(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which the results of blocks are summed: the tensor's own, but at least
    float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _dropout(
    row_keys: Tensor | None, p: float, head_offset: int, context_length: int
) -> WeightsDropout | None:
    """Return the dropout on attention weights for one site's keys `row_keys`, int32 (B, 2), drop
    rate `p`, the first local head's number and the context length; None if `row_keys` is None."""
    return None if row_keys is None else WeightsDropout(row_keys, p, head_offset, context_length)
