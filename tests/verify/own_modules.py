"""Modules of somebody's own, in a file that the processes of verify can import."""

import torch
import torch.nn.functional as F
from own_model import StateSpaceModel  # of examples/
from torch import nn


class Experts(nn.Module):
    """Each token goes to one of three experts: one may get none; a fourth never gets any."""

    def __init__(self, d_model):
        super().__init__()
        self.router = nn.Linear(d_model, 3)
        self.experts = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        weights = self.router(x.detach()).softmax(-1)
        chosen, y = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = chosen == number
            if here.any():
                y = y.index_put((here,), expert(x[here]) * weights[here][:, number, None])
        return x + y


class Mixture(nn.Module):
    """Two layers of experts under a tied head."""

    def __init__(self, config):
        super().__init__()
        V, D = config.model.vocab_size, config.model.d_model
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Experts(D) for _ in range(2))
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skipping(StateSpaceModel):
    """A slice that goes round its blocks where it is the last: a fault that only numbers show."""

    def forward(self, x):
        if hasattr(self, "embedding"):
            return super().forward(x)
        return self.head(self.norm(x + 0 * sum(p.sum() for p in self.blocks.parameters())))


def skipping_slice(config, layers):
    return Skipping(config.model, layers)


class Attention(nn.Module):
    """Causal attention whose queries, keys and values have a projection each, with a bias: that of
    the keys changes no probability, so that its gradient is 0 but for rounding."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.norm = nn.LayerNorm(d_model)
        self.query, self.key, self.value, self.out = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            project(y).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class SeparateProjections(nn.Module):
    """A small GPT with queries, keys and values apart."""

    def __init__(self, config):
        super().__init__()
        V, D = config.model.vocab_size, config.model.d_model
        self.embedding = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Attention(D, config.model.n_heads) for _ in range(2))
        self.head = nn.Linear(D, V)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Faint(nn.Module):
    """One vector has gradients some 1e-8 as large as those of the rest."""

    def __init__(self, config):
        super().__init__()
        V, D = config.model.vocab_size, config.model.d_model
        self.embedding = nn.Embedding(V, D)
        self.faint = nn.Parameter(torch.zeros(D))
        self.head = nn.Linear(D, V)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens) + 1e-8 * self.faint))
