"""Idle OpenMP threads that spin, sleep, or do either by the load: speed beside busy programs that
come and go during a run.

    python benchmarks/wait_policy.py [--cases quickstart-compiled …] [--policies chosen spinning …]
        [--loops 0 1 2 4 0] [--seconds 8] [--nanogpt DIR]

Each run is one process that trains while busy loops are started and ended beside it: so many for
so many seconds, after 2 s for it to notice. Printed are its tokens per second in each such phase,
their ratio to the first one's, and the cores that programs beside all of these kept busy meanwhile.
With `--nanogpt`, a checkout of https://github.com/karpathy/nanoGPT whose data set
`shakespeare_char` is prepared, the same sizes are trained by its train.py, too.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pentameter.disk.owner import processor_seconds
from pentameter.machine.cores_and_memory import usable_cores
from pentameter.machine.load.other_programs import busy_seconds

POLICIES = {
    "chosen": {},  # pentameter's: by the load
    "runtime": {"GOMP_SPINCOUNT": "300000"},  # the runtime's own
    "spinning": {"GOMP_SPINCOUNT": "60001"},  # pentameter's on a quiet machine, not looked after
    "asleep": {"OMP_WAIT_POLICY": "PASSIVE"},
}
SIZES = {"quickstart": (4, 128, 4, 128, 24, 0.0), "shakespeare-char": (6, 384, 6, 256, 64, 0.2)}
"""Preset → layers, width, heads, context, batch rows, dropout."""
CASES = [f"{preset}-{how}" for preset in SIZES for how in ("compiled", "eager")]
NOTICE_SECONDS = 2.0
WARM_UP_STEPS = 6
_CHOSEN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")


@contextmanager
def busy_cores(count: int) -> Iterator[list[int]]:
    """Programs beside the run, each of which wants a core for itself: their process ids."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield [other.pid for other in others]
    finally:
        for other in others:
            other.kill()
            other.wait()


def ours(case: str, folder: str) -> list[str]:
    """The command that trains a case."""
    preset, how = case.rsplit("-", 1)
    settings = {
        "train.steps": "100000",
        "train.eval-interval": "none",
        "train.sample-interval": "none",
        "checkpoint.interval": "none",
        "log.interval": "1",
        "train.compile": str(how == "compiled").lower(),
    }
    options = [word for key, value in settings.items() for word in (f"--{key}", value)]
    return [sys.executable, "-m", "pentameter", "train", preset, "--run-dir", folder, *options]


def nanogpt(case: str, folder: str) -> list[str]:
    """The command that trains nanoGPT at the sizes of a case, on its own data set."""
    preset, how = case.rsplit("-", 1)
    names = ("n_layer", "n_embd", "n_head", "block_size", "batch_size", "dropout")
    options = dict(zip(names, SIZES[preset], strict=True))
    rest = {"device": "cpu", "compile": how == "compiled", "log_interval": 1, "out_dir": folder}
    rest |= {"eval_interval": 100_000, "eval_iters": 1, "max_iters": 100_000, "dtype": "float32"}
    words = [f"--{key}={value}" for key, value in (options | rest).items()]
    return [sys.executable, "train.py", "config/train_shakespeare_char.py", *words]


class Steps:
    """The steps of a run as its lines tell of them, each with the time at which its line came."""

    def __init__(self, run: subprocess.Popen[str]) -> None:
        self.seen: list[tuple[int, float]] = []
        self._run = run
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._run.stdout is not None
        for line in self._run.stdout:
            if found := re.match(r"(?:step|iter) +(\d+)[/:]", line):
                self.seen.append((int(found[1]), time.monotonic()))
            elif "idle threads" in line:
                print(f"{'':30}{line.strip()}", flush=True)

    def wait_for(self, n_steps: int) -> None:
        """Return once so many steps are seen. Exits if the run ends before."""
        while len(self.seen) < n_steps:
            if self._run.poll() is not None:
                sys.exit(f"the run ended with {self._run.returncode}")
            time.sleep(0.01)

    def per_second(self, seconds: float) -> float:
        """Steps per second from now on, over at least so many seconds and three steps."""
        start = len(self.seen)
        time.sleep(seconds)
        self.wait_for(start + 4)
        (first, began), *_, (last, ended) = self.seen[start:]
        return (last - first) / (ended - began)


class Strangers:
    """The cores that programs other than these keep busy, on average since construction."""

    def __init__(self, pids: list[int]) -> None:
        self._pids, self._start, self._then = pids, time.monotonic(), 0.0
        self._then = self._seconds()

    def _seconds(self) -> float:
        return busy_seconds(usable_cores()) - sum(map(processor_seconds, self._pids))

    def cores(self) -> float:
        """How many they are."""
        return (self._seconds() - self._then) / (time.monotonic() - self._start)


def speeds(
    command: list[str], policy: dict[str, str], loops: list[int], seconds: float, where: Path | None
) -> list[tuple[float, float]]:
    """Steps per second of one run in each phase, beside so many busy loops, and the cores that
    strangers kept busy."""
    environment = {key: value for key, value in os.environ.items() if key not in _CHOSEN}
    environment |= policy | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, env=environment, cwd=where, text=True, stdout=subprocess.PIPE
    ) as run:
        try:
            steps, found = Steps(run), []
            steps.wait_for(WARM_UP_STEPS)
            for count in loops:
                with busy_cores(count) as pids:
                    time.sleep(NOTICE_SECONDS)
                    strangers = Strangers([run.pid, *pids])
                    found.append((steps.per_second(seconds), strangers.cores()))
            return found
        finally:
            run.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--policies", nargs="*", default=["chosen"], choices=list(POLICIES))
    parser.add_argument("--loops", nargs="*", type=int, default=[0, 1, 2, 4, 0])
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--nanogpt", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no loop is left behind
    sides = [(name, POLICIES[name], None) for name in asked.policies]
    if asked.nanogpt is not None:
        sides.append(("nanogpt", {}, asked.nanogpt))
    heads = "".join(f"{f'{count} loops':>22}" for count in asked.loops)
    print(
        f"{len(os.sched_getaffinity(0))} cores; tokens/s, x the first phase's, (strangers' cores)"
    )
    print(f"{'':30}{heads}")
    for case in asked.cases:
        _, _, _, context, rows, _ = SIZES[case.rsplit("-", 1)[0]]
        for name, policy, where in sides:
            with tempfile.TemporaryDirectory() as folder:
                command = (ours if where is None else nanogpt)(case, f"{folder}/run")
                found = speeds(command, policy, asked.loops, asked.seconds, where)
            quiet = found[0][0]
            cells = (
                f"{each * context * rows:9,.0f} x {each / quiet:.2f} ({strangers:.1f})"
                for each, strangers in found
            )
            print(f"{case:20}{name:10}", *cells, flush=True)


if __name__ == "__main__":
    main()
