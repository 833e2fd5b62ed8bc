"""Shrink a configuration until a laptop verifies it in seconds: narrower, with the same structure.

Everything that decides *how* a step is computed stays (activation, norms, positions, head, biases,
optimizer). Numbers that would hide a fault are raised: dropout is active, clipping and weight decay
have an effect, the vocabulary does not divide evenly, and weights start at values for which every
parameter matters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pentameter.config.fields import values_of
from pentameter.config.files.load import flat_overrides, load_config
from pentameter.config.schema import Config, ModelConfig, ParallelConfig
from pentameter.config.tables import packaged_table
from pentameter.errors import ConfigError
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.layouts.sharding import shard_size
from pentameter.planning.outline import outline_of_gpt
from pentameter.planning.plan import make_plan
from pentameter.verify.cases import Case, chosen_cases

if TYPE_CHECKING:  # it imports torch
    from pentameter.parallel.sources.model_source import ModelSource

DROPOUTS = ("dropout", "attention.dropout", "embedding_dropout")
LEAST_DROPOUT = 0.1
LEAST_WEIGHT_DECAY = 0.1
LEAST_EPS = 1e-6
"""Smallest eps for Adam, which divides by √v + eps, v being the mean squared gradient.

A key bias has a gradient that is 0 except for rounding, some 1e-18. A smaller eps makes
visible steps from that noise, which differs between any two layouts. Other weights have
gradients of some 1e-3 here.
"""

IDLE_EXPERTS = {
    "model.experts.per_token": 1,
    "model.router.groups": None,
    "model.router.open_groups": None,
    "model.router.group_scores": 2,
    "model.router.top_k_first": False,
    "model.router.renormalize": False,
    "model.router.balance": "bias",
    "model.router.balance_rate": 10.0,  # above any score: an expert above the mean gets none next
    "model.router.balance_weight": 0.01,
}
"""`[model]` settings with which some experts get no token from the second step on."""


def shrink(config: Config, cases: Sequence[Case], *, keeps_model: bool = False) -> Config:
    """Return `config` with a model, batch and context as small as all cases allow, in float64 and
    for one process. `case_config` then adds a case's layout.

    keeps_model: the section `[model]` describes a custom model, and stays as it is. Only a
    vocabulary is added, and dropout is removed, because a custom model draws it anew for each
    micro-batch.

    Heads, widths and context are divisible by every tensor degree, the vocabulary by none. There
    are more layers than any pipeline has stages, so that uneven stages are covered, too. A sliding
    window is a quarter of the context, which it divides: such windows are computed block by block.
    """
    tensor = max(2, math.lcm(*(_width_shards(case.layout) for case in cases)))
    by_sequence = math.lcm(2, *(case.layout.tensor for case in cases if case.layout.sequence))
    context = math.lcm(*(case.layout.context for case in cases))
    n_heads = math.lcm(2, *(math.lcm(_head_shards(c.layout), c.kv_heads or 1) for c in cases))
    width = 4 * math.lcm(n_heads, tensor)
    n_kv_heads = _kv_heads(config, cases, n_heads)
    model, attention, optimizer = config.model, config.model.attention, config.optimizer
    if n_kv_heads is not None and attention.n_kv_heads != attention.n_heads:
        n_heads *= 2
        width *= 1 if model.rotary_fraction == 1.0 else 2  # some channels rotate, in pairs
    n_stages = max(4, *(case.layout.n_stages for case in cases))
    vocab_size = 7 * tensor - 1  # each rank has vocabulary rows, one rank fewer
    embedding = model.embedding_dropout
    window, every = attention.sliding_window, attention.sliding_window_pattern
    is_spread = model.rope_scaling.type == "dynamic"  # over more than one pair of channels
    changes: dict[str, Any] = {
        **flat_overrides(packaged_table("verify/shrunk.toml")),
        "model.n_layers": n_stages + 1,
        "model.attention.n_heads": n_heads,
        "model.attention.n_kv_heads": n_kv_heads,
        "model.attention.head_size": None if attention.head_size is None else 4,
        "model.d_model": width,
        "model.rotary_fraction": 1.0 if model.rotary_fraction == 1.0 or is_spread else 0.5,
        "model.attention.sliding_window": None if window is None else by_sequence * context,
        "model.attention.sliding_window_pattern": None if every is None else 3,
        "model.nope_layers": None if model.nope_layers is None else 2,
        "model.feed_forward.width": math.lcm(12, tensor),
        **(_latent(model) | _experts(model, cases)),
        **_rope_by_length(model, 4 * by_sequence * context),
        "model.context_length": 4 * by_sequence * context,
        "model.vocab_size": vocab_size,
        "model.vocab_multiple": _vocab_multiple(model.vocab_multiple, vocab_size, tensor),
        "model.dropout": max(LEAST_DROPOUT, model.dropout),
        "model.attention.dropout": max(LEAST_DROPOUT, attention.dropout),
        "model.embedding_dropout": None if embedding is None else max(LEAST_DROPOUT, embedding),
        "optimizer.learning_rate": 0.1 if optimizer.name == "sgd" else 0.01,
        "optimizer.eps": max(LEAST_EPS, optimizer.eps),
        "optimizer.weight_decay": max(LEAST_WEIGHT_DECAY, optimizer.weight_decay),
        # Every case can split its batch rows into data shards and micro-batches.
        "train.batch_size": math.lcm(
            8, *(c.layout.n_batch_shards * c.n_micro_batches for c in cases)
        ),
    }
    if keeps_model:
        changes = {key: value for key, value in changes.items() if not key.startswith("model.")}
        changes |= {f"model.{key}": 0.0 for key in DROPOUTS}
        changes["model.vocab_size"] = model.vocab_size or vocab_size
    parallel = ParallelConfig(partition=config.parallel.partition)
    return load_config(config.updated({"parallel": parallel}), changes)


def _latent(model: ModelConfig) -> dict[str, Any]:
    """Return small sizes for latent attention: values narrower than keys, and latents that no
    number of ranks divides. Empty if the model has none."""
    if model.attention.type != "latent":
        return {}
    return {
        "model.attention.kv_rank": 7,
        "model.attention.q_rank": None if model.attention.q_rank is None else 5,
        "model.attention.rope_head_size": 4 if model.rope_scaling.type == "dynamic" else 2,
        "model.attention.v_head_size": None if model.attention.v_head_size is None else 3,
    }


def _rope_by_length(model: ModelConfig, context_length: int) -> dict[str, Any]:
    """Return settings for rotary frequencies that go by a text's length: the context is twice the
    original one, and factors are the default ones, as heads are small. Empty for others."""
    if not model.rope_scaling.goes_by_length:
        return {}
    where = "model.rope_scaling"
    return {
        f"{where}.original_context_length": context_length // 2,
        f"{where}.short_factors": (),
        f"{where}.long_factors": (),
    }


def _experts(model: ModelConfig, cases: Sequence[Case]) -> dict[str, Any]:
    """Return sizes for few small experts: enough for the model's groups and for all ranks that
    shard them. If it has layers both with and without experts, one of each kind remains. Empty if
    the model has no experts."""
    if model.experts.count is None:
        return {}
    is_grouped = model.router.groups is not None
    n_experts = 8 if is_grouped else min(4, model.experts.count)
    return {
        "model.experts.count": math.lcm(n_experts, *(case.layout.expert for case in cases)),
        "model.experts.per_token": min(2, model.experts.n_chosen),
        "model.experts.width": math.lcm(6, *(case.layout.expert_tensor for case in cases)),
        "model.experts.n_shared": min(2, model.experts.n_shared),
        "model.experts.dense_layers": 1 if model.experts.dense_layers else 0,
        "model.router.groups": 4 if is_grouped else None,
        "model.router.open_groups": 2 if is_grouped else None,
        "model.router.group_scores": min(2, model.router.group_scores),
    }


def _kv_heads(config: Config, cases: Sequence[Case], n_heads: int) -> int | None:
    """Return `model.attention.n_kv_heads` for the shrunk model: None if the configuration leaves it
    unset, 1 if it has a single KV head that no case shards, else `n_heads`, as many as can be
    sharded."""
    asked = config.model.attention.n_kv_heads
    divides = any(c.layout.is_grid or c.layout.exchanges_heads for c in cases)
    return asked if asked is None or (asked == 1 and not divides) else n_heads


def _head_shards(layout: Layout) -> int:
    """Return the number of ranks over which the layout shards attention heads: those along `tensor`
    (in mode 3d `depth`), times `context` if it exchanges heads by all-to-all."""
    by_tensor = layout.sizes[layout.grid_width]
    return by_tensor * (layout.context if layout.exchanges_heads else 1)


def _width_shards(layout: Layout) -> int:
    """Return the number of shards into which the layout splits one of the model's widths, or its
    vocabulary: the ranks along `tensor`, in mode 3d times those along `row`."""
    return layout.sizes["tensor"] * (layout.sizes["row"] if layout.is_3d else 1)


def shrunk_cases(
    config: Config, layouts: str, custom: ModelSource | None = None
) -> tuple[Config, list[Case]]:
    """Shrink a configuration for the cases that `layouts` names (text as for `--layouts`: `all`, or
    `data=2;tensor=2`), and return it with the cases.

    `custom` is a custom model's source; None for the built-in GPT. A custom model keeps its section
    `[model]`, and `all` means the cases that it can have. Raises ConfigError for any other case
    that no run could have.
    """
    is_gpt = custom is None
    outline_of = outline_of_gpt if custom is None else custom.outline
    if not is_gpt:
        config = config.model_copy(update={"parallel": ParallelConfig()})
    cases = chosen_cases(config, layouts)
    small = shrink(config, cases, keeps_model=not is_gpt)
    if not is_gpt:
        make_plan(small, outline_of=outline_of)  # errors that no layout avoids
    possible = []
    for case in cases:
        try:
            make_plan(case_config(small, case), outline_of=outline_of)
            if not is_gpt and case.changes_model:
                own = "tied_head, attention_dropout, idle_experts and kv_heads"
                raise ConfigError(f"{own} are of the built-in model")
            if case.idle_experts and config.model.experts.count is None:
                raise ConfigError("idle_experts=true needs experts; set model.experts.count")
            possible.append(case)
        except ConfigError as error:
            if is_gpt or layouts != "all":
                raise ConfigError(f"layout {str(case)!r}: {error}") from None
    return small, possible


def case_config(small: Config, case: Case) -> Config:
    """Return the shrunk configuration `small` with a case's layout, micro-batches, recomputation,
    kind of head, attention dropout, key heads and routing."""
    layout = case.layout
    assert small.train.batch_size is not None  # set by shrink
    parallel = ParallelConfig(**layout.to_json(), partition=small.parallel.partition)
    micro_batch_size = small.train.batch_size // layout.n_batch_shards // case.n_micro_batches
    changes: dict[str, Any] = {
        "train.micro_batch_size": micro_batch_size,
        "train.activation_checkpoint": case.activation_checkpoint,
        "train.compile": case.compile is True,
        "parallel": parallel,
        **(IDLE_EXPERTS if case.idle_experts else {}),
    }
    if case.tied_head is not None:
        changes["model.tied_head"] = case.tied_head
    if case.attention_dropout is False:
        changes["model.attention.dropout"] = 0.0
    if case.kv_heads is not None:
        changes["model.attention.n_kv_heads"] = case.kv_heads
    return small.updated(changes)


def _vocab_multiple(asked: int, vocab_size: int, tensor: int) -> int:
    """Return `model.vocab_multiple` for the shrunk model: 1 if the configuration's (`asked`) is 1,
    else the least multiple that pads the vocabulary to a size coprime to `tensor` and leaves each
    rank some vocabulary rows."""
    if asked == 1:
        return 1
    padded = {m: -(-vocab_size // m) * m for m in range(2, 2 * vocab_size)}
    return next(
        m
        for m, n_rows in padded.items()
        if n_rows > vocab_size
        and math.gcd(n_rows, tensor) == 1
        and shard_size(n_rows, tensor, tensor - 1)
    )


def described_changes(config: Config, small: Config) -> Iterator[str]:
    """Yield each change that shrinking made to the model, the optimizer and the batch size, in
    words: `n_layers 12 → 5`."""
    before, after = values_of(config), values_of(small)
    for path in before:
        is_told = path.startswith(("model.", "optimizer.")) or path == "train.batch_size"
        if is_told and before[path] != after[path]:
            yield f"{path.partition('.')[2]} {_shown(before[path])} → {_shown(after[path])}"


def _shown(value: Any) -> str:
    return "unset" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
