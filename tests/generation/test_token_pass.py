"""A token's pass in one call: as close to fp64 as PyTorch's passes, whatever is beside a text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from threads import check_same_on_any_threads

from pentameter.config.model.rope_scaling import RopeScalingConfig
from pentameter.config.schema import ModelConfig
from pentameter.errors import ConfigError
from pentameter.fused_cpu import native
from pentameter.generation import few_rows as few_rows_module
from pentameter.generation import token_pass as token_pass_module
from pentameter.generation.few_rows import FewRows
from pentameter.generation.loop import Generation, sampled_tokens
from pentameter.generation.token_pass import TokenPass, _Team, obstacle, token_pass
from pentameter.machine.capabilities import compiler_command, machine_capabilities
from pentameter.model.attention.cache import KVCache
from pentameter.model.gpt import GPT, build_model
from pentameter.model.matmul import PLAIN

CONTEXT = 150  # keys are read 64 at a time
BASE = {
    "vocab_size": 37,
    "context_length": CONTEXT,
    "n_layers": 2,
    "d_model": 48,
    "n_heads": 3,
    "init_std": 0.2,
}
ROTARY = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "d_ff": 80}
KINDS: dict[str, dict[str, Any]] = {
    "character": {},
    "biases": {"bias": True, "qkv_bias": True, "activation": "gelu_tanh"},
    "head of its own": {"tied_head": False, "head_bias": True, "vocab_multiple": 16},
    "2017": {
        **{"positions": "sinusoidal", "norm_position": "post", "activation": "relu"},
        "embedding_scale": True,
    },
    "GPT-NeoX": {**ROTARY, "parallel_residual": True, "rotary_fraction": 0.25, "norm": "layernorm"},
    "Llama 3": {
        **ROTARY,
        **{"n_heads": 6, "n_kv_heads": 2, "head_size": 16},
        "rope_scaling": RopeScalingConfig(type="llama3", original_context_length=32),
    },
    "Qwen 3": {
        **ROTARY,
        **{"n_heads": 4, "n_kv_heads": 2, "head_size": 32, "qk_norm": "head", "qkv_bias": True},
    },
    "norms around": {
        **ROTARY,
        **{"n_heads": 4, "n_kv_heads": 1, "head_size": 16, "activation": "geglu_tanh"},
        **{"norm_position": "both", "logit_softcap": 3.0, "embedding_scale": True},
        "attention": {"score_size": 40},
    },
    "norms after": {**ROTARY, "norm_position": "output", "qk_norm": "head", "activation": "geglu"},
    "windows and sinks": {
        **ROTARY,
        **{"n_layers": 4, "sliding_window": 70, "sliding_window_pattern": 2},
        **{"window_rope_theta": 100.0, "nope_layers": (3,), "activation": "relu2"},
        "attention": {"sinks": True},
        "rope_scaling": RopeScalingConfig(type="yarn", original_context_length=32),
    },
}
WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"n_experts": 4}, "experts"),
    "latent": ({"attention": "latent", "positions": "rotary"}, "latent"),
    "norm over heads": ({"qk_norm": "width"}, "all heads"),
    "activation": ({"activation": "swiglu_clamped"}, "swiglu_clamped"),
    "frequencies": (
        {"positions": "rotary", "rope_scaling": RopeScalingConfig(type="dynamic")},
        "length of a text",
    ),
    "head size": ({"head_size": 8}, "multiple of 16"),
    "width": ({"d_ff": 40}, "multiple of 16"),
    "wide head": ({"head_size": 272}, "256"),
}


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@torch.inference_mode(False)
def made(settings: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 1) -> GPT:
    model = build_model(ModelConfig(**(BASE | settings)), seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():  # norms and biases that count
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


@pytest.fixture(scope="module", params=(64, 32, 16))
def width(request: Any) -> Any:
    """The library for registers of so many bytes; of wider ones than the CPU's the compiler makes
    several."""
    reason = native.load("rows", machine_capabilities())
    if reason is not None and (compiler_command() is None or "kernels are for" in reason):
        pytest.skip(reason)
    flags = native.machine_flags("rows", machine_capabilities().cpu) or ()
    # GCC 13 avoids fused multiply-adds for any processor as earlier ones do for this one.
    flags = (*flags, "-mtune=znver2") if flags else ()
    path = native.build("rows", ("-O2", *flags, f"-DVECTOR_BYTES={request.param}"))
    native._loaded["rows"] = native.ctypes.CDLL(str(path))
    yield request.param
    native.unload("rows")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of any size have a pass in one call."""
    monkeypatch.setattr(few_rows_module, "_LEAST_WEIGHTS", 0)
    reason = native.load("rows", machine_capabilities())
    if reason is not None:
        pytest.skip(reason)


def passed(model: GPT, n_slots: int) -> TokenPass:
    cache = KVCache(model.config, n_slots, dtype=model.token_embedding.weight.dtype)
    for each in (*cache.keys, *cache.values):
        each.fill_(float("nan"))  # nothing is read that was not written
    matmul = FewRows()
    assert obstacle(model, matmul) is None
    return TokenPass(model, matmul, cache.keys, cache.values)


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return float((x.double() - exact).square().mean().sqrt())


def tokens_of(n_texts: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 37, (n_texts, CONTEXT), generator=generator)


@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_whole_context_is_as_close_to_fp64_as_pytorchs(width, kind, dtype):
    model, tokens, slots = made(KINDS[kind], dtype), tokens_of(3), [2, 0, 1]
    one_call = passed(model, 3)
    assert one_call.is_precise()
    found = [
        one_call(tokens[:, position].tolist(), [position] * 3, slots).clone()
        for position in range(CONTEXT)
    ]
    own, exact = model(tokens), made(KINDS[kind], dtype).double()(tokens)
    assert exact.std() > 0.1
    logits = torch.stack(found, 1)
    # Each is some roundings away, of sums in other orders.
    assert error(logits, exact) <= 2 * error(own, exact)
    for position in (0, 1, 63, 64, 69, 70, 71, CONTEXT - 1):
        at = slice(position, position + 1)
        assert error(logits[:, at], exact[:, at]) <= 4 * error(own[:, at], exact[:, at])


@DTYPES
@pytest.mark.parametrize("kind", ["character", "Qwen 3", "windows and sinks"])
@torch.inference_mode()
def test_a_text_is_the_same_beside_any_others(width, kind, dtype):
    model, tokens = made(KINDS[kind], dtype), tokens_of(16)
    together, alone = passed(model, 16), passed(model, 16)
    lengths = [1, 5, 64, 65, 2, 71, 90, 3] * 2
    for position in range(max(lengths)):
        texts = [text for text in range(16) if position < lengths[text]]
        of = tokens[texts, position].tolist()
        together(of, [position] * len(texts), texts)
        for text, token in zip(texts, of, strict=True):
            alone([token], [position], [15 - text])
    for n in range(1, 17):
        order = [(3 * n + 5 * text) % 16 for text in range(n)]
        of, positions = tokens[order, 100].tolist(), [lengths[text] for text in order]
        found = together(of, positions, order).clone()
        for row, text in enumerate(order):
            expected = alone(of[row : row + 1], [lengths[text]], [15 - text])
            assert torch.equal(found[row : row + 1], expected)


@DTYPES
@torch.inference_mode()
def test_bits_do_not_depend_on_threads(width, monkeypatch, dtype):
    monkeypatch.setattr(token_pass_module, "_LEAST_WORK", 0)
    one_call = passed(made(KINDS["Qwen 3"], dtype), 5)
    rows = [3, 1, 4, 1, 5], [0] * 5, range(5)
    check_same_on_any_threads(lambda: [one_call(*rows).clone() for _ in range(4)])


def test_one_thread_computes_for_a_while_after_all_were_slower():
    team = _Team()

    def next_passes(n: int, seconds: float) -> list[bool]:
        """Of n passes which are alone, in 2 s; those of all take so many `seconds`."""
        found = []
        for _ in range(n):
            found.append(alone := team.is_alone(16))
            team.took(16, 2.0 if alone else seconds, alone=alone)
        return found

    assert next_passes(5, 1.0) == [True, True, False, False, False]
    assert next_passes(12, 9.0) == [False, True, False, True, True, False, *[True] * 4, False, True]
    assert next_passes(60, 1.0)[-40:] == [False] * 40
    assert sum(next_passes(1000, 9.0)) > 980


