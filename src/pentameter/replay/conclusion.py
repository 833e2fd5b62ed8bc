"""Comparison of a replayed step with what the run recorded. It concludes whether the batch, the
hardware or the code caused what happened in the step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pentameter.config.choices import look_up
from pentameter.config.tables import packaged_table
from pentameter.replay.record import RunRecord, StepNumbers
from pentameter.replay.steps import Replayed

Verdict = Literal["batch", "hardware", "code", "layout", "unknown"]

ROUNDING: Mapping[str, float] = {
    "fp64": 1e-14, "fp32": 1e-6, "tf32": 1e-3, "bf16": 1e-3, "fp16": 1e-3,
}  # fmt: skip
"""Precision → relative difference of a loss that is due to summing in another order, in the first
step after equal weights."""
GROWTH = 2.0
"""Factor by which differences may grow from one step to the next. Measured with a tiny model at a
rate at which it just trains: by up to 10 for single steps, by less than 2 on the average."""
MOST_ROUNDING = 1e-2
"""Largest relative difference of a loss that counts as rounding, after however many steps."""
NORM_FACTOR, WEIGHTS_FACTOR = 10.0, 30.0
"""Largest difference of a gradient norm, and of the weights' distance ÷ the way that they went,
as multiples of a loss's. Measured as above: a norm by 0.2 and weights by 0.13 after 20 steps in
bf16, 0.001 and 0.0004 in fp32."""


def differing_facts(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return "name: then → now" for each fact (`facts.toml`) that differs between two
    environments. Facts that one of them did not record are left out."""
    return [
        f"{name}: {before} → {after}"
        for name, path in packaged_table("replay/facts.toml").items()
        if (before := _at(then, path)) != (after := _at(now, path)) and before is not None
    ]


def _at(record: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True)
class Compared:
    """A recorded number and the replayed one. `is_close` is True if they differ by no more than
    rounding."""

    step: int
    name: str
    recorded: float
    replayed: float
    is_close: bool

    @property
    def is_equal(self) -> bool:
        """True if both have the same bits, or both are NaN."""
        same_nan = math.isnan(self.recorded) and math.isnan(self.replayed)
        return self.recorded == self.replayed or same_nan

    def __str__(self) -> str:
        how = "equal to the bit" if self.is_equal else "to rounding" if self.is_close else "DIFFERS"
        return (
            f"step {self.step:,} {self.name}: recorded {self.recorded!r}, replayed "
            f"{self.replayed!r}, {how}"
        )


@dataclass(frozen=True)
class Conclusion:
    """Result of a comparison: whether the replayed step agrees with the run, and why or why not.

    verdict: the cause, in a word. reason: the same in a sentence. equal: how well they agree,
    `bits` or to `rounding`; None if they do not.
    """

    verdict: Verdict
    reason: str
    equal: Literal["bits", "rounding"] | None
    numbers: tuple[Compared, ...]
    replayed: Replayed

    @property
    def first_different(self) -> int | None:
        """If the replay does not agree, the first step with a number that is not equal to the bit;
        None if there is none, or if it agrees."""
        if self.agrees:
            return None
        return next((each.step for each in self.numbers if not each.is_equal), None)

    @property
    def agrees(self) -> bool:
        """True if nothing differs by more than is allowed."""
        return self.equal is not None


