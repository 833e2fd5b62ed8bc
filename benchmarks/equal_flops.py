"""Two recipes at a small scale, after equal FLOPs: validation loss, mean and spread over seeds.

    python benchmarks/equal_flops.py [--presets gpt2-124m modern-124m] [--rates 6e-4 …]

Each preset keeps what makes it what it is (architecture, optimizer, shape of its schedule) and is
shrunk alike: width 256, four layers, 4,096 pieces of words, 256 tokens of context, 8,192 tokens a
step of the Python standard library's source, less than a pass. The first preset takes `--steps`
steps, the others as many as give the same FLOPs; warm-up and cool-down are the same shares of a run
as in the preset. Rates grow as the width shrinks, × 768 / 256 (Yang et al. 2022, "Tensor programs
V", for matrices under Adam), and `--rates` tries others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import pentameter as pm
from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.data.open_dataset import open_dataset
from pentameter.planning.plan import make_plan
from pentameter.record.events import EvalMetrics
from pentameter.train.run import TrainingRun

WIDTH = 256
SHRUNK = {
    **{"model.n_layers": 4, "model.attention.n_heads": 4, "model.d_model": WIDTH},
    **{"model.context_length": 256, "model.vocab_size": None, "model.vocab_multiple": 64},
    **{"data.corpus": "stdlib", "data.tokenizer": "bpe:4096"},
    **{"train.tokens_per_step": 8192, "train.micro_batch_size": None, "train.device": "cpu"},
    **{"train.eval_interval": None, "train.sample_interval": None},
}


def shrunk(preset: str, steps: int, seed: int, rate: float | None) -> Config:
    """A preset's recipe at the small scale, for `steps` steps."""
    whole = load_config(preset)
    assert whole.train.steps is not None
    share = steps / whole.train.steps
    rate = whole.optimizer.learning_rate * whole.model.d_model / WIDTH if rate is None else rate
    schedule = {
        "schedule.warmup_steps": max(1, round(whole.schedule.warmup_steps * share)),
        "schedule.min_learning_rate": whole.schedule.min_learning_rate
        * (rate / whole.optimizer.learning_rate),
        "schedule.decay_steps": None,
    }
    if whole.schedule.cooldown_steps is not None:
        schedule["schedule.cooldown_steps"] = round(whole.schedule.cooldown_steps * share)
    run = {"seed": seed, "train.steps": steps, "optimizer.learning_rate": rate}
    return load_config(preset, {**SHRUNK, **run, **schedule, "train.eval_interval": steps})


def flops_per_token(config: Config) -> int:
    """Training FLOPs of a token."""
    dataset = open_dataset(config.data)
    return make_plan(config, dataset.vocab_size).least_flops_per_token


def final_loss(config: Config) -> float:
    """The validation loss, whole split, at the end of a run."""
    losses: dict[int, float] = {}

    class Losses:
        def on_eval(self, run: TrainingRun, metrics: EvalMetrics) -> None:
            losses[metrics.step] = metrics.loss

    with tempfile.TemporaryDirectory() as folder:
        pm.Trainer(config, run_dir=Path(folder) / "run", hooks=[Losses()], quiet=True).fit()
    return losses[max(losses)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="+", default=["gpt2-124m", "modern-124m"])
    parser.add_argument("--rates", nargs="*", type=float, help="peak rates to try with each preset")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    budget = asked.steps * flops_per_token(shrunk(asked.presets[0], asked.steps, 1, None))
    results = []
    for preset in asked.presets:
        for rate in asked.rates or [None]:
            steps = round(budget / flops_per_token(shrunk(preset, asked.steps, 1, rate)))
            configs = [shrunk(preset, steps, 1 + number, rate) for number in range(asked.seeds)]
            losses = [final_loss(config) for config in configs]
            used = configs[0].optimizer.learning_rate
            results.append({"preset": preset, "rate": used, "steps": steps, "losses": losses})
            if not asked.json:
                spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
                print(
                    f"{preset:<14} rate {used:.1e} {steps:>5} steps   validation "
                    f"{statistics.fmean(losses):.4f} ± {spread:.4f}",
                    flush=True,
                )
    if asked.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
