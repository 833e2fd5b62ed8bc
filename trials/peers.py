"""The same faults on programs that others use: `PYTHON trials/peers.py PROGRAM FOLDER TEXT`.

PROGRAM is one of `PROGRAMS`; TEXT a file to train on. PYTHON is an interpreter of an environment
with that program's packages, and FOLDER a checkout of it (nanogpt, nanochat) or an empty folder for
what is prepared (litgpt: with litdata and tensorboard; composer: mosaicml with transformers). Set
OMP_NUM_THREADS=1.

A run has 40 steps and saves after every 5. A fault strikes it; then it is started again as its
documentation says and, if that fails and it can be told where to resume from, from the checkpoint
before the newest. Each trial prints a line of JSON with what came of it.
"""

from __future__ import annotations

import argparse
import atexit
import csv
import importlib
import itertools
import json
import math
import multiprocessing
import multiprocessing.context
import os
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

STEPS, INTERVAL = 40, 5
PATIENCE_SECONDS = 900.0
"""Longest wait for a start to end, on a busy machine."""
_context = multiprocessing.get_context("fork")
Process = multiprocessing.context.ForkProcess


@dataclass(frozen=True)
class Program:
    """How a program is started, and what it leaves. A *run* is a folder with its output in `out`
    and what the n-th start printed in `log-n`."""

    folder: Path
    """Where its commands run."""
    text: Path

    environment: ClassVar = {
        "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    printed: ClassVar = r"(?!)"
    """Pattern of a printed step and its loss."""
    saved: ClassVar = ""
    """Glob, in `out`, of the files of checkpoints."""
    step_of_file: ClassVar = r"\d+"
    """Pattern of the step in such a file's path."""
    packages: ClassVar[tuple[str, ...]] = ("torch",)
    """Modules that take long to import."""

    def prepare(self) -> None:
        """Make what it trains on of the text, in the folder; does nothing where that is done."""

    def train(self, out: Path) -> list[str]:
        raise NotImplementedError

    def resumes(self, out: Path) -> Iterator[tuple[str, list[str]]]:
        """(How, command) of the documented way to resume, then of one from an older checkpoint."""
        raise NotImplementedError

    def losses(self, run: Path) -> dict[int, float]:
        """Step → loss, of the last start only; most programs print it."""
        found = re.findall(self.printed, newest_log(run).read_text(errors="replace"))
        return {int(step): float(loss) for step, loss in found}

    def checkpoints(self, out: Path) -> dict[int, list[Path]]:
        """Step (0 if only one is kept) → files, oldest first."""
        found: dict[int, list[Path]] = {}
        for path in sorted(out.glob(self.saved)):
            number = re.search(self.step_of_file, str(path.relative_to(out)))
            if path.is_file() and not path.is_symlink():
                found.setdefault(int(number[0]) if number else 0, []).append(path)
        return dict(sorted(found.items()))


class NanoGPT(Program):
    printed, saved = r"iter (\d+): loss ([\w.]+)", "ckpt.pt"

    def prepare(self) -> None:
        data = self.folder / "data/shakespeare_char"
        if not (data / "train.bin").exists():
            shutil.copy(self.text, data / "input.txt")
            subprocess.run([sys.executable, data / "prepare.py"], check=True)

    def train(self, out: Path) -> list[str]:
        given = {
            "dataset": "shakespeare_char", "device": "cpu", "dtype": "float32", "compile": False,
            "block_size": 64, "batch_size": 4, "n_layer": 4, "n_head": 4, "n_embd": 128,
            "dropout": 0.0, "gradient_accumulation_steps": 1, "max_iters": STEPS,
            "lr_decay_iters": STEPS, "warmup_iters": 2, "eval_interval": INTERVAL, "eval_iters": 1,
            "log_interval": 1, "always_save_checkpoint": True, "out_dir": out,
        }  # fmt: skip
        return [sys.executable, "train.py", *(f"--{key}={value}" for key, value in given.items())]

    def resumes(self, out: Path) -> Iterator[tuple[str, list[str]]]:
        yield "--init_from=resume", [*self.train(out), "--init_from=resume"]


class Nanochat(Program):
    """Its CPU settings (runs/runcpu.sh), smaller. Its caches and checkpoints lie in one folder, so
    that `out` is linked into it."""

    printed, saved = r"step (\d+)/\d+ .*? loss: ([\w.]+)", "*.*"
    environment: ClassVar = {**Program.environment, "NANOCHAT_BASE_DIR": "base"}
    packages = ("torch", "wandb", "pyarrow.parquet", "nanochat.gpt", "nanochat.checkpoint_manager")

    def prepare(self) -> None:
        base = self.folder / "base"
        if (base / "tokenizer/token_bytes.pt").exists():
            return
        from pyarrow import parquet, table

        (base / "base_data_climbmix").mkdir(parents=True)
        for number in range(2):  # the last one is for validation; rows as in its own shards
            rows = table({"text": self.text.read_text().split("\n\n")})
            shard = base / f"base_data_climbmix/shard_{number:05d}.parquet"
            parquet.write_table(rows, shard, row_group_size=1024)
        command = [sys.executable, "-m", "scripts.tok_train", "--vocab-size=1024"]
        environment = {**os.environ, **self.environment}
        subprocess.run(command, cwd=self.folder, env=environment, check=True)

    def train(self, out: Path) -> list[str]:
        out.mkdir(parents=True, exist_ok=True)
        link = self.folder / "base/base_checkpoints" / out.parent.name
        link.parent.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(out)
        options = {
            "depth": 2, "head-dim": 64, "window-pattern": "L", "max-seq-len": 64,
            "device-batch-size": 4, "total-batch-size": 256, "num-iterations": STEPS,
            "eval-every": -1, "core-metric-every": -1, "sample-every": -1, "save-every": INTERVAL,
            "device-type": "cpu", "model-tag": link.name,
        }  # fmt: skip
        given = [f"--{key}={value}" for key, value in options.items()]
        return [sys.executable, "-m", "scripts.base_train", *given]

    def resumes(self, out: Path) -> Iterator[tuple[str, list[str]]]:
        for step in sorted(self.checkpoints(out), reverse=True)[:2]:
            option = f"--resume-from-step={step}"
            yield option, [*self.train(out), option]


class LitGPT(Program):
    saved, packages = "step-*/*", ("litgpt.pretrain", "litdata")

    def prepare(self) -> None:
        if (self.folder / "tokenizer").exists():
            return
        from tokenizers import ByteLevelBPETokenizer

        text, end = self.text.read_text(), "<|endoftext|>"
        (self.folder / "text").mkdir(parents=True)
        cut = len(text) // 10
        (self.folder / "text/0.txt").write_text(text[:cut])  # for validation
        (self.folder / "text/1.txt").write_text(text[cut:])
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator(text.split("\n\n"), vocab_size=1024, special_tokens=[end])
        (self.folder / "tokenizer").mkdir()
        tokenizer.save(str(self.folder / "tokenizer/tokenizer.json"))
        ends = {"bos_token": end, "eos_token": end, "tokenizer_class": "GPT2Tokenizer"}
        (self.folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(ends))
        with tempfile.TemporaryDirectory() as out:  # a first run tokenizes, in processes of its own
            subprocess.run(self.train(Path(out)), check=True)

    def train(self, out: Path) -> list[str]:
        model = {
            "name": "pythia-14m", "block_size": 64, "vocab_size": 1024, "padded_vocab_size": 1024,
            "n_layer": 4, "n_head": 4, "n_embd": 128,
        }  # fmt: skip
        options = {
            **{f"model_config.{key}": value for key, value in model.items()},
            "out_dir": out, "precision": "32-true", "tokenizer_dir": "tokenizer",
            "data": "TextFiles", "data.train_data_path": "text", "data.num_workers": 0,
            "train.global_batch_size": 4, "train.micro_batch_size": 4,
            "train.max_tokens": STEPS * 4 * 64, "train.max_seq_length": 64,
            "train.save_interval": INTERVAL, "train.log_interval": 1, "train.lr_warmup_steps": 2,
            "eval.interval": STEPS, "eval.max_iters": 1, "logger_name": "csv",
        }  # fmt: skip
        given = [f"--{key}={value}" for key, value in options.items()]
        return [sys.executable, "-m", "litgpt", "pretrain", "pythia-14m", *given]

    def resumes(self, out: Path) -> Iterator[tuple[str, list[str]]]:
        yield "--resume auto", [*self.train(out), "--resume=auto"]
        if len(steps := sorted(self.checkpoints(out))) > 1:
            older = out / f"step-{steps[-2]:08d}/lit_model.pth"
            yield f"--resume {older.parent.name}", [*self.train(out), f"--resume={older}"]

    def losses(self, run: Path) -> dict[int, float]:
        """Step → loss as its CSV logger wrote it; the console rounds to three digits."""
        logs = (run / "out/logs/csv").glob("version_*/metrics.csv")
        newest = max(logs, key=lambda path: int(path.parent.name.split("_")[1]), default=None)
        if newest is None:
            return {}
        with newest.open() as file:
            rows = list(csv.DictReader(file))
        return {int(row["iter"]): float(row["loss"]) for row in rows if row["loss"]}


class Composer(Program):
    printed, saved = r"batch (\d+): loss (\S+)", "checkpoints/ep*"
    step_of_file = r"(?<=-ba)\d+"
    packages = ("composer", "composer.models", "transformers.models.gpt2.modeling_gpt2")

    def train(self, out: Path, load_path: str = "") -> list[str]:
        return [sys.executable, __file__, "composer-script", str(out), str(self.text), load_path]

    def resumes(self, out: Path) -> Iterator[tuple[str, list[str]]]:
        yield "the same script (autoresume)", self.train(out)
        if len(found := list(self.checkpoints(out).values())) > 1:
            older = str(found[-2][0])
            yield f"load_path={Path(older).name}", self.train(out, older)


def composer_script(out: str, text: str, load_path: str) -> None:
    """Train a small GPT-2 with Composer's Trainer, as its users' scripts do."""
    import torch
    from composer import Callback, Trainer
    from composer.callbacks import NaNMonitor
    from composer.models import HuggingFaceModel
    from transformers import GPT2Config, GPT2LMHeadModel

    class PrintLoss(Callback):
        def batch_end(self, state: Any, logger: Any) -> None:
            print(f"batch {int(state.timestamp.batch)}: loss {state.loss.item()!r}", flush=True)

    words = Path(text).read_text()
    alphabet = {character: number for number, character in enumerate(sorted(set(words)))}
    tokens = torch.tensor([alphabet[character] for character in words]).unfold(0, 64, 64)
    rows: Any = [{"input_ids": row, "labels": row} for row in tokens[: STEPS * 4]]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_positions": 64, "n_embd": 128, "n_layer": 4, "n_head": 4}
    none: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=len(alphabet), **sizes, **none)
    model = HuggingFaceModel(GPT2LMHeadModel(config), use_logits=True)
    Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        train_dataloader=torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True),
        max_duration=f"{STEPS}ba",
        device="cpu",
        seed=1,
        deterministic_mode=True,
        run_name="peers",
        save_folder=f"{out}/checkpoints",
        save_interval=f"{INTERVAL}ba",
        save_overwrite=True,
        autoresume=not load_path,
        load_path=load_path or None,
        callbacks=[PrintLoss(), NaNMonitor()],
        progress_bar=False,
    ).fit()


