"""The `[parallel]` section: how processes divide a run among themselves."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pentameter.config.choices import TAKES_SEVERAL_STAGES, look_up
from pentameter.config.section import Positive, Section, Switch

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


class ParallelConfig(Section):
    """How the processes divide the work. The training is the same whatever stands here."""

    data: Positive | None = None
    """Parts the batch is divided into; when absent, the processes ÷ all other degrees."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the data-parallel processes share out instead of each holding a copy: 1 the optimizer's
    state, 2 also the gradients, 3 also the weights (Rajbhandari et al. 2020, "ZeRO")."""
    replicate: Positive = 1
    """Copies of what `zero` shares out (HSDP): it is shared among data ÷ replicate processes."""
    tensor: Positive = 1
    """Processes that share each matrix: attention by head, the feed-forward layer by column,
    the vocabulary by row. They should be in one machine."""
    sequence: Switch = False
    """Between the shared matrices, the tensor-parallel processes also share out the tokens."""
    pipeline: Positive = 1
    """Processes that each hold some of the layers."""
    schedule: ScheduleName = "1f1b"
    """The order of a pipeline's forward and backward passes."""
    virtual_stages: Positive = 1
    """Stages that each process of an `interleaved` or `zero-bubble` pipeline holds."""
    partition: Literal["uniform", "weighted"] = "uniform"
    """How layers are dealt out to stages: evenly, or so that stages take the same time, counting
    the embedding and the head as the work they are."""
    timeout_seconds: Annotated[float, Field(strict=True, ge=1, le=2_592_000)] = 600.0
    """Longest wait for another process; then the run ends with exit code 70 and names the rank that
    did not answer. A first step may compile for minutes in one of them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.replicate > 1 and self.zero == 0:
            raise ValueError(
                f"parallel.replicate={self.replicate} makes copies of what parallel.zero shares "
                "out, and parallel.zero=0 shares nothing; set it to 1, 2 or 3"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence=true shares tokens among tensor-parallel processes, and "
                "parallel.tensor=1; raise it, or leave sequence out"
            )
        several = look_up(TAKES_SEVERAL_STAGES, self.schedule, "parallel.schedule", "the schema")
        if self.virtual_stages > 1 and not several:
            possible = " or ".join(
                f"'{name}'" for name, takes in TAKES_SEVERAL_STAGES.items() if takes
            )
            raise ValueError(
                f"parallel.virtual_stages={self.virtual_stages} needs parallel.schedule "
                f"{possible}, not '{self.schedule}'"
            )
        if self.schedule == "interleaved" and self.virtual_stages == 1:
            raise ValueError(
                "parallel.schedule='interleaved' alternates between stages of one process; set "
                "parallel.virtual_stages to 2 or more, or use '1f1b'"
            )
        return self
