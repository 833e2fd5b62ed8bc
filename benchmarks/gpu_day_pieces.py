"""The items `pieces` and `forms` of a GPU day: a step's pieces, and what each faster form replaces.

GPT-2 (124M) at 32 and 64 rows of 1,024 tokens. Milliseconds are medians of 12 by CUDA events, forms
in turns; `a_step` multiplies to 524,288 tokens.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_day_times import in_turns

Tell = Callable[..., None]
SMALL = not torch.cuda.is_available()
"""Without a card sizes are tiny, with which this file is tried."""
V, VOCAB, D, H, K, T, LAYERS, ROWS = 50304, 50257, 768, 12, 64, 1024, 12, 512
MICRO = (32, 64)
if SMALL:
    V, VOCAB, D, H, K, T, LAYERS, ROWS = 304, 301, 32, 2, 16, 16, 2, 8
    MICRO = (2, 4)


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||, in fp64."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def drawn(
    *shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
):
    return (scale * torch.randn(shape, device=device)).to(dtype)


def trials(tell: Tell, device: torch.device) -> None:
    """What a run would choose here."""
    from pentameter.model.gpu.forms import loss_obstacle, obstacle_of, sums_obstacle

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        start = time.perf_counter()
        found = {"loss": obstacle_of(partial(loss_obstacle, dtype, device, V, VOCAB, None))}
        found["loss softcap 30"] = obstacle_of(
            partial(loss_obstacle, dtype, device, V, VOCAB, 30.0)
        )
        if dtype.itemsize == 2:
            found["sums"] = obstacle_of(partial(sums_obstacle, dtype, device))
        tell(trial=str(dtype), s=round(time.perf_counter() - start, 2), obstacles=found)


def sums(tell: Tell, device: torch.device, micro: int) -> None:
    """a. The head's weight gradient, added up in fp32 by the product."""
    from pentameter.model.matmul import PLAIN, PRECISE_SUMS

    compiled = torch.compile(lambda total, g, x: total.add_((g.t() @ x).float()), dynamic=False)
    R = micro * T // 8  # a chunk of eight
    x, weight = drawn(R, D, device=device), drawn(V, D, device=device, scale=0.02)
    g = drawn(R, V, device=device, scale=1e-3)
    total = torch.zeros(V, D, device=device)

    def precise() -> None:
        torch.addmm(total, g.t(), x, out_dtype=torch.float32, out=total)

    forms = {
        "plain": lambda: total.add_(PLAIN.precise_weight_gradient(g, x)),
        "plain compiled": lambda: compiled(total, g, x),
        "product alone": lambda: g.t() @ x,
        "precise": precise,
        "addmm out of place": lambda: torch.addmm(total, g.t(), x, out_dtype=torch.float32),
    }
    ms = in_turns(forms, device)
    errors: dict[str, float | str] = {}
    some = slice(0, min(V, 4096))
    expected = 8 * (g[:, some].double().t() @ x.double())
    for name, matmul in (("plain", PLAIN), ("precise", PRECISE_SUMS)):
        total.zero_()
        try:
            for _ in range(8):
                matmul.differentiate(g, x, weight, total)
            errors[name] = error_of(total[some], expected)
        except Exception as error:
            errors[name] = str(error)[:160]
    n = 8 * ROWS // micro
    a_step = {name: round(n * each, 2) for name, each in ms.items() if isinstance(each, float)}
    tell(sums=micro, ms=ms, a_step=a_step, off=errors)


