"""What `train_cpu.py` holds our step against: a plain GPT, nanoGPT, and Hugging Face's Trainer.

nanoGPT's model and Hugging Face's GPT-2 each train in four ways: fp32 or bf16 autocast, eager or by
`torch.compile`. All peers read the batches of the run itself, with its rates, and drop attention
weights as nanoGPT does: by `dropout`.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.optim.schedule import learning_rate
from pentameter.planning.plan import Plan
from plain_gpt import PlainGPT, make_optimizer, train_step

Train = Callable[[Callable[[float], bool]], None]
"""Trains from step 0 on, and calls what it is given with the mean loss of each step, until that
answers that no other is wanted."""
Side = Callable[[Plan, Path | None], tuple[str, Train]]
"""Returns how the step of a plan is computed, and what trains. Takes a checkout of nanoGPT, too."""


def one_by_one(step: Callable[[int], float]) -> Train:
    """What trains by `step`, which takes the number of a step and returns its mean loss."""

    def train(after: Callable[[float], bool]) -> None:
        number = 0
        while after(step(number)):
            number += 1

    return train


def plain(plan: Plan, checkout: Path | None) -> tuple[str, Train]:
    """The step by `plain_gpt.py`."""
    torch.manual_seed(plan.config.seed)
    config = plan.config.model
    assert config.vocab_size is not None
    model = PlainGPT(
        config.vocab_size,
        config.context_length,
        config.n_layers,
        config.attention.n_heads,
        config.d_model,
        config.dropout,
        config.dropout,  # as nanoGPT: one rate, on attention weights too
    )
    model.train()
    optimizer = make_optimizer(model)
    batch = _tensors(plan)

    def step(number: int) -> float:
        return train_step(model, optimizer, [batch(number)], learning_rate=_rate(plan, number))

    return "fp32, eager", one_by_one(step)


def nanogpt(
    plan: Plan, checkout: Path | None, *, bf16: bool = False, compiled: bool = False
) -> tuple[str, Train]:
    """The step by the model and the optimizer of a checkout of karpathy/nanoGPT, in the order of
    its train.py. There autocast is off on a CPU (`nullcontext`): a user of its bf16 changes a line.
    """
    assert checkout is not None
    theirs = load_nanogpt(checkout)
    torch.manual_seed(plan.config.seed)
    config, groups = plan.config.model, plan.config.optimizer
    model = theirs.GPT(
        theirs.GPTConfig(
            block_size=config.context_length,
            vocab_size=config.vocab_size,
            n_layer=config.n_layers,
            n_head=config.attention.n_heads,
            n_embd=config.d_model,
            dropout=config.dropout,
            bias=config.bias,
        )
    )
    model.train()
    optimizer = model.configure_optimizers(
        groups.weight_decay, groups.learning_rate, groups.betas, "cpu"
    )
    batch = _tensors(plan)
    compute = torch.compile(model) if compiled else model

    def step(number: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = _rate(plan, number)
        with torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext():
            _, loss = compute(*batch(number))
        mean = loss.item()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), groups.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(mean)

    reached = "with a line of its train.py changed" if bf16 else f"--compile={compiled}"
    return f"{_way(bf16, compiled)}: {reached}", one_by_one(step)


def hugging_face(
    plan: Plan, checkout: Path | None, *, bf16: bool = False, compiled: bool = False
) -> tuple[str, Train]:
    """The step by the Trainer of `transformers`, of a GPT-2 of the same size, context, dropout and
    activation. It has the biases of a GPT-2, and no target for the last token of a row."""
    transformers = load_transformers()
    config, groups = plan.config.model, plan.config.optimizer
    transformers.set_seed(plan.config.seed)
    gpt2 = transformers.GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.context_length,
        n_layer=config.n_layers,
        n_head=config.attention.n_heads,
        n_embd=config.d_model,
        activation_function="gelu",
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=config.dropout,
        use_cache=False,
    )

    def train(after: Callable[[float], bool]) -> None:
        class After(transformers.TrainerCallback):  # type: ignore[name-defined]
            def on_log(self, arguments: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
                if "loss" in logs and not after(logs["loss"]):
                    control.should_training_stop = True

        with tempfile.TemporaryDirectory() as folder:
            trainer = transformers.Trainer(
                transformers.GPT2LMHeadModel(gpt2),
                transformers.TrainingArguments(
                    folder,
                    use_cpu=True,
                    bf16=bf16,
                    torch_compile=compiled,
                    per_device_train_batch_size=plan.config.train.batch_size,
                    max_steps=plan.config.train.steps,
                    learning_rate=groups.learning_rate,
                    lr_scheduler_type=plan.config.schedule.name,
                    warmup_steps=plan.config.schedule.warmup_steps,
                    weight_decay=groups.weight_decay,
                    adam_beta1=groups.betas[0],
                    adam_beta2=groups.betas[1],
                    max_grad_norm=groups.clip_norm,
                    seed=plan.config.seed,
                    logging_steps=1,  # without it no loss of a step is told
                    save_strategy="no",
                    disable_tqdm=True,
                    report_to="none",
                ),
                train_dataset=_rows(plan),
                callbacks=[After],
            )
            trainer.train()

    return f"{_way(bf16, compiled)}: transformers {transformers.__version__}", train


WAYS = {
    "": (False, False),
    "-compiled": (False, True),
    "-bf16": (True, False),
    "-bf16-compiled": (True, True),
}
"""End of a side's name → whether it computes in bf16, and compiled."""
NANOGPT: dict[str, Side] = {
    f"nanogpt{way}": partial(nanogpt, bf16=bf16, compiled=compiled)
    for way, (bf16, compiled) in WAYS.items()
}
HUGGING_FACE: dict[str, Side] = {
    f"hf{way}": partial(hugging_face, bf16=bf16, compiled=compiled)
    for way, (bf16, compiled) in WAYS.items()
}


def load_nanogpt(checkout: Path) -> ModuleType:
    """The file model.py of a checkout of nanoGPT. Exits where there is none."""
    path = checkout / "model.py"
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    if spec is None or spec.loader is None or not path.is_file():
        sys.exit(f"--nanogpt {checkout}: no model.py there; name a checkout of karpathy/nanoGPT")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks its own module up
    spec.loader.exec_module(module)
    return module


def load_transformers() -> ModuleType:
    """The package `transformers`, whose Trainer needs `accelerate`. Exits where one is missing."""
    missing = [
        name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None
    ]
    if missing:
        sys.exit(f"the sides hf need {' and '.join(missing)}: pip install {' '.join(missing)}")
    return importlib.import_module("transformers")


def _way(bf16: bool, compiled: bool) -> str:
    return f"{'bf16 autocast' if bf16 else 'fp32'}, {'compiled' if compiled else 'eager'}"


def _rows(plan: Plan) -> torch.utils.data.IterableDataset[dict[str, torch.Tensor]]:
    """The rows of the steps' batches, one after another, as the Trainer's loader stacks them."""

    class Rows(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            batch = _tensors(plan)
            for number in count():
                for row in batch(number)[0]:
                    yield {"input_ids": row, "labels": row}

    return Rows()


def _tensors(plan: Plan) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Number → inputs and targets of the step's batch, each (B, T) int64."""
    batch = training_batches(plan.config, open_dataset(plan.config.data).split("train")).batch

    def tensors(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        current = batch(number)
        return torch.from_numpy(current.inputs), torch.from_numpy(current.targets)

    return tensors


def _rate(plan: Plan, number: int) -> float:
    return learning_rate(number, plan.config.optimizer, plan.config.schedule)
