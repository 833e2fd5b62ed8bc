"""GPT-2's config.json and parameters, and ours: each from the other; what does not fit is refused.

The keys of config.json and their defaults are those of `transformers.GPT2Config`.

GPT-2's linear layers are `Conv1D`: their weight is (n_in, n_out), ours (n_out, n_in). Its fused
attention projection holds all queries, then all keys, then all values, (3, H, K); ours goes head
by head, (H, 3, K), so that heads can be cut.

Shapes: D d_model, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.safetensors_writer import LazyTensor, materialize
from pentameter.config.choices import look_up
from pentameter.config.messages import shown
from pentameter.config.schema import ModelConfig, RopeScalingConfig
from pentameter.errors import ConfigError
from pentameter.planning.architecture import (
    ParameterSpec,
    embedding_dropout,
    feed_forward_width,
    parameter_table,
)

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.model_folder import Weights

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
"""Theirs → ours; of several that are one function the first is written."""

NOT_GPT2 = {
    "norm_position": ("pre", "GPT-2 normalises before each sub-layer"),
    "norm": ("layernorm", "GPT-2 has no RMSNorm"),
    "positions": ("learned", "GPT-2 learns its positions"),
    "embedding_scale": (False, "GPT-2 does not scale its embeddings"),
    "head_bias": (False, "GPT-2's output projection has no bias"),
    "n_kv_heads": (None, "GPT-2's heads share no keys and values"),
    "head_size": (None, "GPT-2's heads are d_model / n_heads wide"),
    "qk_norm": (None, "GPT-2 norms no queries and keys"),
    "sliding_window": (None, "GPT-2 attends to the whole context"),
    "sliding_window_pattern": (None, "as above"),
    "parallel_residual": (False, "GPT-2 adds one layer after the other"),
    "rope_theta": (10000.0, "GPT-2 turns no queries and keys"),
    "rotary_fraction": (1.0, "as above"),
    "rope_scaling": (RopeScalingConfig(), "as above"),
    "logit_softcap": (None, "GPT-2's logits are unbounded"),
}
"""Our key → the only value that GPT-2 can express, and why another is refused."""

WRITTEN = {
    "vocab_size": ("vocab_size", 50257),
    "context_length": ("n_positions", 1024),
    "n_layers": ("n_layer", 12),
    "n_heads": ("n_head", 12),
    "d_model": ("n_embd", 768),
    "d_ff": ("n_inner", None),
    "activation": ("activation_function", "gelu_new"),
    "tied_head": ("tie_word_embeddings", True),
    "dropout": ("resid_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
    "embedding_dropout": ("embd_pdrop", 0.1),
    "init_std": ("initializer_range", 0.02),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
}
"""Our key → theirs in config.json, and its default."""

_OTHER_NAMES = {
    "n_positions": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
}
"""Their key → another name that is read for it."""

NOT_NEEDED = {
    "vocab_multiple": "rows that pad the vocabulary are not written",
    "qkv_bias": "biases that are not here are written as zeros",
    "bias": "as above",
    "init": "how weights began that are written",
    "residual_init_scale": "as above",
}
"""Our keys that the weights alone express, or that say nothing of them, and why."""

NOT_OURS = {
    "scale_attn_weights": (True, "attention here is always scaled by 1/√(head size)"),
    "scale_attn_by_inverse_layer_idx": (False, "attention here is scaled alike in every layer"),
    "reorder_and_upcast_attn": (False, "attention here is computed in the step's own precision"),
    "add_cross_attention": (False, "there is no encoder to attend to"),
    "pruned_heads": ({}, "every layer here has all of its heads"),
    "quantization_config": (None, "quantised weights are not read; save it dequantised"),
}
"""Their key → its default, the only value that is read, and why another is refused."""


BODY = "transformer."
"""Before every name in a GPT2LMHeadModel, but the head's; absent in a GPT2Model."""
HEAD = "lm_head.weight"

_WHOLE = {
    "token_embedding": "wte",
    "position_embedding": "wpe",
    "final_norm": "ln_f",
}
_OF_A_LAYER = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def to_gpt2_config(
    model: ModelConfig, *, vocab_size: int, end_of_text: int | None, dtype: str
) -> dict[str, Any]:
    """The content of config.json for a model.

    vocab_size: rows of its embedding without padding. end_of_text: the tokenizer's id for it.
    dtype: of the weights (`float32`). Raises ConfigError, naming every key and value that GPT-2's
    architecture does not have.
    """
    wrong = [
        f"model.{key}={shown(getattr(model, key))} ({reason})"
        for key, (possible, reason) in NOT_GPT2.items()
        if getattr(model, key) != possible
    ]
    accounted = {*WRITTEN, *NOT_GPT2, *NOT_NEEDED}
    wrong += [
        f"model.{key}={shown(getattr(model, key))} (its config.json has no such key)"
        for key in type(model).model_fields
        if key not in accounted
    ]
    if wrong:
        raise ConfigError(
            f"a Hugging Face GPT-2 cannot express {'; '.join(wrong)}; `export --to safetensors` "
            "writes any model"
        )
    theirs = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{key: getattr(model, ours) for ours, (key, _) in WRITTEN.items()},
        "vocab_size": vocab_size,
        "n_inner": feed_forward_width(model),
        "activation_function": look_up(theirs, model.activation, "model.activation", "GPT-2"),
        "embd_pdrop": embedding_dropout(model),
        "scale_attn_weights": True,
        # Written even where there is none: absent, they would be GPT-2's own 50256.
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
        "torch_dtype": dtype,  # the name that old and new versions of transformers read
    }