class Pentameter(Program):
    saved, packages = "checkpoints/step-????????/*", ("torch", "pentameter.train.loop")

    def prepare(self) -> None:
        (self.folder / "peers.toml").write_text(
            'extends = "shakespeare-char"\nname = "peers"\n'
            "[model]\nn_layers = 4\nn_heads = 4\nd_model = 128\ncontext_length = 64\n"
            "dropout = 0.0\n"
            f'[train]\nsteps = {STEPS}\nbatch_size = 4\nprecision = "fp32"\ncompile = false\n'
            'eval_interval = "none"\nsample_interval = "none"\n'
            f"[checkpoint]\ninterval = {INTERVAL}\n[log]\ninterval = 1\n"
        )

    def train(self, out: Path) -> list[str]:
        command = [sys.executable, "-m", "pentameter", "train", "peers.toml"]
        return [*command, "--run-dir", str(out)]

    def resumes(self, out: Path) -> Iterator[tuple[str, list[str]]]:
        yield "the same command", self.train(out)

    def losses(self, run: Path) -> dict[int, float]:
        """Step → loss in metrics.jsonl since the last start, whose events count no step twice."""
        found: dict[int, float] = {}
        path = run / "out/metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            if not line.endswith("}"):
                break  # it is being written
            event = json.loads(line)
            if event["event"] == "resume":
                found = {}
            if event["event"] == "train":
                found[event["step"]] = event["loss"] if event["loss"] is not None else math.nan
        return found


