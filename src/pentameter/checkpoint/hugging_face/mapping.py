"""A family's config.json and tensors, and ours: each from the other, by the tables of `families`.

Tensors correspond in strips of rows: rows of one of ours are rows of one of theirs. A fused matrix
whose rows are ordered otherwise is many strips, head by head. A region of a tensor is computed from
the strips that lie in it, so nothing else is read. Rows that no strip fills are zero: biases that
the one side has and the other has not.

Shapes: D d_model, H heads, G heads of keys and values, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.hugging_face.families import FAMILIES, NOT_OURS, Family
from pentameter.checkpoint.safetensors_writer import LazyTensor, read_region
from pentameter.config.choices import look_up
from pentameter.config.messages import shown
from pentameter.config.schema import ModelConfig
from pentameter.errors import ConfigError
from pentameter.planning.architecture import (
    ParameterSpec,
    embedding_dropout,
    head_size,
    n_kv_heads,
    parameter_table,
    resolved,
    shares_kv_heads,
)

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.model_folder import Weights


def choose_family(model: ModelConfig) -> str:
    """The `model_type` of the first family that can express a model.

    Raises ConfigError where none can, naming every key and value that the nearest does not have.
    """
    problems = {name: list(_inexpressible(family, model)) for name, family in FAMILIES.items()}
    nearest = min(problems, key=lambda name: len(problems[name]))
    if problems[nearest]:
        raise ConfigError(
            f"a Hugging Face {FAMILIES[nearest].label} cannot express "
            f"{'; '.join(problems[nearest])}; nor can {', '.join(FAMILIES.keys() - {nearest})}; "
            "`export --to safetensors` writes any model"
        )
    return nearest


def _inexpressible(family: Family, model: ModelConfig) -> Iterator[str]:
    """Each key with its value that the family does not have, and why."""
    plain = simplest(model)
    for key, (possible, reason) in family.fixed.items():
        if getattr(plain, key) != possible:
            yield f"model.{key}={shown(getattr(model, key))} ({reason})"
    if model.activation not in family.activations.values():
        yield f"model.activation={shown(model.activation)} ({family.label} has no such function)"
    for rule in family.rules:
        try:
            rule.write(model)
        except ValueError as error:
            yield str(error)
    for key in type(model).model_fields.keys() - accounted_keys(family):
        yield f"model.{key}={shown(getattr(model, key))} (its config.json has no such key)"


def accounted_keys(family: Family) -> list[str]:
    """Our keys that a family's description accounts for, as often as it does."""
    of_rules = [key for rule in family.rules for key in rule.keys]
    return [*family.written, *family.fixed, *family.not_needed, *of_rules]


def simplest(model: ModelConfig) -> ModelConfig:
    """The same architecture without the sizes that would follow from others all the same."""
    same: dict[str, None] = {}
    if model.n_kv_heads == model.n_heads:
        same["n_kv_heads"] = None
    if model.head_size is not None and model.head_size * model.n_heads == model.d_model:
        same["head_size"] = None
    return model.model_copy(update=same)


def to_their_config(
    name: str, model: ModelConfig, *, vocab_size: int, end_of_text: int | None, dtype: str
) -> dict[str, Any]:
    """The content of config.json for a model that family `name` expresses (`choose_family`).

    vocab_size: rows of its embedding without padding. end_of_text: the tokenizer's id for it.
    dtype: of the weights (`float32`).
    """
    family = FAMILIES[name]
    theirs = {ours: theirs for theirs, ours in reversed(list(family.activations.items()))}
    activation = look_up(theirs, model.activation, "model.activation", family.label)
    whole = resolved(model).model_copy(update={"embedding_dropout": embedding_dropout(model)})
    values = {
        **whole.model_dump(include=set(family.written)),
        "vocab_size": vocab_size,
        "activation": activation,
    }
    content: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": name,
        **{key: values[ours] for ours, (key, _) in family.written.items()},
        **{key: default for key, (default, _) in family.not_ours.items() if default is not None},
    }
    for rule in family.rules:
        content |= rule.write(model)
    return {
        **content,
        # Written even where there is none: absent, they would be the family's own.
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "use_cache": True,
        "torch_dtype": dtype,  # the name that old and new versions of transformers read
    }