def conclude(
    record: RunRecord,
    replayed: Replayed,
    again: Replayed | None,
    *,
    precision: str,
    differences: Sequence[str],
    is_own_layout: bool,
) -> Conclusion:
    """Compare the numbers of the replay `replayed` with those in `record`, and conclude the cause.

    again: a second replay of the same steps, made if the first differs from the record; else None.

    precision: the replay's `train.precision`, resolved.

    differences: facts that differ between this environment and those in which the run made the
    steps (see `differing_facts`).

    is_own_layout: True if the run made each of the steps in the replay's layout, with as many rows
    in a micro-batch.
    """
    numbers = tuple(_compared(record, replayed.numbers, precision))
    weights = replayed.weights
    bits = all(each.is_equal for each in numbers)
    bits = bits and (weights is None or weights.is_equal)
    close = all(each.is_close for each in numbers)
    if weights is not None:
        allowed = WEIGHTS_FACTOR * _rounding(precision, len(replayed.numbers))
        close = close and weights.weights_distance <= allowed
    equal: Literal["bits", "rounding"] | None = "bits" if bits else "rounding" if close else None
    must_be_equal = is_own_layout and not differences
    # As text, because NaN is not equal to itself.
    is_repeated = again is None or repr(replayed) == repr(again)
    if must_be_equal and not bits and is_repeated:
        equal = None
        verdict, reason = _hardware(again)
    elif bits or close:
        verdict, reason = _agrees(equal, compared=bool(numbers) or weights is not None)
        if must_be_equal and not bits:
            reason += "; two replays here differ in their last bits, too, as this device's sums do"
    elif must_be_equal:
        verdict, reason = (
            "hardware",
            "two replays of the same step on this machine differ by more than rounding: it does "
            "not compute the same twice, and is faulty",
        )
    elif differences:
        differ = f"these differ here: {'; '.join(differences)}"
        verdict, reason = "code", f"of what the run was made with, {differ}"
    else:
        verdict, reason = (
            "layout",
            "the layout is not the run's in each of these steps, and this is more than rounding: "
            "replay it without --layout, or the step behind the checkpoint at which the run's "
            "layout changed, where it must be equal to the bit, to tell hardware from a fault of "
            "this layout",
        )
    found = Conclusion(verdict, reason, equal, numbers, replayed)
    if found.first_different is None:
        return found
    return replace(found, reason=f"from step {found.first_different} on: {reason}")


def _compared(
    record: RunRecord, found: Mapping[int, StepNumbers], precision: str
) -> Iterator[Compared]:
    """Yield the loss and the gradient norm of each replayed step that the run recorded. If the
    update of a step was skipped, in the run or in the replay, yield instead whether it was made (1
    or 0)."""
    for n_steps, (step, here) in enumerate(found.items(), start=1):
        there = record.numbers.get(step)
        if there is None:
            continue
        if not (there.made and here.made):  # a skipped step has no other numbers
            same = there.made == here.made
            yield Compared(step, "update made", float(there.made), float(here.made), same)
            continue
        rounding = _rounding(precision, n_steps)
        for name, before, after, allowed in (
            ("loss", there.loss, here.loss, rounding),
            ("gradient norm", there.grad_norm, here.grad_norm, NORM_FACTOR * rounding),
        ):
            is_close = math.isclose(before, after, rel_tol=allowed)
            yield Compared(step, name, before, after, is_close)


def _rounding(precision: str, n_steps: int) -> float:
    """Return how far a loss may differ, relatively, and still count as rounding, if `n_steps` steps
    were made since the weights were equal."""
    first = look_up(ROUNDING, precision, "train.precision", "replay")
    return min(MOST_ROUNDING, first * GROWTH ** min(n_steps - 1, 100))


def _agrees(equal: Literal["bits", "rounding"] | None, *, compared: bool) -> tuple[Verdict, str]:
    if not compared:
        return "unknown", "the run records nothing of it, nor of a step after it, to compare with"
    how = "to the bit" if equal == "bits" else "to rounding"
    return (
        "batch",
        f"the step is reproducible {how}: what it did follows from its batch and from the weights "
        "before it",
    )


def _hardware(again: Replayed | None) -> tuple[Verdict, str]:
    return (
        "hardware",
        "layout, versions and kind of machine are the run's, so this must be equal to the bit"
        + (", and a second replay gave what the first did" if again is not None else "")
        + ": the run computed the step wrong, or its record or a checkpoint's tensors changed "
        "before they were hashed",
    )
