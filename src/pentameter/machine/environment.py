"""The surroundings of a run: the content of a run folder's environment.json, and of `doctor`."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pentameter.machine.capabilities import Capabilities, machine_capabilities

PACKAGES = ("pentameter", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "matplotlib")


def environment(
    device: torch.device | None = None, capabilities: Capabilities | None = None
) -> dict[str, Any]:
    """Versions, devices, git commit, command line and flags, as JSON values.

    Args:
        device: that the run trains on; left out of the answer when absent.
        capabilities: of the machine; looked up when absent.
    """
    capabilities = capabilities or machine_capabilities()
    facts: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
        "platform": platform.platform(),
        "command": shlex.join(sys.argv),
        "git": git_state(Path.cwd()),
        "devices": describe_devices(capabilities),
        "flags": {
            "threads": torch.get_num_threads(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        },
    }
    if device is not None:
        facts["device"] = str(device)
    return facts


def versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """Package name → installed version, None where it is not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    if found.get("torch") is not None:
        found["torch"] = str(torch.__version__)  # with its "+cpu", which the metadata may lack
    return found


def describe_devices(capabilities: Capabilities) -> dict[str, Any]:
    """The machine's devices as JSON values."""
    cpu = capabilities.cpu
    return {
        "cpu": {
            "name": cpu.name,
            "cores": cpu.n_cores,
            "threads": cpu.n_threads,
            "vector": cpu.vector,
            "avx512_bf16": cpu.avx512_bf16,
            "amx_bf16": cpu.amx_bf16,
        },
        "gpu_runtime": capabilities.gpu_runtime,
        "gpus": [
            {"name": g.name, "architecture": g.architecture, "memory_bytes": g.memory_bytes}
            for g in capabilities.gpus
        ],
        "mps": capabilities.mps,
    }


def device_name(device: torch.device, capabilities: Capabilities | None = None) -> str:
    """The name of a device's product, as its driver or the kernel says it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = (capabilities or machine_capabilities()).cpu.name
    return f"{name} (MPS)" if device.type == "mps" else name


def git_state(folder: Path) -> dict[str, Any] | None:
    """`commit` and `dirty` of the git checkout around a folder, None outside of one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(status)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
