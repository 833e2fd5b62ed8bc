"""Trials of the battery on several nodes, which `trials/nodes` makes: any of its faults, and a link
that is cut for good."""

from __future__ import annotations

from trials.faults.trial import Trial
from trials.nodes.network import reason_not_to
from trials.nodes.trial import ALL_KINDS, TRIALS


def no_nodes() -> str | None:
    """Why no nodes can be made here; None if they can."""
    return reason_not_to()


def a_fault_on_three_nodes(trial: Trial) -> str:
    """A fault of each kind in turn on a run of three nodes, which has to go on."""
    kind = ALL_KINDS[trial.number % len(ALL_KINDS)]
    made = TRIALS[kind](trial.draw.randrange(2**32), trial.folder)
    assert not made.problem, made
    return f"{kind} at step {made.step}, {made.seconds:.1f} s"
