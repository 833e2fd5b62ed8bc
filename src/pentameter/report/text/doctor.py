"""Facts about a machine, with the choices that training would make on it, and rows of them for a
terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pentameter.disk.cache import cache_folder, data_folder
from pentameter.errors import ConfigError
from pentameter.machine import kernel_checks
from pentameter.machine.capabilities import find_compiler, machine_capabilities
from pentameter.machine.choices import choose_device, choose_precision
from pentameter.machine.cores_and_memory import cpu_quota, memory_limit
from pentameter.machine.environment import device_name, environment
from pentameter.machine.load.other_programs import BUSY_CORES, OtherPrograms
from pentameter.machine.peaks import measure_matmul, peak_flops

# extra of the package → module that shows it is installed
EXTRAS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "trackio": "trackio",
    "serve": "uvicorn",
    "lm-eval": "lm_eval",
    "parquet": "pyarrow",
    "gguf": "gguf",
    "litgpt": "yaml",
    "sentencepiece": "sentencepiece",
    "remote": "fsspec",
    "hub": "huggingface_hub",
    "zstd": "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd",
}

TESTED_TORCH = ("2.13.0", "2.14.1")
"""Torch releases with which all tests passed, oldest first."""


def examine() -> dict[str, Any]:
    """Return the object that `doctor --json` prints. Takes a few seconds, as it times matmuls and
    tries the compiler; some 20 before anything has been compiled here."""
    capabilities = machine_capabilities()
    device = choose_device("auto", capabilities)
    precision, reason = choose_precision("auto", device, capabilities)
    compiler = find_compiler(device, capabilities)
    name = device_name(device, capabilities)
    around = environment(device, capabilities)
    others = OtherPrograms()
    ceilings = _ceilings(device)
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
        "product_ceiling_flops": ceilings,
        "cores_busy_with_others": others.cores(lambda alone: [alone]),
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
    """Return the names of the C++ kernels that this machine's compiler has made, in two lists by
    kind: those that runs have found to compute right, and those that runs have refused, each with
    what runs instead."""
    found = sorted(set(kernel_checks.verdicts()))
    refused = [f"{name} ({level})" for name, level in found if level != kernel_checks.LEVELS[0]]
    wrong = {name for name, level in found if level != kernel_checks.LEVELS[0]}
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
    ceilings: dict[str, float | None] = {"float32": None, "bfloat16": None}
    for name in ceilings:
        with suppress(ConfigError):
            ceilings[name] = measure_matmul(device, getattr(torch, name), seconds=0.5)
    return ceilings


def _data_folders() -> dict[str, Any]:
    folder, cache = data_folder(), cache_folder()
    return {
        "PENTAMETER_DATA_DIR": None if folder is None else str(folder),
        "data_dir_found": folder is not None and folder.is_dir(),
        "cache": str(cache),
        "cache_found": cache.is_dir(),
    }


def machine_rows(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, remark) for each printed line, from `facts`, the object that `doctor
    --json` prints."""
    yield "device", facts["device"], facts["device_name"]
    cpu = facts["devices"]["cpu"]
    able = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "arm_bf16": "BF16"}
    remark = ", ".join([cpu["name"], cpu["vector"], *(able[key] for key in able if cpu[key])])
    yield "cpu", f"{cpu['cores']} cores", remark
    if (quota := facts["limits"]["cores"]) is not None:
        yield "cpu quota", f"{quota:.3g} cores", "the time that this container has"
    if (limit := facts["limits"]["memory_bytes"]) is not None:
        yield "memory limit", f"{limit / 1e9:.3g} GB", "what this container may hold"
    for index, gpu in enumerate(facts["devices"]["gpus"]):
        memory = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        yield f"gpu {index}", memory, f"{gpu['name']}, {gpu['architecture']}"
    if (obstacle := facts["devices"]["gpu_obstacle"]) is not None:
        yield "gpu", "left out", obstacle
    elif not facts["devices"]["gpus"]:
        runtime = facts["devices"]["gpu_runtime"]
        why = f"torch is built for {runtime}" if runtime else "torch is built without CUDA and ROCm"
        yield "gpu", "none", why
    if facts["devices"]["mps"]:
        yield "mps", "yes", "Apple's GPU"
    yield "precision", facts["precision"], facts["precision_reason"]
    yield "compile", "works" if facts["compile"] else "no", facts["compile_reason"]
    for state, names in facts["kernels"].items():
        none = "by no run yet" if state == "proved" else ""
        yield f"kernels {state}", str(len(names)), ", ".join(names) or none
    how = "measured matrix product"
    if (busy := facts["cores_busy_with_others"]) >= BUSY_CORES:
        n = cpu["cores"]
        how += f" beside other programs, which kept {min(busy, n):.1f} of {n} cores busy"
    for name, flops in facts["product_ceiling_flops"].items():
        yield name, "–" if flops is None else f"{flops / 1e12:.3g} TFLOP/s", how
    if facts["published_peak_flops"]:
        value = f"{facts['published_peak_flops'] / 1e12:.4g} TFLOP/s"
        yield "published", value, f"dense peak in {facts['precision']}, what MFU is a share of"
    state = "tested" if facts["torch_is_tested"] else "not tested; it may work"
    tested = f"{state} (tested: {', '.join(facts['torch_tested'])})"
    for name, version in facts["versions"].items():
        yield name, version or "missing", tested if name == "torch" else ""
    for extra, installed in facts["extras"].items():
        hint = "" if installed else f'pip install "pentameter[{extra}]"'
        yield f"extra {extra}", "installed" if installed else "not installed", hint
    data = facts["data"]
    folder = data["PENTAMETER_DATA_DIR"]
    state = "not set" if folder is None else "found" if data["data_dir_found"] else "missing"
    yield "data folder", state, f"PENTAMETER_DATA_DIR={folder}" if folder else ""
    yield "cache", "found" if data["cache_found"] else "not yet there", data["cache"]
    yield "disk free", f"{facts['disk_free_bytes'] / 1e9:.0f} GB", "in this folder"
