"""Checks of a layout against a model and a step: refusals that name what is possible."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pentameter.config.choices import refuse_unknown
from pentameter.config.schema import ModelConfig, TrainConfig
from pentameter.errors import ConfigError, either, listed
from pentameter.planning.architecture import even_sizes, n_kv_heads, padded_vocab_size
from pentameter.planning.layout import Layout, part_size

MOST_PASSES = 1 << 16
"""Forward passes that fill a pipeline, at most: its processes × stages. Planning simulates some
eight times as many, a few hundred thousand a second."""


def check_layout(layout: Layout, model: ModelConfig, local_size: int | None = None) -> None:
    """Raise ConfigError unless a model can be cut so, naming the values that are possible.

    `local_size` is the number of processes in each machine, where it is known.
    """
    layout = layout.for_model(model)
    if layout.tensor_mode == "1d":
        for dimension in layout.dividing_dimensions:
            _check_division(layout, model, dimension)
    else:
        _check_grid(layout, model)
    check_places(layout, model, local_size)
    if layout.turns_back and layout.zero and model.tied_head:
        raise ConfigError(
            f"parallel.schedule='{layout.schedule}' holds the embedding and the tied head on one "
            f"process, where parallel.zero={layout.zero} would share the weight out twice; set "
            "parallel.zero to 0, model.tied_head to false, or use 'zero-bubble'"
        )


def check_passes(layout: Layout, train: TrainConfig) -> None:
    """Raise ConfigError for what wants the backward pass whole where a schedule splits it, and for
    compilation where there is an obstacle to it."""
    if layout.splits_backward and train.activation_checkpoint is not None:
        # PyTorch asks autograd for each group of weights anew: each call computes its block again.
        raise ConfigError(
            f"train.activation_checkpoint='{train.activation_checkpoint}' computes again what a "
            f"single backward pass needs, and parallel.schedule='{layout.schedule}' splits it into "
            "many; leave it out, or use another schedule"
        )
    obstacle = compile_obstacle(layout)
    if train.compile is True and obstacle is not None:
        raise ConfigError(f"train.compile=true is not possible: {obstacle}; set it to 'auto'")


def may_compile(layout: Layout, train: TrainConfig) -> bool:
    """Whether a run of a layout compiles its training steps, if it is long and has a compiler."""
    return train.compile is not False and compile_obstacle(layout) is None


def compile_obstacle(layout: Layout) -> str | None:
    """Why a layout's training steps cannot be compiled, or None where they can."""
    if layout.splits_backward:
        return (
            f"parallel.schedule='{layout.schedule}' splits the backward pass in two, which "
            "compiled code does as a whole"
        )
    return None


def check_places(layout: Layout, model: ModelConfig, local_size: int | None) -> None:
    """Raise ConfigError unless the time of a sequence, the processes of a machine and the layers
    can be divided so, whatever the layers are."""
    _check_time(layout, model)
    _check_normed_heads(layout, model)
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


def _check_division(layout: Layout, model: ModelConfig, dimension: str) -> None:
    """Raise ConfigError unless a mesh dimension can divide its axes: those of `even_sizes` into
    equal parts, the vocabulary so that every process has rows."""
    n = layout.sizes[dimension]
    axes = [axis for axis, dividing in layout.divided_axes.items() if dimension in dividing]
    even = even_sizes(model)
    sizes = {k: v for axis in axes for k, v in even.get(axis, {}).items()}
    for key, size in sizes.items():
        if size % n:
            also = ", or a multiple" if key == "n_kv_heads" else ""
            raise ConfigError(
                f"parallel.{dimension}={n} must divide model.{key}={size}; possible: "
                f"{listed(_divisors(math.gcd(*sizes.values())))}{also}"
            )
    if "vocab" in axes and model.vocab_size is not None:
        n_rows = padded_vocab_size(model)
        if not part_size(n_rows, n, n - 1):
            raise ConfigError(
                f"parallel.{dimension}={n} cuts the {n_rows} rows of the vocabulary into parts of "
                f"{part_size(n_rows, n, 0)}, which leaves the last process none; pad it: "
                f"--model.vocab-multiple {n}"
            )


