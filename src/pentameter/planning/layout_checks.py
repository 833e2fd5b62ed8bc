"""Checks that a layout fits a model and a step; each refusal names the possible values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig, TrainConfig
from pentameter.errors import ConfigError, either, listed
from pentameter.planning.architecture import (
    Axis,
)
from pentameter.planning.gpt import sub_layers
from pentameter.planning.layout import Layout, shard_size
from pentameter.planning.sharding import sharding_of

MOST_PASSES = 1 << 16
"""Maximum forward passes to fill a pipeline: its ranks × stages. Planning simulates about eight
times as many, at a few hundred thousand per second."""


def check_layout(layout: Layout, model: ModelConfig, local_size: int | None = None) -> None:
    """Raise ConfigError if the layout cannot shard the model, naming the possible values.

    `local_size` is the rank count per machine, if known.
    """
    if layout.is_grid:
        _check_grid(layout, model)
    else:
        for dimension in sharding_of(layout, model).sharding_dimensions:
            _check_even_shards(layout, model, dimension)
    check_places(layout, model, local_size)
    if layout.turns_back and model.tied_head:  # the V's first and last stage are on one rank
        held = "holds the embedding and the tied head on one process"
        check_tied_copies(layout, held, "parallel.zero to 0, model.tied_head to false")


def check_tied_copies(layout: Layout, held: str, remedy: str = "parallel.zero to 0") -> None:
    """Raise ConfigError if ZeRO would shard a parameter that two stages on one rank hold as copies,
    as the phrase `held` says."""
    if layout.zero:
        raise ConfigError(
            f"parallel.schedule='{layout.schedule}' {held}, where parallel.zero={layout.zero} "
            f"would shard it twice; set {remedy}, or use another schedule"
        )


def divides_heads(model: ModelConfig, tensor: int) -> bool:
    """Whether `parallel.tensor` ranks can have equally many heads each; key and value heads are
    replicated if there are fewer than ranks."""
    return all(size % tensor == 0 for size in _even_sizes(model)["heads"].values())


def check_passes(layout: Layout, train: TrainConfig) -> None:
    """Raise ConfigError for features that need an unsplit backward pass under a schedule that
    splits it, and for compilation if something prevents it."""
    if layout.splits_backward and train.activation_checkpoint is not None:
        # PyTorch calls autograd once per weight group, and each call would recompute its block.
        raise ConfigError(
            f"train.activation_checkpoint='{train.activation_checkpoint}' computes again what a "
            f"single backward pass needs, and parallel.schedule='{layout.schedule}' splits it into "
            "many; leave it out, or use another schedule"
        )
    obstacle = compile_obstacle(layout)
    if train.compile is True and obstacle is not None:
        raise ConfigError(f"train.compile=true is not possible: {obstacle}; set it to 'auto'")


def may_compile(layout: Layout, train: TrainConfig) -> bool:
    """Whether a run with this layout compiles its training steps, provided that it is long enough
    and has a compiler."""
    return train.compile is not False and compile_obstacle(layout) is None


def compile_obstacle(layout: Layout) -> str | None:
    """Return why a layout's training steps cannot be compiled, or None if they can."""
    if layout.splits_backward:
        return (
            f"parallel.schedule='{layout.schedule}' splits the backward pass in two, which "
            "compiled code does as a whole"
        )
    return None


def check_places(layout: Layout, model: ModelConfig, local_size: int | None) -> None:
    """Raise ConfigError if the layout cannot split the sequence, a machine's ranks or the layers,
    whichever operations a layer contains."""
    _check_sequence_split(layout, model)
    _check_normalized_heads(layout, model)
    t = layout.tensor
    if local_size is not None and local_size % t:
        raise ConfigError(
            f"parallel.tensor={t} must divide the {local_size} processes of a machine, as its "
            "processes exchange every layer's activations; possible: "
            + listed(_divisors(local_size))
        )
    if layout.n_stages > model.n_layers:
        each = f" × parallel.virtual_stages={layout.virtual_stages}"
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline}{each if layout.virtual_stages > 1 else ''} makes "
            f"{layout.n_stages} stages of model.n_layers={model.n_layers} layers; at most "
            f"{model.n_layers} are possible"
        )
    if layout.pipeline * layout.n_stages > MOST_PASSES:
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline} of {layout.n_stages} stages is too deep to plan: "
            "a step's passes are simulated one by one, and filling the pipeline takes "
            f"{layout.pipeline:,} × {layout.n_stages:,} of them; at most {MOST_PASSES:,} are "
            f"simulated, such as those of parallel.pipeline={math.isqrt(MOST_PASSES)} with a stage "
            "each"
        )


def _even_sizes(model: ModelConfig) -> dict[Axis, dict[str, int]]:
    """Return, per axis, the sizes that a sharded axis must split into equal shards, by key in
    `[model]`."""
    return {k: v for each in sub_layers(model) for k, v in each.even_sizes(model).items()}


def _check_even_shards(layout: Layout, model: ModelConfig, dimension: str) -> None:
    """Raise ConfigError if a mesh dimension cannot shard its axes: the sizes in `_even_sizes` into
    equal shards, and the vocabulary so that every rank has rows."""
    n = layout.sizes[dimension]
    sharded = sharding_of(layout, model).sharded_axes
    axes = [axis for axis, dimensions in sharded.items() if dimension in dimensions]
    even = _even_sizes(model)
    sizes = {k: v for axis in axes for k, v in even.get(axis, {}).items()}
    for key, size in sizes.items():
        if size % n:
            also = ", or a multiple" if key == "n_kv_heads" else ""
            raise ConfigError(
                f"parallel.{dimension}={n} must divide model.{key}={size}; possible: "
                f"{listed(_divisors(math.gcd(*sizes.values())))}{also}"
            )
    if "vocab" in axes and model.vocab_size is not None:
        n_rows = model.padded_vocab_size
        if not shard_size(n_rows, n, n - 1):
            raise ConfigError(
                f"parallel.{dimension}={n} cuts the {n_rows} rows of the vocabulary into parts of "
                f"{shard_size(n_rows, n, 0)}, which leaves the last process none; pad it: "
                f"--model.vocab-multiple {n}"
            )


