"""The Plan: everything that follows from a configuration. Each derived number is born here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pentameter.config.divisors import nearest_divisors
from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.plan.flops import CONVENTION, flops_per_token
from pentameter.plan.layout import Layout, stage_layers
from pentameter.plan.table import (
    ParameterSpec,
    embedding_dropout,
    feed_forward_width,
    padded_vocab_size,
    parameter_table,
)

# What AdamW and SGD keep beside each weight, in elements of the weight's own type.
OPTIMIZER_SLOTS = {"adamw": 2, "sgd": 0, "sgd+momentum": 1}


@dataclass(frozen=True)
class Plan:
    """What a run obeys. `config` is resolved: nothing in it is left to be derived."""

    config: Config
    layout: Layout
    table: tuple[ParameterSpec, ...]
    stages: tuple[range, ...]
    vocab_size_padded: int
    n_parameters: int
    n_parameters_padded: int
    batch_size: int
    micro_batch_size: int
    n_micro_batches: int
    tokens_per_step: int
    total_tokens: int
    flops_per_token: int
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The shape of `plan --json` and of a run folder's plan.json."""
        return {
            "model": {
                "parameters": self.n_parameters,
                "parameters_padded": self.n_parameters_padded,
                "vocab_size_padded": self.vocab_size_padded,
                "flops_per_token": self.flops_per_token,
                "flops_convention": CONVENTION,
            },
            "layout": self.layout.to_json(),
            "stages": [[stage.start, stage.stop] for stage in self.stages],
            "batch": {
                "tokens_per_step": self.tokens_per_step,
                "batch_size": self.batch_size,
                "micro_batch_size": self.micro_batch_size,
                "n_micro_batches": self.n_micro_batches,
            },
            "steps": self.config.train.steps,
            "total_tokens": self.total_tokens,
            "total_flops": self.total_tokens * self.flops_per_token,
            "memory": {
                "weights_bytes": self.weights_bytes,
                "gradients_bytes": self.gradients_bytes,
                "optimizer_bytes": self.optimizer_bytes,
            },
            "warnings": [],
        }


def make_plan(config: Config, vocab_size: int | None = None) -> Plan:
    """The Plan of `config` for one process.

    `vocab_size` is the tokenizer's, and needed when the configuration does not state one. Raises
    ConfigError where the numbers cannot be (a batch that does not divide, a vocabulary smaller
    than the tokenizer's), naming the nearest that can.
    """
    config = _resolve(config, vocab_size)
    model, train, optimizer = config.model, config.train, config.optimizer
    table = parameter_table(model)
    n_padded = sum(spec.n_elements for spec in table)
    n_padding = _padding_elements(config)
    assert train.batch_size is not None
    assert train.micro_batch_size is not None
    tokens_per_step = train.batch_size * model.context_length
    element_bytes = 8 if train.precision == "fp64" else 4
    slots = OPTIMIZER_SLOTS[
        "sgd+momentum" if optimizer.name == "sgd" and optimizer.momentum else optimizer.name
    ]
    layout = Layout()
    return Plan(
        config=config,
        layout=layout,
        table=table,
        stages=stage_layers(model.n_layers, layout.pipeline),
        vocab_size_padded=padded_vocab_size(model),
        n_parameters=n_padded - n_padding,
        n_parameters_padded=n_padded,
        batch_size=train.batch_size,
        micro_batch_size=train.micro_batch_size,
        n_micro_batches=train.batch_size // train.micro_batch_size,
        tokens_per_step=tokens_per_step,
        total_tokens=tokens_per_step * train.steps,
        flops_per_token=flops_per_token(model, table),
        weights_bytes=n_padded * element_bytes,
        gradients_bytes=n_padded * element_bytes,
        optimizer_bytes=n_padded * element_bytes * slots,
    )


def _resolve(config: Config, vocab_size: int | None) -> Config:
    """`config` with every value that others imply filled in."""
    model, train = config.model, config.train
    if model.vocab_size is None and vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not set and no tokenizer is at hand to take it from; set it, "
            "e.g. --model.vocab-size 50257"
        )
    if model.vocab_size is not None and vocab_size is not None and model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's {vocab_size} "
            "tokens; leave it out to take the tokenizer's"
        )
    context = model.context_length
    batch_size = train.batch_size
    if batch_size is None:
        assert train.tokens_per_step is not None  # the schema asks for exactly one of the two
        batch_size, rest = divmod(train.tokens_per_step, context)
        if rest or batch_size == 0:
            raise ConfigError(
                f"train.tokens_per_step={train.tokens_per_step} must be a multiple of "
                f"model.context_length={context}; nearest possible: "
                f"{max(1, batch_size) * context}, {(batch_size + 1) * context}"
            )
    micro = train.micro_batch_size or batch_size
    if batch_size % micro:
        raise ConfigError(
            f"train.micro_batch_size={micro} must divide the {batch_size} sequences of a step; "
            f"nearest possible: {', '.join(map(str, nearest_divisors(batch_size, micro)))}"
        )
    schedule, checkpoint = config.schedule, config.checkpoint
    interval = checkpoint.interval or train.eval_interval or train.steps
    return config.model_copy(
        update={
            "model": model.model_copy(
                update={
                    "vocab_size": model.vocab_size or vocab_size,
                    "d_ff": feed_forward_width(model),
                    "embedding_dropout": embedding_dropout(model),
                }
            ),
            "train": train.model_copy(
                update={
                    "batch_size": batch_size,
                    "tokens_per_step": None,
                    "micro_batch_size": micro,
                }
            ),
            "schedule": schedule.model_copy(
                update={"decay_steps": schedule.decay_steps or train.steps}
            ),
            "checkpoint": checkpoint.model_copy(update={"interval": interval}),
        }
    )


def _padding_elements(config: Config) -> int:
    """Elements of the embedding and head rows that only pad the vocabulary."""
    model = config.model
    assert model.vocab_size is not None
    rows = padded_vocab_size(model) - model.vocab_size
    per_row = model.d_model * (1 if model.tied_head else 2) + (1 if model.head_bias else 0)
    return rows * per_row
