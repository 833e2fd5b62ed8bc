"""Items of a GPU day that say whether it is right: numbers, waits, layouts, memory, the guard.

`python gpu_day_right.py LAYOUTS DEVICE` is one rank of the item `nccl`.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gpu_day_cases import (
    FOUR_RANKS,
    GRIDS,
    MODELS,
    TWO_RANKS,
    cosines_of_the_cpu,
    decoder,
    plan_of,
    steps,
    worst,
)
from pentameter.machine.capabilities import machine_capabilities
from pentameter.model import loss
from pentameter.processes.group.join import joined_world
from pentameter.processes.group.rank import find_rank
from pentameter.train.compute import choose_compute

Tell = Callable[..., None]
CPU = torch.device("cpu")
SILENT_SECONDS = 75
"""Seconds after which ranks that say nothing are taken to hang."""


def said(error: BaseException) -> str:
    """Return an error as a line."""
    return f"{type(error).__name__}: {error}"[:400]


def of_facts(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell versions, what the machine has, and which attention kernel runs for which case."""
    include = Path(sysconfig.get_path("include"), "Python.h")
    tell(
        torch=torch.__version__,
        python=sys.version.split()[0],
        cuda=torch.version.cuda,
        python_h=include.exists(),
        cc=os.environ.get("CC"),
        gpus=torch.cuda.device_count(),
        cores=len(os.sched_getaffinity(0)),
    )
    tell(capabilities=str(machine_capabilities()))
    functional = torch.nn.functional
    tell(
        grouped_mm=hasattr(functional, "grouped_mm"),
        flash_impl=hasattr(torch.nn.attention, "activate_flash_attention_impl"),
        addmm=torch.ops.aten.addmm.overloads(),
        mm=torch.ops.aten.mm.overloads(),
    )
    if device.type != "cuda":
        return
    tell(
        name=torch.cuda.get_device_name(),
        arch=torch.cuda.get_arch_list(),
        cudnn=torch.backends.cudnn.version(),
        nccl=torch.cuda.nccl.version(),
        free_and_total=torch.cuda.mem_get_info(),
    )
    for name, g, dtype, masked in (
        ("mha bf16", 8, torch.bfloat16, False),
        ("gqa bf16", 2, torch.bfloat16, False),
        ("gqa bf16 mask", 2, torch.bfloat16, True),
        ("gqa fp32", 2, torch.float32, False),
    ):
        shapes = [(4, n, 1024, 64) for n in (8, g, g)]
        q, k, v = (torch.randn(s, device=device, dtype=dtype, requires_grad=True) for s in shapes)
        seen = torch.ones(1024, 1024, dtype=torch.bool, device=device).tril() if masked else None
        with torch.profiler.profile() as profile:
            y = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=not masked, enable_gqa=g != 8
            )
            y.sum().backward()
            torch.cuda.synchronize()
        names = [each.key for each in profile.key_averages()]
        tell(attention=name, kernels=[n for n in names if "_scaled_dot" in n or "math" in n])


