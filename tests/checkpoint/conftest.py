from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pentameter.checkpoint.folders.store import CheckpointStore, Saved
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.cli.main import main

RUN_ID = "run-a"

sys.path.insert(0, str(Path(__file__).parent))  # for the tests that share `layout_worlds`


def step_tensors(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Different content for each step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "a.weight": torch.randn(5, 7, generator=generator),
            "b.bias": torch.randn(3, generator=generator).bfloat16(),
        },
        "optimizer": {
            "a.weight.exp_avg": torch.randn(5, 7, generator=generator),
            "a.weight.step": torch.tensor(step),
        },
    }


def save_step(store: CheckpointStore, step: int, best: int | None = None) -> Saved:
    state = {"step": step, "best": None if best is None else {"step": best, "loss": 1.0 / 3.0}}
    return store.save(Contents(step, step_tensors(step), state, {"config.toml": b'name = "x"\n'}))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", run_id=RUN_ID, config_hash="c0")


@pytest.fixture
def save() -> Callable[..., Saved]:
    return save_step


@pytest.fixture
def tensors_of() -> Callable[[int], dict[str, dict[str, torch.Tensor]]]:
    return step_tensors


@pytest.fixture
def said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """A function that runs a command in a folder with a text, `text.txt`, and returns what it
    printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat, and that was that.\n" * 40)

    def run(*arguments: str) -> str:
        assert main(list(arguments)) == 0
        return capsys.readouterr().out

    return run
