"""A run that loses half of its nodes, goes on without them and takes them in again.

`python -m trials.nodes.half_lost FOLDER` makes it in FOLDER, with its report.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from pentameter.report.pages.page import write_report
from trials.nodes.cluster import cluster


def lose_half(folder: Path, seconds: float) -> Path:
    """Return the run folder of four nodes that train for so long, lose two, train for so long
    without them, and for so long with them again."""
    with cluster(4, folder) as run:
        run.wait_for_steps(60)  # past a checkpoint: without one a run begins anew
        time.sleep(seconds)
        number = run.attempt()["number"]
        for node in (1, 2):
            run.power_off(node)
        run.wait_until_recovered(number)
        time.sleep(seconds)
        for node in (1, 2):
            run.net.heal(node)
        run.start(1, 2)
        run.wait_for_members(4)
        time.sleep(seconds)
        assert run.stop() == [75] * 4
        return run.run_dir


if __name__ == "__main__":
    print(write_report(lose_half(Path(sys.argv[1]), 60.0)))
