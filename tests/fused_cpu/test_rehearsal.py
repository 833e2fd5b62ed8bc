"""A library that the compiler makes wrong is not used, and the run goes on right."""

import shutil
import warnings

import pytest
import torch

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import functions, kernels, native, rehearsal, step
from pentameter.fused_cpu.rehearsal import rehearse, settle
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.machine import kernel_checks
from pentameter.machine.capabilities import machine_capabilities
from pentameter.model import compiled, loss
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import build_model

ROWS = 4
SIZES = {"vocab_size": 13, "context_length": 32, "n_layers": 3, "n_heads": 2, "d_model": 64}
DROPPING = {"dropout": 0.2, "attention_dropout": 0.1, "bias": True, "qkv_bias": True}
VARIANTS = {
    "gelu": {},
    "llama": {
        **{"activation": "swiglu", "positions": "rotary", "norm": "rmsnorm"},
        **{"n_heads": 4, "n_kv_heads": 2, "head_size": 32, "qk_norm": "head"},
    },
    "experts": {
        **{"n_experts": 4, "experts_per_token": 2, "d_expert": 32, "dense_layers": 1},
        **{"activation": "swiglu", "bias": False, "qkv_bias": False, "balance": "bias"},
    },
}


def config_of(variant="gelu"):
    return ModelConfig(**SIZES | DROPPING | VARIANTS[variant])


@pytest.fixture(autouse=True)
def own_verdicts(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_checks, "_folder", lambda: tmp_path / "proofs")
    monkeypatch.setattr(compiled, "_held", {})
    monkeypatch.setattr(compiled, "_failures", {})
    yield
    native.unload()


@pytest.fixture
def no_step(monkeypatch):
    """Nothing is compiled by PyTorch."""
    monkeypatch.setattr(rehearsal, "_step", lambda *_: None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_libraries_that_are_right_are_kept(loaded, no_step, variant, dtype):
    with warnings.catch_warnings(action="error"):
        assert rehearse(config_of(variant), dtype, ROWS, machine_capabilities()) == {}
    assert native.is_loaded("vector")
    assert dict(kernel_checks.verdicts()) == {"vector kernels": "-O3", "fused step": "-O3"}


def test_libraries_for_tiles_are_rehearsed_and_refused_alike(amx_cpu, no_step, monkeypatch):
    """All that a machine with AMX does before its first step."""
    for name in native.FILES:
        assert native.load(name, amx_cpu) is None
    with warnings.catch_warnings(action="error"):
        assert rehearse(config_of(), torch.bfloat16, ROWS, amx_cpu) == {}
    kept = {"AMX kernels": "-O3", "vector kernels": "-O3", "fused step": "-O3"}
    assert dict(kernel_checks.verdicts()) == kept
    assert settle([{}, {"AMX": "-O2"}], amx_cpu) == (
        "; not as this compiler makes them: AMX built with -O2"
    )
    assert native.is_loaded("AMX")
    settle([{"AMX": "plain"}], amx_cpu)
    assert not native.is_loaded("AMX")
    assert native.is_loaded("vector")


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_on_tiles_agree_in_every_part(emulated_tiles, variant):
    model = rehearsal._shallow(config_of(variant), torch.bfloat16)
    assert len(model.blocks) == (2 if variant == "experts" else 1)
    differing = set()
    with compiled.plainly():
        for part in rehearsal._parts(model, torch.bfloat16, ROWS):
            assert rehearsal._wrong("AMX", part) is None
            on_tiles = rehearsal._results(part)
            with native.without("AMX"):
                if not all(map(torch.equal, on_tiles, rehearsal._results(part))):
                    differing.add(part.name)
    assert {"attention", "feed-forward layer"} <= differing  # or the kernels were not used


def test_a_part_that_is_wrong_is_named(emulated_tiles, monkeypatch):
    model = rehearsal._shallow(config_of(), torch.bfloat16)
    right = functions.AmxFeedForward.forward

    def wrong(*arguments):
        y = right(*arguments)
        y[1, 3, 5] = torch.nan
        return y

    monkeypatch.setattr(functions.AmxFeedForward, "forward", staticmethod(wrong))
    with compiled.plainly():
        found = [
            rehearsal._wrong("AMX", part) for part in rehearsal._parts(model, torch.bfloat16, 4)
        ]
    assert list(filter(None, found)) == ["feed-forward layer: result 0 is not finite"]


def test_what_only_evaluation_computes_is_compared_too(vector_cpu, no_step, monkeypatch, tmp_path):
    """A router with a loss chooses by PyTorch's operations in training, else by the library."""
    sources = tmp_path / "cpp"
    shutil.copytree(native.FOLDER, sources)
    text = (sources / "router.cpp").read_text()
    right = "weight = weight / divisor * job.factor;"
    assert right in text
    (sources / "router.cpp").write_text(text.replace(right, right.replace(";", " * 2.0f;")))
    monkeypatch.setattr(native, "FOLDER", sources)
    capabilities = machine_capabilities()
    assert native.load("vector", capabilities) is None
    config = config_of("experts").updated({"router.z_loss": 1e-3})
    with pytest.warns(UserWarning, match="are wrong: experts"):
        assert rehearse(config, torch.float32, ROWS, capabilities) == {"vector": "plain"}


def test_the_head_is_compared_as_the_run_computes_it(monkeypatch):
    model = rehearsal._shallow(config_of(), torch.float32)
    chunks = []

    def compared():
        chunks.clear()
        parts = rehearsal._parts(model, torch.float32, ROWS)
        (head,) = [part for part in parts if part.name == "head"]
        return [x.shape for x in rehearsal._results(head)]

    of_rows = step.vector_loss.row_loss
    monkeypatch.setattr(
        step.vector_loss,
        "row_loss",
        lambda *given: chunks.append(given[0].shape) or of_rows(*given),
    )
    width = len(model.head_parameters()[0])
    with compiled.plainly():
        assert model.head_parameters()[0].shape in compared()  # its gradient is compared, too
        assert chunks == []
        # Of a loss in chunks two are enough: all logits may take long.
        monkeypatch.setattr(loss, "MAX_LOGITS", 48 * width)
        assert (1, 49, 64) in compared()
        assert sum(n for n, _ in chunks) == 49
        assert len(chunks) == 2


def plant(monkeypatch, folder, *, mended_by_less=False):
    """Have the compiler make a wrong kernel: a row's last numbers are not normalised."""
    sources = folder / "cpp"
    shutil.copytree(native.FOLDER, sources)
    text = (sources / "add_norm.cpp").read_text()
    right = "for (int64_t c = 0; c < job.D; c += LANES) store(normed"
    wrong = right.replace("c < job.D", "c < job.D - LANES")
    assert right in text
    # Libraries are known by their sources, so that each case needs its own.
    planted = f"#ifdef SOUND  // {mended_by_less}\n{right}\n#else\n{wrong}\n#endif\n"
    (sources / "add_norm.cpp").write_text(text.replace(right, planted))
    monkeypatch.setattr(native, "FOLDER", sources)
    if mended_by_less:
        told = folder / "g++"
        told.write_text(
            '#!/bin/sh\ncase " $* " in *" -O2 "*) set -- "$@" -DSOUND;; esac\nexec g++ "$@"\n'
        )
        told.chmod(0o755)
        monkeypatch.setenv("CXX", str(told))


def gradients(model, dtype):
    model.zero_grad()
    tokens = torch.randint(13, (ROWS, 32), generator=torch.Generator().manual_seed(1))
    keys = dropout_keys(model.config, 0, 0, range(ROWS))
    with compiled.plainly():
        fused_loss_sum(model, tokens, tokens.roll(1, 1), keys, dtype).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("mended_by_less", "level", "said"),
    [(False, "plain", "left to PyTorch"), (True, "-O2", "built with -O2")],
)
def test_a_wrong_library_is_refused(
    vector_cpu, no_step, monkeypatch, tmp_path, mended_by_less, level, said
):
    plant(monkeypatch, tmp_path, mended_by_less=mended_by_less)
    capabilities, dtype = machine_capabilities(), torch.float32
    assert native.load("vector", capabilities) is None
    model = build_model(config_of(), 0).train()
    with native.without("vector"):
        right = gradients(model, dtype)
    assert not torch.allclose(gradients(model, dtype), right, rtol=1e-3)
    with pytest.warns(UserWarning, match="vector kernels, built with -O3, are wrong: end of a sub"):
        levels = rehearse(config_of(), dtype, ROWS, capabilities)
    assert levels == {"vector": level}
    # Another start finds the verdict, and compares nothing.
    monkeypatch.setattr(rehearsal, "_shallow", None)
    assert rehearse(config_of(), dtype, ROWS, capabilities) == levels
    phrase = settle([levels], capabilities)
    assert phrase == f"; not as this compiler makes them: vector {said}"
    assert native.is_loaded("vector") is mended_by_less
    torch.testing.assert_close(gradients(model, dtype), right)