@torch.inference_mode()
def test_weights_of_bf16_numbers_have_the_bits_of_fp32(width):
    model = made(KINDS["character"]).bfloat16().float()
    cache = KVCache(model.config, 4)
    rows = [7, 8, 9, 10], [0] * 4, range(4)
    found = [
        TokenPass(model, FewRows(narrows=narrows), cache.keys, cache.values)(*rows).clone()
        for narrows in (True, False)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("weights", ["fp32", "published", "bf16"])
def test_changes_of_weights_are_seen(width, weights):
    model = made(KINDS["character"])
    if weights != "fp32":
        model = model.bfloat16()
    if weights == "published":
        model = model.float()
    one_call = passed(model, 1)
    for factor in (2.0, 1.01):
        with torch.no_grad():
            model.head_parameters()[0].mul_(factor)
            model.get_parameter("final_norm.weight").mul_(factor)
            model.get_parameter("blocks.1.mlp.up.weight").mul_(factor)
        expected = passed(model, 1)([5], [0], [0])
        assert torch.equal(one_call([5], [0], [0]), expected)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (([36, 37], [0, 0], [0, 1]), "token id 37 of text 1 .* 0 … 36; encode .* tokenizer"),
        (([-1, 0], [0, 0], [0, 1]), "token id -1 of text 0"),
        (([0], [CONTEXT], [0]), f"position {CONTEXT} of text 0 is outside the model's 0 … 149$"),
        (([0], [0], [2]), "slot 2 of text 0"),
    ],
)
def test_numbers_out_of_range_are_refused(always, rows, said):
    """The kernel reads where they say."""
    with pytest.raises(ConfigError, match=said):
        passed(made({}), 2)(*rows)


def test_a_prompt_of_one_unknown_token_is_refused(always):
    steps = sampled_tokens(made({}), np.array([37]), 37, Generation(max_new_tokens=2))
    with pytest.raises(ConfigError, match="token id 37"):
        next(steps)


@pytest.mark.parametrize("case", WITHOUT)
def test_a_kind_that_it_does_not_know_stays_with_pytorch(always, case):
    settings, said = WITHOUT[case]
    model, matmul = made(settings), FewRows()
    assert said in (obstacle(model, matmul) or "")
    assert token_pass(model, matmul, (), ()) is None


@pytest.mark.parametrize(
    "case", ["forward", "class", "attention", "dtype", "order", "matmul", "slice"]
)
def test_a_model_that_computes_in_its_own_way_stays_with_pytorch(always, case):
    model, matmul = made({}), FewRows()
    of: Any = model.blocks["0"]
    assert obstacle(model, matmul) is None
    if case == "forward":
        of.mlp.up.forward = lambda x: x
    elif case == "class":
        of.mlp.up = torch.nn.utils.parametrizations.weight_norm(of.mlp.up)
    elif case == "attention":
        of.attention.attend = lambda *_: None
    elif case == "dtype":
        model = model.double()
    elif case == "order":
        weight = of.mlp.up.weight
        of.mlp.up.weight = torch.nn.Parameter(weight.t().contiguous().t())
    elif case == "matmul":
        assert obstacle(model, PLAIN) is not None
        return
    else:
        model = GPT(model.config, first_layer=1)
    assert obstacle(model, matmul) is not None


def test_one_that_is_less_precise_than_pytorch_is_not_used(always, monkeypatch):
    """It is tried at a model's first text, and at the next one after a change of the weights."""
    model, matmul = made(KINDS["Qwen 3"]), FewRows()
    cache = KVCache(model.config, 5, zeroed=True)
    of_cache = cache.keys, cache.values
    assert token_pass(model, matmul, *of_cache) is not None
    assert not any(each.any() for each in (*cache.keys, *cache.values))
    compute = TokenPass._compute

    def nudged(self: TokenPass, rows: Any, n_operations: int, **how: Any) -> None:
        compute(self, rows, n_operations, **how)
        if rows.shape[1] == 3:  # of so many rows alone
            self._of.stream.mul_(1 + 1e-6)

    monkeypatch.setattr(TokenPass, "_compute", nudged)
    assert token_pass(model, matmul, *of_cache) is not None
    with torch.no_grad():
        model.final_norm.weight.mul_(2)
    assert token_pass(model, matmul, *of_cache) is None


@pytest.mark.parametrize("kind", ["character", "Qwen 3"])
@pytest.mark.parametrize("n_samples", [1, 3])
@pytest.mark.parametrize("n_prompt", [1, 20])
def test_texts_are_those_of_pytorchs_passes(always, monkeypatch, kind, n_samples, n_prompt):
    """Beyond the context, too: the window begins anew by a pass over its half."""
    model = made({**KINDS[kind], "context_length": 24, "init_std": 0.5})
    settings = Generation(max_new_tokens=60, num_samples=n_samples, seed=2)
    calls = []
    call = TokenPass.__call__

    def counted(self: TokenPass, *rows: Any) -> Any:
        calls.append(rows)
        return call(self, *rows)

    def tokens() -> Any:
        prompt = np.arange(n_prompt, dtype=np.int64)
        return np.stack(list(sampled_tokens(model, prompt, 37, settings)))

    monkeypatch.setattr(TokenPass, "__call__", counted)
    found = tokens()
    assert len(calls) > 50
    monkeypatch.setattr("pentameter.generation.loop.token_pass", lambda *_: None)
    assert (found == tokens()).all()
    assert len(np.unique(found)) > 5
