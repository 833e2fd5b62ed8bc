"""The loss of a GPT computed by fused operations, with the same parameters and the same bits.

The model stays the plain module that `model/gpt.py` defines; this file only walks over it in
another order: a sub-layer's bias, dropout, residual sum and the next sub-layer's norm become one
operation. A test holds both ways equal in fp64.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.model.dropout import KeyedDropout
from pentameter.model.fused.functions import (
    AddNorm,
    CausalAttention,
    Dropout,
    FeedForward,
    Norm,
    Product,
)
from pentameter.model.fused.kernels import kernel
from pentameter.model.gpt import GPT, Block
from pentameter.model.loss import loss_sum


def can_fuse(config: ModelConfig) -> bool:
    """Whether `fused_loss_sum` knows the architecture: all but norms after the residual sum."""
    return config.norm_position == "pre"


def fused_loss_sum(
    model: GPT, tokens: Tensor, targets: Tensor, dropout_keys: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The summed cross-entropy of `targets` (B, T), as `loss_sum(model(tokens, …), …)`.

    Products run in `dtype`, the residual stream in the parameters' own. `dropout_keys` are those
    of `pentameter.model.dropout_keys`, or None for no dropout. The model holds all layers.
    """
    config = model.config
    if dropout_keys is None:
        sites = torch.zeros(1 + 3 * config.n_layers, len(tokens), 2, dtype=torch.int32)
    else:
        sites = dropout_keys.transpose(0, 1).contiguous()  # a site's keys side by side
    dropping = dropout_keys is not None

    x = model.embed(tokens, 0)
    if dropping and model.embedding_dropout.p > 0:
        x = Dropout.apply(x, sites[model.embedding_dropout.site], model.embedding_dropout.p)

    blocks = [block for block in model.blocks.values() if isinstance(block, Block)]
    next_norms = [*(after.attention_norm for _, after in pairwise(blocks)), model.final_norm]
    h = _norm(x, blocks[0].attention_norm, dtype)
    for block, next_norm in zip(blocks, next_norms, strict=True):
        attention = block.attention
        weights_dropout = attention.weights_dropout
        y = CausalAttention.apply(
            Product.apply(h, attention.qkv.weight),
            attention.qkv.bias,
            config.n_heads,
            sites[weights_dropout.site],
            config.context_length,
            weights_dropout.p if dropping else 0.0,
        )
        y = Product.apply(y, attention.out.weight)
        x, h = _add_norm(
            x, y, attention.out.bias, attention.dropout, sites, dropping, block.mlp_norm
        )
        mlp = block.mlp
        y = FeedForward.apply(h, mlp.up.weight, mlp.up.bias, mlp.down.weight, config.activation)
        x, h = _add_norm(x, y, mlp.down.bias, mlp.dropout, sites, dropping, next_norm)

    head_weight = model.token_embedding.weight if config.tied_head else model.head.weight
    logits = Product.apply(h, head_weight)
    return _biased_loss_sum(logits, model.head.bias, targets, config.vocab_size)


@kernel
def _biased_loss_sum(
    logits: Tensor, bias: Tensor | None, targets: Tensor, vocab_size: int
) -> Tensor:
    return loss_sum(logits if bias is None else logits + bias, targets, vocab_size)


def _norm(x: Tensor, norm: nn.Module, dtype: torch.dtype) -> Tensor:
    return Norm.apply(x, norm.weight, getattr(norm, "bias", None), _centres(norm), dtype)


def _add_norm(
    x: Tensor,
    y: Tensor,
    bias: Tensor | None,
    dropout: KeyedDropout,
    sites: Tensor,
    dropping: bool,
    norm: nn.Module,
) -> tuple[Tensor, Tensor]:
    """x + dropout(y + bias), and its norm: what ends each sub-layer and begins the next."""
    return AddNorm.apply(
        x,
        y,
        bias,
        sites[dropout.site],
        dropout.p if dropping else 0.0,
        norm.weight,
        getattr(norm, "bias", None),
        _centres(norm),
    )


def _centres(norm: nn.Module) -> bool:
    return isinstance(norm, nn.LayerNorm)
