"""The loss in one kernel, against the loss in separate operations.

Without a GPU Triton interprets the kernel; what a compiler makes of it on a chip, `loss_obstacle`
looks at before each run.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from pentameter.model.loss import row_loss

pytest.importorskip(
    "triton", reason="Triton is not installed: `pip install triton` interprets its kernels on a CPU"
)

from pentameter.model.gpu import loss_kernel
from pentameter.model.gpu.loss_kernel import one_pass_row_loss

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, VOCAB_SIZE, PADDED = 9, 43, 48


def inputs(dtype: torch.dtype, *, bias: bool = True) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits (ROWS, PADDED) of some size, in `dtype`, a bias and targets of which two do not
    count."""
    drawn = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(ROWS, PADDED, generator=drawn)
    values = torch.randn(PADDED, generator=drawn) if bias else None
    targets = torch.randint(VOCAB_SIZE, (ROWS,), generator=drawn)
    targets[2] = targets[-1] = -1
    targets[0], targets[1] = VOCAB_SIZE - 1, 0
    at = (logits.to(DEVICE, dtype), None if values is None else values.to(DEVICE))
    return *at, targets.to(DEVICE)


@pytest.mark.parametrize("columns", [16, 64])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_loss_and_gradient_are_those_of_the_plain_form(
    monkeypatch, dtype, bias, softcap, columns
) -> None:
    monkeypatch.setattr(loss_kernel, "MOST_COLUMNS", columns)  # in several blocks, and in one
    logits, values, targets = inputs(dtype, bias=bias)
    precise = logits.double()
    wide = None if values is None else values.double()
    expected = row_loss(precise, wide, targets, VOCAB_SIZE, True, softcap)
    loss = one_pass_row_loss(logits, values, targets, VOCAB_SIZE, True, softcap)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    # Rounded once to the dtype (Triton's interpreter cuts bf16's bits off); fp32 has the error of
    # its exponentials, of numbers up to 16.
    bound = max(torch.finfo(dtype).eps, 4e-6)
    torch.testing.assert_close(logits.double(), precise, rtol=bound, atol=1e-7)
    assert torch.count_nonzero(logits[:, VOCAB_SIZE:]) == 0
    assert torch.count_nonzero(logits[targets < 0]) == 0


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_stay_where_only_the_loss_is_asked_for(softcap) -> None:
    logits, bias, targets = inputs(torch.float32)
    kept = logits.clone()
    with_gradient = one_pass_row_loss(kept.clone(), bias, targets, VOCAB_SIZE, True, softcap)
    loss = one_pass_row_loss(logits, bias, targets, VOCAB_SIZE, False, softcap)
    assert torch.equal(logits, kept)
    assert torch.equal(loss, with_gradient)


def test_large_logits_and_no_rows() -> None:
    logits, _, targets = inputs(torch.float32, bias=False)
    logits *= 1e4
    precise = logits.double()
    expected = row_loss(precise, None, targets, VOCAB_SIZE, True)
    loss = one_pass_row_loss(logits, None, targets, VOCAB_SIZE, True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(logits.double(), precise, rtol=1e-3, atol=1e-6)
    assert one_pass_row_loss(logits[:0], None, targets[:0], VOCAB_SIZE, True).item() == 0


def test_what_is_not_a_number_is_in_the_loss() -> None:
    logits, _, targets = inputs(torch.float32, bias=False)
    logits[3, 5] = float("nan")
    assert one_pass_row_loss(logits, None, targets, VOCAB_SIZE, True).isnan()
    assert logits[3, :VOCAB_SIZE].isnan().all()


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pentameter.model.gpu.loss_kernel import COLUMNS_PER_WARP, MOST_COLUMNS, _row_kernel

for chip, dtype, has in ((75, "fp16", False), (80, "bf16", True), (90, "bf16", False)):
    pointers = dict(logits_at=f"*{dtype}", bias_at="*fp32", targets_at="*i64", losses_at="*fp32")
    numbers = dict(row_stride="i32", width="i32", vocab_size="i32", softcap="fp32")
    chosen = dict(HAS_BIAS=has, HAS_CAP=has, DIFFERENTIATE=True, COLUMNS=MOST_COLUMNS)
    signature = pointers | numbers | dict.fromkeys(chosen, "constexpr")
    constants = {(list(signature).index(name),): value for name, value in chosen.items()}
    source = ASTSource(fn=_row_kernel, signature=signature, constexprs=constants)
    options = {"num_warps": MOST_COLUMNS // COLUMNS_PER_WARP}
    made = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    print(chip, len(made.asm["cubin"]) > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels are for Linux")
def test_it_compiles_for_chips_that_are_not_here(tmp_path) -> None:
    """The interpreter takes what Triton's compiler refuses."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["75 True", "80 True", "90 True"], done.stderr[-2000:]
