"""A module of your own, a small state-space model, trained on any layout.

    python examples/own_model.py                                    # one process
    torchrun --nproc-per-node 2 examples/own_model.py --parallel.zero 3
    torchrun --nproc-per-node 2 examples/own_model.py --parallel.tensor 2
    torchrun --nproc-per-node 2 examples/own_model.py --parallel.pipeline 2
    python examples/own_model.py verify          # every layout against one process, in float64

See docs/own-model.md.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import pentameter as pm
from pentameter.processes.failures.failure import failure_ends_process
from pentameter.processes.group.join import joined_world
from pentameter.processes.group.rank import find_rank


def linear_recurrence(decay, x):
    """Return h (B, T, C) with h[t] = decay[t] · h[t - 1] + x[t], in log2(T) passes over time."""
    shift = 1
    while shift < x.shape[1]:
        x = x + decay * F.pad(x, (0, 0, shift, 0))[:, :-shift]
        decay = decay * F.pad(decay, (0, 0, shift, 0), value=1.0)[:, :-shift]
        shift *= 2
    return x


class Block(nn.Module):
    """A gated linear recurrence: each channel forgets what it holds as its token says."""

    def __init__(self, d_model, width):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.forget = nn.Linear(d_model, width)
        self.value = nn.Linear(d_model, width)
        self.gate = nn.Linear(d_model, width)
        self.out = nn.Linear(width, d_model)

    def forward(self, x):
        """Return the residual stream (B, T, d_model) after this block."""
        y = self.norm(x)
        decay = torch.sigmoid(self.forget(y) + 2)  # remembers some ten tokens at first
        state = linear_recurrence(decay, (1 - decay) * self.value(y))
        return x + self.out(state * F.silu(self.gate(y)))


class StateSpaceModel(nn.Module):
    """Some layers of the model; the first embed tokens, the last give logits."""

    def __init__(self, model, layers):
        super().__init__()
        if layers.start == 0:
            self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        self.blocks = nn.ModuleDict(
            {str(n): Block(model.d_model, model.feed_forward.width) for n in layers}
        )
        if layers.stop == model.n_layers:
            self.norm = nn.LayerNorm(model.d_model)
            self.head = nn.Linear(model.d_model, model.vocab_size, bias=False)

    def forward(self, x):
        """Return logits (B, T, vocab_size) of tokens (B, T), or what this slice makes of them."""
        if hasattr(self, "embedding"):
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


def build(config):
    """Return the whole model: this function is all that data parallelism and ZeRO need."""
    return StateSpaceModel(config.model, range(config.model.n_layers))


def build_slice(config, layers):
    """Return some of its layers: pipelines need this."""
    return StateSpaceModel(config.model, layers)


def tensor_table(config, stream):
    """Return which matrices processes share: tensor parallelism needs this. A recurrence works on
    each channel by itself, so the channels are divided."""
    by_channel = ColwiseParallel(input_layouts=stream)
    return {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        "blocks.*.forget": by_channel,
        "blocks.*.value": by_channel,
        "blocks.*.gate": by_channel,
        "blocks.*.out": RowwiseParallel(output_layouts=stream),
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }


MODEL = pm.OwnModel(build, slice=build_slice, tensor_table=tensor_table, blocks="blocks.*")


def verify():
    """Print how far each layout is from one process; every number of three steps is compared."""
    small = {
        "model.n_layers": 5,
        "model.d_model": 12,
        "model.attention.n_heads": 2,
        "model.feed_forward.width": 16,
    }
    config = pm.load_config("grammar", {**small, "model.context_length": 16})
    outcomes = pm.verify_model(config, model=MODEL)
    for each in outcomes:
        error = each.problem or f"{max(each.loss_error, each.gradient_error):.0e}"
        print(f"{'equal' if each.passed else 'DIFFERENT'}  {each.case.name}: {error}")
    sys.exit(0 if all(each.passed for each in outcomes) else 1)


def train(arguments):
    """Train on the grammar, in as many processes as there are."""
    config = pm.load_config("grammar", ["--name", "own-model", *arguments])
    sharded = config.parallel.zero > 0
    with (
        failure_ends_process(),
        joined_world("cpu", find_rank(), always_group=sharded) as world,
    ):
        end = pm.Trainer(config, model=MODEL, world=world).fit()
        if world.is_main:
            print(f"ended after step {end.step}: {end.reason}")


if __name__ == "__main__":
    verify() if sys.argv[1:] == ["verify"] else train(sys.argv[1:])
