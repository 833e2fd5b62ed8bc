"""Models, layouts and steps of a GPU day: small ones, whose numbers are compared with a CPU's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pentameter.config.model.architecture import RotationKind
from pentameter.config.schema import Config, ModelConfig
from pentameter.data.batches.step import Batch
from pentameter.keyed import bits, make_key
from pentameter.model import gpt, positions
from pentameter.model.attention import latent_attention
from pentameter.model.positions import Rotation
from pentameter.optim.build import build_optimizer
from pentameter.optim.sharded_muon import ShardedMuon
from pentameter.parallel.assemble import assemble
from pentameter.planning.plan import Plan, make_plan
from pentameter.train.update import may_read_late, read, update_weights

BASE: dict[str, Any] = {
    "vocab_size": 256,
    "context_length": 64,
    "n_layers": 2,
    "d_model": 64,
    "attention": {"n_heads": 4},
}


def decoder(**attention: Any) -> dict[str, Any]:
    """A modern decoder's `[model]`, with further keys of its attention."""
    return {
        "norm": "rmsnorm",
        "positions": "rotary",
        "attention": {"n_heads": 4, "n_kv_heads": 2, "qk_norm": "head", **attention},
        "feed_forward": {"activation": "swiglu"},
    }


MIXTURE: dict[str, Any] = {
    "vocab_size": 102,
    "context_length": 128,
    "d_model": 128,
    "experts": {"count": 8, "per_token": 2, "width": 256},
    "router": {"renormalize": True, "balance": "bias"},
}
"""The `[model]` of a small mixture, whose steps are compared, eager, compiled and replayed."""
MIXTURE_ROWS = {"batch_size": 16, "micro_batch_size": 8}
LATENT = {"type": "latent", "n_heads": 4, "kv_rank": 32, "rope_head_size": 8, "v_head_size": 16}
EXPERTS = {"experts": {"count": 8, "per_token": 2}}
BIASED = {
    "experts": {"count": 8, "per_token": 2, "n_shared": 1},
    "router": {"balance": "bias", "score_function": "sigmoid"},
}
DROPOUT = {"dropout": 0.2, "attention": {"n_heads": 4, "dropout": 0.2}}
MODELS: dict[str, dict[str, Any]] = {  # name → sections of the configuration
    "dense": {},
    "dropout": {"model": DROPOUT},
    "chunked": {},  # with few logits at a time
    "modern": {"model": decoder()},
    "window gqa": {"model": decoder(sliding_window=8)},
    "sinks gqa": {"model": decoder(sinks=True)},
    "latent": {"model": {"positions": "rotary", "attention": LATENT}},
    "softcap": {"model": {"logit_softcap": 15.0}},
    "experts": {"model": EXPERTS},
    "experts bias": {"model": BIASED},
    "muon": {"optimizer": {"name": "muon"}},
    "sgd": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "lora": {"lora": {"rank": 4}},
    "selective": {"model": decoder(), "train": {"activation_checkpoint": "selective"}},
    "full": {"model": EXPERTS, "train": {"activation_checkpoint": "full"}},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "data": {"data": 2},
    "zero 1": {"data": 2, "zero": 1},
    "zero 2": {"data": 2, "zero": 2},
    "zero 3": {"data": 2, "zero": 3},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "ring": {"context": 2},
    "all-to-all": {"context": 2, "context_mode": "all-to-all"},
    "1f1b": {"pipeline": 2},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "interleaved": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
    "zero-bubble": {"pipeline": 2, "schedule": "zero-bubble", "virtual_stages": 2},
    "expert": {"data": 2, "expert": 2},
}
GRIDS: dict[str, dict[str, Any]] = {"2d": {"tensor": 4, "tensor_mode": "2d"}}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "data tensor": {"data": 2, "tensor": 2, "sequence": True, "zero": 1},
    "pipeline tensor": {"pipeline": 2, "tensor": 2, "sequence": True},
    "hybrid": {"replicate": 2, "data": 4, "zero": 3},
    "context zero 3": {"context": 2, "data": 2, "zero": 3},
    "expert zero 2": {"data": 4, "expert": 2, "zero": 2},
}


def plan_of(
    sections: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, world: int = 1
) -> Plan:
    """Plan a small run with these sections, on `world` ranks."""
    tree: dict[str, Any] = {"name": "day", "data": {"corpus": "grammar"}, **(sections or {})}
    tree["model"] = {**BASE, **tree.get("model", {})}
    tree["train"] = {"steps": 10, "batch_size": 8, "micro_batch_size": 2, **tree.get("train", {})}
    if parallel:
        tree["parallel"] = parallel
    return make_plan(Config.model_validate(tree), world_size=world)


def keyed_batch(plan: Plan, step: int, rows: np.ndarray) -> Batch:
    """Return these rows of a step's batch of keyed random tokens."""
    size = plan.config.model.context_length + 1
    index = np.arange(plan.batch_size * size, dtype=np.int32)
    words = bits(make_key("day", step), index).view(np.uint32)
    assert plan.config.model.vocab_size is not None
    tokens = (words % plan.config.model.vocab_size).astype(np.int64).reshape(-1, size)[rows]
    return Batch(tokens[:, :-1].copy(), tokens[:, 1:].copy(), rows)


def steps(
    plan: Plan,
    device: torch.device,
    precision: str,
    *,
    n: int = 3,
    late: bool | None = None,
    begin: Callable[[int], None] = lambda step: None,
    seconds: list[float] | None = None,
    **how: Any,
) -> list[tuple[float, float]]:
    """Train n steps on keyed tokens, and return each one's loss and gradient norm.

    late: whether numbers stay on the device until the end; None as a run decides. begin: called
    with each step's number before it. seconds: takes each step's, the device waited for. how:
    further arguments of `assemble`.
    """
    how = {"compiled": False, **how}
    engine = assemble(plan, device, precision, **how)
    kind = torch.optim.Muon if how.get("world") is None else ShardedMuon
    rules = plan.config.optimizer
    optimizer = build_optimizer(engine.named_parameters(), plan.table, rules, kind)
    late = may_read_late(engine, optimizer) if late is None else late
    found = []
    for step in range(n):
        begin(step)
        start = time.perf_counter()
        loss = engine.forward_backward(keyed_batch(plan, step, engine.rows), step)
        found.append(update_weights(engine, optimizer, loss, 1e-2, 1.0, 1.0, at_once=not late))
        if seconds is not None:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    begin(n)
    return [(each.loss.mean, float(each.grad_norm)) for each in read(found)]


@contextmanager
def cosines_of_the_cpu() -> Iterator[None]:
    """Within this context rotary positions have the CPU's cosines on every device. They are fp32
    in every precision, and devices round them differently."""
    plain = positions.rotation

    def rotation(
        where: Tensor,
        config: ModelConfig,
        dtype: torch.dtype,
        length: int | Tensor,
        kind: RotationKind = "whole",
    ) -> Rotation | None:
        length = length.cpu() if isinstance(length, Tensor) else length
        found = plain(where.cpu(), config, dtype, length, kind)
        return found and Rotation(*(each.to(where.device) for each in found))

    modules = [each for each in (positions, gpt, latent_attention) if hasattr(each, "rotation")]
    for module in modules:
        module.rotation = rotation  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.rotation = plain  # type: ignore[attr-defined]


def worst(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """Return the largest relative difference between two runs' numbers."""
    return max(
        abs(a - b) / max(1e-9, abs(b))
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )
