"""The rules of a layout: who sums which gradients and when, and how long gathered weights stay.

`parallel/` obeys them, and memory and traffic count by them; none of these decides anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pentameter.config.schema import LoraConfig
from pentameter.planning.layout import Layout

DataSum = Literal["none", "ddp", "fsdp", "after_backward"]


@dataclass(frozen=True)
class LayoutRules:
    """What follows from a Layout for gradients and gathered weights, one property for each rule."""

    layout: Layout

    @property
    def data_sum(self) -> DataSum:
        """How gradients are summed over the processes that compute different rows or times.

        `fsdp` reduce-scatters them to ZeRO's shards. Whole copies are summed by `ddp` during the
        last backward pass of a step, or `after_backward` by our own all-reduce where the model is
        also divided by tensor or pipeline: DDP knows neither DTensors nor a pipeline's schedule.
        """
        layout = self.layout
        if layout.zero:
            return "fsdp"
        if layout.parameter_sizes["data"] == 1:
            return "none"
        return "ddp" if layout.tensor == layout.pipeline == 1 else "after_backward"

    @property
    def sums_copies_over(self) -> tuple[str, ...]:
        """The dimensions over which gradients of parameters that tensor-parallel processes hold
        alike are summed after the backward pass, as each has those of its own tokens: with
        `sequence`, and in tensor modes that divide rows of the batch."""
        if self.layout.tensor_mode != "1d":
            return tuple(
                name for name in ("row", "tensor") if self.layout.parameter_sizes[name] > 1
            )
        return ("tensor",) if self.layout.sequence else ()

    def reads_at_once(self, lora: LoraConfig) -> bool:
        """Whether tensor-parallel matrices that read the stream together are one operation, which
        keeps this process's part of it, and sends while it computes their gradients. Not where
        adapters act on each of them, nor where a schedule splits the backward pass, whose second
        half would come to all of such an operation again."""
        is_shared = self.layout.tensor > 1 and self.layout.tensor_mode == "1d"
        return is_shared and lora.rank is None and not self.layout.splits_backward

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether every backward pass reduces its gradients to ZeRO's shards, so that none stays
        whole; otherwise they add up, and the last micro-batch of a step reduces the sum. A
        pipeline's schedule reduces at the end of the step, whatever the ZeRO stage."""
        return self.layout.zero >= 2 and self.layout.pipeline == 1

    @property
    def sums_shard_copies(self) -> bool:
        """Whether the shards' gradients are all-reduced over copies of the shards (HSDP)."""
        return self.layout.zero > 0 and self.layout.parameter_sizes["data"] > 1

    @property
    def weights_stay_gathered(self) -> bool:
        """Whether weights gathered for a forward pass stay whole to the end of the step.

        ZeRO 3 gives them up after each pass. A pipeline keeps them: between one backward pass and
        the next forward pass, giving them up would cost messages and leave the peak as it is.
        """
        return self.layout.zero < 3 or self.layout.pipeline > 1

    @property
    def prefetches_weights(self) -> bool:
        """Whether each unit's weights are gathered while the unit before it computes."""
        return self.layout.zero == 3

    def rounds_once(self, n_micro_batches: int) -> bool:
        """Whether weights are rounded for products at the start of a step of several micro-batches,
        and their gradients added up in the weights' dtype as they come. FSDP does so of itself; DDP
        must see the gradients of the weights themselves."""
        layout = self.layout
        is_divided = layout.tensor > 1 or layout.pipeline > 1
        by_matrices = layout.tensor_mode == "1d"  # grids round what they send
        return n_micro_batches > 1 and is_divided and by_matrices and not layout.zero

    def weights_come_rounded(self, n_micro_batches: int) -> bool:
        """Whether a micro-batch finds weights rounded, here or by FSDP, and need not round them."""
        return self.layout.zero > 0 or self.rounds_once(n_micro_batches)

    def keeps_whole_gradients(self, n_micro_batches: int) -> bool:
        """Whether whole gradients, and not shards, are held from one backward pass of a step to
        the next one, or to the optimizer's step."""
        if self.layout.zero == 0 or self.layout.pipeline > 1:
            return True
        return n_micro_batches > 1 and not self.reduces_each_micro_batch

    def adds_up_in_buckets(self, n_micro_batches: int) -> bool:
        """Whether micro-batches add their gradients up in DDP's buckets, which are held from the
        start. Then `.grad` are views of them: zeroed in place, never set to None."""
        return self.data_sum == "ddp" and n_micro_batches > 1
