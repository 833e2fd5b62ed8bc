"""Batch sizes in sequences, per step and per micro-batch, if the configuration leaves them open."""

from __future__ import annotations

from pentameter.config.schema import Config
from pentameter.config.section import LARGEST_COUNT
from pentameter.errors import ConfigError, divisors, listed, nearest_divisors
from pentameter.planning.layouts.layout import Layout


def global_batch_size(config: Config) -> int:
    """Return the sequences per optimizer step, over all devices and micro-batches:
    `train.batch_size` if it is set, else `train.tokens_per_step` ÷ `model.context_length`.

    Raises ConfigError if `tokens_per_step` is not a multiple of the context length, or one of more
    than LARGEST_COUNT sequences.
    """
    if config.train.batch_size is not None:
        return config.train.batch_size
    assert config.train.tokens_per_step is not None  # the schema asks for exactly one of the two
    context = config.model.context_length
    batch_size, rest = divmod(config.train.tokens_per_step, context)
    if rest or batch_size == 0:
        raise ConfigError(
            f"train.tokens_per_step={config.train.tokens_per_step} must be a multiple of "
            f"model.context_length={context}; nearest possible: "
            f"{listed(n * context for n in (batch_size, batch_size + 1) if n)}"
        )
    if batch_size > LARGEST_COUNT:
        raise ConfigError(
            f"train.tokens_per_step={config.train.tokens_per_step} makes {batch_size:,} sequences "
            f"of model.context_length={context} tokens a step, and at most {LARGEST_COUNT:,} are "
            "possible; lower it"
        )
    return batch_size


def micro_batch_size(asked: int | None, batch_size: int, layout: Layout) -> int:
    """Return the sequences in one rank's forward pass: `asked`, if it is not None.

    If it is None, a rank takes all its sequences (`batch_size` ÷ `layout.n_batch_shards`) at once
    without a pipeline. With a pipeline, the number of micro-batches is the smallest divisor of
    these sequences that is at least 4 · `layout.pipeline`; if there are fewer sequences, each is a
    micro-batch. Raises ConfigError if `batch_size`, the step's sequences, is not a multiple of
    `layout.n_batch_shards`, or a rank's sequences are not a multiple of `asked`.
    """
    n_shards = layout.n_batch_shards
    rows, rest = divmod(batch_size, n_shards)
    if rest:
        batches = [n * n_shards for n in (rows, rows + 1) if n]
        raise ConfigError(
            f"{_batch_settings(layout)} must divide the {batch_size} sequences of a step; "
            f"nearest possible: {', '.join(map(str, nearest_divisors(batch_size, n_shards)))}, "
            f"or a batch of {' or '.join(map(str, batches))} sequences"
        )
    if asked is None:
        at_least = 1 if layout.pipeline == 1 else 4 * layout.pipeline
        return rows // next((d for d in divisors(rows) if d >= at_least), rows)
    if rows % asked:
        whose = "of a step" if n_shards == 1 else "that a step gives each part of the data"
        raise ConfigError(
            f"train.micro_batch_size={asked} must divide the {rows} sequences {whose}; "
            f"nearest possible: {', '.join(map(str, nearest_divisors(rows, asked)))}"
        )
    return asked


def _batch_settings(layout: Layout) -> str:
    """Return the settings that split the batch over ranks, for an error message: `parallel.data=4`,
    and a tensor mode that splits it too, with its factor."""
    in_mode = layout.n_batch_shards // layout.data
    data = f"parallel.data={layout.data}"
    if in_mode == 1:
        return data
    return f"{data} × {in_mode} of {layout.grid_setting}"
