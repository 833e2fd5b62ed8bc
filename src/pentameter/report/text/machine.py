"""What `doctor` has found out of a machine, as rows for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


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
    for name, flops in facts["product_ceiling_flops"].items():
        value = "–" if flops is None else f"{flops / 1e12:.3g} TFLOP/s"
        yield name, value, "measured matrix product"
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
