"""`benchmarks/train_cpu.py`: when a step's time counts, and that every side trains what it says."""

import importlib
import math
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
    monkeypatch.setattr(turns.time, "process_time", lambda: next(clock))

    def nobody(after):
        while after(0.0):
            pass

    monkeypatch.setattr(turns, "MOST_SECONDS", 10_000)
    monkeypatch.setitem(turns.SIDES, "plain", lambda *_: ("by nobody", nobody))
    turn = turns._turn("plain", None, 3, None, turns.LEAST_STEPS)
    assert (len(turn.warm_up_seconds), len(turn.seconds)) == (turns.MOST_STEPS, 3)
    assert not turn.settled


def test_a_slow_side_ends_after_its_least_steps(benchmark, monkeypatch):
    turns = benchmark("cpu_turns")
    seconds = iter([*(20.0 * n for n in range(12)), 250.0, 270.0, 290.0])  # the 12th takes 30
    monkeypatch.setattr(turns.time, "perf_counter", lambda: next(seconds))
    clock = turns.Clock("a", 2)
    wanted = [clock.after(float(number)) for number in range(14)]
    assert wanted == [True] * 13 + [False]
    assert (clock.n_warm_up, clock.seconds[12:]) == (12, [20.0, 20.0])
    assert clock.losses == list(range(14))


def losses_of(train, n_steps):
    """The losses of the first steps."""
    losses = []

    def after(loss):
        losses.append(loss)
        return len(losses) < n_steps

    train(after)
    return losses


@pytest.mark.parametrize("side", ["plain", "nanogpt", "ours"])
def test_a_side_learns(benchmark, checkout, side):
    how, train = benchmark("cpu_turns").SIDES[side](tiny_plan(), checkout)
    losses = losses_of(train, 50)
    assert how.startswith("fp32, eager")
    assert sum(losses[25:]) / 25 < sum(losses[:3]) / 3 - 0.1


def test_autocast_is_a_way_of_its_own(benchmark, checkout):
    sides = benchmark("cpu_turns").SIDES
    (how, plain), (bf16_how, bf16) = (
        sides[side](tiny_plan(), checkout) for side in ("nanogpt", "nanogpt-bf16")
    )
    assert (how, bf16_how.partition(":")[0]) == (
        "fp32, eager: --compile=False",
        "bf16 autocast, eager",
    )
    assert losses_of(bf16, 5) == pytest.approx(losses_of(plain, 5), rel=0.02)


def test_a_turn_is_alone_in_a_process(benchmark, checkout):
    turn = benchmark("cpu_turns").take_turn("nanogpt", tiny_plan(), 2, checkout)
    assert len(turn.seconds) == 2
    assert len(turn.losses) == len(turn.warm_up_seconds) + 2 >= 14
    torch.manual_seed(1337)  # the same steps here
    _, train = benchmark("cpu_turns").SIDES["nanogpt"](tiny_plan(), checkout)
    assert turn.losses[:3] == losses_of(train, 3)


def test_the_trainer_of_hugging_face_takes_the_steps_that_are_timed(benchmark):
    pytest.importorskip("accelerate")
    plan = tiny_plan()
    how, train = benchmark("cpu_turns").SIDES["hf-bf16"](plan, None)
    losses = losses_of(train, 50)
    assert how.startswith("bf16 autocast, eager: transformers")
    assert len(losses) == 50
    # of eight tokens a row it sums seven targets and divides by eight
    assert losses[0] == pytest.approx(7 / 8 * math.log(plan.config.model.vocab_size), rel=0.03)
    assert sum(losses[25:]) / 25 < sum(losses[:3]) / 3 - 0.05


def test_what_the_trainer_needs_is_said(benchmark, monkeypatch):
    peers = benchmark("cpu_peers")
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install transformers accelerate"):
        peers.load_transformers()


def test_the_best_peer_is_named(benchmark):
    seconds = {"plain": 3.0, "ours": 2.0, "nanogpt": 12.0, "nanogpt-bf16": 9.0, "hf-bf16": 10.0}
    sides = {
        side: {"seconds": of_side, "cpu_seconds": 1.5 * of_side}
        for side, of_side in (seconds | {"ours": 3.0}).items()
    }
    sides["ours"]["seconds"] = 2.0
    lines = benchmark("train_cpu").ratio_lines(sides)
    assert lines[-1] == "the best of the peers is nanogpt-bf16: ours is 4.50 × as fast"
    assert [" ".join(line.split()) for line in lines[1:3]] == [
        "plain 1.50 × ours, 1.00 × in processor seconds",
        "nanogpt 6.00 × ours, 4.00 × in processor seconds",
    ]
    assert benchmark("train_cpu").ratio_lines({"plain": sides["plain"]}) == []


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
        benchmark("cpu_peers").load_nanogpt(tmp_path)
