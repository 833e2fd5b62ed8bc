"""What the step computes around its matmuls by the vector kernels is what PyTorch's operations
give, in registers of any width; nothing of a step is left to `torch.compile`."""

import pytest
import torch
from threads import check_same_on_any_threads

from pentameter.config.schema import ModelConfig
from pentameter.fused_cpu import attention_kernels, kernels, native
from pentameter.fused_cpu.functions import CausalAttention
from pentameter.fused_cpu.heads import HeadShape, heads_of
from pentameter.fused_cpu.step import fused_loss_sum
from pentameter.fused_cpu.vector import attention, linear, loss, sub_layers
from pentameter.model.compiled import Kernel, plainly
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import build_model
from pentameter.model.loss import elementwise_row_loss, loss_sum
from pentameter.planning.buckets import MAX_LOGITS

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 4e-3}


def relative(x, reference):
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def drawn(*sizes, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in sizes]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("experts", [(), (3,)], ids=["a layer", "experts"])
@pytest.mark.parametrize("scaled", [True, False])
def test_weights_are_folded_and_unfolded_as_written(width, scaled, experts, dtype):
    first, second, scale, g = drawn(
        (*experts, 70, 48), (*experts, 5, 48), (48,), (*experts, 75, 48)
    )
    scale = scale if scaled else None
    folded = linear.fold((first, second), scale, dtype)
    assert torch.equal(folded, kernels.fold.__wrapped__((first, second), scale, dtype))
    gradients, g_scale = linear.unfold(g.to(dtype), (first, second), scale)
    expected, g_expected = kernels.unfold.__wrapped__(g.to(dtype), (first, second), scale)
    assert all(map(torch.equal, gradients, expected))  # each number is one product
    if scaled:
        assert relative(g_scale, g_expected) < 1e-6
    else:
        assert g_scale is None


def test_a_matrix_is_transposed_into_padded_rows(width):
    (x,) = drawn((70, 53))
    found = linear.transpose(x)
    assert torch.equal(found, x.t())
    assert found.stride() == (70 + kernels.PADDING, 1)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rows_are_summed(width, dtype):
    (x,) = drawn((3, 50, 48))
    assert relative(linear.sum_rows(x.to(dtype)), x.to(dtype).double().sum((0, 1))) < 1e-6


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("centred", [True, False])
def test_the_first_norm_equals_the_formula(width, centred, dtype):
    x, g = drawn((3, 50, 48), (3, 50, 48))
    y, mean, scale = sub_layers.norm(x, centred, 1e-5, dtype)
    g_x = sub_layers.norm_backward(g.to(dtype), x, mean, scale, centred, 1e-5)
    exact = x.double().requires_grad_()
    kind = kernels.NormKind(centred, 1e-5)
    expected, *_ = kernels._normalise(exact, kind, torch.float64)
    expected.backward(g.to(dtype).double())
    assert relative(y, expected.detach()) < ROUNDING[dtype]
    assert relative(g_x, exact.grad) < 1e-6


@pytest.mark.parametrize("words", [2**32, 7 * 48 + 5], ids=["one block", "blocks of 7 tokens"])
def test_embeddings_are_dropped_as_in_the_plain_model(width, words, monkeypatch):
    monkeypatch.setattr("pentameter.model.dropout.WORDS", words)
    (x,) = drawn((3, 50, 48))
    keys = torch.randint(-(2**31), 2**31, (3, 2), generator=torch.Generator().manual_seed(1)).int()
    assert torch.equal(sub_layers.dropout(x, keys, 0.3), kernels._dropped(x, keys, 0.3))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("biased", "V"), [(True, 48), (False, 48), (True, 45), (False, 41)])
