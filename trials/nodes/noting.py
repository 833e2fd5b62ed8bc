"""`python -m trials.nodes.noting train …`: the command `pentameter train …`, whose ranks note the
rows of each batch that they train on, in files of the folder that the environment variable FOLDER
names."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

FOLDER = "PENTAMETER_TRIALS_NOTED_BATCHES"


def main() -> int:
    """Run the command. A launcher (`--nodes`) has its ranks note; any other process does so."""
    from pentameter.__main__ import main as run_command
    from pentameter.cli import train

    if "--nodes" in sys.argv:
        train.AS_RANK = "trials.nodes.noting:train_as_rank"
    else:
        note_batches(Path(os.environ[FOLDER]))
    return run_command()


def train_as_rank(request: tuple[Mapping[str, str], list[str]]) -> int:
    """Do what the function of this name in `pentameter.cli.train` does, and note the batches."""
    from pentameter.cli import train

    environment, _ = request
    note_batches(Path(environment[FOLDER]))
    return train.train_as_rank(request)


def note_batches(folder: Path) -> None:
    """From now on, append step and hash of every row to a file of this process's as its batch
    enters the forward pass."""
    from pentameter.data.batches.step import Batch
    from pentameter.parallel.engine import Engine, LossSum

    real = Engine.forward_backward
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)

    def forward_backward(
        self: Engine, batch: Batch, step: int, *, loss_scale: float = 1.0
    ) -> LossSum:
        hashes = {}
        for index, row in enumerate(batch.rows.tolist()):
            one = slice(index, index + 1)
            hashes[row] = Batch(batch.inputs[one], batch.targets[one], batch.rows[one]).hash()
        file.write(json.dumps({"step": step + 1, "rows": hashes}) + "\n")
        return real(self, batch, step, loss_scale=loss_scale)

    Engine.forward_backward = forward_backward  # type: ignore[method-assign]


def noted_batches(folder: Path) -> dict[int, dict[int, set[str]]]:
    """Step → row of its batch → hashes of what all processes have read as that row."""
    found: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # half a line of a process that was killed
                record = json.loads(line)
                for row, digest in record["rows"].items():
                    found[record["step"]][int(row)].add(digest)
    return found


if __name__ == "__main__":
    raise SystemExit(main())
