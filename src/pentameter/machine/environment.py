"""A description of the environment that a run trains in, for the run folder's environment.json
and for `doctor`."""

from __future__ import annotations

import platform
import shlex
import sys
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pentameter.disk.commands import said_by
from pentameter.machine.capabilities import Capabilities, machine_capabilities

PACKAGES = ("pentameter", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "matplotlib")


def environment(device: torch.device, capabilities: Capabilities | None = None) -> dict[str, Any]:
    """Return versions, devices, git commit, command line, flags and the training `device`, as JSON
    values. capabilities: this machine's, by default looked up."""
    devices = asdict(capabilities or machine_capabilities())
    cpu = devices["cpu"]
    cpu["cores"], cpu["threads"] = cpu.pop("n_cores"), cpu.pop("n_threads")
    devices["gpus"] = list(devices["gpus"])  # as JSON reads them back
    return {
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
        "platform": platform.platform(),
        "command": shlex.join(sys.argv),
        "git": git_state(Path.cwd()),
        "devices": devices,
        "flags": {
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
        "device": str(device),
    }


def versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """Return package name → installed version for `names`; None for a package that is not
    installed."""
    found: dict[str, str | None] = dict.fromkeys(names)
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if found.get("torch") is not None:
        found["torch"] = str(torch.__version__)  # with its "+cpu", which the metadata may lack
    return found


def device_name(device: torch.device, capabilities: Capabilities) -> str:
    """Return a device's product name: a GPU's from its driver, else the CPU's from the kernel.
    `capabilities` are this machine's, from `machine_capabilities`."""
    if device.type == "cuda":
        return capabilities.gpu(device).name
    return f"{capabilities.cpu.name}{' (MPS)' if device.type == 'mps' else ''}"


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return `commit` (its hash) and `dirty` (whether files differ from it) for the git checkout
    around `folder`; None outside one."""
    said = said_by(
        "git", "describe", "--always", "--abbrev=64", "--exclude=*", "--dirty", folder=folder
    )
    commit, dirty, _ = said.partition("-dirty")
    return {"commit": commit, "dirty": bool(dirty)} if said else None
