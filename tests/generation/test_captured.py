"""Steps that a GPU replays, without one: recorded as functions, on the CPU and on `meta`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from on_meta import META, Device, Making
from torch import Tensor
from torch.nn.attention import SDPBackend

from pentameter.config.schema import ModelConfig
from pentameter.generation import captured, loop
from pentameter.generation.captured import can_be_captured
from pentameter.generation.loop import (
    Generation,
    _Window,
    chosen_kernels,
    sampled_tokens,
    window_tokens,
)
from pentameter.model.attention.dot_product import PLAIN_ATTENTION
from pentameter.model.gpt import GPT, build_model
from pentameter.serve import passes
from pentameter.serve.passes import Slots

V = 30
LLAMA = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "n_kv_heads": 2}
LATENT = {"attention": "latent", "kv_rank": 12, "q_rank": 10, "v_head_size": 6}
MODELS: dict[str, dict[str, Any]] = {
    "a gpt-2": {},
    "a llama": LLAMA | {"qk_norm": "head", "tied_head": False},
    "windows and sinks": LLAMA | {"sliding_window": 5, "attention_sinks": True},
    "bases and windows by layer": LLAMA
    | {
        "norm_position": "both",
        "attention": {"score_size": 20, "sliding_window": 5, "sliding_window_pattern": (1,)},
        "window_rope_theta": 100.0,
        "nope_layers": (0,),
    },
    "latent attention": LATENT | {"positions": "rotary"},
    "sinusoidal": {"positions": "sinusoidal", "dropout": 0.3, "logit_softcap": 20.0},
}


def make_model(device: torch.device | str = "cpu", **settings: Any) -> GPT:
    values = {"vocab_size": V, "context_length": 24, "n_layers": 2, "n_heads": 4, "d_model": 32}
    config = ModelConfig(**(values | {"init_std": 0.4} | settings))
    if device == META:
        with torch.device(META):
            return GPT(config).eval()
    return build_model(config, seed=3, device=device, dtype=torch.float64).eval()


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Tensor]]:
    """A device that captures: what it records are functions. Returns those recorded so far."""
    steps: list[Callable[[], Tensor]] = []

    def recorded(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
        steps.append(step)
        result = step()

        def replay() -> Tensor:  # as a graph does, into the same memory
            return result.copy_(step())

        return replay

    monkeypatch.setattr(captured, "recorded", recorded)
    monkeypatch.setattr(loop, "_LEAST_KEYS", 4)
    for user in (loop, passes):
        monkeypatch.setattr(user, "can_be_captured", lambda device, config: True)
    return steps


@pytest.mark.parametrize("kind", MODELS)
def test_logits_of_replayed_steps_are_those_of_the_window(kind: str, records: list[Any]) -> None:
    model = make_model(**MODELS[kind])
    text = np.random.default_rng(1).integers(0, V, (3, 60))
    window = _Window(model, 3, V)
    for n in range(2, 60):
        seen = text[:, n - window_tokens(n, 24) : n]
        with torch.inference_mode():
            expected = model(torch.from_numpy(seen))[:, -1, :V].numpy()
        # float64: only the order of sums differs.
        np.testing.assert_allclose(window.next_logits(text[:, :n]), expected, rtol=0, atol=1e-10)
    assert len(records) == 4  # for 4, 8, 16 and all keys
    assert all(each.attend is PLAIN_ATTENTION for each in _attentions(model))


def _attentions(model: GPT) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "attend")]


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_the_text_is_that_of_single_steps(
    temperature: float, records: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = make_model(**LLAMA), np.array([3, 1, 4])
    settings = Generation(temperature, max_new_tokens=70, num_samples=3, seed=2)
    found = np.stack(list(sampled_tokens(model, prompt, V, settings)))
    assert records
    monkeypatch.setattr(loop, "can_be_captured", can_be_captured)
    assert (found == np.stack(list(sampled_tokens(model, prompt, V, settings)))).all()
    assert len(np.unique(found)) > 5  # else it would prove nothing


@pytest.mark.parametrize("kind", MODELS)
def test_the_server_s_replayed_rows_have_the_bits_of_single_passes(
    kind: str, records: list[Any]
) -> None:
    plain, slots = (Slots(make_model(**MODELS[kind]), V, 4) for _ in range(2))
    shapes = slots.find_shapes()
    assert not records  # none for shapes that may never be used
    plain.shapes = shapes
    for position in range(20):
        rows = {
            n: ((5 * n + 7 * position) % V, position, position + 1)
            for n in range(4)
            if n != position % 3
        }
        found, expected = slots.write(rows), plain.write(rows)
        assert all((found[n] == expected[n]).all() for n in rows)
    assert records


@pytest.mark.parametrize("kind", MODELS)
def test_a_recorded_step_waits_for_nothing(kind: str) -> None:
    inputs = torch.zeros(4, dtype=torch.int64, device=META)
    model = make_model(META, **MODELS[kind])
    window, slots = _Window(model, 3, V), Slots(make_model(META, **MODELS[kind]), V, 3)
    with torch.inference_mode(), Making(), Device():
        assert window._one_more(16, inputs).shape == (3, V)
        assert slots._written(slice(0, 3), 16, inputs[:3].expand(4, 3)).shape == (3, V)


def test_a_gpu_captures_what_waits_for_nothing() -> None:
    gpu, dense = torch.device("cuda"), make_model().config
    experts = make_model(n_experts=4).config
    assert can_be_captured(gpu, dense)
    assert not can_be_captured(gpu, experts)
    assert not can_be_captured(torch.device("cpu"), dense)
    assert not can_be_captured(torch.device("mps"), dense)


def test_a_gpu_attends_without_a_plan_for_each_number_of_keys() -> None:
    q = torch.zeros(1, 1, 1, 8)
    with chosen_kernels(torch.device("cuda"), torch.bfloat16):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert SDPBackend.CUDNN_ATTENTION not in loop._GPU_KERNELS


class Graphs:
    """What `recorded` asks of a GPU, without one. `fault`: what goes wrong in the capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: str | None = None) -> None:
        self.fault, self.replays = fault, 0
        stream = type("Stream", (), {"wait_stream": lambda *_: None})()
        monkeypatch.setattr(captured, "_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self.capture)

    @contextmanager
    def capture(self, graph: Graphs, **_: Any) -> Any:
        yield
        if self.fault == "refused":
            raise RuntimeError("operation not permitted when stream is capturing\nCUDA kernel …")

    def replay(self) -> None:
        self.replays += 1


def test_a_step_is_replayed_if_its_bits_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs(monkeypatch)
    calls = []

    def step() -> Tensor:
        calls.append(1)
        return torch.tensor([1.0, float("nan")])

    play = captured.recorded(step, torch.device("cuda"))
    n_calls = len(calls)
    assert play() is play()
    assert (len(calls), graphs.replays) == (n_calls, 3)


def test_a_step_that_cannot_be_recorded_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    Graphs(monkeypatch, "refused")

    def step() -> Tensor:
        return torch.ones(2)

    with pytest.warns(UserWarning, match="not permitted when stream is capturing$"):
        assert captured.recorded(step, torch.device("cuda")) is step


def test_a_step_with_other_bits_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    Graphs(monkeypatch)
    drawn = iter(range(9))

    def step() -> Tensor:
        return torch.tensor(float(next(drawn)))

    with pytest.warns(UserWarning, match="its bits differ"):
        assert captured.recorded(step, torch.device("cuda")) is step
