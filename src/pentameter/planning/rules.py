"""A layout's rules: how gradients are reduced, and how long all-gathered weights stay.

`parallel/` obeys these rules and the memory and communication estimates count by them; none decides
anything again.
"""

from __future__ import annotations

from dataclasses import dataclass

from pentameter.config.schema import LoraConfig
from pentameter.planning.layouts.layout import Layout


@dataclass(frozen=True)
class LayoutRules:
    """The rules by which a layout reduces gradients, and keeps all-gathered or rounded weights; one
    method or property per rule."""

    layout: Layout

    def reads_at_once(self, lora: LoraConfig) -> bool:
        """Whether column-parallel matrices with the same input (such as queries, keys and values)
        are computed as one operation, in tensor mode 1d. It saves only this rank's shard of the
        input, and overlaps its communication with the matmuls for the gradients. Not with adapters,
        which act on each matrix separately, nor with a schedule that splits the backward pass,
        whose second half would run the whole operation again."""
        is_column_parallel = self.layout.tensor > 1 and not self.layout.is_grid
        return is_column_parallel and lora.rank is None and not self.layout.splits_backward

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether every backward pass reduces its gradients to ZeRO's shards, so that no unsharded
        gradient remains: with ZeRO 2 and 3, unless in a pipeline. If not, gradients accumulate, and
        a step's last micro-batch reduces their sum. A pipeline's schedule reduces at the end of the
        step for every ZeRO stage."""
        return self.layout.zero >= 2 and self.layout.pipeline == 1

    @property
    def weights_stay_gathered(self) -> bool:
        """Whether weights gathered for a forward pass stay unsharded until the end of the step.
        False only with ZeRO 3 and no pipeline.

        ZeRO 3 reshards them after each pass. A pipeline keeps them: resharding between one backward
        pass and the next forward pass would cost messages without lowering the peak memory.
        """
        return self.layout.zero < 3 or self.layout.pipeline > 1

    @property
    def prefetches_weights(self) -> bool:
        """Whether each unit's weights are all-gathered while the previous unit computes: with ZeRO
        3."""
        return self.layout.zero == 3

    def rounds_once(self, n_micro_batches: int) -> bool:
        """Whether weights are rounded to the matmul dtype once, at the start of a step, and their
        gradients are accumulated in the weights' dtype as they arrive. True with several
        micro-batches in a model-parallel layout without ZeRO and without a grid. FSDP rounds by
        itself; DDP needs gradients for the weights themselves."""
        layout = self.layout
        # Grids round the blocks they send.
        is_rounded = not (layout.is_data_parallel or layout.is_grid or layout.zero)
        return n_micro_batches > 1 and is_rounded

    def weights_come_rounded(self, n_micro_batches: int) -> bool:
        """Return whether weights are already in the matmul dtype when a micro-batch reads them:
        rounded once per step (`rounds_once`), or by FSDP before it sends them (every ZeRO stage
        above 0)."""
        return self.layout.zero > 0 or self.rounds_once(n_micro_batches)

    def keeps_whole_gradients(self, n_micro_batches: int) -> bool:
        """Whether gradients are held unsharded, rather than as shards, from one backward pass of a
        step to the next, or to the optimizer's step. So it is without ZeRO, in a pipeline, and with
        several micro-batches under ZeRO 1."""
        if self.layout.zero == 0 or self.layout.pipeline > 1:
            return True
        return n_micro_batches > 1 and not self.reduces_each_micro_batch
