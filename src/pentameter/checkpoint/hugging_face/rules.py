"""Conversion rules for keys in config.json that several `[model]` keys decide, or that must be
computed: attention windows by layer, switches for biases. The files in `families/` assign rules to
families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pentameter.config.messages import shown
from pentameter.config.schema import ModelConfig

Content = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """A conversion for some `[model]` keys (`keys`): `write` and `read` translate between a model's
    configuration and config.json. Both raise ValueError, naming keys and values, for settings that
    the other side cannot express."""

    keys: tuple[str, ...]
    write: Callable[[ModelConfig], dict[str, Any]] = lambda _model: {}
    """Function from the model section to entries for config.json."""
    read: Callable[[Content, Content], dict[str, Any]] = lambda _content, _section: {}
    """Function from config.json's content, and the model section as far as the family's tables give
    it, to values for `keys`."""


def _layer_types(model: ModelConfig) -> list[str]:
    """List `sliding_attention` or `full_attention` for each layer."""
    layers = map(model.attention.has_window, range(model.n_layers))
    return ["sliding_attention" if has_window else "full_attention" for has_window in layers]


def _write_windows(model: ModelConfig) -> dict[str, Any]:
    types = _layer_types(model)
    first = types.index("sliding_attention") if "sliding_attention" in types else len(types)
    return {
        "use_sliding_window": model.attention.sliding_window is not None,
        "sliding_window": model.attention.sliding_window,
        # Programs that do not know `layer_types` have windows in all layers from here on.
        "max_window_layers": 0 if "full_attention" in types[first:] else first,
        "layer_types": types,
    }


def _read_windows(
    content: Content, section: Content, *, has_window: Callable[[int, int], bool]
) -> dict[str, Any]:
    """Read `sliding_window` and `sliding_window_pattern` from config.json (`content`), and return
    them. If it does not list each layer's kind (`layer_types`), `has_window(layer,
    max_window_layers)` says whether a layer has a window. Raises ValueError for other kinds."""
    size = content.get("sliding_window", 4096) if content.get("use_sliding_window") else None
    n = content.get("max_window_layers", 28)
    if type(n) is not int:
        raise ValueError(f"max_window_layers={shown(n)} is not a number of layers")
    return _windows(content, section, size, lambda layer: has_window(layer, n))


def _windows(
    content: Content, section: Content, size: int | None, has_window: Callable[[int], bool]
) -> dict[str, Any]:
    """Return `sliding_window` and `sliding_window_pattern` for windows of `size` tokens (None:
    none) in the layers that config.json lists, or else in those for which `has_window` is true.
    Raises ValueError for other kinds of layers, and for windows without a size."""
    n_layers = section["n_layers"]
    key, types = "layer_types", content.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise ValueError(f"{key}={shown(types)} is not a list of words, one for each layer")
    if types is None:
        key = "max_window_layers"
        types = [
            "sliding_attention" if size is not None and has_window(layer) else "full_attention"
            for layer in range(n_layers)
        ]
    whole = [layer for layer, kind in enumerate(types) if kind == "full_attention"]
    are_known = len(types) == n_layers and all(
        kind in ("full_attention", "sliding_attention") for kind in types
    )
    if not are_known or (size is None and len(whole) < n_layers):
        raise ValueError(
            f"{key}={shown(content.get(key))} with sliding_window={shown(size)} is not supported: "
            f"each of {n_layers} layers has a window of so many tokens (sliding_attention) or sees "
            "the whole context (full_attention)"
        )
    if len(whole) == n_layers:
        return {"attention.sliding_window": None, "attention.sliding_window_pattern": None}
    return {
        "attention.sliding_window": size,
        "attention.sliding_window_pattern": layers_in_short(whole, n_layers),
    }


def layers_in_short(layers: Sequence[int], n_layers: int) -> int | tuple[int, ...] | None:
    """Return the value that names these `layers`, in order, of `n_layers` in a key that names
    layers: a number if they are every so many, else a tuple; None without any."""
    if not layers:
        return None
    every = layers[0] + 1
    return every if list(layers) == [*range(every - 1, n_layers, every)] else tuple(layers)


LAYERS_WITH_A_WINDOW = Rule(
    ("attention.sliding_window", "attention.sliding_window_pattern"),
    _write_windows,
    partial(_read_windows, has_window=lambda layer, n: layer >= n),
)
"""Rule for attention windows. If config.json does not list each layer's kind, the layers from
`max_window_layers` on have a window."""
EVERY_OTHER_WITH_A_WINDOW = Rule(
    LAYERS_WITH_A_WINDOW.keys,
    _write_windows,
    partial(_read_windows, has_window=lambda layer, n: layer < n and layer % 2 == 0),
)
"""Rule like LAYERS_WITH_A_WINDOW, but without a list every other layer below `max_window_layers`
has a window."""


def _write_alternating(model: ModelConfig) -> dict[str, Any]:
    size = model.attention.sliding_window
    return {  # their code asks for a size, also where no layer has a window
        "sliding_window": model.context_length if size is None else size,
        "layer_types": _layer_types(model),
    }


def _read_alternating(
    content: Content, section: Content, *, size: int, every: int, key: str | None = None
) -> dict[str, Any]:
    """Return `sliding_window`, by default of `size` tokens, and `sliding_window_pattern`. If
    config.json does not list each layer's kind, every `every`th layer has no window, or as many as
    its key `key` says."""
    n = every if key is None else content.get(key, every)
    if type(n) is not int or n < 1:
        raise ValueError(f"{key}={shown(n)} is not a number of layers")
    size = content.get("sliding_window", size)
    return _windows(content, section, size, lambda layer: (layer + 1) % n != 0)


ALTERNATING_WINDOWS = Rule(
    LAYERS_WITH_A_WINDOW.keys, _write_alternating, partial(_read_alternating, size=128, every=2)
)
"""Rule for a family without a switch for windows. If config.json does not list each layer's kind,
every other layer has a window of 128 tokens, beginning with the first."""
LONG_ALTERNATING_WINDOWS = Rule(
    LAYERS_WITH_A_WINDOW.keys, _write_alternating, partial(_read_alternating, size=4096, every=2)
)
"""Rule like ALTERNATING_WINDOWS, but with windows of 4096 tokens."""
WINDOWS_IN_FIVE_OF_SIX = Rule(
    LAYERS_WITH_A_WINDOW.keys,
    _write_alternating,
    partial(_read_alternating, size=4096, every=6, key="sliding_window_pattern"),
)
"""Rule like LONG_ALTERNATING_WINDOWS, but without a list every sixth layer has no window, or every
`sliding_window_pattern`th."""


def _rotating_layers(content: Content, section: Content) -> list[bool]:
    """List whether each layer rotates queries and keys: as `no_rope_layers` says, which has a 0 for
    a layer that does not, or else all but every `no_rope_layer_interval`th. Raises ValueError for
    what is no such list or number."""
    n_layers, listed = section["n_layers"], content.get("no_rope_layers")
    every = content.get("no_rope_layer_interval", 4)
    if type(every) is not int or every < 1:
        raise ValueError(f"no_rope_layer_interval={shown(every)} is not a number of layers")
    if listed is None:
        return [(layer + 1) % every != 0 for layer in range(n_layers)]
    if not isinstance(listed, list) or len(listed) < n_layers:
        raise ValueError(f"no_rope_layers={shown(listed)} does not have 0 or 1 for each layer")
    return [bool(rotates) for rotates in listed[:n_layers]]


def _write_nope(model: ModelConfig) -> dict[str, Any]:
    rotating = [int(model.rotates_by(layer) is not None) for layer in range(model.n_layers)]
    return {"no_rope_layers": rotating}


def _read_nope(content: Content, section: Content) -> dict[str, Any]:
    rotating = _rotating_layers(content, section)
    still = [layer for layer, rotates in enumerate(rotating) if not rotates]
    return {"nope_layers": layers_in_short(still, len(rotating))}


NOPE_LAYERS = Rule(("nope_layers",), _write_nope, _read_nope)
"""Rule for a family in which some layers rotate no queries and keys."""


def _read_windows_without_rope(content: Content, section: Content) -> dict[str, Any]:
    size = content.get("sliding_window") if content.get("use_sliding_window") else None
    rotating = _rotating_layers(content, section)
    return _windows(content, section, size, lambda layer: not rotating[layer])


WINDOWS_WITHOUT_ROPE = Rule(LAYERS_WITH_A_WINDOW.keys, _write_windows, _read_windows_without_rope)
"""Rule like LAYERS_WITH_A_WINDOW, but without a list the layers that rotate nothing have a
window."""
ONE_SWITCH_FOR_WINDOWS = Rule(
    ("attention.sliding_window",),
    lambda model: {
        "use_sliding_window": model.attention.sliding_window is not None,
        "sliding_window": model.attention.sliding_window,
    },
    lambda content, _section: {
        "attention.sliding_window": content.get("sliding_window", 4096)
        if content.get("use_sliding_window")
        else None
    },
)
"""Rule for a family in which all layers have a window or none has."""


def _read_score_bound(content: Content, section: Content) -> dict[str, Any]:
    bound = content.get("attn_logit_softcapping", 50.0)
    if bound is not None:
        raise ValueError(
            f"attn_logit_softcapping={shown(bound)} is not supported: attention scores are not "
            "bounded here, as no fused kernel of PyTorch does that"
        )
    return {}


SCORES_WITHOUT_BOUND = Rule((), lambda _model: {"attn_logit_softcapping": None}, _read_score_bound)
"""Rule for a family that may bound its attention scores, and does unless config.json says null."""


def _write_attention_biases(model: ModelConfig) -> dict[str, Any]:
    if model.attention.qkv_bias != model.out_bias:
        raise ValueError(
            f"model.attention.qkv_bias={shown(model.attention.qkv_bias)} beside "
            f"model.attention.out_bias={shown(model.out_bias)} (attention's four projections have "
            "a bias all or none)"
        )
    return {"attention_bias": model.out_bias}


def _read_biases(content: Content, section: Content) -> dict[str, Any]:
    """Return the biases of attention, and with `mlp_bias` of the feed-forward layer. What follows
    by default, the output projection's from the feed-forward layer's, is left out."""
    attention, mlp = content.get("attention_bias", False), content.get("mlp_bias", False)
    out = None if attention == mlp else attention
    return {"attention.qkv_bias": attention, "attention.out_bias": out, "bias": mlp}


def _read_attention_biases(content: Content, section: Content) -> dict[str, Any]:
    bias = content.get("attention_bias", False)
    return {"attention.qkv_bias": bias, "attention.out_bias": bias if bias else None}


ATTENTION_BIASES = Rule(
    ("attention.qkv_bias", "attention.out_bias"), _write_attention_biases, _read_attention_biases
)
"""Rule for a family in which all four projections of attention have a bias or none has, whatever
the feed-forward layer has."""
ATTENTION_AND_MLP_BIASES = Rule(
    (*ATTENTION_BIASES.keys, "bias"),
    lambda model: {**_write_attention_biases(model), "mlp_bias": model.bias},
    _read_biases,
)
"""Rule like ATTENTION_BIASES, with a second switch for the feed-forward layer."""


def _refuse_odd_width(model: ModelConfig) -> dict[str, Any]:
    if model.d_model % model.attention.n_heads:
        raise ValueError(
            f"model.d_model={model.d_model} beside model.attention.n_heads="
            f"{model.attention.n_heads} (the width must be a multiple of the heads, even where "
            "heads have a size of their own)"
        )
    return {}


HEADS_DIVIDE_WIDTH = Rule((), _refuse_odd_width)
"""Rule that refuses a model whose d_model is not a multiple of its number of heads."""

CONTEXT_BY_ITS_OLD_NAME = Rule((), lambda model: {"n_ctx": model.context_length})
"""Rule that also writes `n_ctx`, GPT-2's first name for n_positions, because llama.cpp's converter
asks for it."""


def _read_every_head(content: Content, section: Content) -> dict[str, Any]:
    n_heads, n_kv_heads = section["attention.n_heads"], content.get("num_key_value_heads")
    if n_kv_heads not in (None, n_heads):
        raise ValueError(
            f"num_key_value_heads={shown(n_kv_heads)} beside num_attention_heads={shown(n_heads)} "
            "is not supported: latent attention computes keys and values for each head"
        )
    return {"attention.n_kv_heads": None}


EVERY_HEAD_HAS_KEYS = Rule(
    ("attention.n_kv_heads",),
    lambda model: {"num_key_value_heads": model.attention.n_heads},
    _read_every_head,
)
"""Rule for latent attention: all heads read one latent, but each computes its own keys and values
from it, so there is no choice of KV heads."""
