"""A plain GPT in fp32, eager: the yardstick that the benchmarks of this folder measure against.

It is what a reader of a good tutorial would write: the character GPT's architecture, PyTorch's
own dropout, AdamW and fused attention, one training step after the other, and a sampling loop
that runs the whole window through the model for every token. Nothing here is made slow on
purpose and nothing is tuned; no part of the package imports it.

Shapes: B batch, T time, D d_model, H heads, K head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn


class LayerNorm(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(
        self, d_model: int, n_heads: int, dropout: float, attention_dropout: float, bias: bool
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=bias)
        self.out = nn.Linear(d_model, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.n_heads, D // self.n_heads).transpose(1, 2)  # (B, H, T, K)
            for part in self.qkv(x).split(D, dim=-1)
        )
        dropout = self.attention_dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.dropout(self.out(y.transpose(1, 2).reshape(B, T, D)))


class FeedForward(nn.Module):
    def __init__(self, d_model: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model, bias=bias)
        self.down = nn.Linear(4 * d_model, d_model, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(
        self, d_model: int, n_heads: int, dropout: float, attention_dropout: float, bias: bool
    ) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(d_model, bias)
        self.attention = Attention(d_model, n_heads, dropout, attention_dropout, bias)
        self.feed_forward_norm = LayerNorm(d_model, bias)
        self.feed_forward = FeedForward(d_model, dropout, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class PlainGPT(nn.Module):
    """Pre-norm GPT with learned positions and a tied head."""

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        n_layers: int,
        n_heads: int,
        d_model: int,
        dropout: float,
        attention_dropout: float,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.context_length = context_length
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(context_length, d_model)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(d_model, n_heads, dropout, attention_dropout, bias) for _ in range(n_layers)
        )
        self.final_norm = LayerNorm(d_model, bias)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.head.weight = self.token_embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / math.sqrt(2 * n_layers) if residual else 0.02
                nn.init.normal_(parameter, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, tokens: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (logits, mean loss) with targets, else (logits of the last place, None)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        x = self.final_norm(x)
        if targets is None:
            return self.head(x[:, -1:]), None
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(
        self,
        tokens: torch.Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
    ) -> torch.Tensor:
        """Return tokens (B, T + max_new_tokens); every one costs a pass over the whole window."""
        for _ in range(max_new_tokens):
            logits, _loss = self(tokens[:, -self.context_length :])
            logits = logits[:, -1] / temperature
            if top_k is not None:
                smallest_kept = torch.topk(logits, min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < smallest_kept, -math.inf)
            drawn = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            tokens = torch.cat((tokens, drawn), dim=1)
        return tokens


def make_optimizer(
    model: PlainGPT,
    *,
    learning_rate: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.1,
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """Return AdamW that decays matrices only; PyTorch chooses its form where `fused` is absent."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)


def train_step(
    model: PlainGPT,
    optimizer: torch.optim.Optimizer,
    micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    learning_rate: float,
    clip_norm: float = 1.0,
) -> float:
    """Return the step's mean loss, after one update.

    micro_batches: (inputs, targets) pairs, each (B, T) int64; their gradients are averaged.
    """
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    pairs = list(micro_batches)
    total = 0.0
    for inputs, targets in pairs:
        _logits, loss = model(inputs, targets)
        loss = loss / len(pairs)
        loss.backward()
        total += loss.item()
    if clip_norm:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total
