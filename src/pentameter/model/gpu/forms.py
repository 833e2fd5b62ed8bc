"""Faster forms of a step's operations on a GPU, each tried against the plain form before a run.

What compiles on a chip and a release on which it never ran need not be right there. So a run takes
a form only where a trial on its own device agrees with float64; else it keeps the plain one, with
the reason. A trial looks at results and not at times, so that one machine always computes in the
same way.

Shapes: R rows of tokens, V padded vocabulary, K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from pentameter.keyed import bits, make_key
from pentameter.model.experts import Experts
from pentameter.model.loss import HeadLoss, RowLoss, row_loss
from pentameter.model.matmul import PLAIN, PRECISE_SUMS, Matmul

ROWS = 192
"""Rows of tokens in a trial."""


@dataclass(frozen=True)
class GpuForms:
    """The operations of a GPT that run on a GPU in another form than PyTorch's plain one, because
    it is faster and its results were found right; and the reasons for those that do not. By default
    none, as on a CPU."""

    drops_by_blocks: bool = False
    """Attention's kernels apply dropout, block by block, and store no weights."""
    experts_at_once: bool = False
    """bf16 matmuls of all experts run at once, without a wait of the host."""
    precise_sums: bool = False
    """The head's weight gradient is added up in fp32 by its matmul, not by operations behind it."""
    one_pass_loss: bool = False
    """Loss and gradient of a chunk of logits are computed in one kernel."""
    fused_ring: bool = False
    """Ring attention runs by PyTorch's fused attention, which stores no weights."""
    obstacles: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The reasons for which forms that this run would use were left, by the names of their
    fields."""

    def matmul(self, plain: Matmul) -> Matmul:
        """Return the matmul for a run: one that adds up a weight's gradient in fp32 if
        `precise_sums` is set and `plain` is PyTorch's plain matmul, else `plain` itself, the one
        that the run's precision asks for."""
        return PRECISE_SUMS if self.precise_sums and plain is PLAIN else plain

    def install(self, model: nn.Module) -> None:
        """Have the head's loss in `model` computed in one kernel if `one_pass_loss` is set, and its
        experts' rows multiplied as `experts_at_once` says, in place."""
        for module in model.modules():
            if isinstance(module, Experts):
                module.at_once = self.experts_at_once
            if isinstance(module, HeadLoss) and self.one_pass_loss:
                module.row_loss = _one_pass()

    def facts(self) -> dict[str, bool | str]:
        """Return by its name whether each form is taken or, if it was left, the reason."""
        names = (each.name for each in fields(self) if each.name != "obstacles")
        return {name: self.obstacles.get(name, getattr(self, name)) for name in names}

    def __str__(self) -> str:
        """Return "precise sums, one pass loss · no fused ring (REASON)"; "" without any trial."""
        spoken = {name.replace("_", " "): fact for name, fact in self.facts().items()}
        taken = ", ".join(name for name, fact in spoken.items() if fact is True)
        left = [f"no {name} ({fact})" for name, fact in spoken.items() if isinstance(fact, str)]
        return " · ".join([taken, *left] if taken else left)


PLAIN_FORMS = GpuForms()


def obstacle_of(trial: Callable[[], str | None]) -> str | None:
    """Run `trial`, which returns a phrase that says why a form cannot be used, None if it can.
    Return its result, or the text of the error that ended it. Without the form a run is slower, not
    impossible, so nothing is raised."""
    try:
        return trial()
    except Exception as error:  # from an import, a compiler, a driver: whatever it is
        said = next(iter(str(error).strip().splitlines()), "")
        return f"{type(error).__name__}: {said}" if said else type(error).__name__


def sums_obstacle(products: torch.dtype, device: torch.device) -> str | None:
    """Try, on `device`, a matmul that adds its product of 16-bit matrices (dtype `products`) to an
    fp32 one, as `PreciseSums` computes a weight's gradient. Return a phrase that says how far the
    result is from one in fp64; None if it is right."""
    g, x = (_drawn(name, ROWS, K).to(device, products) for name, K in (("g", 320), ("x", 96)))
    weight = _drawn("weight", 320, 96).to(device, products)
    total = _drawn("total", 320, 96).to(device)
    expected = total.double() + 2 * (g.double().t() @ x.double())
    for _ in range(2):
        PRECISE_SUMS.differentiate(g, x, weight, total)
    # Far below the rounding of a product to 16 bits; sums of this many numbers in fp32 lose less.
    return _difference("the gradient", total, expected, 2.0**-15, expected.abs().max().item())


def loss_obstacle(
    products: torch.dtype, device: torch.device, padded: int, vocab_size: int, softcap: float | None
) -> str | None:
    """Try, on `device`, the kernel that computes loss and gradient in one pass, on logits in
    `products`. Return a phrase that says how far its results are from the plain form's in fp64;
    None if they are right.

    padded: columns of the logits, of which the first `vocab_size` are tokens.
    softcap: bound on the logits; None for none.
    """
    logits = (4 * _drawn("logits", ROWS, padded)).to(device, products)
    bias = _drawn("bias", 1, padded).to(device)[0]
    index = torch.arange(ROWS, dtype=torch.int32)
    targets = (bits(make_key("gpu forms", "targets"), index).long() % vocab_size).to(device)
    targets[0], targets[1], targets[-1] = -1, vocab_size - 1, 0
    precise = logits.double()
    expected = row_loss(precise, bias.double(), targets, vocab_size, True, softcap)
    loss = _one_pass()(logits, bias, targets, vocab_size, True, softcap)
    bound = max(torch.finfo(products).eps, 2.0**-16)
    least = 2.0**-21 / bound  # as a probability near 1 less 1, or fp16's smallest numbers, are off
    return _difference("the loss", loss, expected, 2.0**-16, 1.0) or _difference(
        "the gradient", logits, precise, bound, least
    )


def _difference(
    what: str, found: Tensor, expected: Tensor, bound: float, least: float
) -> str | None:
    """Compare `found` with `expected`, which is in fp64, number by number. Return a phrase,
    beginning with `what`, if one differs by more than `bound` times its size; a size below `least`
    counts as `least`. None if none does."""
    off = ((found.double() - expected).abs() / expected.abs().clamp_min(least)).max().item()
    return None if off <= bound else f"{what} is off by {off:.1e}, more than {bound:.1e}"


def _drawn(name: str, n_rows: int, n_columns: int) -> Tensor:
    """Draw a matrix (n_rows, n_columns) from a key: uniform with variance 1, fp32 on the CPU."""
    index = torch.arange(n_rows * n_columns, dtype=torch.int32)
    numbers = bits(make_key("gpu forms", name), index).view(n_rows, n_columns)
    return (numbers.double() * (3**0.5 / 2**31)).float()


def _one_pass() -> RowLoss:
    """Return the function that computes loss and gradient in one Triton kernel. Imports Triton."""
    from pentameter.model.gpu.loss_kernel import one_pass_row_loss

    return one_pass_row_loss