def test_the_loss_equals_the_formula(width, biased, V, dtype):
    logits, bias = drawn((2, 33, V), (V,))
    logits, bias = (4 * logits).to(dtype), bias if biased else None
    targets = torch.randint(-1, 41, (2, 33), generator=torch.Generator().manual_seed(2))
    found = [logits.clone().requires_grad_(), None if bias is None else bias.requires_grad_()]
    value = loss.BiasedLoss.apply(*found, targets, 41)
    (value * 3).backward()
    exact = logits.double().requires_grad_()
    exact_bias = None if bias is None else bias.detach().double().requires_grad_()
    expected = loss_sum(exact if bias is None else exact + exact_bias, targets, 41)
    (expected * 3).backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    assert relative(found[0].grad, exact.grad) < ROUNDING[dtype]
    assert not found[0].grad[..., 41:].any()
    assert not found[0].grad[targets < 0].any()
    if biased:
        assert relative(bias.grad, exact_bias.grad) < 2e-6
    rows, of_rows = logits.flatten(0, 1).clone(), logits.flatten(0, 1).clone()
    plain = None if bias is None else bias.detach()
    chunk = loss.row_loss(rows, plain, targets.flatten(), 41, True)
    assert chunk.item() == value.item()
    elementwise_row_loss(of_rows, plain, targets.flatten(), 41, True)
    assert relative(rows, of_rows) < ROUNDING[dtype]


def test_a_loss_that_is_no_number_stays_so(width):
    logits = torch.zeros(1, 2, 16)
    logits[0, 1, 3] = torch.nan
    targets = torch.tensor([[1, 2]])
    given = logits.requires_grad_()
    value = loss.BiasedLoss.apply(given, None, targets, 16)
    value.backward()
    assert value.isnan()
    assert given.grad[0, 1].isnan().all()
    assert given.grad[0, 0].isfinite().all()


SHAPES = {
    "heads alike": HeadShape(2, 2, 32, 1e-5, 64, 0.0),
    "dropout": HeadShape(2, 2, 16, 1e-5, 70, 0.3),
    "shared": HeadShape(4, 2, 48, 1e-5, 64, 0.2),
}