def _check_grid(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError unless a tensor mode of several dimensions can divide heads, widths and
    vocabulary. In three dimensions a width is cut twice, by `depth` and by `row`."""
    edge = layout.sizes["tensor"]
    cuts = edge * edge if layout.tensor_mode == "3d" else edge
    whose = f"parallel.tensor_mode='{layout.tensor_mode}' over parallel.tensor={layout.tensor}"
    even = even_sizes(model)
    sizes = {**even["heads"], **even["kv_heads"], "d_model": model.d_model, **even["mlp"]}
    for key, size in sizes.items():
        n = edge if key in ("n_heads", "n_kv_heads") else cuts
        if size % n:
            raise ConfigError(
                f"{whose} divides model.{key}={size} by {n}; possible: "
                f"{listed(_nearest_multiples(size, n))}"
            )
    n_rows = padded_vocab_size(model) if model.vocab_size is not None else cuts
    if not part_size(n_rows, cuts, cuts - 1):
        raise ConfigError(
            f"{whose} cuts the {n_rows} rows of the vocabulary into parts of "
            f"{part_size(n_rows, cuts, 0)}, which leaves the last of {cuts} none; pad it: "
            f"--model.vocab-multiple {cuts}"
        )


def _check_normed_heads(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError where keys are normed by all heads' channels, and no process has them."""
    if layout.kv_copies > 1 and model.qk_norm == "width":
        raise ConfigError(
            f"model.qk_norm='width' norms the channels of all model.n_kv_heads={model.n_kv_heads} "
            f"heads together, of which each of parallel.tensor={layout.tensor} processes computes "
            f"one; possible: {listed(_divisors(n_kv_heads(model)))}"
        )


def _nearest_multiples(n: int, of: int) -> list[int]:
    """The multiples of a number on both sides of n, 0 left out."""
    return [each for each in (n // of * of, -(-n // of) * of) if each]


def _check_time(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError unless the time of a sequence can be cut into equal parts: two chunks for
    each process of a ring, and those into equal parts again with `sequence`."""
    ways = []
    n_parts = 1
    if layout.context > 1:
        chunks = layout.chunks_of_time
        n_parts = chunks * layout.context
        ways.append(f"parallel.context={layout.context}")
        ways += [f"two chunks each of parallel.context_mode='{layout.context_mode}'"] * (chunks > 1)
        _check_exchanged_heads(layout, model)
    if layout.sequence:
        n_parts = math.lcm(n_parts, layout.context * layout.tensor)
        ways.append(f"parallel.sequence=true over parallel.tensor={layout.tensor}")
    if model.context_length % n_parts:
        raise ConfigError(
            f"{' with '.join(ways)} needs a multiple of {n_parts} as model.context_length, not "
            f"{model.context_length}: set "
            f"{either(_nearest_multiples(model.context_length, n_parts))}, or lower a degree"
        )


def _check_exchanged_heads(layout: Layout, model: ModelConfig) -> None:
    """Raise ConfigError unless heads can be exchanged for time: each process then has some."""
    few = n_kv_heads(model) < model.n_heads
    n_heads = layout.n_kv_heads_here(n_kv_heads(model))
    if layout.exchanges_heads and n_heads % layout.context:
        raise ConfigError(
            f"parallel.context_mode='all-to-all' gives each of parallel.context={layout.context} "
            f"processes some of the {n_heads} {'key/value ' if few else ''}heads that one of "
            f"parallel.tensor={layout.tensor} has; possible: {listed(_divisors(n_heads))}, or "
            "parallel.context_mode='ring'"
        )


def check_micro_batches(layout: Layout, n_micro_batches: int, micro_batch_size: int) -> None:
    """Raise ConfigError unless the pipeline's schedule can take so many micro-batches.

    1F1B fills the pipeline before it alternates between forward and backward; schedules that
    alternate between stages too work in rounds of `pipeline` micro-batches.
    """
    if layout.pipeline == 1:
        return
    match layout.schedule:
        case "1f1b" if n_micro_batches < layout.pipeline:
            remedy = "lower train.micro_batch_size"
            if n_micro_batches * micro_batch_size < layout.pipeline:
                least = layout.n_row_parts * layout.pipeline
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