PROGRAMS: Mapping[str, type[Program]] = {
    "nanogpt": NanoGPT, "nanochat": Nanochat, "litgpt": LitGPT, "composer": Composer,
    "pentameter": Pentameter,
}  # fmt: skip
FAULTS = ("none", "C1", "C2", "S1", "K1", "D1", "N1")


def newest_log(run: Path) -> Path:
    return max(run.glob("log-*"), key=lambda path: int(path.name.split("-")[1]))


def start(command: list[str], run: Path, *planted: Callable[[], object]) -> Process:
    """Start a program in a child of this process, which has imported its packages: that takes
    longer than the run. `planted` is called in the child before."""
    run.mkdir(exist_ok=True)
    log = run / f"log-{len(list(run.glob('log-*')))}"
    log.touch()
    process = _context.Process(target=become, args=(command[1:], log, planted))
    process.start()
    return process


def become(arguments: list[str], log: Path, planted: Iterable[Callable[[], object]]) -> None:
    """Do what `python ARGUMENTS` does, with the output in a file, until after its exit handlers."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    for plant in planted:
        plant()
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def wait(process: Process) -> int:
    """The exit code, once it has ended; minus the signal if that ended it."""
    process.join(PATIENCE_SECONDS)
    assert process.exitcode is not None, "does not end"
    return process.exitcode


def plant_nan(step: int) -> None:
    """Make the loss NaN for its gradients, the `step`-th time that one is propagated back."""
    import torch

    backward, calls = torch.Tensor.backward, itertools.count(1)

    def with_nan(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        backward(loss * (math.nan if next(calls) == step else 1.0), *arguments, **options)

    torch.Tensor.backward = with_nan  # type: ignore[assignment, method-assign]


def wait_until(done: Callable[[], bool], process: Process, pause: float) -> None:
    """Wait for something that a process does; an assertion fails if it ends before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not done():
        assert process.is_alive(), f"ended with {process.exitcode} before it was struck"
        assert time.monotonic() < deadline, "does not get there"
        time.sleep(pause)