def of_equal(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell how far each model is from the CPU's fp64: in fp64, with rotary cosines of the CPU, and
    in bf16 here, as a run takes it here, and there."""
    whole = loss.MAX_LOGITS
    for name in MODELS if device.type == "cuda" else ("chunked", "window gqa", "experts"):
        sections = MODELS[name]
        row: dict[str, Any] = {"model": name}
        loss.MAX_LOGITS = 2**12 if name == "chunked" else whole
        try:
            plan = plan_of(sections)
            right = steps(plan, CPU, "fp64")
            with cosines_of_the_cpu():
                row["fp64"] = worst(steps(plan, device, "fp64"), right)
            row["bf16"] = worst(steps(plan, device, "bf16"), right)
            row["bf16 of the CPU"] = worst(steps(plan, CPU, "bf16"), right)
            if device.type == "cuda":
                forms = choose_compute(plan).forms
                row["as a run takes it"] = worst(steps(plan, device, "bf16", forms=forms), right)
                row["forms"] = str(forms)
        except Exception as error:
            row["error"] = said(error)
            traceback.print_exc()
        tell(**row)
    loss.MAX_LOGITS = whole


def of_compiled(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell how far compiled steps as a run takes them are from the CPU's fp64, and that they
    repeat. On a GPU these models are small enough for CUDA graphs."""
    if device.type == "cpu":
        tell(skipped="a CPU's compiled steps are tested elsewhere")
        return
    for name in ("dense", "dropout", "experts", "modern", "full"):
        row: dict[str, Any] = {"model": name}
        try:
            plan = plan_of(MODELS[name])
            how: dict[str, Any] = {"forms": choose_compute(plan).forms, "compiled": True, "n": 5}
            right = steps(plan, CPU, "fp64", n=5)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                first = steps(plan, device, "bf16", **how)
            row["bf16"] = worst(first, right)
            row["eager"] = worst(steps(plan, device, "bf16", **{**how, "compiled": False}), right)
            row["again"] = worst(steps(plan, device, "bf16", **how), first)
            row["warnings"] = sorted({str(each.message)[:150] for each in seen})[:4]
        except Exception as error:
            row["error"] = said(error)
            traceback.print_exc()
        tell(**row)


def of_syncs(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell where a step that reads its numbers late waits for the device: it must not."""
    if device.type != "cuda":
        tell(skipped="only CUDA tells of its waits")
        return

    def watch(step: int) -> None:
        torch.cuda.set_sync_debug_mode("warn" if step == 1 else "default")

    for name, sections in MODELS.items():
        try:
            plan = plan_of(sections)
            forms = choose_compute(plan).forms
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                steps(plan, device, "bf16", n=2, late=True, begin=watch, forms=forms)
                torch.cuda.set_sync_debug_mode("default")
            waits = [each for each in seen if "synchroniz" in str(each.message)]
            at = Counter(f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in waits)
            tell(model=name, waits=len(waits), at=dict(at))
        except Exception as error:
            torch.cuda.set_sync_debug_mode("default")
            tell(model=name, error=said(error))


# -- layouts ---------------------------------------------------------------------------------------


def of_nccl(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell how far layouts of two and of four ranks, over NCCL on one GPU, are from one process in
    fp64 on the CPU. NCCL takes ranks with other host ids for other hosts, and they talk over
    sockets on loopback: times mean nothing; streams, order and dtypes are real."""
    layouts = {2: list(TWO_RANKS), 4: list(FOUR_RANKS)}
    if device.type == "cpu":  # where `verify` holds them all
        layouts = {2: ["zero 3", "1f1b"], 4: ["expert zero 2"]}
    both = [
        threading.Thread(target=_layouts, args=(tell, device, names, n, folder))
        for n, names in layouts.items()
    ]
    for each in both:
        each.start()
    for each in both:
        each.join()


def of_grid(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell the same of a grid of four ranks, whose many small collectives take long there."""
    _layouts(tell, device, list(GRIDS), 4, folder)


def _layouts(tell: Tell, device: torch.device, todo: list[str], n: int, folder: Path) -> None:
    while todo:
        ranks = [_rank(todo, device, r, n, folder) for r in range(n)]
        output = ranks[0].stdout
        assert output is not None
        os.set_blocking(output.fileno(), False)
        latest, ended = time.monotonic(), False
        while not ended:
            line = output.readline()
            if line.startswith("{"):
                row = json.loads(line)
                todo.remove(row["layout"])
                latest = time.monotonic()
                tell(**row)
            elif not line:
                silent = time.monotonic() - latest > SILENT_SECONDS
                ended = silent or any(each.poll() is not None for each in ranks)
                time.sleep(0.02)
        time.sleep(0.5)  # what is still in the pipe
        for line in iter(output.readline, ""):
            if line.startswith("{"):
                row = json.loads(line)
                todo.remove(row["layout"])
                tell(**row)
        codes = [each.poll() for each in ranks]
        for each in ranks:
            each.kill()
            each.wait()
        if todo and any(code != 0 for code in codes):
            tell(layout=todo.pop(0), error=f"no more was said; exits {codes}")


def _rank(
    layouts: list[str], device: torch.device, rank: int, n: int, folder: Path
) -> subprocess.Popen[str]:
    port = 20_000 + os.getpid() % 9_000 + 10 * len(layouts) + n
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_HOSTID": f"host{rank}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, __file__, json.dumps(layouts), device.type]
    log = (folder / f"nccl-{n}-{rank}.log").open("ab")
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE if rank == 0 else log,
        stderr=log,
        text=True,
    )


@cache
def _alone(kind: str, device: torch.device, precision: str, n: int) -> list[tuple[float, float]]:
    return steps(plan_of(_model_of(kind)), device, precision, n=n)


def _model_of(kind: str) -> dict[str, Any]:
    """Return sections of experts, of a decoder that pipelines can divide, or of a smaller one."""
    if kind == "experts":
        return MODELS["experts"]
    return {"model": {**decoder(), "n_layers": 4 if kind == "dense" else 1}}


def be_rank(layouts: list[str], kind: str) -> None:
    """Run these layouts as one rank; rank 0 prints a line for each."""
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device(kind)
    every = TWO_RANKS | FOUR_RANKS | GRIDS
    with joined_world(kind, find_rank(), always_group=True, timeout_seconds=60) as world:
        for name in layouts:
            row: dict[str, Any] = {"layout": name, "ranks": world.size}
            try:
                model = "experts" if "expert" in name else "small" if name in GRIDS else "dense"
                n = 1 if name in GRIDS else 3
                sections = dict(_model_of(model))
                if name == "zero-bubble":
                    sections["train"] = {"micro_batch_size": 1}
                plan = plan_of(sections, every[name], world.size)
                seconds: list[float] = []
                precise = steps(plan, device, "fp64", world=world, n=n)
                found = steps(plan, device, "bf16", world=world, n=n, seconds=seconds)
                if world.is_main:
                    row["fp64"] = worst(precise, _alone(model, device, "fp64", n))
                    row["fp64 of the CPU"] = worst(precise, _alone(model, CPU, "fp64", n))
                    row["bf16"] = worst(found, _alone(model, device, "bf16", n))
                row["seconds"] = min(seconds)
            except Exception as error:
                row["error"] = said(error)
                traceback.print_exc()
            if world.is_main:
                print(json.dumps(row), flush=True)
            if "error" in row:
                os._exit(1)


# -- arithmetic, guard, memory ---------------------------------------------------------------------


def of_numbers(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell how far each precision is from fp64, and whether the guard leaves the same steps out on
    the device as on the host."""
    from pentameter.config.schema import GuardConfig
    from pentameter.parallel.engine import LossSum
    from pentameter.train.faults.guard import Guard
    from pentameter.train.state import TrainState

    plan = plan_of({"model": decoder()})
    right = steps(plan, CPU, "fp64")
    for precision in ("fp64", "fp32", "tf32", "bf16", "fp16"):
        try:
            tell(precision=precision, off=worst(steps(plan, device, precision), right))
        except Exception as error:
            tell(precision=precision, error=said(error))
    settings = GuardConfig(spike_factor=4.0, window=8, skips=2)
    noise = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    losses = [
        float(3 + each) * (10 if i in (12, 20, 21, 22, 30) else 1) for i, each in enumerate(noise)
    ]
    losses[25] = float("nan")
    left: dict[str, list[float]] = {}
    for where in (CPU, device):
        guard = Guard(settings, TrainState(), where, halts=False)
        totals = [torch.tensor(each, device=where, dtype=torch.float64) for each in losses]
        norm = torch.tensor(1.0, device=where)
        one = torch.tensor(1, device=where)
        judged = [guard.judge(LossSum(total, one), norm) for total in totals]
        left[where.type] = torch.stack(judged).tolist()
    tell(
        guard=left[device.type] == left["cpu"], left_out=[i for i, x in enumerate(left["cpu"]) if x]
    )


def of_memory(tell: Tell, device: torch.device, folder: Path) -> None:
    """Tell what recomputation, ZeRO and offload hold at their peak, beside the Plan's estimate, and
    that the numbers stay."""
    from pentameter.estimating.bytes.plan_estimates import plan_memory

    on_gpu = device.type == "cuda"
    size = {"n_layers": 8, "d_model": 512, "context_length": 1024, "vocab_size": 8192}
    model = (
        {**decoder(), **size, "attention": {"n_heads": 8, "n_kv_heads": 4}} if on_gpu else decoder()
    )
    rows = {"batch_size": 16, "micro_batch_size": 8} if on_gpu else {}
    plain: list[tuple[float, float]] = []
    cases: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
        ("kept", {}, None),
        ("selective", {"activation_checkpoint": "selective"}, None),
        ("full", {"activation_checkpoint": "full"}, None),
        ("zero 3", {}, {"data": 1, "zero": 3}),
        ("offload", {"offload": True}, {"data": 1, "zero": 3}),
        ("zero 3 of experts", {}, {"data": 1, "zero": 3}),
        ("offload of experts", {"offload": True}, {"data": 1, "zero": 3}),
    ]
    for name, train, parallel in cases:
        row: dict[str, Any] = {"memory": name}
        try:
            sections = {"model": model | (MODELS["experts"]["model"] if "experts" in name else {})}
            plan = plan_of({**sections, "train": rows | train}, parallel)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
                row["before_mb"] = round(torch.cuda.memory_allocated() / 1e6)
                torch.cuda.reset_peak_memory_stats()
            with joined_world(device.type, None, always_group=parallel is not None) as world:
                group = world if parallel else None
                found = steps(plan, device, "bf16", world=group)
            plain = plain or found
            row["off"] = None if "experts" in name else worst(found, plain)
            if on_gpu:
                row["peak_mb"] = round(torch.cuda.max_memory_allocated() / 1e6)
            row["planned_mb"] = round(plan_memory(plan, "bf16").device_bytes / 1e6)
        except Exception as error:
            row["error"] = said(error)
            traceback.print_exc()
        tell(**row)


if __name__ == "__main__":
    be_rank(json.loads(sys.argv[1]), sys.argv[2])
