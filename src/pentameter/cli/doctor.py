"""`pentameter doctor`: this machine's capabilities, and the choices that training would make."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import printable

if TYPE_CHECKING:
    import torch


# extra of the package → module that shows it is installed
EXTRAS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "serve": "uvicorn",
    "lm-eval": "lm_eval",
    "parquet": "pyarrow",
    "remote": "fsspec",
    "hub": "huggingface_hub",
    "zstd": "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd",
}

TESTED_TORCH = ("2.13.0", "2.14.1")
"""Torch releases with which all tests passed, oldest first."""


@dataclass(frozen=True)
class DoctorArguments:
    """Show devices, versions, and usable and missing features."""

    measure: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure this machine's CPU for `plan` and `train --layout best`: a minute, half a minute
    more the first time, in which nothing else should run."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Print this machine's capabilities and choices, whatever they are, or with --measure its
    speed; return the exit code 0. `arguments` are the command line after the verb."""
    asked = parse(DoctorArguments, arguments, verb="doctor")
    if asked.measure:
        return _measure(as_json=asked.json)
    facts = examine()
    if asked.json:
        print(json.dumps(facts))
        return 0
    from rich.console import Console
    from rich.table import Table

    from pentameter.report.text.machine import machine_rows

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for row in machine_rows(facts):
        table.add_row(*map(printable, row))
    Console(highlight=False, markup=False).print(table)
    return 0


def _measure(*, as_json: bool) -> int:
    """Measure this machine's speed, write it to the file that `plan` and `train --layout best`
    read, and print it; return the exit code 0."""
    from pentameter.calibrate.measured_machine import measure_machine
    from pentameter.estimating.seconds.cluster import read_devices

    path = measure_machine()
    (device,) = read_devices(path).values()
    if as_json:
        print(json.dumps({"path": str(path), **device.model_dump()}))
    else:
        print(path.read_text(encoding="utf-8"), end="")
        print(f"\nwritten to {path}; pentameter plan quickstart reads it")
    return 0


def examine() -> dict[str, Any]:
    """Return the object that `doctor --json` prints. Takes a few seconds, as it times matmuls and
    tries the compiler; some 20 before anything has been compiled here."""
    import torch

    from pentameter.machine.capabilities import find_compiler, machine_capabilities
    from pentameter.machine.choices import choose_device, choose_precision
    from pentameter.machine.cores import cpu_quota, memory_limit
    from pentameter.machine.environment import device_name, environment
    from pentameter.machine.peaks import peak_flops

    capabilities = machine_capabilities()
    device = choose_device("auto", capabilities)
    precision, reason = choose_precision("auto", device, capabilities)
    compiler = find_compiler(device, capabilities)
    name = device_name(device, capabilities)
    around = environment(device, capabilities)
    return {
        "torch": str(torch.__version__),
        "torch_is_tested": _is_tested(str(torch.__version__)),
        "torch_tested": list(TESTED_TORCH),
        "device": str(device),
        "device_name": name,
        "precision": precision,
        "precision_reason": reason,
        "compile": compiler.works,
        "compile_reason": compiler.reason,
        "kernels": _kernels(),
        "product_ceiling_flops": _ceilings(device),
        "published_peak_flops": peak_flops(name, precision),
        "devices": around["devices"],
        "limits": {"cores": cpu_quota(), "memory_bytes": memory_limit()},
        "versions": around["versions"],
        "platform": around["platform"],
        "extras": {extra: _is_there(module) for extra, module in EXTRAS.items()},
        "data": _data_folders(),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
    }


def _kernels() -> dict[str, list[str]]:
    """Return the names of the kernels that runs have proved on this machine, as this compiler makes
    them, and of those that they have refused, with how they run instead."""
    from pentameter.machine.kernel_checks import LEVELS, verdicts

    found = sorted(set(verdicts()))
    refused = [f"{name} ({level})" for name, level in found if level != LEVELS[0]]
    wrong = {name for name, level in found if level != LEVELS[0]}
    return {"proved": sorted({name for name, _ in found} - wrong), "refused": refused}


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def _is_tested(version: str) -> bool:
    """Return True if a torch version, without its build ("+cpu"), is in TESTED_TORCH."""
    return version.partition("+")[0] in TESTED_TORCH


def _ceilings(device: torch.device) -> dict[str, float | None]:
    import torch

    from pentameter.errors import ConfigError
    from pentameter.machine.peaks import measure_matmul

    ceilings: dict[str, float | None] = {"float32": None, "bfloat16": None}
    for name in ceilings:
        with suppress(ConfigError):
            ceilings[name] = measure_matmul(device, getattr(torch, name), seconds=0.5)
    return ceilings


def _data_folders() -> dict[str, Any]:
    from pentameter.disk.cache import cache_folder, data_folder

    folder, cache = data_folder(), cache_folder()
    return {
        "PENTAMETER_DATA_DIR": None if folder is None else str(folder),
        "data_dir_found": folder is not None and folder.is_dir(),
        "cache": str(cache),
        "cache_found": cache.is_dir(),
    }