def start_until(program: Program, run: Path, step: int) -> Process:
    """A first start, once it has made a step."""
    process = start(program.train(run / "out"), run)
    wait_until(lambda: max(program.losses(run), default=0) >= step, process, 0.01)
    return process


def said(run: Path) -> str:
    """The last line that the last start printed."""
    lines = newest_log(run).read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""


def recover(program: Program, run: Path, whole: Mapping[int, float], last: int) -> dict[str, Any]:
    """What comes of resuming: how, the steps up to `last` that are made again, and whether losses
    are those of the undisturbed run."""
    failed = []
    for how, command in program.resumes(run / "out"):
        code = wait(start(command, run))
        if code:
            failed.append(f"{how}: exit {code}, {said(run)}")
            continue
        found = program.losses(run)
        again = [step for step in whole if step >= min(found)]
        apart = max(abs(found.get(step, math.inf) - whole[step]) / whole[step] for step in again)
        return {
            "failed": failed, "resumed": how, "from": min(found), "again": last - min(found) + 1,
            "equal": all(found.get(step) == whole[step] for step in again),
            "largest difference": apart,
        }  # fmt: skip
    return {"failed": failed, "resumed": None}


def kill_in_save(program: Program, run: Path, draw: random.Random, whole_bytes: int) -> bool:
    """Kill shortly after a checkpoint begins to be written; False if it was whole by then."""

    def seen() -> dict[Path, tuple[int, int]]:
        """Path → (bytes, time it was changed) of files of checkpoints, and of folders."""
        out = run / "out"
        paths = [*out.glob(program.saved), *(path for path in out.iterdir() if path.is_dir())]
        found = {}
        for path in paths:
            with suppress(FileNotFoundError):  # it has got another name
                found[path] = (path.stat().st_size, path.stat().st_mtime_ns)
        return found

    process = start_until(program, run, draw.randrange(INTERVAL + 1, STEPS - INTERVAL))
    earlier, pause = seen(), draw.uniform(0.0, 0.01)
    wait_until(lambda: seen() != earlier, process, 0.0005)
    time.sleep(pause)
    process.kill()
    wait(process)
    changed = {
        path: size for path, (size, when) in seen().items() if earlier.get(path) != (size, when)
    }
    return sum(changed[path] for path in changed if path.is_file()) < 0.99 * whole_bytes


