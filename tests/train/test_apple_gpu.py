"""What Apple's GPU refuses is not asked of it, on one that is simulated: float64 there, and copies
that widen on their way to the host."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_mps import simulated_mps
from source_files import SOURCE, files, nodes
from tiny_runs import config

import pentameter as pm
from pentameter.checkpoint.folders.load_model import LoadedModel, load_model
from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import make_plan
from pentameter.serve.passes import Slots
from pentameter.train.loop import Trainer

MAY_WIDEN = {
    # gloo and NCCL sum these: several processes on MPS are refused (`local_device`)
    "parallel/gradients.py": 2,
    "parallel/engine.py": 2,
    # where Triton compiles, or numpy stands for it
    "model/attention/checked_attention.py": 1,
}
"""File → calls that name both float64 and a device."""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("To be, or not to be: that is the question.\n" * 40)
    return path


def on_mps(text: Path, **train: object) -> Config:
    of_train = {
        "device": "mps",
        "steps": 2,
        "eval_interval": 1,
        "sample_interval": 1,
        "sample_tokens": 4,
    } | train
    return config(
        model={"dropout": 0.1},
        data={"corpus": None, "path": str(text)},
        train=of_train,
        guard={"spike_factor": 3.0},  # whose history is float64, on the host
    )


def test_the_simulated_device_refuses_what_the_real_one_does():
    with simulated_mps():
        there = torch.ones(2, device="mps")
        for refused in (
            lambda: there.to("cpu", torch.float64),
            lambda: torch.zeros(2).copy_(there).double().copy_(there),
            there.double,
            lambda: torch.zeros(2, dtype=torch.float64, device="mps"),
            lambda: torch.zeros(2, dtype=torch.float64).to("mps"),
        ):
            with pytest.raises(TypeError, match="float64"):
                refused()
        with torch.inference_mode(), pytest.raises(TypeError, match="float64"):
            there.to("cpu", torch.float64)
        assert there.cpu().double().tolist() == [1, 1]


def written(loaded: LoadedModel) -> tuple[str, list[tuple[int, str]]]:
    model, tokenizer = loaded.model, loaded.tokenizer
    (whole,) = pm.generate(model, tokenizer, "To be", max_new_tokens=5, temperature=0)
    return whole, list(pm.stream(model, tokenizer, "or not", max_new_tokens=5, num_samples=2))


def test_a_run_trains_samples_and_saves_there_and_its_model_writes(tmp_path, text):
    with simulated_mps():
        end = Trainer(on_mps(text), run_dir=tmp_path / "run", quiet=True).fit()
        there = load_model(tmp_path / "run", device="mps")
        assert next(there.model.parameters()).device.type == "mps"
        of_there = written(there)
    assert end.step == 2
    assert len(list((tmp_path / "run" / "samples").iterdir())) == 3
    assert of_there == written(load_model(tmp_path / "run"))


def test_the_server_reads_and_writes_there(tmp_path, text):
    Trainer(on_mps(text, device="cpu"), run_dir=tmp_path / "run", quiet=True).fit()

    def logits(device: str) -> list[np.ndarray]:
        model = load_model(tmp_path / "run", device=device).model
        slots = Slots(model, model.config.vocab_size, 2)
        return [slots.read(0, [1, 2, 3], 0, 3), slots.write({0: (4, 3, 4)})[0]]

    here = logits("cpu")
    with simulated_mps():
        there = logits("mps")
    for a, b in zip(here, there, strict=True):
        assert a.dtype == b.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)  # fp32, summed in another order


def test_the_engine_hands_logits_and_losses_to_the_host(text):
    plan = make_plan(on_mps(text), vocab_size=20)

    def numbers(device: str) -> list[np.ndarray]:
        engine = assemble(plan, torch.device(device), "fp32", compiled=False)
        tokens = np.arange(8)[None]
        batch = Batch(tokens, tokens + 1, np.arange(1))
        return [engine.row_losses(batch), engine.next_logits(tokens)]

    here = numbers("cpu")
    with simulated_mps():
        there = numbers("mps")
    for a, b in zip(here, there, strict=True):
        assert a.dtype == b.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)  # fp32, summed in another order


def names_both(call: ast.Call) -> bool:
    """Whether the call itself names float64 and a device: a copy that widens, or a new tensor."""
    named = [*call.args, *(each.value for each in call.keywords)]
    widens = any(isinstance(each, ast.Attribute) and each.attr == "float64" for each in named)
    of_method = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
    return widens and (
        any(each.arg == "device" for each in call.keywords) or (of_method and len(named) > 1)
    )


def test_float64_and_a_device_are_named_by_one_call_only_where_there_is_no_mps():
    found = Counter(
        str(path.relative_to(SOURCE))
        for path in files()
        for node in nodes(path)
        if isinstance(node, ast.Call) and names_both(node)
    )
    assert found == MAY_WIDEN


def test_the_rule_sees_what_it_is_to_see():
    for code in ("x.to('cpu', torch.float64)", "torch.zeros(2, dtype=torch.float64, device=d)"):
        assert names_both(ast.parse(code).body[0].value)
    for code in ("x.to(torch.float64)", "torch.zeros(2, dtype=torch.float64)", "x.cpu().double()"):
        assert not names_both(ast.parse(code).body[0].value)
