"""The description of a Hugging Face architecture ("family"): its differences from a decoder like
Llama. "Their" names are those in `transformers`.

Whatever a table cannot express (one key in config.json that several `[model]` keys decide) is a
`Rule` in `rules.py`, `expert_rules.py` or `rotary_rules.py`. The families themselves are in
`families/`; `config_json.py` and, for tensors, `tensor_map.py` apply their tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.hugging_face.rules import Rule
from pentameter.config.model.rope_scaling import RopeScalingConfig

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Activation name in config.json → pentameter's. If several names denote one function, the first is
written."""
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
"""Activation name in config.json → pentameter's, for a feed-forward layer with a gate."""


@dataclass(frozen=True)
class StoredForm:
    """The names, shapes and kinds of all tensors that a model folder must have."""

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
    values, rows (3, H, K) with H heads and K channels per head. `heads`: one tensor, head by head,
    rows (H, 3, K). `latent`: the three tensors of latent attention that compute rotated channels:
    queries from the stream, queries from a latent (a model has one of these two), and the keys' and
    values' latent with the rotated key. Rotated channels are pairs of neighbors there.
    """

    names: tuple[str, ...]
    order: Literal["apart", "parts", "heads", "latent"]


AS_ABOVE = "as above"
"""Placeholder for the same reason as in the table's previous entry."""

NEUTRAL: Mapping[str, tuple[Any, str]] = {
    "norm_position": ("pre", "{} normalises before each sub-layer"),
    "norm": ("rmsnorm", "{} has RMSNorm only"),
    "positions": ("rotary", "{} turns queries and keys by their position"),
    "rope_theta": (10000.0, "{} turns no queries and keys"),
    "rope_scaling": (RopeScalingConfig(), AS_ABOVE),
    "rotary_fraction": (1.0, "{} turns all channels of a head"),
    "embedding_scale": (False, "{} does not scale its embeddings"),
    "head_bias": (False, "{}'s output projection has no bias"),
    "attention.qkv_bias": (False, "{} is written without biases"),
    "bias": (False, AS_ABOVE),
    "attention.n_kv_heads": (None, "{}'s heads share no keys and values"),
    "attention.head_size": (None, "{}'s heads are d_model / n_heads wide"),
    "attention.qk_norm": (None, "{} norms no queries and keys"),
    "attention.sliding_window": (None, "{} attends to the whole context"),
    "attention.sliding_window_pattern": (None, AS_ABOVE),
    "parallel_residual": (False, "{} adds one layer after the other"),
    "logit_softcap": (None, "{}'s logits are unbounded"),
    **dict.fromkeys(
        ("experts.count", "experts.per_token", "experts.width"), (None, "{} has no experts")
    ),
    "experts.dense_layers": (0, "{} has no experts"),
    "experts.n_shared": (0, "{} has no shared experts"),
    "experts.shared_gate": (False, "{} has no shared experts"),
    "router.score_function": ("softmax", "{} has no router of sigmoids"),
    **dict.fromkeys(("router.renormalize", "router.top_k_first"), (False, "{} has no experts")),
    "router.scale": (1.0, "{} does not scale a router's scores"),
    "router.bias": (False, "{} has no router with a bias"),
    **dict.fromkeys(
        ("router.groups", "router.open_groups"), (None, "{} forms no groups of experts")
    ),
    "router.group_scores": (2, "{} forms no groups of experts"),
    "experts.capacity": (None, "{} leaves out no token"),
}
"""pentameter key → (the only value that a family can express unless its description has the key,
the reason for refusing another)."""

NOT_WRITTEN = {
    "vocab_multiple": "rows that pad the vocabulary are not written",
    "dropout": "acts in training only, and theirs has no such dropout",
    "embedding_dropout": "as above",
    "init": "how weights began that are written",
    "residual_init_scale": "as above",
    "router.balance": "acts in training only, but for `bias`, which rules refuse",
    **dict.fromkeys(
        ("router.balance_rate", "router.balance_weight", "router.z_loss"), "acts in training only"
    ),
}
"""pentameter key that does not affect written weights → why not. A family may write it
nevertheless."""

NAMES = {
    "token_embedding": "embed_tokens",
    "final_norm": "norm",
    "attention_norm": "input_layernorm",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "experts_norm": "post_attention_layernorm",
    "experts.router": "mlp.gate",
    "experts.gate": "mlp.experts.{expert}.gate_proj",
    "experts.up": "mlp.experts.{expert}.up_proj",
    "experts.down": "mlp.experts.{expert}.down_proj",
    "experts.shared.gate": "mlp.shared_expert.gate_proj",
    "experts.shared.up": "mlp.shared_expert.up_proj",
    "experts.shared.down": "mlp.shared_expert.down_proj",
    "experts.shared_gate": "mlp.shared_expert_gate",
}
"""pentameter module → its name in a decoder like Llama, inside and outside a layer. `{expert}`
stands for an expert's number."""

