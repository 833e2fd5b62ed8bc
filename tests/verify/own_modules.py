"""Modules of somebody's own, in a file that the processes of verify can import."""

from collections import namedtuple

import numpy as np
import torch
import torch.nn.functional as F
from own_model import StateSpaceModel  # of examples/
from torch import nn

from pentameter.parallel.sources.custom_model import OwnModel


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


class Dropping(StateSpaceModel):
    """Drops a tenth of its logits, whatever the configuration says."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


def dropping(config):
    return Dropping(config.model, range(config.model.n_layers))


class Layer(nn.Module):
    """Adds to each position what a masked mean of the sequence says."""

    def __init__(self, d_model):
        super().__init__()
        self.up, self.down = nn.Linear(d_model, 8), nn.Linear(8, d_model)

    def forward(self, x, mask):
        count = mask.sum(1, keepdim=True).clamp(min=1)
        mean = (x * mask[..., None]).sum(1, keepdim=True) / count[..., None]
        return x + self.down(torch.tanh(self.up(x + mean)))


class Labelled(nn.Module):
    """Names and measures a sequence, of which a mask says how long it is. The layers 1 and 2 share
    a matrix; every slice reads the mask; a table is a buffer."""

    def __init__(self, model, layers):
        super().__init__()
        D = model.d_model
        if layers.start == 0:
            self.embedding = nn.Embedding(model.vocab_size, D)
        if not {1, 2}.isdisjoint(layers):
            self.shared = nn.Linear(D, D)
        self.blocks = nn.ModuleDict({str(n): Layer(D) for n in layers})
        self.register_buffer("table", torch.linspace(0.5, 1.5, D), persistent=False)
        self.scale = nn.ParameterDict({str(n): nn.Parameter(torch.ones(D)) for n in layers})
        self.n_layers = model.n_layers
        if layers.stop == model.n_layers:
            self.head = nn.Linear(D, 4)

    def forward(self, x, targets=None, *, inputs=None):
        if hasattr(self, "embedding"):
            inputs, x = x, self.embedding(x["tokens"])
        for name, block in self.blocks.items():
            x = block(x * self.scale[name] * self.table, inputs["mask"])
            if name in ("1", "2"):
                x = x + self.shared(x)
        if not hasattr(self, "head"):
            return x
        y = self.head(x).mean(1)
        error = (y[:, 3] - targets.value) ** 2 * inputs["nested"][0]
        return error.sum() + F.cross_entropy(y[:, :3], targets.label, reduction="sum")


Answers = namedtuple("Answers", ["label", "value"])


def labelled(config):
    return Labelled(config.model, range(config.model.n_layers))


def labelled_slice(config, layers):
    return Labelled(config.model, layers)


def labelled_batches(step, rows):
    numbers = [np.random.default_rng((step, row)) for row in rows]
    length = np.array([random.integers(1, 8) for random in numbers])
    inputs = {
        "tokens": np.stack([random.integers(0, 16, 8) for random in numbers]),
        "mask": torch.from_numpy(np.arange(8) < length[:, None]),
        "nested": [np.array([random.random() for random in numbers], dtype=np.float32)],
    }
    return inputs, Answers(length % 3, torch.from_numpy(length / 8))


def labelled_count(targets):
    return len(targets.label)


def labelled_weights(config, path, module):
    for _, parameter in module.named_parameters(recurse=False):
        nn.init.normal_(parameter, std=0.3)


LABELLED = OwnModel(
    labelled,
    slice=labelled_slice,
    blocks="blocks.*",
    init_weights=labelled_weights,
    count_targets=labelled_count,
)


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
        self.blocks = nn.ModuleList(Attention(D, config.model.attention.n_heads) for _ in range(2))
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
