"""Fused causal attention with keyed dropout on its weights, for GPUs: three Triton kernels.

They implement FlashAttention-2 (Dao 2023, "FlashAttention-2: faster attention with better
parallelism and work partitioning", algorithms 1 and 2), with dropout as in FlashAttention (Dao et
al. 2022, appendix B.4). The attention weights exist one tile at a time and are never written to
memory. Neither is the mask: every kernel recomputes it from the batch rows' keys, with the
arithmetic of `keyed.bits`.

Forward, for one head's queries q, keys k and values v, with K the head size and ∘ the element-wise
product:

    S = q·kᵀ / √K, −∞ if hidden          ℓ = log Σ exp S, over each row      P = exp(S − ℓ)
    Z = keep / (1 − p)                   y = (P ∘ Z)·v

ℓ sums all weights, the dropped ones too, so a row that drops every key gives 0 and needs no special
case. Backward, for the gradient g with respect to y:

    dv = (P ∘ Z)ᵀ·g      dP = (g·vᵀ) ∘ Z      D = Σ P ∘ dP = Σ g ∘ y, over each row
    dS = P ∘ (dP − D)    dq = dS·k / √K       dk = dSᵀ·q / √K

One kernel computes dq, one tile of queries at a time; another computes dk and dv, one tile of keys
at a time, for all heads that use the keys. So no two programs add to the same number, and results
do not depend on the order in which they run. Logarithms are to base 2, in which a GPU computes
exponentials.

Importing this file imports Triton, which comes with a PyTorch built for GPUs. A run imports it only
if it can use it. On a CPU, Triton interprets the kernels if TRITON_INTERPRET=1
was set in the environment beforehand.

Shapes: B batch, T tokens, H heads, G KV heads, K head size, W a window.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pentameter import keyed
from pentameter.model.attention.dot_product import DotProductAttention, Weighting
from pentameter.model.dropout import keep_bound, rows_per_block

_MULTIPLIER_1, _SHIFT_1 = tl.constexpr(keyed.MULTIPLIER_1 - 2**32), tl.constexpr(keyed.SHIFT_1)
_MULTIPLIER_2, _SHIFT_2 = tl.constexpr(keyed.MULTIPLIER_2 - 2**32), tl.constexpr(keyed.SHIFT_2)
_MULTIPLIER_3, _SHIFT_3 = tl.constexpr(keyed.MULTIPLIER_3), tl.constexpr(keyed.SHIFT_3)
_MASK_1 = tl.constexpr(keyed.WORD >> keyed.SHIFT_1)
_MASK_2 = tl.constexpr(keyed.WORD >> keyed.SHIFT_2)
_MASK_3 = tl.constexpr(keyed.WORD >> keyed.SHIFT_3)

LOG2_E = math.log2(math.e)


class Tiles(NamedTuple):
    """Sizes for one kernel launch: `own`, rows in the tile that a program computes; `others`, rows
    in each of the tiles that it iterates over; and warps per program."""

    own: int
    others: int
    warps: int


def tiles(head_size: int, element_bytes: int, *, backward: bool) -> Tiles:
    """Return a kernel's Tiles for heads of `head_size` channels and elements of `element_bytes`
    bytes: the largest for which the compiler keeps values in registers and each kernel needs at
    most 99 KiB of shared memory, which GPUs with compute capability 8.6 have.

    `backward` selects the two gradient kernels. Tiles come from a table, not from a timed search:
    the order in which it sums would then depend on the candidate that won.
    """
    # A warp on AMD GPUs is twice as wide.
    few, many = (4, 8) if torch.version.hip is None else (4, 4)
    if element_bytes > 2:
        return Tiles(32, 32, many) if head_size <= 64 else Tiles(32, 16, many)
    if head_size <= 64:
        return Tiles(64, 64, few) if backward else Tiles(128, 64, few)
    return Tiles(64, 32, many) if backward else Tiles(128, 32, many)


@triton.jit
def _bits(index, key_0, key_1):
    """Compute `keyed.bits`, 32 random bits for each int32 number in `index`, with the key words
    key_0 and key_1: the same operations, line by line, on words that wrap. The masks turn an
    arithmetic shift into a logical one."""
    x = index ^ key_0
    x = x * _MULTIPLIER_1
    x = x ^ ((x >> _SHIFT_1) & _MASK_1)
    x = x ^ key_1
    x = x * _MULTIPLIER_2
    x = x ^ ((x >> _SHIFT_2) & _MASK_2)
    x = x * _MULTIPLIER_3
    return x ^ ((x >> _SHIFT_3) & _MASK_3)


@triton.jit
def _numbered(head, positions, key_0, key_1, context_length, ROWS: tl.constexpr):
    """Number a head's attention weights for dropout, as `weight_index` and `keyed.folded` do. For
    each query at `positions` return the number of its first weight within its block, and the two
    words of the key for that block. ROWS: how many queries a block has; 0 if one block has all."""
    if ROWS == 0:
        numbers = (head * context_length + positions) * context_length
        word_0, word_1 = key_0 + tl.zeros_like(numbers), key_1 + tl.zeros_like(numbers)
    else:
        row = tl.zeros_like(positions).to(tl.int64) + head
        row = row * context_length + positions
        numbers = (row % ROWS * context_length).to(tl.int32)
        block = (row // ROWS).to(tl.int32)
        word_0 = tl.where(block == 0, key_0, _bits(2 * block, key_0, key_1))
        word_1 = tl.where(block == 0, key_1, _bits(2 * block + 1, key_0, key_1))
    return numbers, word_0, word_1


@triton.jit
def _load_tile(at, rows, stride, T, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Load `rows` of one head, whose first row is at the pointer `at` and whose rows are `stride`
    elements apart: (rows, COLUMNS), with 0 beyond T rows and K columns."""
    column = tl.arange(0, COLUMNS)
    inside = (rows < T)[:, None] & (column < K)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at + offsets, mask=inside, other=0.0)


