"""A model too large for one process: none ever holds more of it than its share."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pentameter.config.schema import Config
from pentameter.processes.group.world import World
from trials.layout_runs import changed

FEW_BYTES = 1024
"""What meshes and groups say to each other."""

MODEL: dict[str, Any] = {
    "model.vocab_size": 1021,  # neither a power of two nor even
    "model.n_layers": 6,
    "model.attention.n_heads": 4,
    "model.d_model": 64,
    "model.context_length": 32,
    "train.steps": 1,
    "train.batch_size": 16,
    "train.precision": "fp32",
    "train.compile": False,
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel.zero": 3}),
    (2, {"parallel.pipeline": 2}),
    (2, {"parallel.tensor": 2}),
    (2, {"parallel.zero": 2, "train.offload": True}),
    (4, {"parallel.zero": 1, "parallel.pipeline": 2}),
    (
        8,
        {
            "parallel.zero": 3,
            "parallel.tensor": 2,
            "parallel.pipeline": 2,
            "parallel.schedule": "interleaved",
            "parallel.virtual_stages": 2,
        },
    ),
]


@dataclass(frozen=True)
class Assembled:
    """What a process has after `assemble`, and what that took. Sizes are in bytes."""

    peak: int
    """The most that torch held at once for it."""
    largest: int
    """Of single allocations."""
    kept: list[int]
    """What each parameter's part takes, with what FSDP pads it to even sizes."""
    parts: dict[str, tuple[tuple[int, ...], torch.Tensor]]
    """Parameter → where its part here begins in the whole, and the part."""


def assembled(world: World, config: Config) -> Assembled:
    """Assemble and count every allocation of torch's on the way."""
    from pentameter.parallel.assemble import assemble
    from pentameter.parallel.local_shards import local_shard
    from pentameter.planning.plan import make_plan

    gc.collect()  # or what an earlier job left would be freed here, and counted
    plan = make_plan(config, world_size=world.size)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        engine = assemble(plan, torch.device("cpu"), "fp32", compiled=False, world=world)
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    recorded.export_chrome_trace(path)
    trace = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    Path(path).unlink()
    held, peak, largest = 0, 0, 0
    for event in trace:
        if event.get("name") == "[memory]":
            n_bytes = event["args"]["Bytes"]
            held, largest = held + n_bytes, max(largest, n_bytes)
            peak = max(peak, held)
    parts, kept = {}, []
    for name, parameter in engine.named_parameters():
        part, offset = local_shard(parameter)
        parts[name] = (offset, part.clone())
        kept.append(part.untyped_storage().nbytes())
    return Assembled(peak, largest, kept, parts)


@pytest.fixture(scope="module")
def whole(runs):
    (alone,) = runs.do(1, assembled, changed("grammar", MODEL))
    assert alone.peak == pytest.approx(sum(alone.kept), abs=FEW_BYTES)
    return alone


@pytest.mark.parametrize(
    ("size", "layout"), LAYOUTS, ids=[str(number) for number in range(len(LAYOUTS))]
)
def test_no_process_ever_holds_more_than_its_share(runs, whole, size, layout):
    processes = runs.do(size, assembled, changed("grammar", MODEL, layout))
    for process in processes:
        # FSDP copies a part of uneven size to pad it, one at a time.
        padding = max(process.kept) if "parallel.zero" in layout else 0
        assert process.peak <= sum(process.kept) + padding + FEW_BYTES
        assert process.largest == max(process.kept)
        assert sum(process.kept) < 0.7 * sum(whole.kept)
    if layout.get("parallel.zero") == 3:  # no weight is whole anywhere
        assert max(process.largest for process in processes) < 0.6 * whole.largest


@pytest.mark.parametrize(
    ("size", "layout"), LAYOUTS, ids=[str(number) for number in range(len(LAYOUTS))]
)
def test_every_share_has_the_values_of_one_process(runs, whole, size, layout):
    seen = {name: torch.zeros_like(part) for name, (_, part) in whole.parts.items()}
    for process in runs.do(size, assembled, changed("grammar", MODEL, layout)):
        for name, (offset, part) in process.parts.items():
            place = tuple(
                slice(start, start + n) for start, n in zip(offset, part.shape, strict=True)
            )
            assert torch.equal(part, whole.parts[name][1][place]), name
            seen[name][place] = 1
    assert all(bool(each.all()) for each in seen.values())
