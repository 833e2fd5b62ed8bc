"""What cards at home and in a data centre get, from simulated capabilities: docs/gpu.md's table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pentameter.config.files.load import load_config
from pentameter.estimating.seconds.cluster import device_of_driver
from pentameter.machine import capabilities as machine
from pentameter.machine.capabilities import (
    Capabilities,
    Compiler,
    CpuCapabilities,
    GpuCapabilities,
    find_compiler,
)
from pentameter.machine.choices import choose_device, choose_precision
from pentameter.model.attention.dot_product import repeats_kv_heads
from pentameter.model.gpu.forms import PLAIN_FORMS
from pentameter.model.grouped_matmul import at_once_obstacle
from pentameter.parallel.context.block_kernels import BlockKernel, block_kernel
from pentameter.parallel.context.run_attention import chip_obstacle
from pentameter.parallel.precision import arithmetic
from pentameter.planning.plan import make_plan
from pentameter.processes.group.world import World
from pentameter.train.faults import device_memory

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
CPU = CpuCapabilities("Some CPU", 8, 8, amx_bf16=False, avx512_bf16=False, vector="AVX2")
CARDS = {  # card → (GPU, capability that PyTorch says, GB held by other programs)
    "RTX 4090 24 GB, with a screen": ("NVIDIA GeForce RTX 4090", "sm_89", 25.3, 89, 1.5),
    "RTX 4060 Laptop 8 GB, with a screen": (
        "NVIDIA GeForce RTX 4060 Laptop GPU", "sm_89", 8.4, 89, 0.8,
    ),
    "T4 16 GB": ("Tesla T4", "sm_75", 15.8, 75, 0),
    "RTX 5090 32 GB, with a screen": ("NVIDIA GeForce RTX 5090", "sm_120", 33.7, 120, 1.5),
    "H100 80 GB": ("NVIDIA H100 80GB HBM3", "sm_90", 85.0, 90, 0),
    "B200 180 GB": ("NVIDIA B200", "sm_100", 191.0, 100, 0),
    "MI250, one die of 64 GB": ("AMD Instinct MI250", "gfx90a", 68.7, 90, 0),
    "Mac (MPS)": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def a_compiler(monkeypatch):
    """A machine with Triton, a C compiler and Python's headers, whose kernels run."""
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    monkeypatch.setattr(machine, "_first_found", lambda variable, names: names[0])
    monkeypatch.setattr(machine, "_launcher_error", lambda command: None)
    monkeypatch.setattr(
        machine, "_tried", lambda device, command, how, options: Compiler(command, True, how)
    )


def row(card: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A card's row of the table."""
    at = CARDS[card]
    gpu = None if at is None else GpuCapabilities(at[0], at[1], int(at[2] * 1e9))
    here = Capabilities(CPU, () if gpu is None else (gpu,), "cuda 13.0", mps=gpu is None)
    device = choose_device("auto", here)
    precision = choose_precision("auto", device, here)[0]
    dtype = arithmetic(precision).products
    assert find_compiler(device, here).works == (gpu is not None)
    if at is None or gpu is None:
        assert device.type == "mps"
        assert not repeats_kv_heads(None, dtype, (64, 64), masked=True)
        told = (precision, "PyTorch's own", "PyTorch's own", "–", "no", "no", "–")
        return f"| {card} | {' | '.join(told)} |"
    assert device.type == "cuda"
    capability, held = at[3:]

    def grouped(*, masked: bool) -> str:
        repeats = repeats_kv_heads(capability, dtype, (64, 64), masked=masked)
        return "repeated" if repeats else "as they are"

    model = load_config("gpt2-124m", {}).model
    experts = model.model_copy(update={"bias": False})
    at_once = at_once_obstacle(experts, 8, 3072, dtype, gpu) is None
    ring = block_kernel("cuda", capability, dtype, 64)
    assert isinstance(ring, BlockKernel)
    kernel = "flash" if "flash" in ring.attend.__name__ else "memory-efficient"
    monkeypatch.setattr(device_memory, "memory_bytes", lambda device: gpu.memory_bytes)
    monkeypatch.setattr(device_memory, "held_by_others", lambda device: int(held * 1e9))
    plan = make_plan(
        load_config("gpt2-124m", {"train.micro_batch_size": None, "train.precision": precision})
    )
    chosen = SimpleNamespace(device=device, precision=precision, forms=PLAIN_FORMS)
    fitted = device_memory.fit_micro_batches(plan, chosen, World()).micro_batch_size
    told = (
        precision, grouped(masked=False), grouped(masked=True), kernel,
        "yes" if chip_obstacle(gpu) is None else "no", "yes" if at_once else "no",
        str(fitted),
    )  # fmt: skip
    return f"| {card} | {' | '.join(told)} |"


@pytest.mark.parametrize("card", CARDS)
def test_what_a_card_gets_is_what_the_page_says(card, monkeypatch):
    assert row(card, monkeypatch) in PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("card", [card for card, gpu in CARDS.items() if gpu is not None])
def test_a_card_can_be_planned_for_and_its_mfu_told(card):
    name, _, gigabytes, _, _ = CARDS[card]
    known = device_of_driver(name)
    assert known is not None
    assert known.can_be_planned
    assert known.memory_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    here = Capabilities(CPU, (GpuCapabilities(name, CARDS[card][1], 0),), "cuda 13.0", mps=False)
    precision = choose_precision("auto", torch.device("cuda"), here)[0]
    assert known.peak_flops(precision) is not None