def _check_grid(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError if a 2-D, 2.5-D or 3-D tensor mode cannot shard heads, widths and
    vocabulary. Mode 3d shards a width twice, by `depth` and by `row`."""
    edge = layout.sizes["tensor"]
    n_shards = edge * edge if layout.is_3d else edge
    whose = f"{layout.grid_setting} over parallel.tensor={layout.tensor}"
    even = _even_sizes(model)
    sizes = {k: v for each in even.values() for k, v in each.items()} | {"d_model": model.d_model}
    for key, size in sizes.items():
        n = edge if key in ("n_heads", "n_kv_heads") else n_shards
        if size % n:
            raise ConfigError(
                f"{whose} divides model.{key}={size} by {n}; possible: "
                f"{listed(_nearest_multiples(size, n))}"
            )
    n_rows = model.padded_vocab_size if model.vocab_size is not None else n_shards
    if not shard_size(n_rows, n_shards, n_shards - 1):
        raise ConfigError(
            f"{whose} cuts the {n_rows} rows of the vocabulary into parts of "
            f"{shard_size(n_rows, n_shards, 0)}, which leaves the last of {n_shards} none; pad it: "
            f"--model.vocab-multiple {n_shards}"
        )


def _check_normalized_heads(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError if keys are normalized over all heads' channels but no rank has all these
    heads."""
    if sharding_of(layout, model).kv_copies > 1 and model.qk_norm == "width":
        raise ConfigError(
            f"model.qk_norm='width' norms the channels of all model.n_kv_heads={model.n_kv_heads} "
            f"heads together, of which each of parallel.tensor={layout.tensor} processes computes "
            f"one; possible: {listed(_divisors(model.kv_heads))}"
        )


def _nearest_multiples(n: int, base: int) -> list[int]:
    """Return the multiples of `base` next to n, below and above, without 0."""
    return [each for each in (n // base * base, -(-n // base) * base) if each]


def _check_sequence_split(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError if a sequence cannot be split into equal shards: two chunks per rank in a
    ring, and each rank's chunks evenly again with `sequence`."""
    ways = []
    n_shards = 1
    if layout.context > 1:
        chunks = layout.chunks_of_time
        n_shards = chunks * layout.context
        ways.append(f"parallel.context={layout.context}")
        ways += [f"two chunks each of parallel.context_mode='{layout.context_mode}'"] * (chunks > 1)
        _check_exchanged_heads(layout, model)
    if layout.sequence:
        n_shards = math.lcm(n_shards, layout.context * layout.tensor)
        ways.append(f"parallel.sequence=true over parallel.tensor={layout.tensor}")
    if model.context_length % n_shards:
        raise ConfigError(
            f"{' with '.join(ways)} needs a multiple of {n_shards} as model.context_length, not "
            f"{model.context_length}: set "
            f"{either(_nearest_multiples(model.context_length, n_shards))}, or lower a degree"
        )


def _check_exchanged_heads(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError if context parallelism's all-to-all cannot give each rank equally many
    heads."""
    few = model.kv_heads < model.n_heads
    n_heads = sharding_of(layout, model).n_kv_heads_here
    if layout.exchanges_heads and n_heads % layout.context:
        raise ConfigError(
            f"parallel.context_mode='all-to-all' gives each of parallel.context={layout.context} "
            f"processes some of the {n_heads} {'key/value ' if few else ''}heads that one of "
            f"parallel.tensor={layout.tensor} has; possible: {listed(_divisors(n_heads))}, or "
            "parallel.context_mode='ring'"
        )


def check_micro_batches(layout: Layout, n_micro_batches: int, micro_batch_size: int) -> None:
    """Raise ConfigError if the pipeline's schedule cannot run `n_micro_batches` micro-batches.

    1F1B fills the pipeline before it alternates between forward and backward passes. Schedules that
    also alternate between stages work in rounds with `pipeline` micro-batches each.
    """
    if layout.pipeline == 1:
        return
    match layout.schedule:
        case "1f1b" if n_micro_batches < layout.pipeline:
            remedy = "lower train.micro_batch_size"
            if n_micro_batches * micro_batch_size < layout.pipeline:
                least = layout.n_batch_shards * layout.pipeline
                remedy = f"raise train.batch_size to {least}, or lower parallel.data or pipeline"
            raise ConfigError(
                f"parallel.schedule='1f1b' over parallel.pipeline={layout.pipeline} processes "
                f"takes at least as many micro-batches, there are {n_micro_batches}; {remedy}, or "
                "use 'gpipe'"
            )
        case "gpipe" | "1f1b" | "zero-bubble-v":
            pass
        case "interleaved" | "zero-bubble":
            rounds = max(1, n_micro_batches // layout.pipeline)
            if n_micro_batches % rounds:
                raise ConfigError(
                    f"parallel.schedule='{layout.schedule}' takes {n_micro_batches} micro-batches "
                    f"in {rounds} equal rounds: choose train.micro_batch_size so that they are a "
                    f"multiple of parallel.pipeline={layout.pipeline}, or fewer than twice as many"
                )
        case unknown:
            refuse_unknown(unknown, "parallel.schedule", "the layout")


def _divisors(n: int) -> Sequence[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