def strike(
    program: Program, fault: str, run: Path, draw: random.Random, whole_bytes: int
) -> dict[str, Any]:
    """Let a fault strike a run of its own."""
    step = INTERVAL * draw.randrange(2, STEPS // INTERVAL - 1) + 1  # right after one that saves
    out = run / "out"
    if fault == "C1":
        for attempt in range(6):
            if kill_in_save(program, run, draw, whole_bytes):
                return {"attempts": attempt + 1, "last": max(program.losses(run))}
            shutil.rmtree(run)
        raise AssertionError("no kill came before the checkpoint was whole")
    if fault == "N1":
        code = wait(start(program.train(out), run, partial(plant_nan, step)))
        losses = program.losses(run)
        lost = [step for step, loss in losses.items() if not math.isfinite(loss)]
        return {"at": step, "exit": code, "said": said(run), "last": max(losses), "nan at": lost}
    process = start_until(program, run, step)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM if fault == "S1" else signal.SIGKILL)
    struck: dict[str, Any] = {"exit": wait(process), "last": max(program.losses(run))}
    if fault in ("K1", "D1"):
        newest = list(program.checkpoints(out).values())[-1]
        file = max(newest, key=lambda path: path.stat().st_size)
    if fault == "K1":
        os.truncate(file, draw.randrange(file.stat().st_size))
    if fault == "D1":
        half = file.stat().st_size // 2
        limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (half, half))
        struck["exit"] = wait(start(next(program.resumes(out))[1], run, limit))
        struck["last"] = max([struck["last"], *program.losses(run)])
    return {**struck, "said": said(run)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    program = PROGRAMS[options.program](options.folder.resolve(), options.text.resolve())
    program.folder.mkdir(exist_ok=True)
    os.chdir(program.folder)
    sys.path[0] = str(program.folder)
    os.environ.update(program.environment)
    program.prepare()
    for name in program.packages:
        importlib.import_module(name)
    scratch = Path(tempfile.mkdtemp(prefix="peers-"))
    undisturbed = scratch / "undisturbed"
    code = wait(start(program.train(undisturbed / "out"), undisturbed))
    assert code == 0, newest_log(undisturbed).read_text()[-3000:]
    whole = program.losses(undisturbed)
    saved = list(program.checkpoints(undisturbed / "out").values())
    whole_bytes = sum(path.stat().st_size for path in saved[-1])
    about = {"program": options.program, "steps": len(whole), "whole bytes": whole_bytes}
    print(json.dumps({**about, "kept": len(saved)}), flush=True)
    for number in range(options.first, options.first + options.trials):
        for fault in options.only:
            run = scratch / f"{fault}-{number}"
            draw = random.Random(f"{options.seed} {fault} {number}")
            found = {"program": options.program, "fault": fault, "trial": number}
            if fault == "none":
                assert wait(start(program.train(run / "out"), run)) == 0
                found["equal"] = program.losses(run) == whole
            else:
                found |= strike(program, fault, run, draw, whole_bytes)
                if fault != "N1" or found["exit"]:
                    found |= recover(program, run, whole, found["last"])
            print(json.dumps(found), flush=True)
            shutil.rmtree(run)
    shutil.rmtree(scratch)


if __name__ == "__main__":
    if sys.argv[1] == "composer-script":
        composer_script(*sys.argv[2:])
    else:
        main()
