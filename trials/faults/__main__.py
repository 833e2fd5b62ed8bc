"""`python -m trials.faults`: run the battery, or see whether it catches known mistakes.

Run from the repository's root. Results are kept line by line in a file; the same command goes on
where it was stopped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trials.faults.battery import FaultClass, Record

PRELOADED = [
    "pentameter.train.loop",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
"""What the fork server imports once for all processes."""
QUICK = 8
"""Without --full, one trial of so many is run, at least one of each class."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trials.faults", description=__doc__)
    parser.add_argument("--full", action="store_true", help="all trials, not an eighth of them")
    parser.add_argument("--only", nargs="+", metavar="ID", help="classes, or single trials: C2:17")
    parser.add_argument("--trials", type=int, help="so many trials of each class")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("build/faults/results.jsonl"))
    parser.add_argument("--mutations", action="store_true", help="plant known mistakes instead")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="a run under faults instead")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between a soak's faults")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    from trials.faults.battery import adopt_orphans

    adopt_orphans()
    # A battery that nohup, or a shell's `&`, has started ignores these, and so would its trials.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="pentameter-battery-") as scratch:
        os.environ["XDG_CACHE_HOME"] = str(Path(scratch, "cache"))
        shared = Path(scratch, "undisturbed")
        shared.mkdir()
        if chosen.soak is not None:
            from trials.faults.soak import soak

            return soak(Path(scratch), chosen.soak, chosen.every, chosen.seed)
        return mutations(shared, chosen) if chosen.mutations else battery(shared, chosen)


def battery(shared: Path, chosen: argparse.Namespace) -> int:
    """Run the chosen trials, and print the table; the exit code says whether all held."""
    from rich.console import Console
    from rich.progress import Progress

    from trials.faults.battery import Record, markdown, run_trials
    from trials.faults.table import CLASSES

    record = Record(chosen.results, chosen.seed)
    single = dict(each.split(":") for each in chosen.only or () if ":" in each)
    wanted = {each.partition(":")[0] for each in chosen.only or ()}
    unknown = wanted - {each.id for each in CLASSES}
    if unknown:
        raise SystemExit(f"there is no class {', '.join(sorted(unknown))}")
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        for each in CLASSES:
            if wanted and each.id not in wanted:
                continue
            if (why := each.obstacle()) is not None:
                console.print(f"{each.id} is left out: {why}")
                continue
            numbers = [int(single[each.id])] if each.id in single else due(each, record, chosen)
            if numbers == []:
                continue
            task = progress.add_task(
                f"{each.id} {each.fault}", total=None if numbers is None else len(numbers)
            )
            n_left = 1 if numbers is None else len(numbers)
            for result in run_trials(each, chosen.seed, numbers, shared):
                n_left -= 1
                progress.advance(task)
                if not result.held or each.id in single:
                    verdict = "held" if result.held else "failed"
                    told = f"{result.id}:{result.number} {verdict}: {result.seen}"
                    console.print(told, markup=False, highlight=False)
                if each.id not in single:
                    record.add(result)
            if n_left > 0:
                console.print(f"{each.id}: {n_left} could not be tried, and say nothing")
    print(markdown(CLASSES, record))
    return int(any(not result.held for result in record.results))


def due(fault_class: FaultClass, record: Record, chosen: argparse.Namespace) -> list[int] | None:
    """Numbers of the trials that are asked for and not on record; None for all of the tests that
    are a class, unless they are on record."""
    done = {result.number for result in record.of(fault_class)}
    if fault_class.trial is None:
        return [] if done else None
    n_trials = chosen.trials or -(-fault_class.n_trials // (1 if chosen.full else QUICK))
    return [n for n in range(min(n_trials, fault_class.n_trials)) if n not in done]


def mutations(shared: Path, chosen: argparse.Namespace) -> int:
    """Plant each known mistake, and run trials of its class until one does not hold."""
    from trials.faults.mistakes import MISTAKES, catch

    n_caught = 0
    for mistake in MISTAKES:
        caught = catch(mistake, shared, chosen.seed)
        n_caught += caught is not None
        told = "not caught" if caught is None else f"trial {caught.number}: {caught.seen[:160]}"
        print(f"{mistake.name} ({mistake.id}): {told}", flush=True)
    print(f"{n_caught} of {len(MISTAKES)} caught")
    return int(n_caught < len(MISTAKES))


multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
if __name__ == "__main__":
    raise SystemExit(main())
