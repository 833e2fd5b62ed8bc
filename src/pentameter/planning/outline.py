"""A model's outline: the facts that planning needs, for the built-in GPT or a custom model.

Every operation in the GPT is known (`planning/gpt.py`). A custom model provides its
parameters and its own declarations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.planning.adapters import check_adapters, training_table
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.flops import CONVENTION, flops_per_token
from pentameter.planning.layout import Layout
from pentameter.planning.layout_checks import check_tied_copies

OWN_CONVENTION = "3 × the products of a forward pass that torch.utils.flop_counter counts"


@dataclass(frozen=True)
class ModelOutline:
    """The facts that planning needs about one model, for a resolved configuration."""

    table: tuple[ParameterSpec, ...]
    """Every parameter, in the order of the model's `named_parameters()`."""
    names_of: Callable[[range], frozenset[str]]
    """Maps a layer range to the names of the parameters in that slice."""
    flops_per_token: int | None
    """Forward and backward FLOPs per trained token; None if they could not be counted."""
    built_by: str | None = None
    """The function that builds a custom model, as `module:name`; None for the GPT."""
    divided_by: frozenset[str] = frozenset()
    """Model parallelism that a custom model declares: `tensor`, `pipeline`. Data parallelism needs
    no declaration."""
    recomputes: bool = False
    """Whether a custom model names the sub-modules whose activations can be recomputed."""
    gives_logits: bool = True
    """Whether text can be sampled: the model computes logits without targets."""

    @property
    def flops_convention(self) -> str:
        """The FLOP counting convention, in words."""
        return CONVENTION if self.built_by is None else OWN_CONVENTION

    def names_of_stages(self, stages: Sequence[range]) -> tuple[frozenset[str], ...]:
        """Return the parameter names in each pipeline stage. Raises ConfigError for a parameter
        that belongs to no stage, and for a stage with nothing to train."""
        names = tuple(map(self.names_of, stages))
        if missing := {spec.name for spec in self.table}.difference(*names):
            raise ConfigError(
                f"{min(missing)} is a parameter of the whole module and of no slice of its layers"
            )
        trained = {spec.name for spec in self.table if spec.is_trained}
        for layers, stage_names in zip(stages, names, strict=True):
            if not stage_names & trained:
                raise ConfigError(
                    f"the stage of layers {layers.start}–{layers.stop - 1} has nothing to train, "
                    "as no layer of it is adapted; lower parallel.pipeline, or see lora.targets "
                    "and the `blocks` of pm.OwnModel"
                )
        return names


def outline_of_gpt(config: Config) -> ModelOutline:
    """Return the built-in GPT's outline. Layout checks use its axes."""
    model = config.model

    def names_of(layers: range) -> frozenset[str]:
        table = training_table(config, first_layer=layers.start, last_layer=layers.stop)
        return frozenset(spec.name for spec in table)

    return ModelOutline(training_table(config), names_of, flops_per_token(model, config.lora))


def check_custom_layout(layout: Layout, config: Config, outline: ModelOutline) -> None:
    """Raise ConfigError if a custom model cannot run with this layout, naming the declaration that
    it lacks."""
    whose = f"the module that {outline.built_by} builds"
    check_adapters(config.lora, layout)
    if layout.context > 1:
        raise ConfigError(
            f"parallel.context={layout.context} splits each sequence, and {whose} mixes its "
            "positions (by attention, say) in code that would have to ask other processes for "
            "theirs; set it to 1, or use parallel.sequence, which splits it between the layers"
        )
    if layout.is_grid:
        raise ConfigError(
            f"{layout.grid_setting} splits activations by row and width, so "
            f"that each operation between two matmuls of {whose}, a norm or a softmax, would have "
            "to be a distributed one; use '1d'"
        )
    if layout.tensor > 1 and "tensor" not in outline.divided_by:
        raise ConfigError(
            f"parallel.tensor={layout.tensor}: {whose} does not say which of its matrices are "
            "divided, and how; give pm.OwnModel a `tensor_table`, or use data, zero"
        )
    if layout.pipeline > 1 and "pipeline" not in outline.divided_by:
        raise ConfigError(
            f"parallel.pipeline={layout.pipeline}: {whose} does not say what a slice of its layers "
            "is; give pm.OwnModel a `slice`, or use data, zero"
        )
    if config.parallel.partition != "uniform":
        raise ConfigError(
            f"parallel.partition='{config.parallel.partition}' weighs layers by their operations, "
            f"which are not known of {whose}; use 'uniform'"
        )
    if layout.zero and (scalars := [spec.name for spec in outline.table if not spec.shape]):
        raise ConfigError(
            f"parallel.zero={layout.zero} divides parameters by their first dimension, and "
            f"{scalars[0]} of {whose} has none; make it a vector of one number"
        )
    if config.optimizer.name == "muon" and not any(spec.is_block_matrix for spec in outline.table):
        raise ConfigError(
            f"optimizer.name='muon' takes the matrices of blocks, and {whose} names none; give "
            "pm.OwnModel `blocks`, like 'blocks.*', or use 'adamw'"
        )
    how = config.train.activation_checkpoint
    if how is not None and not outline.recomputes:
        raise ConfigError(
            f"train.activation_checkpoint='{how}' computes sub-modules again, and {whose} names "
            "none; give pm.OwnModel `blocks`, like 'blocks.*'"
        )


def tied_parameters(
    layout: Layout, stage_names: Sequence[frozenset[str]]
) -> dict[str, tuple[int, ...]]:
    """Map each parameter that several stages hold, sorted by name, to its ranks' `pipeline`
    coordinates: each coordinate once, in stage order."""
    count = Counter(chain.from_iterable(stage_names))
    return {
        name: tuple(
            dict.fromkeys(
                layout.pipeline_rank_of_stage[stage]
                for stage, held in enumerate(stage_names)
                if name in held
            )
        )
        for name in sorted(count)
        if count[name] > 1
    }


def check_tied_within(layout: Layout, stage_names: Sequence[frozenset[str]]) -> None:
    """Raise ConfigError if two stages on one rank hold a parameter that ZeRO shards."""
    for name, holders in tied_parameters(layout, stage_names).items():
        if len(holders) < sum(name in own for own in stage_names):
            stages = f"with {layout.virtual_stages} stages a process"
            check_tied_copies(layout, f"{stages} holds two copies of {name} on one of them")