@triton.jit
def _store_tile(at, rows, stride, tile, T, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a tile (rows, COLUMNS) in the elements that `_load_tile` would read with the same
    arguments; nothing beyond T rows and K columns."""
    column = tl.arange(0, COLUMNS)
    inside = (rows < T)[:, None] & (column < K)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at + offsets, tile.to(at.dtype.element_ty), mask=inside)


@triton.jit
def _visible(queries, keys, T, window):
    """Return the mask of keys that each query sees: its own and earlier ones, back to its window.
    `queries` and `keys` are token numbers that broadcast; queries from T on see none."""
    return (keys <= queries) & (keys > queries - window) & (queries < T)


@triton.jit
def _forward_kernel(
    q_at, k_at, v_at, y_at, logs_at, row_keys_at, positions_at,
    q_row, q_time, q_head, k_row, k_time, k_head, v_row, v_time, v_head,
    row_keys_row, row_keys_word,
    T, H, n_sharing, window, first_head, context_length, bound, score_scale, keep_scale,
    K: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write attention's output y (B, T, H, K) and the base-2 log-sum-exp of scores, ℓ (B, H, T),
    for one head's tile of queries.

    Arguments ending in `_at` are pointers, those in `_row`, `_time` and `_head` strides. n_sharing:
    query heads for each KV head. window: keys that a query sees. first_head: the number of local
    head 0 in the whole model. bound: a smaller hash drops its weight. score_scale: turns dot
    products into base-2 scores. keep_scale: 1 / (1 - p). ROWS: as for `_numbered`.
    """
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    first_query = tl.program_id(0) * QUERIES
    queries = first_query + tl.arange(0, QUERIES)
    q = _load_tile(q_at + row * q_row + head * q_head, queries, q_time, T, K, COLUMNS)
    k_at += row * k_row + head // n_sharing * k_head
    v_at += row * v_row + head // n_sharing * v_head
    key_0 = tl.load(row_keys_at + row * row_keys_row)
    key_1 = tl.load(row_keys_at + row * row_keys_row + row_keys_word)
    query_position = tl.load(positions_at + queries, mask=queries < T, other=0).to(tl.int32)
    numbers, key_0, key_1 = _numbered(
        first_head + head, query_position, key_0, key_1, context_length, ROWS
    )

    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    y = tl.zeros([QUERIES, COLUMNS], tl.float32)
    first_key = tl.maximum(first_query - window + 1, 0) // KEYS * KEYS
    for start in range(first_key, tl.minimum(first_query + QUERIES, T), KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _load_tile(k_at, keys, k_time, T, K, COLUMNS)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        visible = _visible(queries[:, None], keys[None, :], T, window)
        scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 1))
        shift = tl.where(now == float("-inf"), 0.0, now)  # for a row that has seen no key yet
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(most - shift)
        total = total * shrink + tl.sum(weights, 1)
        key_position = tl.load(positions_at + keys, mask=keys < T, other=0).to(tl.int32)
        keep = (
            _bits(numbers[:, None] + key_position[None, :], key_0[:, None], key_1[:, None]) >= bound
        )
        left = tl.where(keep, weights, 0.0)
        v = _load_tile(v_at, keys, v_time, T, K, COLUMNS)
        y = y * shrink[:, None]
        y += tl.dot(left.to(v.dtype), v, input_precision=PRECISION)
        most = now
    total = tl.where(queries < T, total, 1.0)
    y = y * (keep_scale / total)[:, None]
    _store_tile(y_at + (row * T * H + head) * K, queries, H * K, y, T, K, COLUMNS)
    logs = most + tl.log2(total)
    tl.store(logs_at + (row * H + head) * T + queries, logs, mask=queries < T)


