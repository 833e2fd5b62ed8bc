"""The loss of a GPT computed by fused operations, with the same parameters and the same bits.

The model stays the plain module that `model/gpt.py` defines; this file only walks over it in
another order: a sub-layer's bias, dropout, residual sum and the next sub-layer's norm become one
operation. A test holds both ways equal in fp64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.errors import ConfigError
from pentameter.fused_cpu import amx
from pentameter.fused_cpu.functions import (
    AddNorm,
    AmxAttention,
    CausalAttention,
    EmbeddingDropout,
    FeedForward,
    Norm,
    Product,
)
from pentameter.fused_cpu.kernels import CENTRED, precise
from pentameter.fused_cpu.obstacles import architecture_obstacle
from pentameter.model.compiled import kernel
from pentameter.model.dropout import StreamDropout
from pentameter.model.gpt import GPT, Block
from pentameter.model.loss import chunked_loss_sum, compiled_row_loss, exceeds_chunk, loss_sum
from pentameter.planning.architecture import head_size


def fused_loss_sum(
    model: GPT, tokens: Tensor, targets: Tensor, dropout_keys: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The summed cross-entropy of `targets` (B, T), as `loss_sum(model(tokens, …), …)`.

    Products run in `dtype`, the residual stream in the parameters' own. `dropout_keys` are those
    of `pentameter.model.dropout_keys`, or None for no dropout. The model holds all layers.
    Raises ConfigError for an architecture that has an obstacle.
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

    x = model.embed(tokens, torch.arange(tokens.shape[1]))
    if dropping and model.embedding_dropout.p > 0:
        x = EmbeddingDropout.apply(
            x, sites[model.embedding_dropout.site], model.embedding_dropout.p
        )

    blocks = [block for block in model.blocks.values() if isinstance(block, Block)]
    centred = CENTRED[config.norm]
    on_amx = amx.can_attend(dtype, head_size(config))
    attend = AmxAttention.apply if on_amx else CausalAttention.apply
    h = Norm.apply(x, centred, dtype)
    for block in blocks:
        attention, norm = block.attention, block.attention_norm
        weights_dropout = attention.weights_dropout
        y = attend(
            Product.apply(h, attention.qkv.weight, norm.weight),
            _folded_bias(attention.qkv.weight, attention.qkv.bias, norm),
            config.n_heads,
            sites[weights_dropout.site],
            config.context_length,
            weights_dropout.p if dropping else 0.0,
        )
        y = Product.apply(y, attention.out.weight, None)
        x, h = _add_norm(x, y, attention.out.bias, attention.dropout, sites, dropping, centred)
        mlp, norm = block.mlp, block.mlp_norm
        bias = _folded_bias(mlp.up.weight, mlp.up.bias, norm)
        y = FeedForward.apply(
            h, mlp.up.weight, norm.weight, bias, mlp.down.weight, config.activation
        )
        x, h = _add_norm(x, y, mlp.down.bias, mlp.dropout, sites, dropping, centred)

    weight, bias = model.head_parameters()
    assert config.vocab_size is not None  # a GPT has one
    if exceeds_chunk(targets.numel(), len(weight)):
        x = _scaled(h, model.final_norm)
        return chunked_loss_sum(x, weight, bias, targets, config.vocab_size, compiled_row_loss)
    logits = Product.apply(h, weight, model.final_norm.weight)
    bias = _folded_bias(weight, bias, model.final_norm)
    return _biased_loss_sum(logits, bias, targets, config.vocab_size)


@kernel
def _biased_loss_sum(
    logits: Tensor, bias: Tensor | None, targets: Tensor, vocab_size: int
) -> Tensor:
    return loss_sum(logits if bias is None else logits + bias, targets, vocab_size)


def _scaled(h: Tensor, norm: nn.Module) -> Tensor:
    """h (B, T, D), normalised by `norm`, times its weight and with its bias, in h's dtype."""
    bias = getattr(norm, "bias", None)
    y = precise(h) * norm.get_parameter("weight")
    return (y if bias is None else y + bias).to(h.dtype)


def _folded_bias(weight: Tensor, bias: Tensor | None, norm: nn.Module) -> Tensor | None:
    """The bias (n,) of a linear layer that `norm` is folded into: its own plus W · the norm's."""
    norm_bias = getattr(norm, "bias", None)
    return bias if norm_bias is None else F.linear(norm_bias, weight, bias)


def _add_norm(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    dropout: StreamDropout,
    sites: Tensor,
    dropping: bool,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """x + dropout(y + bias) and its norm: the end of each sub-layer and the start of the next."""
    p = dropout.p if dropping else 0.0
    return AddNorm.apply(x, y, bias, sites[dropout.site], p, centred)
