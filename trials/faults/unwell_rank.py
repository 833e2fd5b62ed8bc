"""Trials of the battery: one of two ranks multiplies wrongly, forgets a bit, or sends another word
than it has. As a program this module trains with such a rank."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any

from trials.faults.launched_ranks import LAYOUTS, as_command, launch_and_wait, train_with

if TYPE_CHECKING:
    from trials.faults.trial import Trial

SAID = {
    "product": "rank 1 on {host} computes wrong products",
    "memory": "rank 1 on {host} reads other bytes than it wrote",
    "link": "rank 0 on {host} receives other words from rank 1",
}
"""What is unwell → how the message begins."""
GRID = list(itertools.product(LAYOUTS, SAID))


def an_unwell_rank(trial: Trial) -> str:
    """Rank 1 of two is unwell: the run is refused before its first step, and says so."""
    from trials.faults.oracle import tiny_config

    layout, what = GRID[trial.number % len(GRID)]
    config = tiny_config(trial.folder, **{"train.steps": 5, **LAYOUTS[layout]})
    code, said = launch_and_wait(__name__, config, trial.folder, what)
    assert code == 70, said
    told = said.splitlines()[-1].removeprefix("pentameter: ")
    assert told.startswith(SAID[what].format(host=os.uname().nodename)), told
    assert "No step was made" in told, told
    metrics = trial.run / "metrics.jsonl"
    assert not metrics.exists() or '"train"' not in metrics.read_text(), "a step was made"
    return f"{layout}, {what}"


# -- in the processes -----------------------------------------------------------------------------


def train(config: str, folder: str, what: str) -> None:
    """Train as one of two ranks, of which rank 1 is unwell."""
    from pentameter.machine import health
    from pentameter.parallel import links

    if os.environ["RANK"] == "1":
        multiply, copy, pass_on = health.multiply, health.copy, links.pass_on

        def wrong_product(left: Any, right: Any) -> Any:
            product = multiply(left, right)
            product[0, 0] += 1
            return product

        def wrong_memory(written: Any, pattern: Any) -> None:
            copy(written, pattern)
            written[0] &= ~1

        def wrong_link(tensor: Any, group: Any) -> Any:
            return pass_on(tensor ^ 1, group)

        match what:
            case "product":
                health.multiply = wrong_product
            case "memory":
                health.copy = wrong_memory
            case "link":
                links.pass_on = wrong_link
    train_with(config, folder, _Watching())


class _Watching:
    """A hook that does nothing."""

    def on_end(self, run: Any, end: Any) -> None:
        pass


if __name__ == "__main__":
    raise SystemExit(as_command(train))