def projection(shape, T, turned, biased, dtype):
    width = (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_size
    projected, bias, g, angles = drawn(
        (3, T, width), (width,), (3, T, shape.n_heads * shape.head_size), (T, shape.head_size // 4)
    )
    tables = (angles.cos(), angles.sin()) if turned else (None, None)
    return projected.to(dtype), bias if biased else None, g.to(dtype), tables


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("turned", "biased", "normed"),
    [(False, False, False), (True, True, False), (False, True, True), (True, False, True)],
)
@pytest.mark.parametrize(("name", "T"), [("heads alike", 32), ("dropout", 64), ("shared", 64)])
def test_attention_equals_its_plain_form(
    width, name, T, turned, biased, normed, dtype, monkeypatch
):
    shape = SHAPES[name]
    keys = torch.randint(-(2**31), 2**31, (3, 2), generator=torch.Generator().manual_seed(1)).int()
    projected, bias, g, tables = projection(shape, T, turned, biased, dtype)
    norms = drawn((shape.head_size,), (shape.head_size,), seed=5) if normed else (None, None)

    def results(form):
        given = [projected.to(form).requires_grad_()]
        for x in (bias, *norms):
            given.append(None if x is None else x.detach().to(high[form]).requires_grad_())
        angles = (None if x is None else x.to(high[form]) for x in tables)
        y = CausalAttention.apply(shape, keys, *given, *angles)
        y.backward(g.to(form))
        return [y.detach(), *(x.grad for x in given if x is not None)]

    high = {torch.bfloat16: torch.float32, torch.float32: torch.float32}
    high[torch.float64] = torch.float64
    with plainly():
        exact = results(torch.float64)
        monkeypatch.setattr(attention_kernels, "split_heads", None)  # or it was not used
        found = results(dtype)
    for each, expected in zip(found, exact, strict=True):
        # Scores, weights and their gradients are rounded one after another, by 6e-8 or 4e-3.
        assert relative(each, expected) < {torch.float32: 5e-6, torch.bfloat16: 2e-2}[dtype]


def test_scores_that_are_no_numbers_stay_so(width):
    shape = HeadShape(1, 1, 16, 1e-5, 32, 0.0)
    scores = torch.zeros(1, 32, 32)
    scores[0, 20, 3] = torch.nan
    keys = torch.zeros(1, 2, dtype=torch.int32)
    e, _, inverse = attention.softmax_forward(scores, None, 0, keys, shape)
    assert inverse[0, 20].isnan()
    assert inverse[0, :20].isfinite().all()
    assert torch.equal(e[0].triu(1), torch.zeros(32, 32))


def test_no_result_around_matmuls_depends_on_threads(loaded):
    shape = SHAPES["shared"]
    keys = torch.ones(3, 2, dtype=torch.int32)
    projected, bias, g, tables = projection(shape, 64, True, True, torch.bfloat16)
    weight, scale, g_weight, logits, g_bias = drawn(
        (100, 48), (48,), (100, 48), (1, 100, 48), (48,)
    )
    targets = torch.arange(100)[None] % 48

    def computed():
        given = projected.clone().requires_grad_()
        y = CausalAttention.apply(shape, keys, given, bias, None, None, *tables)
        y.backward(g)
        rows = [logits.clone().requires_grad_(), g_bias.clone().requires_grad_()]
        value = loss.BiasedLoss.apply(*rows, targets, 48)
        value.backward()
        (unfolded,), g_scale = linear.unfold(g_weight, (weight,), scale)
        results = [y.detach(), given.grad, value.detach(), unfolded, g_scale]
        return [*results, linear.sum_rows(weight), *(x.grad for x in rows)]

    check_same_on_any_threads(computed)


def test_what_the_kernels_do_not_take_is_left_to_others(loaded):
    logits = torch.randn(4, 48)
    assert loss.can_compute(logits, None, None)
    assert not loss.can_compute(logits, None, 30.0)
    assert not loss.can_compute(logits[:, :40], None, None)
    assert not loss.can_compute(logits.double(), None, None)

    def takes(T, n_blocks, size=32, norm=None, context=64):
        shape = HeadShape(2, 2, size, 1e-5, context, 0.0)
        heads = heads_of(shape, torch.randn(1, T, 6 * size), None, norm, norm, None, None)
        return attention.can_attend(heads, shape, n_blocks)

    assert takes(64, 2)
    assert takes(64, 2, norm=torch.ones(32))
    assert not takes(64, 2, norm=torch.ones(2, 32))
    assert not takes(48, 2)
    assert not takes(64, 2, size=24)
    assert not takes(64, 2, size=512)
    assert not takes(64, 2, context=2**16)
    native.unload()
    assert not takes(64, 2)
    assert not loss.can_compute(logits, None, None)


VARIANTS = {
    "gpt": {},
    "with all": {"bias": True, "qkv_bias": True, "head_bias": True, "dropout": 0.2}
    | {"attention_dropout": 0.1, "activation": "gelu_tanh"},
    "llama": {"norm": "rmsnorm", "positions": "rotary", "n_kv_heads": 2, "activation": "swiglu"}
    | {"tied_head": False},
    "modern": {"norm": "rmsnorm", "positions": "rotary", "qk_norm": "head", "activation": "relu2"},
}


@pytest.mark.parametrize("most_logits", [MAX_LOGITS, 1000], ids=["whole", "in chunks"])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_asks_torch_compile_for_nothing(loaded, variant, dtype, most_logits, monkeypatch):
    """So that a start waits neither for PyTorch's compiler nor for its import."""
    monkeypatch.setattr("pentameter.model.loss.MAX_LOGITS", most_logits)
    sizes = {"vocab_size": 13, "context_length": 32, "n_layers": 2}
    config = ModelConfig(**sizes | {"n_heads": 4, "d_model": 64} | VARIANTS[variant])

    def refuse(self, *arguments):
        raise AssertionError(f"{self._name} was compiled")

    tokens = torch.randint(13, (4, 32), generator=torch.Generator().manual_seed(4))
    keys = dropout_keys(config, 3, 5, range(4))
    answers = []
    for form in (torch.float64, dtype):
        model = build_model(config, 7, dtype=torch.promote_types(form, torch.float32)).train()
        with pytest.MonkeyPatch.context() as patch, torch.compiler.set_stance("force_eager"):
            if form is dtype:
                patch.setattr(Kernel, "__call__", refuse)
            value = fused_loss_sum(model, tokens, tokens.roll(1, 1), keys, form)
            value.backward()
        answers.append((value.item(), [p.grad for p in model.parameters() if p.requires_grad]))
    (exact, expected), (found, gradients) = answers
    together = [torch.cat([x.flatten() for x in each]) for each in (gradients, expected)]
    # Each of some ten sums rounds once more.
    assert found == pytest.approx(exact, rel=10 * ROUNDING[dtype])
    assert relative(*together) < 10 * ROUNDING[dtype]
