"""A small vision transformer that learns to name patterns in images it makes itself.

    python examples/vision_transformer.py                          # one process
    torchrun --nproc-per-node 2 examples/vision_transformer.py --parallel.zero 3
    torchrun --nproc-per-node 8 examples/vision_transformer.py \
        --parallel.zero 3 --parallel.tensor 2 --parallel.pipeline 2
    python examples/vision_transformer.py verify    # layouts against one process, in float64

It shows what a custom model may bring beside its own layers: batches that are no text, and initial
weights that each process draws for its own layers alone. See docs/own-model.md.
"""

import sys

import numpy as np
import torch.nn.functional as F
from torch import arange, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import pentameter as pm
from pentameter.processes.failures.failure import failure_ends_process
from pentameter.processes.group.join import joined_world
from pentameter.processes.group.rank import find_rank

SIZE, PATCH, N_CLASSES = 16, 4, 4
N_PATCHES = (SIZE // PATCH) ** 2  # the sequence of the transformer: model.context_length
HELD_OUT = 1_000_000  # a step that no run reaches: its images are never trained on


def batches(step, rows):
    """Return images (B, 1, SIZE, SIZE) of noisy waves and labels (B,): along x, y or a diagonal."""
    images, labels = [], []
    y, x = np.mgrid[:SIZE, :SIZE]
    directions = (x, y, x + y, x - y)
    for row in rows:
        random = np.random.default_rng((11, step, row))
        label = random.integers(N_CLASSES)
        wave = np.sin(random.uniform(0.6, 1.2) * directions[label] + random.uniform(0, 2 * np.pi))
        images.append(wave + random.normal(size=(SIZE, SIZE)))
        labels.append(label)
    return np.stack(images).astype(np.float32)[:, None], np.array(labels)


class Attention(nn.Module):
    """Every patch attends to every patch."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.head_size = d_model // n_heads
        self.q, self.k, self.v = (nn.Linear(d_model, d_model, bias=False) for _ in range(3))
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        """Return what the heads of this process add to the stream."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's layer with norms before attention and feed-forward."""

    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = Attention(d_model, n_heads)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        """Return the residual stream (B, N_PATCHES, d_model) after this block."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    """Some layers of the model; the first embed patches, the last give logits of classes."""

    def __init__(self, model, layers):
        super().__init__()
        if layers.start == 0:
            self.patch = nn.Linear(PATCH * PATCH, model.d_model)
            self.position = nn.Embedding(N_PATCHES, model.d_model)
        self.blocks = nn.ModuleDict(
            {
                str(n): Block(model.d_model, model.attention.n_heads, model.feed_forward.width)
                for n in layers
            }
        )
        if layers.stop == model.n_layers:
            self.norm = nn.LayerNorm(model.d_model)
            self.head = nn.Linear(model.d_model, N_CLASSES)

    def forward(self, x):
        """Return logits (B, N_CLASSES) of images, or what this slice makes of the stream."""
        if hasattr(self, "patch"):
            patches = F.unfold(x, PATCH, stride=PATCH).transpose(1, 2)
            x = self.patch(patches) + self.position(arange(N_PATCHES, device=x.device)[None])
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)).mean(1) if hasattr(self, "head") else x


def build(config):
    """Return the whole model."""
    return VisionTransformer(config.model, range(config.model.n_layers))


def build_slice(config, layers):
    """Return some of its layers, for pipelines."""
    return VisionTransformer(config.model, layers)


def init_weights(config, path, module):
    """Set the weights that a sub-module has itself. The generator is seeded by its path, so each
    process draws its own layers' alone, and the same ones on every layout."""
    if isinstance(module, nn.LayerNorm):
        module.reset_parameters()
        return
    adds_to_stream = path.endswith((".out", ".down"))
    nn.init.normal_(module.weight, std=0.05 / (config.model.n_layers if adds_to_stream else 1))
    if getattr(module, "bias", None) is not None:
        nn.init.zeros_(module.bias)


def tensor_table(config, stream):
    """Return which matrices processes share: heads and hidden channels are split."""
    reads, adds = ColwiseParallel(input_layouts=stream), RowwiseParallel(output_layouts=stream)
    return {
        "patch": ColwiseParallel(output_layouts=stream),
        "position": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
        **{f"blocks.*.attention.{name}": reads for name in "qkv"},
        "blocks.*.attention.out": adds,
        "blocks.*.up": reads,
        "blocks.*.down": adds,
        "head": ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
    }


MODEL = pm.OwnModel(
    build,
    slice=build_slice,
    tensor_table=tensor_table,
    blocks="blocks.*",
    init_weights=init_weights,
)
SETTINGS = {
    "name": "vision-transformer",
    "model.context_length": N_PATCHES,
    "model.n_layers": 4,
    "model.d_model": 64,
    "model.attention.n_heads": 4,
    "model.feed_forward.width": 128,
    "train.batch_size": 64,
    "train.steps": 300,
    "data.grammar.n_characters": 2000,  # a run has a text; this one never reads it
}


class HeldOut:
    """Evaluate images that training never sees; a hook."""

    def on_step(self, trainer, step):
        """Print their loss now and then. Every process computes its rows of them."""
        if step.step % 100 == 0 or step.step == trainer.plan.steps:
            loss = trainer.engine.evaluate(trainer.batches.batch(HELD_OUT)).mean
            trainer.console.say(f"held-out images: {loss:.4f} nats")
            trainer.record("held_out", step=step.step, loss=loss)


def verify(layouts="all"):
    """Print how far each layout is from one process; every number of three steps is compared."""
    small = {
        "model.n_layers": 4,
        "model.d_model": 12,
        "model.attention.n_heads": 2,
        "model.feed_forward.width": 16,
    }
    config = pm.load_config("grammar", {**SETTINGS, **small})
    outcomes = pm.verify_model(config, model=MODEL, batches=batches, layouts=layouts)
    for each in outcomes:
        error = each.problem or f"{max(each.loss_error, each.gradient_error):.0e}"
        print(f"{'equal' if each.passed else 'DIFFERENT'}  {each.case.name}: {error}")
    sys.exit(0 if all(each.passed for each in outcomes) else 1)


def train(arguments):
    """Train in as many processes as there are."""
    settings = [f"--{key}={value}" for key, value in SETTINGS.items()]
    config = pm.load_config("grammar", [*settings, *arguments])
    sharded = config.parallel.zero > 0
    with (
        failure_ends_process(),
        joined_world("cpu", find_rank(), always_group=sharded) as world,
    ):
        run = pm.Trainer(config, model=MODEL, batches=batches, hooks=[HeldOut()], world=world)
        end = run.fit()
        if world.is_main:
            print(f"ended after step {end.step}: {end.reason}")


if __name__ == "__main__":
    verify(*sys.argv[2:]) if sys.argv[1:2] == ["verify"] else train(sys.argv[1:])
