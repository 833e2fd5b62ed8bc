"""The same faults on nanoGPT: `python tests/faults/nanogpt.py FOLDER` of a checkout of it.

FOLDER/data/shakespeare_char must be prepared. A fault strikes `train.py`, which saves every 5 of 40
iterations; then it is started again with `--init_from=resume`, as its README says. Printed is
whether it goes on, where, and whether the losses are those of the run that nothing disturbed.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SETTINGS = {
    "dataset": "shakespeare_char", "device": "cpu", "dtype": "float32", "compile": False,
    "block_size": 64, "batch_size": 12, "n_layer": 2, "n_head": 2, "n_embd": 64, "dropout": 0.0,
    "gradient_accumulation_steps": 1, "max_iters": 40, "lr_decay_iters": 40, "warmup_iters": 2,
    "eval_interval": 5, "eval_iters": 1, "log_interval": 1, "always_save_checkpoint": True,
}  # fmt: skip
PATIENCE_SECONDS = 200.0


def command(out: Path, *options: str) -> list[str]:
    given = [f"--{key}={value}" for key, value in SETTINGS.items()]
    return [sys.executable, "-u", "train.py", *given, f"--out_dir={out}", *options]


def run(folder: Path, out: Path, *options: str, before: tuple[str, ...] = ()) -> tuple[int, str]:
    """(exit code, what it printed) of a run to its end."""
    done = subprocess.run(
        [*before, *command(out, *options)], cwd=folder, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_SECONDS,
    )  # fmt: skip
    return done.returncode, done.stdout


def losses(said: str) -> dict[int, str]:
    """Iteration → loss as it was printed."""
    return {int(n): loss for n, loss in re.findall(r"iter (\d+): loss ([\d.]+)", said)}


def interrupt(folder: Path, out: Path, number: int, at: int) -> tuple[int, str]:
    """Send a signal once an iteration is printed."""
    process = subprocess.Popen(
        command(out), cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said = ""
    for line in process.stdout:
        said += line
        if f"iter {at}:" in line:
            with suppress(ProcessLookupError):
                process.send_signal(number)
            break
    said += process.stdout.read()
    return process.wait(), said


def kill_in_write(n: int) -> tuple[str, ...]:
    """Kill before the n-th write to the checkpoint."""
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", "ckpt.pt"]
    return (*inject, "-e", "trace=write", "-e", f"inject=write:signal=SIGKILL:when={n}")


def resumed(folder: Path, out: Path, whole: dict[int, str], before: str) -> str:
    """What came of the same command with --init_from=resume."""
    code, said = run(folder, out, "--init_from=resume")
    if code:
        return f"does not resume: {said.strip().splitlines()[-1][:150]}"
    found = losses(said)
    first = min(found)
    lost = max(losses(before), default=0) - first
    same = {**losses(before), **found} == whole
    return f"resumes at {first} ({lost} iterations lost), losses {'equal' if same else 'differ'}"


def main() -> None:
    folder, draw = Path(sys.argv[1]), random.Random(0)
    n_trials = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "out")
        code, said = run(folder, out)
        assert code == 0, said[-2000:]
        whole = losses(said)
        again = losses(run(folder, Path(scratch, "again"))[1])
        print(f"undisturbed, twice: losses {'equal' if again == whole else 'differ'}", flush=True)
        for _ in range(n_trials):
            for name, number in (("C2 SIGKILL", signal.SIGKILL), ("S1 SIGTERM", signal.SIGTERM)):
                shutil.rmtree(out, ignore_errors=True)
                code, said = interrupt(folder, out, number, draw.randint(6, 38))
                print(f"{name}: exit {code}; {resumed(folder, out, whole, said)}", flush=True)
            shutil.rmtree(out, ignore_errors=True)
            run(folder, out, "--max_iters=20")
            file = out / "ckpt.pt"
            os.truncate(file, draw.randrange(file.stat().st_size))
            print(f"K1 truncated: {resumed(folder, out, whole, '')}", flush=True)
            shutil.rmtree(out, ignore_errors=True)
            run(folder, out, "--max_iters=10")
            limit = draw.choice([100, 400])  # KiB; a checkpoint has more
            size = ("bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash")
            code, said = run(folder, out, "--init_from=resume", before=size)
            print(f"D1 file-size limit: exit {code}; {resumed(folder, out, whole, '')}", flush=True)


if __name__ == "__main__":
    main()
