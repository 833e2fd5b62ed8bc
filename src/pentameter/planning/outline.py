"""A model's outline: its parameters, its FLOPs and how it may be sharded, which planning needs.

Every operation in the GPT is known (`planning/gpt.py`). A custom model provides its parameters and
its own declarations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.planning.adapters import is_of_adapter, run_operations, training_table
from pentameter.planning.architecture import ParameterSpec
from pentameter.planning.flops import (
    CONVENTION,
    causal_flops_per_token,
    end_weights,
    flops_per_token,
    padding_elements,
)
from pentameter.planning.layouts.layout import Layout

OWN_CONVENTION = "3 × the products of a forward pass that torch.utils.flop_counter counts"


@dataclass(frozen=True)
class ModelOutline:
    """A model's parameters, FLOPs and permitted parallelism, for a resolved configuration; a frozen
    record. Planning needs nothing else from a model."""

    table: tuple[ParameterSpec, ...]
    """Every parameter, in the order of the model's `named_parameters()`."""
    names_of: Callable[[range], frozenset[str]]
    """Function from a layer range to the names of the parameters in that slice of the model.
    Embeddings belong to the first layer, final norm and head to the last."""
    flops_per_token: int | None
    """Forward and backward FLOPs per trained token; None if they could not be counted."""
    causal_flops_per_token: int | None = None
    """`flops_per_token` without those for masked positions; None for a custom model."""
    n_padding: int = 0
    """Embedding and head elements that only pad the vocabulary."""
    end_weights: tuple[float, float] = (0.0, 0.0)
    """Embedding and head costs in units of one layer's cost, to balance pipeline stages; zero for a
    uniform partition."""
    built_by: str | None = None
    """Name of the function that builds a custom model, as `file.py:function`; None for the GPT."""
    divided_by: frozenset[str] = frozenset()
    """The model parallelism that a custom model supports: `tensor`, `pipeline`, both or none. Data
    parallelism needs no declaration."""
    recomputes: bool = False
    """Whether a custom model names the sub-modules whose activations can be recomputed."""
    gives_logits: bool = True
    """Whether text can be sampled: the model computes logits without targets."""

    @property
    def n_parameters(self) -> int:
        """The model's parameter count without adapters, including vocabulary padding."""
        return sum(spec.n_elements for spec in self._weights)

    @property
    def n_active(self) -> int:
        """Parameters that one token is multiplied with, padding included; fewer than all with
        experts."""
        return sum(spec.n_active for spec in self._weights)

    @property
    def _weights(self) -> list[ParameterSpec]:
        """The model's own weights: without adapters and without training state (`is_state`)."""
        return [spec for spec in self.table if not is_of_adapter(spec) and not spec.is_state]

    @property
    def flops_convention(self) -> str:
        """The convention by which FLOPs are counted, in words for plan.json."""
        return CONVENTION if self.built_by is None else OWN_CONVENTION

    def names_of_stages(self, stages: Sequence[range]) -> tuple[frozenset[str], ...]:
        """Return the parameter names in each pipeline stage, given the stages' layer ranges. Raises
        ConfigError for a parameter that belongs to no stage, and for a stage with nothing to
        train."""
        names = tuple(map(self.names_of, stages))
        if missing := {spec.name for spec in self.table}.difference(*names):
            raise ConfigError(
                f"{min(missing)} is a parameter of the whole module and of no slice of its layers"
            )
        trained = {spec.name for spec in self.table if spec.is_trained}
        for layers, stage_names in zip(stages, names, strict=True):
            if not stage_names & trained:
                why, remedy = "its slice has no parameters", "the `slice` of pm.OwnModel"
                if stage_names:
                    why = "no layer of it is adapted"
                    remedy = "lora.targets and the `blocks` of pm.OwnModel"
                raise ConfigError(
                    f"the stage of layers {layers.start}–{layers.stop - 1} has nothing to train, "
                    f"as {why}; lower parallel.pipeline, or see {remedy}"
                )
        return names


def outline_of_gpt(config: Config) -> ModelOutline:
    """Return the built-in GPT's outline (parameters, FLOPs, stage balance), with adapters if
    `lora.rank` is set. `config.model.vocab_size` must be set. Raises ConfigError if the adapters do
    not fit the model."""

    def names_of(layers: range) -> frozenset[str]:
        table = training_table(config, first_layer=layers.start, last_layer=layers.stop)
        return frozenset(spec.name for spec in table)

    table, run = training_table(config), run_operations(config.model, config.lora)
    return ModelOutline(
        table,
        names_of,
        flops_per_token(run),
        causal_flops_per_token(config.model, run),
        n_padding=padding_elements(table, config.model),
        end_weights=end_weights(run, config.parallel.partition),
    )


def tied_parameters(
    layout: Layout, stage_names: Sequence[frozenset[str]]
) -> dict[str, tuple[int, ...]]:
    """Map each parameter that several stages hold to the `pipeline` coordinates that hold it, each
    once, in stage order. Parameters are sorted by name. `stage_names` are each stage's parameter
    names."""
    count = Counter(chain.from_iterable(stage_names))
    found = {}
    for name in sorted(name for name in count if count[name] > 1):
        stages = (stage for stage, held in enumerate(stage_names) if name in held)
        ranks = map(layout.pipeline_rank_of_stage.__getitem__, stages)
        found[name] = tuple(dict.fromkeys(ranks))
    return found
