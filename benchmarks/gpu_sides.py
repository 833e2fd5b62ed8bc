"""The two sides of `train_gpu.py`: the step that the trainer runs, and a plain one.

Both learn from the same random tokens, in batches keyed by step; nothing is downloaded. Loss and
time of a step do not depend on what the tokens say.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pentameter.data.batches.step import TrainingBatches
from pentameter.data.shards.dataset import TokenSequence, TokenSplit
from pentameter.keyed import bits, make_key
from pentameter.model.gpu.forms import PLAIN_FORMS
from pentameter.optim.build import build_optimizer
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.assemble import assemble
from pentameter.parallel.precision import LossScale, arithmetic
from pentameter.planning.plan import Plan
from pentameter.train.compute import choose_compute
from pentameter.train.update import may_read_late, update_weights
from plain_gpt import PlainGPT, make_optimizer

N_TOKENS = 2**22  # 8 MB: larger than a step, small enough to draw in a moment


def random_batches(plan: Plan) -> TrainingBatches:
    """The training batches of random tokens, uniform over the vocabulary."""
    config = plan.config
    assert config.model.vocab_size is not None
    words = bits(make_key(config.seed, "benchmark"), np.arange(N_TOKENS, dtype=np.int32))
    tokens = (words.view(np.uint32) % config.model.vocab_size).astype(np.uint16)
    split = TokenSplit("train", TokenSequence([tokens], 0, N_TOKENS), n_bytes=N_TOKENS)
    return TrainingBatches(
        split,
        config.data.order,
        seed=config.seed,
        batch_size=plan.batch_size,
        context_length=config.model.context_length,
    )


class Ours:
    """Steps as `train/trainer.py` makes them, from the batch to the zeroed gradients."""

    def __init__(self, plan: Plan, device: torch.device, precision: str, *, compiled: bool) -> None:
        self.plan, self.precision = plan, precision
        forms = choose_compute(plan).forms if device.type == "cuda" else PLAIN_FORMS
        self.engine = assemble(plan, device, precision, compiled=compiled, forms=forms)
        self.optimizer = build_optimizer(
            self.engine.named_parameters(), plan.table, plan.config.optimizer
        )
        self.loss_scale = LossScale()
        self.batches = random_batches(plan)

    @property
    def n_parameters(self) -> int:
        """Numbers in the model, padding included."""
        return sum(p.numel() for p in self.engine.parameters())

    def step(self, number: int) -> Tensor:
        """The mean loss of step `number` (0-based), 0-dimensional, after its update."""
        engine, config = self.engine, self.plan.config
        scaled = self.precision == "fp16"
        scale = self.loss_scale.scale if scaled else 1.0
        loss = engine.forward_backward(self.batches.batch(number), number, loss_scale=scale)
        rate = learning_rate(number, config.optimizer, config.schedule)
        clip_norm = config.optimizer.clip_norm
        at_once = not may_read_late(engine, self.optimizer)
        update = update_weights(
            engine, self.optimizer, loss, rate, scale, clip_norm, at_once=at_once
        )
        if scaled:
            self.loss_scale.update(finite=update.made)
        return torch.as_tensor(update.loss.total / update.loss.n_targets)


class Plain:
    """What a good single-file trainer does: `torch.compile`, autocast, PyTorch's fused attention
    with its own dropout, fused AdamW, the next micro-batch fetched while this one is computed, and
    no word with the host until somebody asks for the loss.
    """

    def __init__(self, plan: Plan, device: torch.device, precision: str, *, compiled: bool) -> None:
        torch.manual_seed(plan.config.seed)
        torch.set_float32_matmul_precision("high")
        self.plan, self.device = plan, device
        model, optimizer = plan.config.model, plan.config.optimizer
        plain = PlainGPT(
            plan.vocab_size_padded,
            model.context_length,
            model.n_layers,
            model.attention.n_heads,
            model.d_model,
            model.dropout,
            model.attention.dropout,
            bias=model.bias,
        ).to(device)
        plain.train()
        self.parameters = list(plain.parameters())
        self.model = torch.compile(plain) if compiled else plain
        self.optimizer = make_optimizer(
            plain,
            learning_rate=optimizer.learning_rate,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )
        self.arithmetic = arithmetic(precision)
        self.scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
        self.batches = random_batches(plan)
        self.fetched = self._fetch(0)

    @property
    def n_parameters(self) -> int:
        """Numbers in the model, padding included."""
        return sum(p.numel() for p in self.parameters)

    def step(self, number: int) -> Tensor:
        """The mean loss of step `number`, 0-dimensional and on the device, after its update.

        Steps follow each other: the batch of the next one is fetched during this one.
        """
        n_micro = self.plan.n_micro_batches
        total = torch.zeros((), device=self.device)
        for micro in range(n_micro):
            with self.arithmetic.autocast(self.device):
                _logits, loss = self.model(*self.fetched)
            self.fetched = self._fetch(number * n_micro + micro + 1)
            self.scaler.scale(loss / n_micro).backward()
            total += loss.detach() / n_micro
        clip_norm = self.plan.config.optimizer.clip_norm
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def _fetch(self, micro_batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) of a micro-batch, counted from the first step's first one."""
        step, micro = divmod(micro_batch, self.plan.n_micro_batches)
        size = self.plan.micro_batch_size
        batch = self.batches.batch(step, np.arange(micro * size, (micro + 1) * size))
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        if self.device.type == "cuda":
            return (
                inputs.pin_memory().to(self.device, non_blocking=True),
                targets.pin_memory().to(self.device, non_blocking=True),
            )
        return inputs.to(self.device), targets.to(self.device)


SIDES: dict[str, type[Ours] | type[Plain]] = {"plain": Plain, "ours": Ours}
