"""A worker of a sweep that trains nothing: it does what the learning rate of its run says."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from pentameter.errors import InterruptedRunError, TrainingFailedError


def serve():
    return act


def act(arguments: list[str]) -> int:
    values = dict(each.removeprefix("--").split("=", 1) for each in arguments if "=" in each)
    folder = Path(values["run-dir"])
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text("")
    (folder / "pid").write_text(str(os.getpid()))
    (folder / "threads").write_text(os.environ.get("OMP_NUM_THREADS", ""))
    deed = values["train.sample_prompt"]
    if deed == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "fails":
        raise TrainingFailedError("the loss is not finite")
    if deed == "waits":
        signal.signal(signal.SIGTERM, stop)
        (folder / "waiting").touch()
        time.sleep(60)
    event = {"event": "eval", "step": 1, "split": "val", "loss": 1.5, "best": True}
    (folder / "metrics.jsonl").write_text(json.dumps(event) + "\n")
    return 0


def stop(number, frame):
    raise InterruptedRunError("stopped, which is saved")
