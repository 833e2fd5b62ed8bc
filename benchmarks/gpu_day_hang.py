"""The item `hang` of a GPU day: what a launch says of a rank that makes no progress, over NCCL.

    PYTHONPATH=src python gpu_day_hang.py [--device cuda] [--out FOLDER]

Two launches of two ranks on ONE card, side by side. In `device` rank 0 waits for the device, as no
Python call does, so that NCCL's watchdog must end it; `loop` is `pentameter train`, whose ranks
also agree over gloo at each step. Rank 1 sleeps in step 5. Each must name rank 1, the collective
and rank 0, show rank 1's stack with `oversleep`, and end within 10 s or so after the timeout.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS, STEP = 6, 5
CONFIG = f"""
name = "hang"
[data]
corpus = "grammar"
tokenizer = "char"
[model]
context_length = 32
n_layers = 2
d_model = 32
[model.attention]
n_heads = 2
[train]
steps = 1000
batch_size = 8
micro_batch_size = 4
precision = "fp32"
compile = false
[parallel]
tensor = 2
timeout_seconds = {TIMEOUT_SECONDS}
"""


def of_hang(tell: Callable[..., None], device: Any, folder: Path) -> None:
    """Tell what a launch says of a rank that makes no progress."""
    running = {}
    for case in ("device", "loop"):
        place = folder / f"hang-{case}"
        shutil.rmtree(place, ignore_errors=True)
        (place / "tmp").mkdir(parents=True)
        command = [sys.executable, __file__, "--launch", case, "--device", device.type]
        with (place / "stdout").open("wb") as out, (place / "stderr").open("wb") as err:
            running[case] = (
                place,
                subprocess.Popen(
                    [*command, "--out", str(place)],
                    stdout=out,
                    stderr=err,
                    env={**os.environ, "TMPDIR": str(place / "tmp")},
                ),
            )
    for case, (place, launcher) in running.items():
        code: int | str
        try:
            code = launcher.wait(100)
        except subprocess.TimeoutExpired:
            launcher.kill()
            code = "hangs"
        said = (place / "stderr").read_text(errors="replace").splitlines()
        slept = place / "slept"
        ended = time.time() if code == "hangs" else (place / "ended").stat().st_mtime
        last = said[-1] if said else ""
        tell(
            hang=case,
            right=bool(
                re.match("pentameter: rank 1 did not answer within ", last)
                and re.search("did not reach .*, where rank 0 waits", last)
                and any("in oversleep" in line for line in said)
            ),
            exit=code,
            seconds_from_sleep=round(ended - slept.stat().st_mtime, 1) if slept.exists() else None,
            said=last,
            waits=[line for line in said if " waited at " in line],
            stack=[line for line in said if line.startswith("rank 1:   File")][:6],
            records=[record_in_words(path) for path in sorted(place.glob("flight-*"))],
            watchdog=[line[:300] for line in said if "Watchdog caught" in line][:1],
            tail=[] if code == 70 else [line[:300] for line in said[-15:]],
        )


def record_in_words(path: Path) -> str:
    """Return what a rank's flight record has."""
    import pickle

    record = pickle.loads(path.read_bytes())  # of our own ranks
    open_ones = [
        (each["profiling_name"], each["process_group"], each["state"], each["is_p2p"])
        for each in record["entries"]
        if not each["retired"] and each["state"] != "completed"
    ]
    return (
        f"{path.name}: version {record['version']}, {len(record['entries'])} entries, open "
        f"{open_ones[:3]}, keys {sorted(record['entries'][-1]) if record['entries'] else []}, "
        f"groups {record['pg_config']}"
    )


def launch(case: str, device: str, folder: Path) -> None:
    """Launch two ranks of a case, and keep the records that they leave."""
    from pentameter.errors import PentameterError
    from pentameter.processes.failures.failure import failure_of, print_failure
    from pentameter.processes.launch.local_launch import run_local
    from pentameter.processes.launch.program import Command

    def keep() -> None:
        for record in (folder / "tmp").glob("*/flight-*"):
            shutil.copy(record, folder)

    command = [sys.executable, __file__, "--rank", case, "--device", device, "--out", str(folder)]
    code = 0
    try:
        run_local(Command(command), 2, look=keep)
    except PentameterError as error:
        print_failure(failure_of(error), debug=False)
        code = error.exit_code
    (folder / "ended").touch()
    raise SystemExit(code)


def oversleep(folder: Path) -> None:
    """Make no progress."""
    (folder / "slept").touch()
    time.sleep(600)


def be_rank(case: str, device: str, folder: Path) -> None:
    """Be one of two ranks on one card, as two hosts that talk over sockets on loopback."""
    rank = int(os.environ["RANK"])
    os.environ |= {"NCCL_HOSTID": f"host{rank}", "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    from pentameter.processes.launch.worker import watch_launcher

    watch_launcher()
    import torch

    from pentameter.parallel.engine import Engine
    from pentameter.train import compute

    there = torch.device(device, 0) if device == "cuda" else torch.device(device)
    compute.local_device = lambda device, world: there  # it refuses two ranks on one card
    plain = Engine.forward_backward

    def forward_backward(self: Any, batch: Any, step: int, **more: Any) -> Any:
        if step == STEP and rank == 1:
            oversleep(folder)
        return plain(self, batch, step, **more)

    Engine.forward_backward = forward_backward  # type: ignore[method-assign]
    if case == "loop":
        from pentameter.cli.main import main

        config = folder / "hang.toml"
        if rank == 0:
            config.with_suffix(".new").write_text(CONFIG)
            config.with_suffix(".new").rename(config)
        while not config.exists():
            time.sleep(0.05)
        where = ["--run-dir", str(folder / "run"), "--train.device", device]
        raise SystemExit(main(["train", str(config), *where]))
    import tomllib

    import numpy as np

    from pentameter.config.schema import Config
    from pentameter.data.batches.step import Batch
    from pentameter.optim.build import build_optimizer
    from pentameter.parallel.assemble import assemble
    from pentameter.planning.plan import make_plan
    from pentameter.processes.failures.failure import failure_ends_process
    from pentameter.processes.group.join import joined_world
    from pentameter.processes.group.rank import find_rank
    from pentameter.train.update import update_weights

    tree = tomllib.loads(CONFIG)
    tree["model"]["vocab_size"] = 64
    del tree["data"]["tokenizer"]
    plan = make_plan(Config.model_validate(tree), world_size=2)
    with (
        failure_ends_process(),
        joined_world(device, find_rank(), timeout_seconds=TIMEOUT_SECONDS) as world,
    ):
        engine = assemble(plan, there, "fp32", compiled=False, world=world)
        optimizer = build_optimizer(engine.named_parameters(), plan.table, plan.config.optimizer)
        tokens = np.ones((len(engine.rows), 32), dtype=np.int64)
        for step in range(1000):
            world.activity.note("training", step)
            loss = engine.forward_backward(Batch(tokens, tokens, engine.rows), step)
            update_weights(engine, optimizer, loss, 1e-3, 1.0, 1.0, at_once=True)


def alone() -> None:
    """Be the launcher or a rank of a case, or run the item by itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launch")
    parser.add_argument("--rank")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    asked = parser.parse_args()
    if asked.launch:
        launch(asked.launch, asked.device, asked.out)
    elif asked.rank:
        be_rank(asked.rank, asked.device, asked.out)
    else:
        import json

        import torch

        start = time.monotonic()
        of_hang(
            lambda **row: print(json.dumps(row, indent=1)), torch.device(asked.device), asked.out
        )
        print(f"{time.monotonic() - start:.1f} s in all")


if __name__ == "__main__":
    alone()
