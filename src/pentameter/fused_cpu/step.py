"""A GPT's loss computed by fused operations, with the same parameters and the same dropout masks as
the plain model.

The model stays the plain module from `model/gpt.py`; this file walks it in another order: a
sub-layer's bias, dropout and residual sum join the next sub-layer's norm in one operation. A test
holds both equal in fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.errors import ConfigError
from pentameter.fused_cpu import amx_attention, amx_feed_forward, functions
from pentameter.fused_cpu.experts.experts import weighted_outputs
from pentameter.fused_cpu.experts.router import route, router_logits
from pentameter.fused_cpu.functions import (
    AddNorm,
    AmxAttention,
    AmxFeedForward,
    CausalAttention,
    EmbeddingDropout,
    FoldedLinear,
    Norm,
)
from pentameter.fused_cpu.heads import HeadShape
from pentameter.fused_cpu.kernels import CENTRED, NormKind, precise
from pentameter.fused_cpu.vector import loss as vector_loss
from pentameter.model.attention.attention import Attention
from pentameter.model.compiled import kernel
from pentameter.model.dropout import StreamDropout
from pentameter.model.experts import Experts, GroupedLinear, Router
from pentameter.model.feed_forward import MLP, FeedForward
from pentameter.model.gpt import GPT, Block
from pentameter.model.loss import (
    chunked_loss_sum,
    exceeds_chunk,
    loss_sum,
    softcapped,
)
from pentameter.model.positions import rotation
from pentameter.planning.fused_step import architecture_obstacle


def fused_loss_sum(
    model: GPT, tokens: Tensor, targets: Tensor, dropout_keys: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the summed cross-entropy in nats, 0-dim, for `targets` (B, T), like `model(tokens,
    targets=targets, dropout_keys=dropout_keys)`.

    tokens: int64 (B, T). Matmuls run in `dtype`, the residual stream in the parameters' dtype.
    dropout_keys: int32 (B, n_sites, 2) from `model.dropout.dropout_keys`, or None for no
    dropout. The model must hold all layers. Raises ConfigError for an architecture that the
    fused step does not know.
    """
    config = model.config
    obstacle = architecture_obstacle(config)
    if obstacle is not None:
        raise ConfigError(f"{obstacle} is not known to the fused step; set train.compile=false")
    if dropout_keys is None:
        sites = torch.zeros(1 + 3 * config.n_layers, len(tokens), 2, dtype=torch.int32)
    else:
        sites = dropout_keys.transpose(0, 1).contiguous()  # a site's keys side by side
    dropping = dropout_keys is not None

    positions = torch.arange(tokens.shape[1])
    x = model.embed(tokens, positions)
    if dropping and model.embedding_dropout.p > 0:
        x = EmbeddingDropout.apply(
            x, sites[model.embedding_dropout.site], model.embedding_dropout.p
        )
    length = model.text_length or len(positions)
    rotation_tables = rotation(positions, config, x.dtype, length) or (None, None)

    blocks = [block for block in model.blocks.values() if isinstance(block, Block)]
    kind = NormKind(CENTRED[config.norm], config.norm_eps)
    h = Norm.apply(x, kind, dtype)
    for block in blocks:
        (attention_norm, attention), (mlp_norm, mlp) = block.sub_layers()
        assert isinstance(attention, Attention)
        assert isinstance(mlp, MLP | Experts)
        keys = sites[attention.weights_dropout.site] if dropping else None
        y = attention_output(h, attention_norm, attention, config, keys, rotation_tables)
        x, h = add_norm(x, y, attention.out.bias, attention.dropout, sites, dropping, kind)
        y, bias = feed_forward_output(h, mlp_norm, mlp, config.feed_forward.activation)
        x, h = add_norm(x, y, bias, mlp.dropout, sites, dropping, kind)

    return head_loss_sum(h, model, targets)