def losses(tell: Tell, device: torch.device, micro: int) -> None:
    """c. Loss and gradient of a chunk of logits."""
    from pentameter.model.gpu import loss_kernel
    from pentameter.model.loss import compiled_row_loss, row_loss

    R = micro * T // 8
    targets = torch.randint(VOCAB, (R,), device=device)
    logits = drawn(R, V, device=device, scale=4.0)
    some = slice(0, 256)
    kept, precise = logits[some].clone(), logits[some].double()
    exact = row_loss(precise, None, targets[some], VOCAB, True)
    errors: dict[str, tuple[float, float]] = {}
    for name, form in (
        ("row_loss", row_loss),
        ("compiled", compiled_row_loss),
        ("one pass", loss_kernel.one_pass_row_loss),
    ):
        g = kept.clone()
        loss = form(g, None, targets[some], VOCAB, True, None)
        errors[name] = (error_of(g, precise), abs(loss.item() / exact.item() - 1))
    forms: dict[str, Callable[[], Any]] = {
        "compiled": lambda: compiled_row_loss(logits, None, targets, VOCAB, True, None),
        "no gradient": lambda: loss_kernel.one_pass_row_loss(logits, None, targets, VOCAB, False),
        "copy": lambda: logits.mul_(1.0),  # one reading, one writing
    }

    def configured(columns: int, per_warp: int) -> Callable[[], Any]:
        def work() -> None:
            before = loss_kernel.MOST_COLUMNS, loss_kernel.COLUMNS_PER_WARP
            loss_kernel.MOST_COLUMNS, loss_kernel.COLUMNS_PER_WARP = columns, per_warp
            try:
                loss_kernel.one_pass_row_loss(logits, None, targets, VOCAB, True)
            finally:
                loss_kernel.MOST_COLUMNS, loss_kernel.COLUMNS_PER_WARP = before

        return work

    for columns, warps in (
        (2048, 8),
        (4096, 8),
        (4096, 16),
        (8192, 16),
        (8192, 32),
        (16384, 32),
        (32768, 32),
    ):
        forms[f"one pass {columns} {warps} warps"] = configured(columns, columns // warps)
    if micro == MICRO[0]:
        forms["row_loss"] = lambda: row_loss(logits, None, targets, VOCAB, True, None)
    ms = in_turns(forms, device)
    n = 8 * ROWS // micro
    a_step = {name: round(n * each, 2) for name, each in ms.items() if isinstance(each, float)}
    tell(
        loss=micro,
        GB=round(2 * logits.numel() * 2 / 1e9, 3),
        ms=ms,
        a_step=a_step,
        off=errors,
    )


def head(tell: Tell, device: torch.device, micro: int) -> None:
    """Head and loss together, forward (which has the gradients in it)."""
    from pentameter.model.gpu.loss_kernel import one_pass_row_loss
    from pentameter.model.loss import chunked_loss_sum, compiled_row_loss
    from pentameter.model.matmul import PLAIN, PRECISE_SUMS

    x = drawn(micro * T, D, device=device, dtype=torch.float32).requires_grad_()
    weight = drawn(V, D, device=device, dtype=torch.float32, scale=0.02).requires_grad_()
    targets = torch.randint(VOCAB, (micro * T,), device=device)

    def run(of_chunk, matmul) -> Callable[[], Any]:
        def work() -> Any:
            with torch.autocast(device.type, torch.bfloat16):
                return chunked_loss_sum(x, weight, None, targets, VOCAB, of_chunk, matmul=matmul)

        return work

    forms = {
        "plain": run(compiled_row_loss, PLAIN),
        "one pass": run(one_pass_row_loss, PLAIN),
        "precise sums": run(compiled_row_loss, PRECISE_SUMS),
        "both": run(one_pass_row_loss, PRECISE_SUMS),
    }
    ms = in_turns(forms, device)
    losses: dict[str, float | str] = {}
    for name, work in forms.items():
        try:
            losses[name] = float(work())
        except Exception as error:
            losses[name] = str(error)[:100]
    n = ROWS // micro
    a_step = {name: round(n * each, 1) for name, each in ms.items() if isinstance(each, float)}
    tell(head=micro, ms=ms, a_step=a_step, losses=losses)


def qkv(tell: Tell, device: torch.device, micro: int) -> None:
    """d. The gradient of the qkv projection: from one buffer that is copied together (as it is),
    and from three matrices without the copy."""
    R = micro * T
    parts = [drawn(R, H, K, device=device) for _ in range(3)]
    x, weight = drawn(R, D, device=device), drawn(3 * H * K, D, device=device, scale=0.02)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def copied() -> None:
        g = torch.stack(parts, -2).view(R, -1)
        found["copied"] = g @ weight, g.t() @ x

    def apart() -> None:
        of = [each.reshape(H * K, D) for each in weight.view(H, 3, K, D).unbind(1)]
        flat = [each.view(R, -1) for each in parts]
        g_x = flat[0] @ of[0]
        for g, w in zip(flat[1:], of[1:], strict=True):
            g_x.addmm_(g, w)
        g_weight = torch.stack([(g.t() @ x).view(H, K, D) for g in flat], 1).view(-1, D)
        found["apart"] = g_x, g_weight

    whole = torch.stack(parts, -2).view(R, -1)
    forms = {
        "copied": copied,
        "apart": apart,
        "the copy alone": lambda: torch.stack(parts, -2),
        "products alone": lambda: (whole @ weight, whole.t() @ x),
    }
    ms = in_turns(forms, device)
    some = slice(0, 512)
    expected = whole[some].double() @ weight.double()
    errors = {name: error_of(g_x[some], expected) for name, (g_x, _) in found.items()}
    between = error_of(found["apart"][1], found["copied"][1])
    n = LAYERS * ROWS // micro
    a_step = {name: round(n * each, 1) for name, each in ms.items() if isinstance(each, float)}
    tell(qkv=micro, ms=ms, a_step=a_step, off=errors, weights_differ=between)


def attention(tell: Tell, device: torch.device, micro: int) -> None:
    """e. Attention by each of PyTorch's kernels, on views of one projection as the model's are."""
    names = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    qkv = drawn(micro, T, H, 3, K, device=device).requires_grad_()
    g = drawn(micro, H, T, K, device=device)

    def forward() -> torch.Tensor:
        q, k, v = (each.transpose(1, 2) for each in qkv.unbind(-2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> Any:
        return torch.autograd.grad(forward(), qkv, g)

    def by(backend: SDPBackend | None, work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            if backend is None:
                return work()
            with sdpa_kernel(backend):
                return work()

        return run

    forms: dict[str, Callable[[], Any]] = {}
    for backend in (None, *names):
        name = "as chosen" if backend is None else backend.name
        forms[f"{name} forward"] = by(backend, lambda: forward().detach())
        forms[f"{name} both"] = by(backend, both)
    ms = in_turns(forms, device)
    n = LAYERS * ROWS // micro
    a_step = {name: round(n * each, 1) for name, each in ms.items() if isinstance(each, float)}
    tell(attention=micro, ms=ms, a_step=a_step)


def flash(tell: Tell, device: torch.device) -> None:
    """Tell how far each attention kernel is from fp64, and whether FlashAttention 3 is there."""
    names = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    q = drawn(2, H, T, K, device=device)
    exact = F.scaled_dot_product_attention(*(q.double(),) * 3, is_causal=True)
    errors: dict[str, float | str] = {}
    for backend in names:
        try:
            with sdpa_kernel(backend):
                y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            errors[backend.name] = error_of(y, exact)
        except Exception as error:
            errors[backend.name] = str(error).splitlines()[0][:100]
    tell(attention_errors=errors, cudnn=torch.backends.cudnn.version())
    try:
        from torch.nn import attention

        listed: Any = attention.list_flash_attention_impls()
        attention.activate_flash_attention_impl("FA3")
        said = "active"
        attention.restore_flash_attention_impl()
    except Exception as error:
        listed, said = locals().get("listed"), f"{type(error).__name__}: {str(error)[:200]}"
    tell(FA3=said, listed=listed)


def rest(tell: Tell, device: torch.device, micro: int) -> None:
    """Pieces of a step: GELU, layer norm, products, reading and writing."""
    R = micro * T
    wide = drawn(R, 4 * D, device=device).requires_grad_()
    stream = drawn(R, D, device=device, dtype=torch.float32).requires_grad_()
    low = drawn(R, D, device=device).requires_grad_()
    weight = torch.ones(D, device=device, requires_grad=True)
    bias = torch.zeros(D, device=device, requires_grad=True)
    up, down = drawn(4 * D, D, device=device), drawn(D, 4 * D, device=device)
    b = drawn(4 * D, device=device)
    x, g_wide = low.detach(), drawn(R, 4 * D, device=device)

    def gelu(y: torch.Tensor) -> torch.Tensor:
        return F.gelu(y, approximate="tanh")

    def both(
        work: Callable[[torch.Tensor], torch.Tensor], y: torch.Tensor, *more
    ) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(work(y), (y, *more), y.detach())

    forms = {
        "GELU forward": lambda: gelu(wide.detach()),
        "GELU both": both(gelu, wide),
        "norm fp32 stream both": both(
            lambda y: F.layer_norm(y, (D,), weight, bias), stream, weight, bias
        ),
        "norm bf16 stream both": both(
            lambda y: F.layer_norm(y, (D,), weight.to(y.dtype), bias.to(y.dtype)), low
        ),
        "sum fp32": lambda: stream.detach() + x,
        "sum bf16": lambda: x + x,
        "up": lambda: torch.addmm(b, x, up.t()),
        "up, then GELU": lambda: gelu(torch.addmm(b, x, up.t())),
        "up with GELU (private)": lambda: torch._addmm_activation(b, x, up.t(), use_gelu=True),
        "down": lambda: g_wide @ down.t(),
        "up's weight gradient": lambda: g_wide.t() @ x,
        "up's input gradient": lambda: g_wide @ up,
    }
    ms = in_turns(forms, device)
    n = LAYERS * ROWS // micro
    tell(
        pieces=micro,
        ms=ms,
        a_step={name: round(n * each, 1) for name, each in ms.items() if isinstance(each, float)},
        of_norms="a step has 25 / 12 as many",
        up_tflops=round(2e-9 * R * D * 4 * D / ms["up"], 1),
    )


def whole_steps(tell: Tell, device: torch.device, micro: int) -> None:
    """Whole compiled steps: the plain forms and the new ones by turns."""
    from pentameter.config.files.load import load_config
    from pentameter.data.batches.step import Batch
    from pentameter.model.gpu.forms import PLAIN_FORMS, GpuForms
    from pentameter.parallel.assemble import assemble
    from pentameter.planning.plan import make_plan

    new = GpuForms(precise_sums=True, one_pass_loss=True)
    asked = {
        "train.micro_batch_size": micro,
        "train.tokens_per_step": ROWS * T,
        "model.vocab_size": VOCAB,
    }
    if SMALL:
        asked |= {
            "model.context_length": T,
            "model.n_layers": LAYERS,
            "model.d_model": D,
            "model.attention.n_heads": H,
        }
    plan = make_plan(load_config("gpt2-124m", asked))
    engines, losses = {}, {}
    tokens = torch.randint(VOCAB, (ROWS, T + 1)).numpy()
    for name, forms in (("plain", PLAIN_FORMS), ("new", new)):
        try:
            engine = assemble(plan, device, "bf16", compiled=True, forms=forms)

            def step(engine=engine) -> Any:
                rows = engine.rows
                engine.zero_gradients()
                return engine.forward_backward(Batch(tokens[rows, :-1], tokens[rows, 1:], rows), 0)

            losses[name] = float(step().total)
            engines[name] = step
        except Exception as error:
            tell(step=micro, form=name, error=f"{type(error).__name__}: {str(error)[:200]}")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tell(
        step=micro,
        ms=in_turns(engines, device, 4),
        losses=losses,
        of="forward and backward only",
    )
    if device.type == "cuda":
        tell(
            step=micro,
            peak_GB=round(torch.cuda.max_memory_allocated() / 1e9, 2),
            engines=len(engines),
        )
    del engines, engine, step
    if device.type == "cuda":
        torch.cuda.empty_cache()


def of_pieces(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell the time of a step's pieces, and of what each faster form replaces."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("highest")
    parts = [partial(trials, tell, device), partial(flash, tell, device)]
    for each in (losses, sums, head, attention, qkv, rest):
        parts += [partial(each, tell, device, micro) for micro in MICRO]
    for part in parts:
        start = time.perf_counter()
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            tell(part=str(part.func.__name__), error=f"{type(error).__name__}: {error}"[:400])
        tell(took=str(part.func.__name__), seconds=round(time.perf_counter() - start, 1))


def of_forms(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell the time of whole compiled steps with the plain and with the faster forms."""
    torch.manual_seed(0)
    for micro in (*MICRO, 2 * MICRO[-1]):
        whole_steps(tell, device, micro)
