"""`benchmarks/train_cpu.py`: when a step's time counts, and that every side trains what it says."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pentameter.config.schema import Config
from pentameter.data.open_dataset import open_dataset
from pentameter.planning.plan import make_plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

CHECKOUT = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int = 1
    vocab_size: int = 1
    n_layer: int = 1
    n_head: int = 1
    n_embd: int = 1
    dropout: float = 0.0
    bias: bool = True

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print("number of parameters")
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, tokens, targets):
        logits = self.table(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        assert device_type == "cpu"
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)
"""
"""What the benchmark uses of nanoGPT's model.py, around a table of bigrams."""


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "model.py").write_text(CHECKOUT, encoding="utf-8")
    return tmp_path


def tiny_plan():
    model = {"context_length": 8, "n_layers": 1, "n_heads": 1, "d_model": 32}
    train = {"steps": 50, "batch_size": 4, "device": "cpu", "precision": "fp32", "compile": False}
    fast = {
        "optimizer": {"learning_rate": 0.01},
        "schedule": {"name": "constant", "warmup_steps": 1},
    }
    sections = {"model": model, "data": {"corpus": "grammar"}, "train": train, **fast}
    config = Config.model_validate(sections)
    return make_plan(config, open_dataset(config.data).vocab_size)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([19, 11, 10, 9, 8.5, 8, 8, 8, 8, 8, 8], False),  # 11 steps
        ([19, 11, 10, 9, 8.5, 8, 8, 8, 8, 8, 8, 8], True),
        ([8.0] * 11 + [8.5], False),  # one of the last is slower
        ([8.0] * 11 + [8.3], True),
        ([9.0, 9.0, 9.0, 9.0] * 2 + [8.8, 8.7, 8.6, 8.5], False),  # it still falls
        ([8.0] * 8 + [8.2] * 4, True),  # it does not
    ],
)
def test_a_step_settles_by_a_rule(benchmark, seconds, expected):
    assert benchmark("cpu_turns").settled(seconds) is expected


def test_what_never_settles_ends_and_says_so(benchmark, monkeypatch):
    turns = benchmark("cpu_turns")
    clock = iter([n * n / 4 for n in range(10_000)])  # each step takes longer than the one before
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(clock))
    monkeypatch.setitem(turns.SIDES, "plain", lambda *_: ("by nobody", lambda number: 0.0))
    turn = turns._turn("plain", None, 3, None)
    assert (len(turn.warm_up_seconds), len(turn.seconds)) == (turns.MOST_STEPS, 3)
    assert not turn.settled


@pytest.mark.parametrize("side", ["plain", "nanogpt", "ours"])
def test_a_side_learns(benchmark, checkout, side):
    how, step = benchmark("cpu_turns").SIDES[side](tiny_plan(), checkout)
    losses = [step(0) for _ in range(30)]  # the same batch
    assert how.startswith("fp32, eager")
    assert losses[-1] < losses[0] - 0.5


def test_a_turn_is_alone_in_a_process(benchmark, checkout):
    turn = benchmark("cpu_turns").take_turn("nanogpt", tiny_plan(), 2, checkout)
    assert len(turn.seconds) == 2
    assert len(turn.losses) == len(turn.warm_up_seconds) + 2 >= 14
    torch.manual_seed(1337)  # the same steps here
    _, step = benchmark("cpu_turns").nanogpt(tiny_plan(), checkout)
    assert turn.losses[:3] == [step(number) for number in range(3)]


def test_figures_follow_from_the_turns(benchmark):
    turns, train_cpu = benchmark("cpu_turns"), benchmark("train_cpu")
    one = turns.Turn("eager", [5.0, 4.0, 3.0], [9.0], [2.0, 4.0], [4.0, 4.0], True, 100, 0.0)
    two = replace(one, seconds=[3.0, 3.0], cpu_seconds=[5.0, 6.0], peak_bytes=200)
    plan = tiny_plan()
    figures = train_cpu.side_summary(plan, [one, two], 1e9, last=2)
    assert (figures["seconds"], figures["cpu_seconds"]) == (3.0, 4.5)
    assert figures["tokens_per_second"] == pytest.approx(4 * 8 / 3)
    assert figures["share_of_ceiling"] == pytest.approx(32 * plan.flops_per_token / 3 / 1e9)
    assert (figures["peak_bytes"], figures["loss"]) == (200, 4.5)


def test_a_folder_without_nanogpt_is_refused(benchmark, tmp_path):
    with pytest.raises(SystemExit, match=r"no model\.py there"):
        benchmark("cpu_turns").load_nanogpt(tmp_path)