def from_their_config(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The model section, as yet unchecked, of what config.json (`path`, for messages) says.

    Raises ConfigError for another architecture and for a setting that is not expressible here.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(
            f"{path}: model_type={shown(kind)} is not supported; these are read: "
            f"{', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]
    for key, (default, reason) in {**NOT_OURS, **family.not_ours}.items():
        value = content.get(key, default)
        if value not in (default, None):
            raise ConfigError(f"{path}: {key}={shown(value)} is not supported: {reason}")
    section = {
        ours: content.get(key, content.get(family.other_names.get(key, key), default))
        for ours, (key, default) in family.written.items()
    }
    activation, possible = section["activation"], family.activations
    if not isinstance(activation, str) or activation not in possible:
        key, _ = family.written["activation"]
        raise ConfigError(
            f"{path}: {key}={shown(activation)} is not supported; possible: {', '.join(possible)}"
        )
    section["activation"] = possible[activation]
    section |= {key: value for key, (value, _) in family.fixed.items()} | dict(family.read)
    for rule in family.rules:
        try:
            section |= rule.read(content, section)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
    return section


@dataclass(frozen=True)
class Strip:
    """Rows of one of our tensors that are rows of one of theirs (before any transposition)."""

    ours: str
    row: int
    theirs: str
    their_row: int
    n_rows: int


@dataclass(frozen=True)
class RowSource:
    """Rows of a tensor that is read, and where they go."""

    row: int
    name: str
    source_row: int
    n_rows: int


@dataclass(frozen=True)
class TensorMap:
    """All strips between the tensors of a model and those of a family."""

    strips: tuple[Strip, ...]
    our_shapes: Mapping[str, tuple[int, ...]]
    """Without rows that pad the vocabulary, with the biases that the family has."""
    their_shapes: Mapping[str, tuple[int, ...]]
    """As they lie in the file."""
    transposed: frozenset[str]
    """Names of theirs."""

    @staticmethod
    def of(family: Family, model: ModelConfig) -> TensorMap:
        """The map between a model and the family that expresses it."""
        biases = {key: True for key in ("bias", "qkv_bias") if key in family.not_needed}
        whole = model.model_copy(update={**biases, "vocab_multiple": 1})
        table = parameter_table(whole)
        strips = tuple(strip for spec in table for strip in _strips(family, whole, spec))
        specs = {spec.name: spec for spec in table}
        shapes: dict[str, tuple[int, ...]] = {}
        transposed = set()
        for strip in strips:
            spec = specs[strip.ours]
            n_rows = max(strip.their_row + strip.n_rows, shapes.get(strip.theirs, (0,))[0])
            shapes[strip.theirs] = (n_rows, *spec.shape[1:])
            if family.transposed and spec.is_block_matrix:
                transposed.add(strip.theirs)
        for name in transposed:
            shapes[name] = shapes[name][::-1]
        ours = {spec.name: spec.shape for spec in table}
        return TensorMap(strips, ours, shapes, frozenset(transposed))

    def to_theirs(self, weights: Weights) -> dict[str, LazyTensor]:
        """Their tensors by name, of ours; each region converted when it is asked for."""
        dtype = next(iter(weights.values())).dtype
        sources: dict[str, list[RowSource]] = {name: [] for name in self.their_shapes}
        for strip in self.strips:
            if strip.ours in weights:
                source = RowSource(strip.their_row, strip.ours, strip.row, strip.n_rows)
                sources[strip.theirs].append(source)

        def read(name: str, region: tuple[slice, ...]) -> torch.Tensor:
            return read_region(weights[name], region)

        return {
            name: _lazy(shape, dtype, sources[name], read, transposed=name in self.transposed)
            for name, shape in self.their_shapes.items()
        }

    def to_ours(
        self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> dict[str, LazyTensor]:
        """Our tensors by name in `dtype`, of theirs, complete and of the right shapes; each region
        converted when it is asked for."""
        sources: dict[str, list[RowSource]] = {name: [] for name in self.our_shapes}
        for strip in self.strips:
            source = RowSource(strip.row, strip.theirs, strip.their_row, strip.n_rows)
            sources[strip.ours].append(source)

        def read(name: str, region: tuple[slice, ...]) -> torch.Tensor:
            there = tensors[name]
            return (there.t() if name in self.transposed else there)[region]

        return {
            name: _lazy(shape, dtype, sources[name], read, transposed=False)
            for name, shape in self.our_shapes.items()
        }


def _lazy(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    sources: list[RowSource],
    read: Callable[[str, tuple[slice, ...]], torch.Tensor],
    *,
    transposed: bool,
) -> LazyTensor:
    return LazyTensor(
        shape, dtype, partial(_compute, dtype=dtype, sources=sources, read=read, turn=transposed)
    )


def _compute(
    region: tuple[slice, ...],
    *,
    dtype: torch.dtype,
    sources: list[RowSource],
    read: Callable[[str, tuple[slice, ...]], torch.Tensor],
    turn: bool,
) -> torch.Tensor:
    """A region of a tensor, put together from the rows of others; zero where there are none."""
    import torch

    rows, *others = region[::-1] if turn else region
    result = torch.zeros([each.stop - each.start for each in (rows, *others)], dtype=dtype)
    for source in sources:
        start, stop = max(rows.start, source.row), min(rows.stop, source.row + source.n_rows)
        if start < stop:
            shift = source.source_row - source.row
            found = read(source.name, (slice(start + shift, stop + shift), *others))
            result[start - rows.start : stop - rows.start] = found.to(dtype)
    return result.t().contiguous() if turn else result


def _strips(family: Family, model: ModelConfig, spec: ParameterSpec) -> Iterator[Strip]:
    """Where the rows of a parameter are in the family's tensors."""
    place, _, kind = spec.name.rpartition(".")  # `blocks.0.attention.qkv`, `weight`
    if spec.layer is None:
        name = family.head if place == "head" else f"{family.body}{family.names[place]}.{kind}"
        yield Strip(spec.name, 0, name, 0, spec.shape[0])
        return
    place = place.removeprefix(f"blocks.{spec.layer}.")
    prefix = f"{family.body}{family.layers}{spec.layer}."
    if place in family.names:
        yield Strip(spec.name, 0, f"{prefix}{family.names[place]}.{kind}", 0, spec.shape[0])
        return
    K, order = head_size(model), family.projections.order
    for row, (part, head) in enumerate(_projected(model, place)):
        match order:
            case "apart":
                names, there = family.projections.names[part], head
            case "parts":
                names, there = family.projections.names[0], part * model.n_heads + head
            case "heads":
                names, there = family.projections.names[0], 3 * head + part
        yield Strip(spec.name, row * K, f"{prefix}{names}.{kind}", there * K, K)


def _projected(model: ModelConfig, place: str) -> Iterator[tuple[int, int]]:
    """What each K rows of our projection are: 0 queries, 1 keys or 2 values, and of which head."""
    n_heads = {"attention.kv": n_kv_heads(model)}.get(place, model.n_heads)
    parts = {"attention.q": (0,), "attention.kv": (1, 2), "attention.qkv": (0, 1, 2)}[place]
    assert shares_kv_heads(model) or place == "attention.qkv"
    return ((part, head) for head in range(n_heads) for part in parts)
