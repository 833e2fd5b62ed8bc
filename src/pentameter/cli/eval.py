"""`pentameter eval`: how well a model predicts a whole split."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from pentameter.cli.arguments import parse_arguments
from pentameter.cli.loading import load_for_verb
from pentameter.errors import ConfigError

if TYPE_CHECKING:
    from pentameter.train.hooks import EvalMetrics

HELP = "Loss, perplexity and bits per byte of a model over a whole split."


@dataclass(frozen=True)
class EvalArguments:
    """Evaluate a model on a whole split, every token once.

    Other text than the model's own: --data.path FILE, or any other --data.… key.
    """

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder (its best checkpoint, else its last) or a checkpoint folder."""
    split: Literal["val", "test", "train"] = "val"
    """The part of the data, as the data section cuts it."""
    batch_size: int = 32
    """Sequences at once; the result does not depend on it."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the model runs; auto takes the fastest present."""
    precision: Literal["auto", "fp64", "fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Arithmetic of the matrix products."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Evaluate; 0."""
    parsed, overrides = parse_arguments(EvalArguments, arguments, verb="eval")
    if parsed.batch_size < 1:
        raise ConfigError(f"--batch-size {parsed.batch_size} must be at least 1")
    metrics = _evaluate(parsed, overrides)
    if parsed.json:
        names = ("step", "split", "loss", "perplexity", "bits_per_byte", "tokens", "seconds")
        print(json.dumps({name: getattr(metrics, name) for name in names}))
    else:
        print(
            f"{metrics.split}: loss {metrics.loss:.4f} nats/token · perplexity "
            f"{metrics.perplexity:.4f} · {metrics.bits_per_byte:.4f} bits/byte · "
            f"{metrics.tokens:,} tokens · step {metrics.step}"
        )
    return 0


def _evaluate(parsed: EvalArguments, overrides: list[str]) -> EvalMetrics:
    from pentameter.config.load import load_config
    from pentameter.data.dataset import open_dataset
    from pentameter.parallel.assemble import Stage
    from pentameter.parallel.device import choose_device, choose_precision
    from pentameter.plan.plan import make_plan
    from pentameter.train.evaluation import evaluate

    device = choose_device(parsed.device)
    precision, _ = choose_precision(parsed.precision, device)
    loaded = load_for_verb(parsed.model, device)
    config = load_config(loaded.checkpoint.path / "config.toml", overrides)
    if config.model_copy(update={"data": loaded.config.data}) != loaded.config:
        raise ConfigError("eval takes overrides of the data section only: --data.path FILE")
    dataset = open_dataset(config.data, tokenizer=loaded.tokenizer)
    if precision == "fp64":
        loaded.model.double()
    stage = Stage(loaded.model, make_plan(config), device, precision, compiled=False)
    metrics = evaluate(
        stage,
        dataset.split(parsed.split),
        name=parsed.split,
        step=loaded.checkpoint.step,
        batch_size=parsed.batch_size,
    )
    assert metrics is not None  # nothing asks it to stop
    return metrics
