"""`python -m trials.nodes --trials N --seed S`: faults on a run of four nodes, and a table.

`--results FILE` appends each trial to FILE as a line of JSON; the table is then that of all its
lines, and of these alone with `--trials 0`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

from trials.nodes.network import reason_not_to
from trials.nodes.trial import ALL_KINDS, Trial, run_trials, table


def main() -> int:
    """Make the trials, ten on each run, print each and then the table; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m trials.nodes", description=__doc__)
    parser.add_argument("--trials", type=int, default=len(ALL_KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--kind", action="append", choices=ALL_KINDS, help="these faults alone")
    parser.add_argument("--results", type=Path, help="file to append the trials to")
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
            if asked.results is not None:
                with asked.results.open("a") as file:
                    file.write(json.dumps({"seed": seed, **asdict(trial)}) + "\n")
        if not any(trial.problem for trial in made[first:]):
            shutil.rmtree(folder)  # else what the nodes said is looked at
    print(table(made if asked.results is None else recorded(asked.results)))
    return int(any(trial.problem for trial in made))


def recorded(results: Path) -> list[Trial]:
    """The trials in a file of results."""
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    return [Trial(**{key: line[key] for key in line if key != "seed"}) for line in lines]


if __name__ == "__main__":
    raise SystemExit(main())
