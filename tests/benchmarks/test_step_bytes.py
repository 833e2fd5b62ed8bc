"""`benchmarks/step_bytes.py`: a step's bytes are those of its shapes."""

import importlib
from pathlib import Path

import pytest

from pentameter.config.files.load import load_config
from pentameter.fused_cpu import native
from pentameter.machine.capabilities import machine_capabilities
from pentameter.planning.plan import make_plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROWS, T, D, LAYERS = 4, 16, 32, 2
STREAM = ROWS * T * D * 4  # bytes in fp32; in bf16 half


@pytest.fixture
def step_bytes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    if native.load("vector", machine_capabilities()) is not None:
        pytest.skip("no vector kernels here")
    yield importlib.import_module("step_bytes")
    native.unload()


def count(step_bytes, amx=False, **keys):
    values = {
        "model.vocab_size": 65,
        "model.n_layers": LAYERS,
        "model.d_model": D,
        "model.context_length": T,
        "model.attention.n_heads": 1,
        "train.device": "cpu",
        "train.batch_size": ROWS,
    }
    config = load_config("shakespeare-char", values | keys)
    return step_bytes.count_step(make_plan(config), amx)


def test_the_ends_of_sub_layers_move_the_stream_and_what_joins_it(step_bytes):
    counted, parameter_bytes = count(step_bytes)
    statistics = 2 * ROWS * T * 4  # each row's mean and scale
    ends = 2 * LAYERS
    # Reads the stream and the sub-layer's output in bf16; writes both again, and the statistics.
    keys = ROWS * 2 * 4
    forward = ends * (3 * STREAM + statistics + keys)
    assert counted.moved["AddNorm, forward", "add_norm"] == forward
    assert counted.least["AddNorm, forward"] == forward
    # AdamW reads and writes weights and two moments, and reads gradients, and counts its steps.
    optimizer = counted.moved["optimizer", "aten._fused_adamw_"]
    assert 4 * parameter_bytes <= optimizer < 4 * parameter_bytes + 1000


def test_kernels_for_amx_are_counted_where_there_are_none(step_bytes):
    counted, _ = count(step_bytes, amx=True)
    width = 4 * D
    weights = 2 * D * width * 2
    kept = ROWS * T * width * 2
    moved = counted.moved["AmxFeedForward, forward", "feed_forward"]
    table = moved - LAYERS * (weights + kept + STREAM)
    assert 0 <= table < LAYERS * 4096  # of the activation
    assert not any(operation.startswith("CausalAttention") for operation, _ in counted.moved)
    assert not native.is_loaded("AMX")


def test_micro_batches_round_weights_once(step_bytes):
    whole, _ = count(step_bytes)
    halves, _ = count(step_bytes, **{"train.micro_batch_size": ROWS // 2})
    for counted in (whole, halves):
        rounded = {key: n for key, n in counted.moved.items() if key[1] == "fold"}
        assert rounded == {key: n for key, n in whole.moved.items() if key[1] == "fold"}