@triton.jit
def _queries_kernel(
    q_at, k_at, v_at, y_at, g_at, logs_at, sums_at, dq_at, row_keys_at, positions_at,
    q_row, q_time, q_head, k_row, k_time, k_head, v_row, v_time, v_head,
    y_row, y_time, y_head, g_row, g_time, g_head, row_keys_row, row_keys_word,
    T, H, n_sharing, window, first_head, context_length, bound, score_scale, keep_scale, scale,
    K: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the queries' gradient dq (B, T, H, K) and `sums`, D = Σ g ∘ y (B, H, T), for one head's
    tile of queries. Arguments as for `_forward_kernel`, with `g`, y's gradient, and `scale`, 1 /
    √K."""
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    first_query = tl.program_id(0) * QUERIES
    queries = first_query + tl.arange(0, QUERIES)
    q = _load_tile(q_at + row * q_row + head * q_head, queries, q_time, T, K, COLUMNS)
    y = _load_tile(y_at + row * y_row + head * y_head, queries, y_time, T, K, COLUMNS)
    g = _load_tile(g_at + row * g_row + head * g_head, queries, g_time, T, K, COLUMNS)
    sums = tl.sum(g.to(tl.float32) * y.to(tl.float32), 1)
    in_head = (row * H + head) * T + queries
    tl.store(sums_at + in_head, sums, mask=queries < T)
    logs = tl.load(logs_at + in_head, mask=queries < T, other=0.0)
    k_at += row * k_row + head // n_sharing * k_head
    v_at += row * v_row + head // n_sharing * v_head
    key_0 = tl.load(row_keys_at + row * row_keys_row)
    key_1 = tl.load(row_keys_at + row * row_keys_row + row_keys_word)
    query_position = tl.load(positions_at + queries, mask=queries < T, other=0).to(tl.int32)
    numbers, key_0, key_1 = _numbered(
        first_head + head, query_position, key_0, key_1, context_length, ROWS
    )

    dq = tl.zeros([QUERIES, COLUMNS], tl.float32)
    first_key = tl.maximum(first_query - window + 1, 0) // KEYS * KEYS
    for start in range(first_key, tl.minimum(first_query + QUERIES, T), KEYS):
        keys = start + tl.arange(0, KEYS)
        k = _load_tile(k_at, keys, k_time, T, K, COLUMNS)
        v = _load_tile(v_at, keys, v_time, T, K, COLUMNS)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * score_scale
        visible = _visible(queries[:, None], keys[None, :], T, window)
        weights = tl.exp2(tl.where(visible, scores - logs[:, None], float("-inf")))
        key_position = tl.load(positions_at + keys, mask=keys < T, other=0).to(tl.int32)
        keep = (
            _bits(numbers[:, None] + key_position[None, :], key_0[:, None], key_1[:, None]) >= bound
        )
        dp = tl.dot(g, tl.trans(v), input_precision=PRECISION) * keep_scale
        ds = weights * (tl.where(keep, dp, 0.0) - sums[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
    _store_tile(dq_at + (row * T * H + head) * K, queries, H * K, dq * scale, T, K, COLUMNS)


@triton.jit
def _keys_kernel(
    q_at, k_at, v_at, g_at, logs_at, sums_at, dk_at, dv_at, row_keys_at, positions_at,
    q_row, q_time, q_head, k_row, k_time, k_head, v_row, v_time, v_head,
    g_row, g_time, g_head, row_keys_row, row_keys_word,
    T, H, n_sharing, window, first_head, context_length, bound, score_scale, keep_scale, scale,
    K: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients dk and dv (B, T, G, K) for a tile of keys and values, summed over the
    query heads that use them. Tiles are transposed in this kernel: keys are matrix rows, queries
    columns. Arguments as for `_forward_kernel`, with `g`, y's gradient, `sums` from
    `_queries_kernel`, and `scale`, 1 / √K."""
    G = H // n_sharing
    row, kv_head = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    first_key = tl.program_id(0) * KEYS
    keys = first_key + tl.arange(0, KEYS)
    k = _load_tile(k_at + row * k_row + kv_head * k_head, keys, k_time, T, K, COLUMNS)
    v = _load_tile(v_at + row * v_row + kv_head * v_head, keys, v_time, T, K, COLUMNS)
    key_0 = tl.load(row_keys_at + row * row_keys_row)
    key_1 = tl.load(row_keys_at + row * row_keys_row + row_keys_word)
    key_position = tl.load(positions_at + keys, mask=keys < T, other=0).to(tl.int32)

    dk = tl.zeros([KEYS, COLUMNS], tl.float32)
    dv = tl.zeros([KEYS, COLUMNS], tl.float32)
    last = tl.minimum(first_key + KEYS - 1 + window, T)  # later queries see none of these keys
    for head in range(kv_head * n_sharing, (kv_head + 1) * n_sharing):
        for start in range(first_key // QUERIES * QUERIES, last, QUERIES):
            queries = start + tl.arange(0, QUERIES)
            q = _load_tile(q_at + row * q_row + head * q_head, queries, q_time, T, K, COLUMNS)
            g = _load_tile(g_at + row * g_row + head * g_head, queries, g_time, T, K, COLUMNS)
            in_head = (row * H + head) * T + queries
            logs = tl.load(logs_at + in_head, mask=queries < T, other=0.0)
            sums = tl.load(sums_at + in_head, mask=queries < T, other=0.0)
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * score_scale
            visible = _visible(queries[None, :], keys[:, None], T, window)
            weights = tl.exp2(tl.where(visible, scores - logs[None, :], float("-inf")))
            query_position = tl.load(positions_at + queries, mask=queries < T, other=0)
            numbers, word_0, word_1 = _numbered(
                first_head + head, query_position.to(tl.int32), key_0, key_1, context_length, ROWS
            )
            numbers = numbers[None, :] + key_position[:, None]
            keep = _bits(numbers, word_0[None, :], word_1[None, :]) >= bound
            left = tl.where(keep, weights, 0.0)
            dv += tl.dot(left.to(g.dtype), g, input_precision=PRECISION)
            dp = tl.dot(v, tl.trans(g), input_precision=PRECISION) * keep_scale
            ds = weights * (tl.where(keep, dp, 0.0) - sums[None, :])
            dk += tl.dot(ds.to(q.dtype), q, input_precision=PRECISION)
    at = (row * T * G + kv_head) * K
    _store_tile(dk_at + at, keys, G * K, dk * scale, T, K, COLUMNS)
    _store_tile(dv_at + at, keys, G * K, dv * keep_scale, T, K, COLUMNS)


def attend_dropping(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_keys: Tensor,
    positions: Tensor,
    p: float,
    window: int,
    first_head: int,
    context_length: int,
) -> tuple[Tensor, Tensor]:
    """Return causal attention with dropout on its weights: each query's weighted mean value
    (B, H, T, K), and the base-2 log-sum-exp of its scores, fp32 (B, H, T).

    q is (B, H, T, K), k and v are (B, G, T, K), all in one dtype: fp32, bf16 or fp16. `row_keys`,
    int32 (B, 2), are one dropout site's keys; `p`, `first_head` (the first local head's number) and
    `context_length` are fields of a WeightsDropout. `positions` (T,) are those of queries and keys.
    A query sees `window` keys, its own included.
    """
    B, H, T, K = q.shape
    q, k, v = map(_by_rows, (q, k, v))
    y = q.new_empty(B, T, H, K).transpose(1, 2)
    logs = q.new_empty(B, H, T, dtype=torch.float32)
    if q.numel():
        at = (q, k, v, y, logs, row_keys, positions)
        strides = (*_strides(q, k, v), *row_keys.stride())
        numbers = (T, H, H // k.shape[1], window, first_head, context_length, *_factors(p, K))
        in_block = rows_per_block((first_head + H) * context_length, context_length)
        _launch(_forward_kernel, (*at, *strides, *numbers), q, H, in_block, backward=False)
    return y, logs


def attend_dropping_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    logs: Tensor,
    row_keys: Tensor,
    positions: Tensor,
    p: float,
    window: int,
    first_head: int,
    context_length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients for q (B, H, T, K), k and v (B, G, T, K), given y's gradient `g`
    (B, H, T, K).

    y, logs: `attend_dropping`'s results. All other arguments: those that it was called with.
    """
    (B, H, T, K), G = q.shape, k.shape[1]
    g, q, k, v, y = map(_by_rows, (g, q, k, v, y))
    dq, dk, dv = (q.new_empty(B, T, n, K).transpose(1, 2) for n in (H, G, G))
    if q.numel():
        sums = torch.empty_like(logs)
        numbers = (T, H, H // G, window, first_head, context_length, *_factors(p, K), K**-0.5)
        keys = row_keys.stride()
        in_block = rows_per_block((first_head + H) * context_length, context_length)
        at = (q, k, v, y, g, logs, sums, dq, row_keys, positions)
        launched = (*at, *_strides(q, k, v, y, g), *keys, *numbers)
        _launch(_queries_kernel, launched, q, H, in_block, backward=True)
        at = (q, k, v, g, logs, sums, dk, dv, row_keys, positions)
        launched = (*at, *_strides(q, k, v, g), *keys, *numbers)
        _launch(_keys_kernel, launched, q, G, in_block, backward=True)
    return dq, dk, dv


def _launch(
    kernel: Any,
    arguments: tuple[Any, ...],
    q: Tensor,
    n_heads: int,
    in_block: int | None,
    *,
    backward: bool,
) -> None:
    """Run a kernel on every tile of tokens, for `n_heads` heads in each batch row of q
    (B, H, T, K). `in_block` is how many queries are numbered in one block; None for all.
    `arguments` are the kernel's without the compile-time ones, which are chosen here."""
    B, _, T, K = q.shape
    own, others, warps = tiles(K, q.element_size(), backward=backward)
    queries, keys = (others, own) if kernel is _keys_kernel else (own, others)
    # Most AMD chips have no tf32 in Triton; full precision is always available.
    rounds = torch.get_float32_matmul_precision() != "highest" and torch.version.hip is None
    with torch.cuda.device_of(q):  # Triton launches on the current device; a no-op for a CPU
        kernel[(triton.cdiv(T, own), B * n_heads)](
            *arguments,
            K=K,
            COLUMNS=max(16, triton.next_power_of_2(K)),
            QUERIES=queries,
            KEYS=keys,
            ROWS=in_block or 0,
            PRECISION="tf32" if rounds else "ieee",
            num_warps=warps,
            num_stages=2,
        )


def _factors(p: float, head_size: int) -> tuple[int, float, float]:
    """Return three of the kernels' arguments: the bound below which a hash drops a weight, the
    factor that turns dot products into base-2 scores, and 1 / (1 - p) for the weights that are
    kept."""
    return keep_bound(p), head_size**-0.5 * LOG2_E, 1 / (1 - p)


def _by_rows(x: Tensor) -> Tensor:
    """Return x with its last dimension contiguous, as the kernels need: x itself, or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return each tensor's (B, H, T, K) strides for batch, sequence and head, in one flat tuple."""
    return tuple(x.stride(dimension) for x in tensors for dimension in (0, 2, 1))


dropped_attention = torch.library.custom_op(
    "pentameter::dropped_attention", attend_dropping, mutates_args=()
)
_dropped_attention_backward = torch.library.custom_op(
    "pentameter::dropped_attention_backward", attend_dropping_backward, mutates_args=()
)


@dropped_attention.register_fake
def _(q: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, H, T, K = q.shape
    return q.new_empty(B, T, H, K).transpose(1, 2), q.new_empty(B, H, T, dtype=torch.float32)


@_dropped_attention_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    (B, H, T, K), G = q.shape, k.shape[1]
    dq, dk, dv = (q.new_empty(B, T, n, K).transpose(1, 2) for n in (H, G, G))
    return dq, dk, dv


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.numbers = inputs[5:]
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])


def _backward(ctx: Any, g: Tensor, _g_logs: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _dropped_attention_backward(g, *ctx.saved_tensors, *ctx.numbers)
    return dq, dk, dv, *(None,) * 6


dropped_attention.register_autograd(_backward, setup_context=_setup_context)


class KernelAttention(DotProductAttention):
    """Attention whose dropout is applied inside Triton kernels, so that the attention weights are
    never stored; a DotProductAttention. It drops the same weights as the one that stores them, and
    its results are equal up to rounding. The kernels support neither sinks nor a key-value cache;
    calls with these store the weights."""

    equal_widths = True

    def dropping(self, q: Tensor, k: Tensor, v: Tensor, how: Weighting) -> Tensor:
        """Return attention with dropout, (B, H, Q, K), for q (B, H, Q, K), k and v (B, G, S, K): by
        the kernels if they support the call."""
        T, dropout = q.shape[2], how.dropout
        if dropout is None or k.shape[2] != T or how.sinks is not None:
            return super().dropping(q, k, v, how)
        numbers = (dropout.p, min(how.window or T, T), dropout.first_head, dropout.context_length)
        positions = how.key_positions(k)
        y: Tensor = dropped_attention(q, k, v, dropout.row_keys, positions, *numbers)[0]
        return y
