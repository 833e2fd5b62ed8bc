"""How a step is divided, and how wide its numbers are: what memory and communication count in."""

from __future__ import annotations

from dataclasses import dataclass

from pentameter.config.choices import look_up
from pentameter.config.schema import Config
from pentameter.planning.layout import Layout

BYTES = {
    "auto": (4, 4),  # where the run has not chosen yet
    "fp64": (8, 8),
    "fp32": (4, 4),
    "tf32": (4, 4),
    "bf16": (4, 2),
    "fp16": (4, 2),
}
"""`train.precision` → bytes of a weight's number, and of one that goes into a product."""


@dataclass(frozen=True)
class StepSizes:
    """Of one part of the data: one process of `data`, or those that share its rows."""

    n_rows: int
    """Sequences of a step."""
    micro_batch_size: int
    """Sequences of a micro-batch, which divides them."""
    element_bytes: int
    """Of a weight's number, and of the stream's."""
    product_bytes: int
    """Of a number that goes into a matrix product."""

    @property
    def n_micro_batches(self) -> int:
        """Micro-batches of a step."""
        return self.n_rows // self.micro_batch_size


def step_sizes(config: Config, layout: Layout, precision: str | None = None) -> StepSizes:
    """The sizes of a step of a resolved configuration; `precision` is that of the run where the
    configuration leaves it open, without which products are taken to be in full precision."""
    train = config.train
    assert train.batch_size is not None  # resolved
    assert train.micro_batch_size is not None
    precision = precision or train.precision
    element_bytes, product_bytes = look_up(BYTES, precision, "train.precision", "the planner")
    return StepSizes(
        n_rows=train.batch_size // layout.data,
        micro_batch_size=train.micro_batch_size,
        element_bytes=element_bytes,
        product_bytes=product_bytes,
    )