def head_loss_sum(h: Tensor, model: GPT, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in nats, 0-dim, for `targets`, int64 (B, T), of the model's
    last hidden states h (B, T, D): the stream after the final norm's formula, but before its weight
    and bias."""
    config = model.config
    weight, bias = model.head_parameters()
    assert config.vocab_size is not None  # a GPT has one
    cap = config.logit_softcap
    if exceeds_chunk(targets.numel(), len(weight)):
        x = _apply_norm_weight(h, model.final_norm)
        return chunked_loss_sum(
            x, weight, bias, targets, config.vocab_size, vector_loss.row_loss, softcap=cap
        )
    logits = FoldedLinear.apply(h, model.final_norm.weight, weight)
    norm_bias = getattr(model.final_norm, "bias", None)
    if norm_bias is not None:
        bias = F.linear(norm_bias, weight, bias)
    if vector_loss.can_compute(logits, bias, cap):
        return vector_loss.BiasedLoss.apply(logits, bias, targets, config.vocab_size)
    return _biased_loss_sum(logits, bias, targets, config.vocab_size, cap)


def attention_output(
    h: Tensor,
    norm: nn.Module,
    attention: Attention,
    config: ModelConfig,
    keys: Tensor | None,
    rotation_tables: tuple[Tensor | None, Tensor | None],
) -> Tensor:
    """Return an attention layer's output (B, T, D), without the bias of its last linear.

    h (B, T, D): the residual stream after `norm`'s formula, but before `norm`'s weight and bias,
    which are folded into the linears here. keys: one dropout site's keys, int32 (B, 2), or None for
    no dropout. rotation_tables: the rotary embedding's (cosine, sine), each (T, R / 2) for R
    rotated channels per head; (None, None) without rotary positions.
    """
    shape = _head_shape(config, keys is not None)
    if keys is None:
        keys = torch.zeros(len(h), 2, dtype=torch.int32)
    native = amx_attention.can_attend(config, attention.out.weight.dtype, h.dtype)
    attend = (AmxAttention if native else CausalAttention).apply
    y: Tensor = attend(shape, keys, *_heads(h, norm, attention), *rotation_tables)
    return FoldedLinear.apply(y, None, attention.out.weight)


def _head_shape(config: ModelConfig, dropping: bool) -> HeadShape:
    """Return the attention layers' sizes, and their dropout probability: 0 unless `dropping`."""
    attention = config.attention
    sizes = attention.n_heads, attention.kv_heads, config.head_channels
    p = attention.dropout if dropping else 0.0
    return HeadShape(*sizes, config.norm_eps, config.context_length, p)


def _heads(h: Tensor, norm: nn.Module, attention: Attention) -> tuple[Tensor | None, ...]:
    """Return four arguments for the fused attention operations: the output of the query, key and
    value linears, side by side (B, T, width), without bias; their biases (width,), or None; and the
    query norm's and the key norm's weight, (K,) each for a norm per head, (heads, K) for one over
    all heads, or None for both without such norms.

    h (B, T, D) is normalised by the formula of `norm`, the sub-layer's, whose weight and bias are
    folded into the linears' weights and biases.
    """
    layers = [attention.q, attention.kv] if attention.shares_kv else [attention.qkv]
    weights = (layer.weight for layer in layers)
    projected = FoldedLinear.apply(h, norm.get_parameter("weight"), *weights)
    made = projected, _folded_bias(layers, norm)
    if attention.qk_norm is None:
        return *made, None, None
    norms = [each.get_parameter("weight") for each in (attention.q_norm, attention.k_norm)]
    if attention.qk_norm == "head":
        return *made, *norms
    return *made, *(each.unflatten(0, (-1, attention.head_size)) for each in norms)


def feed_forward_output(
    h: Tensor, norm: nn.Module, mlp: MLP | Experts, activation: str
) -> tuple[Tensor, Tensor | None]:
    """Return (output, bias) of a feed-forward layer or of experts: the output (B, T, D), and a bias
    (D,) that the caller has still to add, or None.

    h (B, T, D): the residual stream after `norm`'s formula, but before its weight and bias.
    activation: its name in `model.feed_forward.activation`.
    """
    if isinstance(mlp, MLP):
        return _feed_forward(h, norm, mlp, activation), mlp.down.bias
    scale = norm.get_parameter("weight")
    logits = router_logits(h, scale, mlp.router.weight)
    routing = route(mlp.router, _biased(logits, mlp.router, norm))
    layers = [layer for layer in (mlp.gate, mlp.up) if layer is not None]
    bias = _folded_bias(layers, norm)
    y = weighted_outputs(h, routing, scale, bias, (*layers, mlp.down), activation)
    if mlp.shared is not None:
        shared = _feed_forward(h, norm, mlp.shared, activation)
        if mlp.shared.down.bias is not None:
            shared = shared + mlp.shared.down.bias
        if mlp.shared_gate is not None:
            gate = FoldedLinear.apply(h, scale, mlp.shared_gate.weight)
            shared = shared * _biased(gate, mlp.shared_gate, norm).sigmoid()
        y = (y + shared).to(h.dtype)
    return y, None


def _biased(y: Tensor, layer: nn.Linear | Router, norm: nn.Module) -> Tensor:
    """Return y (B, T, n), a linear layer's output without its bias, plus that bias, into which
    `norm`'s bias is folded. If neither has one, y itself; else the sum, in at least the parameters'
    dtype."""
    bias = _folded_bias([layer], norm)
    return y if bias is None else y + bias


def _feed_forward(h: Tensor, norm: nn.Module, mlp: FeedForward, activation: str) -> Tensor:
    """Return the feed-forward layer's output (B, T, D), without `down`'s bias. h (B, T, D): the
    residual stream after `norm`'s formula; `norm`'s weight and bias are folded into the first
    linear. activation: its name in `model.feed_forward.activation`.

    The AMX kernels compute it if `can_feed_forward` is true (bf16, sizes divisible by 32, no large
    `down`), else PyTorch's matmuls with an activation kernel.
    """
    layers = [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up]
    native = amx_feed_forward.can_feed_forward(h, mlp.down.weight)
    apply = (AmxFeedForward if native else functions.FeedForward).apply
    scale, weights = norm.get_parameter("weight"), (layer.weight for layer in layers)
    return apply(h, scale, _folded_bias(layers, norm), mlp.down.weight, activation, *weights)


@kernel
def _biased_loss_sum(
    logits: Tensor, bias: Tensor | None, targets: Tensor, vocab_size: int, softcap: float | None
) -> Tensor:
    """Return the summed cross-entropy in nats, 0-dim, for logits (B, T, V) + bias (V,) after the
    softcap; None for a bias or softcap means none. targets: int64 (B, T), -1 for tokens that do not
    count."""
    logits = logits if bias is None else logits + bias
    return loss_sum(softcapped(logits, softcap), targets, vocab_size)


def _apply_norm_weight(h: Tensor, norm: nn.Module) -> Tensor:
    """Return h (B, T, D), normalised, times `norm`'s weight plus its bias, if it has one, in h's
    dtype."""
    bias = getattr(norm, "bias", None)
    y = precise(h) * norm.get_parameter("weight")
    return (y if bias is None else y + bias).to(h.dtype)


def _folded_bias(
    layers: Sequence[nn.Linear | GroupedLinear | Router], norm: nn.Module
) -> Tensor | None:
    """Return the biases to use for these layers, side by side, (n,), or (E, n) for those of
    experts: each layer's bias plus its weight times the bias of `norm`, which precedes them. None
    if neither the layers nor `norm` have a bias."""
    norm_bias = getattr(norm, "bias", None)
    biases: list[Tensor] = []
    for layer in layers:
        bias = layer.bias
        if norm_bias is not None:
            folded = layer.weight @ norm_bias
            bias = folded if bias is None else folded + bias
        if bias is not None:
            biases.append(bias)
    return torch.cat(biases, -1) if biases else None


def add_norm(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    dropout: StreamDropout,
    sites: Tensor,
    dropping: bool,
    kind: NormKind,
) -> tuple[Tensor, Tensor]:
    """Return x + dropout(y + bias) and its norm, without weight and bias, (B, T, D) each: one
    sub-layer's end and the next one's start.

    x: the residual stream (B, T, D). y: the sub-layer's output (B, T, D). bias: its last linear's
    (D,), or None. dropout: the sub-layer's module, for its site and probability. sites: all dropout
    keys, int32 (n_sites, B, 2). dropping: False switches dropout off. kind: the norm's formula and
    epsilon.
    """
    p = dropout.p if dropping else 0.0
    return AddNorm.apply(x, y, bias, sites[dropout.site], p, kind)
