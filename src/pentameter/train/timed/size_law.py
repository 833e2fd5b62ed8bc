"""The scaling law by which `train --time` chooses a model size for a time budget.

The loss on a text falls with the model's size and with the tokens that it is trained on, and a
token seen again teaches less than a new one:

    bits per byte = E + A / N^α + B / D^β,    D = U + U · R* · (1 - exp(-(passes - 1) / R*))

N counts the parameters in the blocks' matrices, U the tokens in the training split, D the effective
tokens (Hoffmann et al. 2022, "Training compute-optimal large language models"; Muennighoff et al.
2023, "Scaling data-constrained language models", where R* is 15). E is the same for all sizes, and
is left out. A and B were fitted on short runs of ours: benchmarks/measurements/recipes.md has them,
and `benchmarks/loss_law.py` makes them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

SIZE_FACTOR, SIZE_POWER = 20.0, 0.35
TOKENS_FACTOR, TOKENS_POWER = 103.0, 0.37
"""A and α, B and β in the law above. The powers are those in Besiroglu et al. 2024, "Chinchilla
scaling: a replication attempt"; A and B are ours."""
LASTING_PASSES = 15.0
"""R* in the law above: the scale, in passes over the text, on which repetition stops teaching."""


@dataclass(frozen=True)
class Size:
    """A model's width and depth, and its context length in tokens."""

    d_model: int
    n_layers: int
    context_length: int

    @property
    def n_matrix_parameters(self) -> int:
        """Parameters in the blocks' matrices, if the feed-forward layer is four times as wide as
        the model, or has a gate and `gated_width`."""
        return 12 * self.n_layers * self.d_model**2


SIZES = tuple(
    Size(*each)
    for each in (
        (64, 2, 256), (96, 3, 256), (128, 4, 256), (192, 4, 256), (256, 5, 256), (320, 6, 256),
        (384, 6, 256), (512, 8, 512), (640, 10, 512), (768, 12, 1024), (1024, 16, 1024),
        (1280, 20, 1024), (1600, 24, 1024), (2048, 24, 2048),
    )
)  # fmt: skip
"""Sizes to choose from, smallest first. Those wider than 192 channels exceed any in the runs that
the law was fitted on."""


def gated_width(d_model: int) -> int:
    """Return the width of a feed-forward layer with a gate, whose three matrices have as many
    parameters as the two of a layer that is four times as wide as the model: 8/3 · `d_model`, to
    the nearest multiple of 32 (but at least 32), as which formats with a scale for each block of
    numbers want it."""
    return max(32, 32 * round(d_model / 12))


def loss_above_floor(n_parameters: float, n_tokens: float, n_unique_tokens: float) -> float:
    """Return a model's expected loss in bits per byte, minus the part that no model can avoid (the
    constant E of the fitted law).

    n_parameters: parameters in the matrices of the model's blocks.
    n_tokens: tokens that the training reads.
    n_unique_tokens: tokens in the training split; what is read again counts less.
    """
    fresh = n_tokens
    if n_tokens > n_unique_tokens:
        more = n_tokens / n_unique_tokens - 1
        fresh = n_unique_tokens * (1 + LASTING_PASSES * -math.expm1(-more / LASTING_PASSES))
    return SIZE_FACTOR * n_parameters**-SIZE_POWER + TOKENS_FACTOR * fresh**-TOKENS_POWER


def best_size(
    sizes: Iterable[Size],
    flops_per_token: Callable[[Size], float],
    flops: float,
    n_unique_tokens: int,
) -> Size:
    """Return the size with the lowest expected loss after `flops` FLOPs of training on a split with
    `n_unique_tokens`; `flops_per_token` gives a size's FLOPs per training token."""
    return min(
        sizes,
        key=lambda size: loss_above_floor(
            size.n_matrix_parameters, flops / flops_per_token(size), n_unique_tokens
        ),
    )


def sizes_within(sizes: Sequence[Size], d_model: int | None, n_layers: int | None) -> list[Size]:
    """Return `sizes` restricted to the width and depth that the user chose; None leaves one open.
    For a chosen width the result is one size with it, whose depth and context length are those of
    the size nearest in width. A chosen depth replaces that of every size left."""
    found = list(sizes)
    if d_model is not None:
        near = min(found, key=lambda size: abs(size.d_model - d_model))
        found = [Size(d_model, near.n_layers, near.context_length)]
    if n_layers is not None:
        found = [Size(size.d_model, n_layers, size.context_length) for size in found]
    return found


BYTES_PER_ENTRY, TOKENS_PER_ENTRY = 450, 64
"""Minimum bytes of text, and minimum tokens in a run, for each vocabulary entry, so that most are
learned."""
VOCABULARIES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
CHARACTERS = "char"


def best_vocabulary(n_bytes: int, tokens_of_run: Callable[[int], float]) -> str:
    """Return the `data.tokenizer` for a text with `n_bytes` of UTF-8: "bpe:N" with the largest N in
    VOCABULARIES for which the text has at least BYTES_PER_ENTRY · N bytes and the run at least
    TOKENS_PER_ENTRY · N tokens; "char" if there is none. `tokens_of_run` gives the tokens that a
    run has time for with a vocabulary size."""
    found = CHARACTERS
    for size in VOCABULARIES:
        if size * BYTES_PER_ENTRY <= n_bytes and size * TOKENS_PER_ENTRY <= tokens_of_run(size):
            found = f"bpe:{size}"
    return found


STEPS_OF_A_RUN = 1500
SMALLEST_STEP_TOKENS, LARGEST_STEP_TOKENS = 2048, 1 << 19


def step_tokens(n_tokens: float) -> int:
    """Return the tokens per step for a run that reads `n_tokens`: the largest power of two that
    leaves at least STEPS_OF_A_RUN steps, but no less than SMALLEST_STEP_TOKENS and no more than
    LARGEST_STEP_TOKENS."""
    wanted = max(1, math.floor(n_tokens / STEPS_OF_A_RUN))
    fitting = 1 << (wanted.bit_length() - 1)
    return min(LARGEST_STEP_TOKENS, max(SMALLEST_STEP_TOKENS, fitting))


WIDTH_OF_RATE, RATE = 128, 6e-3
"""A model width and its best peak learning rate under Muon, whose updates are as large as
AdamW's."""


def best_rate(d_model: int) -> float:
    """Return the peak learning rate for a model width: RATE at WIDTH_OF_RATE, and in inverse
    proportion to the square root of the width."""
    return round(RATE * math.sqrt(WIDTH_OF_RATE / d_model), 5)


TUNING_SHARE = 0.3
"""The peak learning rate with which a trained model is tuned ÷ the best one for its width. On four
texts (docs/results.md) the validation loss was then never above its start."""


def tuning_rate(d_model: int) -> float:
    """Return the peak learning rate for training a model of this width further, on other text or on
    more of its own."""
    return float(f"{TUNING_SHARE * best_rate(d_model):.3g}")