def from_gpt2_config(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The model section, as yet unchecked, of what config.json (`path`, for messages) says.

    Biases are everywhere, as GPT-2 has them. Raises ConfigError for another architecture and for
    a setting that is not GPT-2's own.
    """
    kind = content.get("model_type")
    if kind != "gpt2":
        raise ConfigError(
            f"{path}: model_type={shown(kind)} is not supported; only GPT-2 folders "
            '(model_type "gpt2") are read'
        )
    for key, (default, reason) in NOT_OURS.items():
        value = content.get(key, default)
        if value not in (default, None):
            raise ConfigError(f"{path}: {key}={shown(value)} is not supported: {reason}")
    section = {
        ours: content.get(key, content.get(_OTHER_NAMES.get(key, key), default))
        for ours, (key, default) in WRITTEN.items()
    }
    activation, width = section["activation"], section["d_model"]
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ConfigError(
            f"{path}: activation_function={shown(activation)} is not supported; possible: "
            f"{', '.join(ACTIVATIONS)}"
        )
    section["activation"] = ACTIVATIONS[activation]
    if section["d_ff"] is None and isinstance(width, int):
        section["d_ff"] = 4 * width
    return {**section, "qkv_bias": True, "bias": True, "residual_init_scale": True}


@dataclass(frozen=True)
class Pair:
    """A parameter of ours and where GPT-2 keeps it."""

    ours: ParameterSpec
    theirs: str
    """Its name in a GPT2LMHeadModel."""
    n_heads: int | None
    """Of the fused attention projection, whose rows they order otherwise."""

    @property
    def is_transposed(self) -> bool:
        """True for the weight of a linear layer within a block."""
        return self.ours.layer is not None and len(self.ours.shape) == 2

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape there."""
        return self.ours.shape[::-1] if self.is_transposed else self.ours.shape

    def to_theirs(self, source: torch.Tensor | LazyTensor) -> torch.Tensor:
        """Our tensor as GPT-2 has it; padded rows of the vocabulary are left out."""
        tensor = materialize(source)
        if self.ours.axes[0] == "vocab":
            tensor = tensor[: self.ours.shape[0]]
        if self.n_heads is not None:
            tensor = tensor.unflatten(0, (self.n_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return (tensor.t() if self.is_transposed else tensor).contiguous()

    def to_ours(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """GPT-2's tensor as we have it, in `dtype`."""
        tensor = tensor.to(dtype)
        tensor = tensor.t() if self.is_transposed else tensor
        if self.n_heads is not None:
            tensor = tensor.unflatten(0, (3, self.n_heads, -1)).transpose(0, 1).flatten(0, 2)
        return tensor.contiguous()


def pairs(model: ModelConfig) -> Iterator[Pair]:
    """Every parameter that the GPT-2 of this architecture has: with all biases, without padding."""
    whole = model.model_copy(update={"bias": True, "qkv_bias": True, "vocab_multiple": 1})
    for spec in parameter_table(whole):
        place, _, kind = spec.name.rpartition(".")  # `blocks.0.attention.qkv`, `weight`
        if spec.layer is None:
            name = HEAD if place == "head" else f"{BODY}{_WHOLE[place]}.{kind}"
            yield Pair(spec, name, None)
        else:
            place = place.removeprefix(f"blocks.{spec.layer}.")
            name = f"{BODY}h.{spec.layer}.{_OF_A_LAYER[place]}.{kind}"
            yield Pair(spec, name, model.n_heads if place == "attention.qkv" else None)


def to_gpt2(model: ModelConfig, weights: Weights) -> dict[str, LazyTensor]:
    """GPT-2's tensors by name, each converted when it is asked for.

    A bias that our model does not have is zero there, which changes no result.
    """
    import torch

    dtype = next(iter(weights.values())).dtype
    converted = {}
    for pair in pairs(model):
        source = weights.get(pair.ours.name)
        if source is None:
            compute = partial(torch.zeros, pair.their_shape, dtype=dtype)
        else:
            compute = partial(pair.to_theirs, source)
        converted[pair.theirs] = LazyTensor(pair.their_shape, dtype, compute)
    return converted


def from_gpt2(
    model: ModelConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, LazyTensor]:
    """Our tensors by name in `dtype`, each converted when it is asked for.

    tensors: GPT-2's, complete and of the right shapes, named as in a GPT2LMHeadModel.
    """
    return {
        pair.ours.name: LazyTensor(
            pair.ours.shape, dtype, partial(pair.to_ours, tensors[pair.theirs], dtype)
        )
        for pair in pairs(model)
    }
