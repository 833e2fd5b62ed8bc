"""The description of a Hugging Face architecture ("family"): its differences from a decoder like
Llama. "Their" names are those in `transformers`.

Whatever a table cannot express (one key in config.json that several `[model]` keys decide) is a
`Rule` in `rules.py`, `expert_rules.py` or `rotary_rules.py`. The families themselves are in
`families/`, a TOML file each; `config_json.py` and, for tensors, `tensor_map.py` apply their
tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.hugging_face.rules import Rule


@dataclass(frozen=True)
class StoredForm:
    """The tensors that a model folder must have: the name and shape of each, and whether it holds
    bytes or floating-point numbers."""

    shapes: Mapping[str, tuple[int, ...]]
    """Name → shape."""
    in_bytes: frozenset[str]
    """Names of tensors that hold bytes (uint8); the others hold floating-point numbers."""


@dataclass(frozen=True)
class Packing:
    """Three functions for a family whose folders do not store its parameters as they are, but
    tensors computed from them: several parameters in one tensor, for example, or numbers in 4 bits.
    "Parameters" are the tensors that the family's tables of names describe."""

    pack: Callable[[Mapping[str, LazyTensor]], dict[str, LazyTensor]]
    """Function from parameters, by name, to the tensors of a folder."""
    unpack: Callable[[Mapping[str, LazyTensor], Iterable[str]], dict[str, LazyTensor]]
    """Function from the tensors of a folder, and the names of the parameters wanted, to these
    parameters."""
    form_of: Callable[[Mapping[str, tuple[int, ...]], Iterable[str]], StoredForm]
    """Function from the parameters' shapes, and the names of the tensors that a folder has, to the
    tensors that it must have."""


@dataclass(frozen=True)
class Projections:
    """Names of the tensors that hold the query, key and value projections (three, or a single one),
    and the order of their rows.

    `apart`: three tensors, head by head. `parts`: one tensor, all queries, then all keys, then all
    values, rows (H + 2 G, K) with H heads, G KV heads and K channels per head. `heads`: one tensor,
    head by head, rows (H, 3, K). `latent`: the three tensors of latent attention that compute
    rotated channels: queries from the stream, queries from a latent (a model has one of these two),
    and the keys' and values' latent with the rotated key. Rotated channels are pairs of neighbors
    there.
    """

    names: Sequence[str]
    order: Literal["apart", "parts", "heads", "latent"]


@dataclass(frozen=True)
class Family:
    """The correspondence of one architecture of Hugging Face (a model family such as Llama) to
    `[model]`, as tables: names of tensors, keys of config.json. Each file in `families/` says how
    its family differs from Llama."""

    label: str
    """Its name in messages, such as `Llama`."""
    architecture: str
    """The class in `transformers`, such as `LlamaForCausalLM`."""
    written: Mapping[str, tuple[str, Any]]
    """pentameter key → (key in config.json, its value there if the key is absent)."""
    neutral: Mapping[str, tuple[Any, str]]
    """pentameter key → (the only value that the family can express, unless it writes the key or has
    a rule for it; the reason for refusing another, with {} for `label`)."""
    not_written: Mapping[str, str]
    """pentameter key that does not affect written weights → why not. A family may write it none the
    less."""
    not_ours: Mapping[str, tuple[Any, str]]
    """Key in config.json that pentameter does not have → (the only value that is accepted, which is
    its default; the reason for refusing another)."""
    activations: Mapping[str, str]
    """Activation name in config.json → pentameter's."""
    body: str
    """Prefix of every tensor name except the head's. Folders of the model without its head lack
    it."""
    layers: str
    """Prefix before a layer's number."""
    head: str
    """Name of the output projection's weight."""
    names: Mapping[str, str]
    """pentameter module (`attention.out`) → the family's (`self_attn.o_proj`), inside and outside a
    layer; or parameter → tensor. Modules of a layer with the same name lie in one tensor, one's
    rows after the other's, in the table's order. If a name contains `{expert}`, an expert's number,
    each expert's matrix is a tensor by itself; if not, all experts of a layer are in one tensor, (E
    experts, outputs, inputs)."""
    stacked: Mapping[str, str]
    """pentameter parameter of experts → its tensor's name in folders with the layout that
    `transformers` 5 has in memory: one tensor for all experts, (E experts, outputs, inputs). If two
    parameters have the same name, each expert's matrix holds the first one's rows, then the second
    one's."""
    projections: Projections
    """Tensors with the queries', keys' and values' rows."""
    quantizations: Sequence[str]
    """Values for `quant_method` in config.json that are read; weights are dequantised."""
    passed_over: str
    """Pattern for names of tensors, without `body`, that old versions stored and that are not
    read."""
    rules: Sequence[Rule]
    """Conversions for keys that no table can express."""
    packing: Packing | None
    """Computes a folder's tensors from those that `names` describes, and back; None if folders
    store exactly those."""
    read: Mapping[str, bool | str] = field(default_factory=dict)
    """pentameter key that config.json lacks and only the weights express → the value it gets for
    weights that are read. If it has an entry for a key about biases, or for `balance`, then biases
    that a model lacks are written as zeros."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Key in config.json → a second name under which it is read."""
    transposed: bool = False
    """True if a layer's matrices are stored as (n_in, n_out), the transpose of pentameter's."""
    may_stack: bool = False
    """True if folders may also hold a layer's experts in common tensors, by the names in
    `stacked`."""
    extra_layers: Sequence[Any] | None = None
    """(Key in config.json, default) for the number of layers for multi-token prediction that a
    folder may hold behind the model's own; they are not read. None if the family has none."""

    @property
    def stacks_experts(self) -> bool:
        """True if `names` has one tensor for all experts of a layer."""
        return "{expert}" not in self.names["experts.gate"]

    @cached_property
    def not_needed(self) -> frozenset[str]:
        """The `[model]` keys that a config.json of this family need not hold, because the weights
        alone express them, or because they do not affect written weights."""
        return frozenset(self.not_written.keys() - self.written.keys() | self.read.keys())

    @cached_property
    def fixed(self) -> Mapping[str, tuple[Any, str]]:
        """pentameter key → (the only value that the family can express, the reason for refusing
        another)."""
        of_rules = {key for rule in self.rules for key in rule.keys}
        elsewhere = {*self.written, *self.not_needed, *of_rules}
        return {
            key: (value, reason.format(self.label))
            for key, (value, reason) in self.neutral.items()
            if key not in elsewhere
        }
