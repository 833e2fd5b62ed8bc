"""How long a user waits: for help, for the first step, for evaluations.

    python benchmarks/startup.py [--json] [--preset NAME] [--also KEY=VALUE …]

`--help` is the best of five starts. A first step is that of a run of one step without evaluation,
from the command to the end of its update, once with empty caches (PyTorch's compiler's and ours)
and once more. It is taken apart in the same process: each part's seconds are its own, without
those of parts within it, and what is left is `other`. The compiler's runs are counted beside them:
several may run at once. A busy machine spoils the processor's seconds least, which are those of
the process and of the programs that it ran. Evaluation's share is that of a run at the preset's
intervals, from its own metrics.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "pentameter"]
PARTS = {
    "data": ["train.start.open_dataset", "train.start.training_batches"],
    "probe of torch.compile": ["machine.capabilities._tried"],
    "our kernels: build": ["fused_cpu.native.build"],
    "our kernels: check": ["fused_cpu.rehearsal._library_level"],
    "kernels of torch.compile": ["model.compiled.Kernel.__call__"],
    "rehearsal, for the rest": ["train.compute.rehearse"],
    "matmuls' speed": ["train.compute.ceiling"],
    "device, for the rest": ["train.start.choose_compute"],
    "model, optimizer": ["train.start._build"],
    "first step": ["parallel.engine.Engine.forward_backward", "train.loop.update_weights"],
}
"""A part's name → the functions, below `pentameter`, whose time it is."""
LAST = "train.loop.update_weights"


class Stopwatch:
    """The seconds of parts of this process, each without those of parts within it."""

    def __init__(self, started: float) -> None:
        self.started = started
        self.parts: dict[str, float] = {}
        self.within: list[float] = [0.0]
        self.total: float | None = None
        self.processor = 0.0
        self.compiler: list[float] = []

    def measure(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed as `part`."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.time()
            self.within.append(0.0)
            try:
                return function(*arguments, **named)
            finally:
                seconds = time.time() - begin
                self.parts[part] = self.parts.get(part, 0.0) + seconds - self.within.pop()
                self.within[-1] += seconds

        return timed

    def install(self, part: str, path: str) -> None:
        """Time the function at `path` below `pentameter` as `part`."""
        names, owner = path.split("."), None
        for n in range(len(names) - 1, 0, -1):
            try:
                owner = importlib.import_module(".".join(["pentameter", *names[:n]]))
            except ModuleNotFoundError:
                continue
            for name in names[n:-1]:
                owner = getattr(owner, name)
            break
        timed = self.measure(part, getattr(owner, names[-1]))
        if path != LAST:
            setattr(owner, names[-1], timed)
            return

        def last(*arguments: Any, **named: Any) -> Any:
            try:
                return timed(*arguments, **named)
            finally:
                if self.total is None:
                    self.total, self.processor = time.time() - self.started, processor_seconds()

        setattr(owner, names[-1], last)

    def count_compilers(self) -> None:
        """Keep the seconds of each of the compiler's runs."""
        run = subprocess.run

        def counted(command: Any, *arguments: Any, **named: Any) -> Any:
            begin = time.time()
            try:
                return run(command, *arguments, **named)
            finally:
                words = command.split() if isinstance(command, str) else list(map(str, command))
                if any(word.endswith((".cpp", ".o", ".h", ".hpp", ".gch")) for word in words):
                    self.compiler.append(time.time() - begin)

        subprocess.run = counted  # type: ignore[assignment]


def take_apart(started: float, arguments: list[str], report: Path) -> None:
    """Run the command in this process, and write its parts' seconds to `report`."""
    watch = Stopwatch(started)
    watch.parts["python"] = time.time() - started
    load = watch.measure("imports", importlib.import_module)
    with load("pentameter.cli.options.arguments").importing():
        watch.measure("import of torch", importlib.import_module)("torch")
        load("pentameter.train.loop")
    for part, paths in PARTS.items():
        for path in paths:
            watch.install(part, path)
    watch.count_compilers()
    from pentameter.cli.main import main as run_command

    sys.argv[1:] = arguments
    code = run_command()
    assert watch.total is not None, f"no step was made; exit code {code}"
    watch.parts["other"] = watch.total - sum(watch.parts.values())
    found = {
        "total": watch.total,
        "processor": watch.processor,
        "parts": watch.parts,
        "compiler": watch.compiler,
    }
    report.write_text(json.dumps(found))


def processor_seconds() -> float:
    """Seconds for which cores computed for this process and for those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def seconds_of(arguments: list[str]) -> float:
    """Wall-clock seconds of one process."""
    start = time.perf_counter()
    subprocess.run([*COMMAND, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def first_step(preset: str, folder: Path, name: str, also: list[str]) -> dict[str, Any]:
    """From the command to the end of step 1, by a run of one step without evaluation."""
    arguments = ["train", preset, "--run-dir", str(folder / name), "--train.steps=1"]
    arguments += ["--train.eval-interval=none", "--train.sample-interval=none"]
    arguments += ["--train.compile=true", *(f"--{each}" for each in also)]
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "XDG_CACHE_HOME": "ours", "TMPDIR": "tmp"}
    for each in caches.values():
        (folder / each).mkdir(exist_ok=True)
    report = folder / f"{name}.json"
    subprocess.run(
        [sys.executable, __file__, "--take-apart", str(time.time()), str(report), *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {key: str(folder / each) for key, each in caches.items()},
    )
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def evaluation_share(metrics: Path) -> float:
    """Seconds of evaluation per second of training in a run's metrics."""
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    evaluations = [e for e in events if e["event"] == "eval" and e["step"] > 0]
    steps = [e["step_seconds"] for e in events if e["event"] == "train"]
    typical = sorted(steps)[len(steps) // 2]
    trained = typical * evaluations[-1]["step"]
    return sum(e["seconds"] for e in evaluations) / trained


def bytes_in(folder: Path) -> int:
    """The bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    if sys.argv[1:2] == ["--take-apart"]:
        started, report, *arguments = sys.argv[2:]
        return take_apart(float(started), arguments, Path(report))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--preset", default="quickstart")
    parser.add_argument("--also", nargs="*", default=[], help="options of train, as train.steps=1")
    parser.add_argument(
        "--metrics", type=Path, help="metrics.jsonl of a run, for evaluation's share"
    )
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "help_seconds": min(seconds_of(["--help"]) for _ in range(5)),
        "train_help_seconds": min(seconds_of(["train", "--help"]) for _ in range(5)),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for state in ("cold", "warm"):
            found = first_step(asked.preset, folder, state, asked.also)
            result[f"first_step_{state}_seconds"] = found["total"]
            result[f"{state}_processor_seconds"] = found["processor"]
            result[f"{state}_parts"] = found["parts"]
            result[f"{state}_compiler_runs"] = len(found["compiler"])
            result[f"{state}_compiler_seconds"] = sum(found["compiler"])
        result["cache_megabytes"] = sum(
            bytes_in(folder / each) / 1e6 for each in ("inductor", "ours", "tmp")
        )
    if asked.metrics:
        result["evaluation_share"] = evaluation_share(asked.metrics)
    if asked.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        if isinstance(value, dict):
            for part, seconds in value.items():
                print(f"    {part:<26} {seconds:.2f}")
        else:
            print(f"{name:<30} {value:.3f}")


if __name__ == "__main__":
    main()