def test_what_one_rank_refuses_no_rank_uses(loaded):
    capabilities = machine_capabilities()
    assert settle([{}, {}], capabilities) == ""
    assert native.is_loaded("vector")
    phrase = settle([{}, {"vector": "plain", "unfold": "-O2"}, {"unfold": "plain"}], capabilities)
    assert phrase == (
        "; not as this compiler makes them: unfold left to PyTorch, vector left to PyTorch"
    )
    assert not native.is_loaded("vector")
    assert compiled.refused() == {"unfold": "plain"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_kernel_is_asked_to_transpose_16_bits(monkeypatch, variant):
    """In a tile on the stack, which g++ 11 and 12 leave unwritten."""
    called = []

    def spy(self, *arguments):
        called.append(self._name)
        if self is kernels.copy_transposed:
            assert all(x.dtype.itemsize > 2 for x in arguments)
        for x in compiled._tensors(arguments):
            if x.is_floating_point() and x.dtype.itemsize == 2 and x.numel() > 1:
                assert x.stride(-1) == 1, f"{self._name} is given {x.shape}, {x.stride()}"
        return self._function(*arguments)

    monkeypatch.setattr(compiled.Kernel, "__call__", spy)
    model = rehearsal._shallow(config_of(variant), torch.bfloat16)
    rehearsal._step(model, torch.bfloat16, ROWS)
    assert "unfold" in called


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("widths", [(96, 32), (32, 96)])
def test_weight_gradients_are_contiguous_products(dtype, widths):
    g, x = (
        torch.randn(2, 16, n, generator=torch.Generator().manual_seed(n)).to(dtype) for n in widths
    )
    with compiled.plainly():
        product = functions._weight_gradient(g, x)
    assert product.is_contiguous()
    exact = g.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
    torch.testing.assert_close(product.double(), exact, rtol=1e-2, atol=0.05)
