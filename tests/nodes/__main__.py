"""`python -m tests.nodes --trials N --seed S`: faults on a run of four nodes, and a table."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from network import reason_not_to
from trials import ALL_KINDS, run_trials, table


def main() -> int:
    """Make the trials, ten on each run, print each and then the table; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.nodes", description=__doc__)
    parser.add_argument("--trials", type=int, default=len(ALL_KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--kind", action="append", choices=ALL_KINDS, help="these faults alone")
    asked = parser.parse_args()
    if (reason := reason_not_to()) is not None:
        print(reason)
        return 1
    chance = random.Random(asked.seed)
    kinds: list[str] = []
    while len(kinds) < asked.trials:  # each as often as any other, in a random order
        kinds += chance.sample(sorted(asked.kind or ALL_KINDS), len(asked.kind or ALL_KINDS))
    kinds, made = kinds[: asked.trials], []
    for first in range(0, len(kinds), 10):
        seed = 1000 * asked.seed + first
        folder = Path(tempfile.mkdtemp(prefix="pentameter-nodes-"))
        some = kinds[first : first + 10]
        for trial in run_trials(some, seed, folder, n_nodes=asked.nodes):
            made.append(trial)
            print(f"{seed} {trial}", flush=True)
        if not any(trial.problem for trial in made[first:]):
            shutil.rmtree(folder)  # else what the nodes said is looked at
    print(table(made))
    return int(any(trial.problem for trial in made))


if __name__ == "__main__":
    raise SystemExit(main())