STACKED = {
    "experts.router.weight": "mlp.gate.weight",
    "experts.gate.weight": "mlp.experts.gate_up_proj",
    "experts.up.weight": "mlp.experts.gate_up_proj",
    "experts.down.weight": "mlp.experts.down_proj",
}
"""pentameter parameter of experts → its tensor's name in folders with the layout that
`transformers` 5 has in memory: one tensor for all experts, (E experts, outputs, inputs). If two
parameters have the same name, each expert's matrix holds the first one's rows, then the second
one's."""


@dataclass(frozen=True)
class Family:
    """Description of a Hugging Face architecture, as tables. What they do not mention is as in a
    decoder like Llama: its tensor names are the defaults, and NEUTRAL and NOT_WRITTEN give the
    other keys."""

    label: str
    """Its name in messages, such as `Llama`."""
    architecture: str
    """The class in `transformers`, such as `LlamaForCausalLM`."""
    written: Mapping[str, tuple[str, Any]]
    """pentameter key → (key in config.json, its value there if the key is absent)."""
    rules: tuple[Rule, ...] = ()
    """Conversions for keys that no table can express."""
    differs: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Replacements for entries in NEUTRAL."""
    read: Mapping[str, bool | str] = field(default_factory=dict)
    """pentameter key that config.json lacks and only the weights express → the value it gets for
    weights that are read. If it has an entry for a key about biases, or for `balance`, then biases
    that a model lacks are written as zeros."""
    not_ours: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Key in config.json that pentameter does not have → (the only value that is accepted, which is
    its default; the reason for refusing another)."""
    activations: Mapping[str, str] = field(default_factory=GATED_ACTIVATIONS.copy)
    """Activation name in config.json → pentameter's."""
    body: str = "model."
    """Prefix of every tensor name except the head's. Folders of the model without its head lack
    it."""
    layers: str = "layers."
    """Prefix before a layer's number."""
    head: str = "lm_head.weight"
    """Name of the output projection's weight."""
    names: Mapping[str, str] = field(default_factory=NAMES.copy)
    """pentameter module (`attention.out`) → the family's (`self_attn.o_proj`), inside and outside a
    layer; or parameter → tensor. If a name contains `{expert}`, an expert's number, each expert's
    matrix is a tensor by itself; if not, all experts of a layer are in one tensor, (E experts,
    outputs, inputs)."""
    stacked: Mapping[str, str] = field(default_factory=dict)
    """Names as in `STACKED`, if folders of this family may also hold a layer's experts in common
    tensors; else empty."""
    projections: Projections = Projections(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "apart"
    )
    """Tensors with the queries', keys' and values' rows."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Key in config.json → a second name under which it is read."""
    transposed: bool = False
    """True if a layer's matrices are stored as (n_in, n_out), the transpose of pentameter's."""
    extra_layers: tuple[str, int] | None = None
    """(Key in config.json, default) for the number of layers for multi-token prediction that a
    folder may hold behind the model's own; they are not read. None if the family has none."""
    packing: Packing | None = None
    """Computes a folder's tensors from those that `names` describes, and back; None if folders
    store exactly those."""
    quantizations: tuple[str, ...] = ("fp8",)
    """Values for `quant_method` in config.json that are read; weights are dequantised."""
    passed_over: str = r"layers\.\d+\.(self_attn|attention)\.rotary_emb\.inv_freq"
    """Pattern for names of tensors, without `body`, that old versions stored and that are not
    read."""

    @property
    def stacks_experts(self) -> bool:
        """True if `names` has one tensor for all experts of a layer."""
        return "{expert}" not in self.names["experts.gate"]

    @cached_property
    def not_needed(self) -> frozenset[str]:
        """pentameter keys that config.json does not hold: only the weights express them, or they do
        not affect written weights."""
        return frozenset(NOT_WRITTEN.keys() - self.written.keys() | self.read.keys())

    @cached_property
    def fixed(self) -> Mapping[str, tuple[Any, str]]:
        """pentameter key → (the only value that the family can express, the reason for refusing
        another)."""
        of_rules = {key for rule in self.rules for key in rule.keys}
        elsewhere = {*self.written, *self.not_needed, *of_rules}
        return {
            key: (value, reason.format(self.label))
            for key, (value, reason) in {**NEUTRAL, **self.differs}.items()
            if key not in elsewhere
        }
