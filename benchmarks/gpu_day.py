"""A day with a GPU in one command: what only a card can say, the most valuable first, on one card.

    PYTHONPATH=src python benchmarks/gpu_day.py --out FOLDER [--seconds 530] [--only equal,nccl]

Each item runs in a process group of its own with its own limit, and appends a JSON line to
FOLDER/gpu_day.jsonl after each case, so that a day that is cut off still tells. Items whose times
mean nothing run first, side by side; those that measure follow, each alone. At the end, and with
`--page FOLDER` at any time, the lines become a page, FOLDER/gpu_day.md.

`--device cpu` runs every item at small sizes without a card: it shows that this script works, and
its times mean nothing. Needed on a machine without network: torch, numpy, safetensors, tokenizers,
and as wheels pydantic, pydantic-core, annotated-types, typing-inspection, tyro, docstring-parser,
typeguard, rich, markdown-it-py, mdurl, pygments, for that machine's Python.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpu_day_page import write_page

ITEMS = {  # item → (module, most seconds, measures)
    "facts": ("gpu_day_right", 60, False),
    "equal": ("gpu_day_right", 120, False),
    "compiled": ("gpu_day_right", 170, False),
    "compiler": ("gpu_day_compiler", 100, False),
    "graphs": ("gpu_day_graphs", 75, False),
    "syncs": ("gpu_day_right", 90, False),
    "nccl": ("gpu_day_right", 140, False),
    "grid": ("gpu_day_right", 110, False),
    "numbers": ("gpu_day_right", 90, False),
    "memory": ("gpu_day_right", 90, False),
    "run": ("gpu_day_runs", 120, False),
    "stall": ("gpu_day_runs", 90, False),
    "speak": ("gpu_day_runs", 100, False),
    "hang": ("gpu_day_hang", 100, False),
    "kernels": ("gpu_day_speed", 60, True),
    "attention": ("gpu_day_attention", 75, True),
    "pieces": ("gpu_day_pieces", 75, True),
    "mixtures": ("gpu_day_experts", 75, True),
    "fp8": ("gpu_day_fp8", 75, True),
    "forms": ("gpu_day_pieces", 120, True),
    "stream": ("gpu_day_speed", 75, True),
    "124m": ("gpu_day_speed", 130, True),
    "char": ("gpu_day_speed", 120, True),
    "time": ("gpu_day_runs", 100, False),
}
AT_ONCE = {"cuda": 12}
"""Items whose times mean nothing that run side by side, by device; two on others."""
LEAST_SECONDS = 10
"""An item is not begun when less is left."""


class Day:
    """The items under way, and the file of what they said."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.start = time.monotonic()
        self.running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}

    @property
    def left(self) -> float:
        """Seconds that are left of the day."""
        return float(self.asked.seconds - (time.monotonic() - self.start))

    def most_seconds(self, name: str) -> float:
        """The limit of an item: a CPU may be a slow one, and busy."""
        return ITEMS[name][1] * (1 if self.asked.device == "cuda" else 10)

    def begin(self, name: str) -> None:
        """Start an item, unless the day ends before."""
        if self.left < LEAST_SECONDS:
            tell(self.asked, name, skipped="no time left")
            return
        command = [sys.executable, __file__, "--item", name, "--out", str(self.asked.out)]
        command += ["--device", self.asked.device]
        log = (self.asked.out / f"{name}.log").open("ab")
        environment = {**os.environ, **({} if ITEMS[name][2] else {"OMP_NUM_THREADS": "2"})}
        child = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        self.running[name] = child, time.monotonic()

    def wait(self, most_running: int) -> None:
        """Wait until at most so many items run, and end those beyond their limit."""
        while len(self.running) > most_running:
            for name, (child, began) in list(self.running.items()):
                seconds = time.monotonic() - began
                code: int | str | None = child.poll()
                if code is None and (seconds > self.most_seconds(name) or self.left <= 0):
                    code = "out of time"
                if code is None:
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                del self.running[name]
                at = round(time.monotonic() - self.start, 1)
                tell(self.asked, name, ended=code, seconds=round(seconds, 1), at=at)
            time.sleep(0.1)


def tell(asked: argparse.Namespace, item: str, **row: Any) -> None:
    """Append a line of an item to the day's file, and print it."""
    line = json.dumps({"item": item, **row}, default=str)
    with (asked.out / "gpu_day.jsonl").open("a") as file:
        file.write(line + "\n")
    print(line[:400], flush=True)


def run_item(asked: argparse.Namespace) -> None:
    """Run one item in this process."""
    import importlib

    import torch

    module = importlib.import_module(ITEMS[asked.item][0])
    item: Callable[..., None] = getattr(module, "of_" + asked.item.replace("124m", "gpt2"))
    try:
        item(lambda **row: tell(asked, asked.item, **row), torch.device(asked.device), asked.out)
    except Exception as error:
        traceback.print_exc()
        tell(asked, asked.item, error=f"{type(error).__name__}: {error}"[:600])
        raise SystemExit(1) from None


def main() -> None:
    """Run the items that were asked for, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=530)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu_day")))
    parser.add_argument("--only", default="", help="items, separated by commas")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--page", type=Path, help="write the page of this folder's lines alone")
    parser.add_argument("--item", choices=list(ITEMS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.page:
        write_page(asked.page)
        return
    if asked.item:
        run_item(asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    wanted = [each for each in asked.only.split(",") if each] or list(ITEMS)
    if unknown := sorted(set(wanted) - set(ITEMS)):
        parser.error(f"no such item: {', '.join(unknown)}; there are {', '.join(ITEMS)}")
    day = Day(asked)
    for name in (each for each in wanted if not ITEMS[each][2]):
        day.wait(AT_ONCE.get(asked.device, 2) - 1)
        day.begin(name)
    for name in (each for each in wanted if ITEMS[each][2]):
        day.wait(0)
        day.begin(name)
    day.wait(0)
    write_page(asked.out)


if __name__ == "__main__":
    main()
