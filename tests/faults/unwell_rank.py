"""An unwell rank: one of two multiplies wrongly, forgets a bit, or sends another word than it has.

    python -m tests.faults.unwell_rank [LAYOUT HOW]

`unwell(seed)` draws a layout and a way, `unwell_by` takes them; both return how the run was
refused, for a test or a battery of trials to judge.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WAYS = ("product", "memory", "link")
LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"parallel.tensor": 2},
    "pipeline": {"parallel.pipeline": 2},
    "zero": {"parallel.zero": 3},
}
PATIENCE_SECONDS = 90.0


@dataclass(frozen=True)
class Refused:
    """How a run with an unwell rank ended, what it said, and whether it made a step."""

    layout: str
    how: str
    exit_code: int
    message: str
    made_a_step: bool


def unwell(seed: int) -> Refused:
    """Run a trial of this fault class, drawn by `seed`."""
    drawn = random.Random(seed)
    return unwell_by(drawn.choice(list(LAYOUTS)), drawn.choice(WAYS))


def unwell_by(layout: str, how: str) -> Refused:
    """Train on two ranks, of which rank 1 is unwell in one of WAYS."""
    from oracle import tiny_config

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        config = tiny_config(folder, **{"train.steps": 5, **LAYOUTS[layout]})
        done = subprocess.run(
            [sys.executable, __file__, "launch", str(config), str(folder), how],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            timeout=PATIENCE_SECONDS,
            check=False,
        )
        metrics = folder / "run" / "metrics.jsonl"
        made = metrics.exists() and '"train"' in metrics.read_text()
        return Refused(layout, how, done.returncode, done.stderr.strip(), made)


# -- in the processes -----------------------------------------------------------------------------


def launch(config: str, folder: str, how: str) -> None:
    """Start two workers as `--nproc 2` does."""
    from pentameter.processes.local_launch import run_local

    run_local([sys.executable, __file__, "train", config, folder, how], 2)


def train(config: str, folder: str, how: str) -> None:
    """Train as one of two ranks, of which rank 1 is unwell."""
    from hangs import train_with

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

        def wrong_link(sent: Any, *arguments: Any) -> Any:
            return pass_on(sent ^ 1, *arguments)

        match how:
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
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:2] in (["launch"], ["train"]):
        from hangs import as_command

        raise SystemExit(as_command({"launch": launch, "train": train}))
    for each in [sys.argv[1:]] if sys.argv[1:] else itertools.product(LAYOUTS, WAYS):
        print(unwell_by(*each), flush=True)
