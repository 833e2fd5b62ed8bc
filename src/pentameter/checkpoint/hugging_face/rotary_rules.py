"""Conversion rules for rotary positions: config.json has them in one object, `rope_parameters`, or
in the keys of earlier versions. The files in `families/` assign rules to families."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from pentameter.checkpoint.hugging_face.rules import Content, Rule
from pentameter.config.messages import shown
from pentameter.config.model.rope_scaling import RopeScalingConfig
from pentameter.config.schema import ModelConfig
from pentameter.config.tables import packaged_table

_ORIGINAL, _LONGEST = "original_max_position_embeddings", "max_position_embeddings"
"""Keys of config.json for the length of context before it was extended, and now."""
_EXTENDED = "max_sequence_length"
"""Key of our own in config.json, which transformers passes over: the tokens to which `dynamic`
scaling extends the context, where they are not `factor` times the original ones."""
_SHARPENING = ("attention_factor", "mscale", "mscale_all_dim")
"""Keys for YaRN's factors of queries, keys and scores. They are read together, because each one's
meaning depends on the others."""


@cache
def _forms() -> dict[str, Any]:
    """Return what `rope_scaling.toml` says of the forms of scaling: `keys` (type → its keys in
    `model.rope_scaling`), `names` (key → its name in config.json) and `defaults` there."""
    return packaged_table("checkpoint/hugging_face/rope_scaling.toml")


@dataclass(frozen=True)
class _Form:
    """The form in which a family's config.json has rotary positions: the arguments of
    `rotary_rule`."""

    partly: bool = False
    fraction: float = 0.25
    former_names: Sequence[str] = ("rotary_emb_base", "rotary_pct")
    theta: float = 10000.0
    window_theta: float | None = None
    scaling: Content | None = None
    scales_scores: bool = False
    types: Sequence[str] | None = None


def _write_rope(model: ModelConfig, *, form: _Form) -> dict[str, Any]:
    """Return the entries of config.json for rotary positions, twice: in the form for transformers 5
    (`rope_parameters`) and for earlier versions. Raises ValueError for a type of scaling that the
    family does not have."""
    scaling, partly = model.rope_scaling, form.partly
    name = scaling.type or "default"
    if form.types is not None and name not in form.types:
        raise ValueError(
            f"model.rope_scaling.type={shown(scaling.type)} (possible: {', '.join(form.types)})"
        )
    values = {_forms()["names"][key]: getattr(scaling, key) for key in _forms()["keys"][name]}
    lengths = {}
    if scaling.type == "yarn":
        values |= _write_sharpening(scaling)
    if scaling.type == "longrope":
        values |= _write_longrope(model)
        lengths = {_ORIGINAL: scaling.original_context_length}  # where Phi-3 has it
    if scaling.type == "dynamic":  # there it begins behind the longest context
        original = scaling.original_context_length
        lengths = {_LONGEST: original}
        if model.context_length != _longest(scaling.factor, original):
            lengths[_EXTENDED] = model.context_length
    fraction = {"partial_rotary_factor": model.rotary_fraction} if partly else {}
    former = dict(zip(form.former_names, (model.rope_theta, model.rotary_fraction), strict=True))
    return {
        **lengths,
        **(former if partly else {"rope_theta": model.rope_theta}),
        "rope_scaling": {"rope_type": name, "type": name, **values} if values else None,
        "rope_parameters": {
            "rope_type": name,
            "rope_theta": model.rope_theta,
            **fraction,
            **values,
        },
    }


def _write_longrope(model: ModelConfig) -> dict[str, Any]:
    """Return both lists of factors, and the factor of queries and keys if it is given."""
    scaling, n = model.rope_scaling, model.turning_channels // 2
    values: dict[str, Any] = {
        "short_factor": list(scaling.short_factors or (1.0,) * n),
        "long_factor": list(scaling.long_factors or (scaling.factor,) * n),
    }
    if scaling.attention_factor is not None:
        values["attention_factor"] = scaling.attention_factor
    return values


def _write_sharpening(scaling: RopeScalingConfig) -> dict[str, float]:
    """Return YaRN's factors in config.json's form. There `mscale` acts only together with
    `mscale_all_dim`, and `attention_factor` is left out if it follows from the other values."""
    values = {}
    if scaling.mscale_all_dim:
        values = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    is_left_out = scaling.mscale != 1.0 and not values
    if scaling.attention_factor is not None or is_left_out:
        values["attention_factor"] = scaling.rotation_factor
    return values


def _read_rope(content: Content, section: Content, *, form: _Form) -> dict[str, Any]:
    """Return `rope_theta`, `rope_scaling` and, if the family rotates a part of each head,
    `rotary_fraction` from config.json, in the form for transformers 5 or for an earlier version.
    Raises ValueError for a type or key that is not supported."""
    partly, theta = form.partly, form.theta
    where = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    found = content.get(where) or form.scaling or {}
    if not isinstance(found, dict):
        raise ValueError(f"{where}={shown(found)} is not an object")
    theirs = found.get("rope_type", found.get("type", "default"))
    names, keys = _forms()["names"], _forms()["keys"]
    theirs = _forms()["former"].get(theirs, theirs) if isinstance(theirs, str) else theirs
    possible = keys if form.types is None else form.types
    if not isinstance(theirs, str) or theirs not in possible:
        raise ValueError(
            f"{where}: rope_type={shown(theirs)} is not supported; possible: {', '.join(possible)}"
        )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SHARPENING}
    if unknown := sorted(found.keys() - known - {*names.values()}):
        raise ValueError(f"{where}: {unknown[0]}={shown(found[unknown[0]])} is not supported")
    values: dict[str, Any] = {"type": None if theirs == "default" else theirs}
    presets = {**_forms()["defaults"], **_lengths(content, section, found, theirs)}
    for key in keys[theirs]:
        name, preset = names[key], presets.get(key)
        values[key] = preset if found.get(name) is None else found[name]
        if values[key] is None:
            raise ValueError(f"{where} has no {name}, which rope_type={theirs!r} needs")
    read: dict[str, Any] = {}
    if theirs == "yarn":
        values |= _read_sharpening(found, where, scales_scores=form.scales_scores)
    if theirs == "longrope":
        values["original_context_length"] = presets["original_context_length"]
        values["attention_factor"] = found.get("attention_factor")
    if theirs == "dynamic":
        values["original_context_length"] = section["context_length"]
        longest = _longest(values["factor"], section["context_length"])
        read["context_length"] = content.get(_EXTENDED, longest)
    base, part = form.former_names if partly else ("rope_theta", "")
    base_there = content.get(base, content.get("rope_theta", theta))
    fraction = content.get(
        "partial_rotary_factor", content.get(part, form.fraction if partly else 1.0)
    )
    fraction = found.get("partial_rotary_factor", fraction)
    if not partly and fraction != 1:
        raise ValueError(
            f"partial_rotary_factor={shown(fraction)} is not supported: this family turns all "
            "channels of a head"
        )
    read |= {"rope_theta": found.get("rope_theta", base_there), "rope_scaling": values}
    return {**read, "rotary_fraction": fraction} if partly else read


def _lengths(content: Content, section: Content, found: Content, theirs: str) -> dict[str, Any]:
    """Return the original length of context that config.json (`content`) gives beside the object
    `found`, or else the model's own; for longrope also the factor that follows from the two."""
    longest = section["context_length"]
    original = content.get(_ORIGINAL)
    if theirs != "longrope":
        return {"original_context_length": original or longest}
    original = original or found.get(_ORIGINAL) or longest
    are_numbers = type(original) is int and type(longest) is int and original > 0
    return {
        "original_context_length": original,
        "factor": longest / original if are_numbers else None,
    }


def _longest(factor: Any, original: Any) -> Any:
    """Return the tokens to which `dynamic` scaling by this factor extends a context of `original`
    ones; the original where one is no such number, which the schema then refuses."""
    are_numbers = type(factor) in (int, float) and type(original) is int
    is_extended = are_numbers and 1 <= factor <= sys.maxsize
    return int(original * factor) if is_extended else original


def _read_sharpening(found: Content, where: str, *, scales_scores: bool) -> dict[str, float]:
    """Return the keys in `_SHARPENING` from the object `found`, which config.json has under the key
    `where`. Unless `scales_scores`, `mscale_all_dim` acts on rotated queries and keys only; its
    effect is then returned as an `attention_factor`. Raises ValueError for a value that is no
    number."""
    numbers = {}
    for key in ("factor", *_SHARPENING):
        value = found.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise ValueError(f"{where}: {key}={shown(value)} is not a number")
        if value and abs(value) > sys.float_info.max:
            raise ValueError(f"{where}: {key} is infinite or too large")
        if value:
            numbers[key] = float(value)
    values = {key: numbers[key] for key in ("attention_factor",) if key in numbers}
    if "mscale_all_dim" not in numbers:
        return values  # alone, mscale does not act there
    if scales_scores:
        values["mscale_all_dim"] = numbers["mscale_all_dim"]
    if "attention_factor" in values:
        return values
    if scales_scores and "mscale" in numbers:
        return {**values, "mscale": numbers["mscale"]}
    if not 0 < numbers.get("factor", 0.0) < math.inf:
        return values  # the schema refuses it later
    given = RopeScalingConfig(type="yarn", factor=numbers["factor"])
    if "mscale" in numbers:
        given = given.model_copy(update={key: numbers[key] for key in _SHARPENING[1:]})
    return {**values, "attention_factor": given.rotation_factor}


def _write_by_layer(model: ModelConfig, *, form: _Form) -> dict[str, Any]:
    """Return the entries of config.json for rotary positions of a family whose layers with a window
    have a base of their own, and no scaling. Raises ValueError as `_write_rope` does, and for a
    model whose scaling acts there, too."""
    written, base = _write_rope(model, form=form), model.window_rope_theta
    if base is None and model.attention.sliding_window and model.rope_scaling.type is not None:
        raise ValueError(
            f"model.rope_scaling.type={shown(model.rope_scaling.type)} without "
            "model.window_rope_theta (layers with a window have frequencies without scaling)"
        )
    base = model.rope_theta if base is None else base
    of_windows = {"rope_type": "default", "rope_theta": base}
    whole = written["rope_parameters"]
    by_layer = {"full_attention": whole, "sliding_attention": of_windows}
    return {**written, "rope_local_base_freq": base, "rope_parameters": by_layer}


def _read_by_layer(content: Content, section: Content, *, form: _Form) -> dict[str, Any]:
    """Return what `_read_rope` does and `window_rope_theta`, the base in layers with a window, from
    config.json: `rope_parameters` has an object for each kind of layer, and earlier versions have
    `rope_local_base_freq`. `section` has the windows already."""
    given = content.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope_parameters={shown(given)} is not an object")
    whole, of_windows = (given.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
    where = "rope_parameters.sliding_attention"
    if not isinstance(of_windows, dict) or of_windows.get("rope_type", "default") != "default":
        raise ValueError(
            f"{where}={shown(of_windows)} is not supported: the rotation in layers with a window "
            "has a base, and no scaling"
        )
    read = _read_rope({**content, "rope_parameters": whole}, section, form=form)
    former = content.get("rope_local_base_freq", form.window_theta)
    base = of_windows.get("rope_theta", former)
    is_alike = base == read["rope_theta"] and read["rope_scaling"]["type"] is None
    has_windows = section["attention.sliding_window"] is not None
    return {**read, "window_rope_theta": base if has_windows and not is_alike else None}


def rotary_rule(**form: Any) -> Rule:
    """Return the rule for a family that rotates queries and keys, by its table `[rotary]`.

    form: partly, whether it rotates only a fraction of each head's channels, by default all;
    fraction, which one config.json means if it gives none; former_names, of base and fraction, in
    config.json of earlier versions. theta: the rotation's base if config.json gives none;
    window_theta: that of layers with a window, which have a base of their own. scaling:
    `rope_parameters` if config.json has none. scales_scores: YaRN's `mscale_all_dim` also
    multiplies attention scores, as in families with latent attention. types: the types of scaling
    that the family has; None for all.
    """
    of_family = _Form(**form)
    keys = ("rope_theta", "rope_scaling", *(["rotary_fraction"] if of_family.partly else []))
    if of_family.window_theta is None:
        return Rule(keys, partial(_write_rope, form=of_family), partial(_read_rope, form=of_family))
    write, read = (partial(each, form=of_family) for each in (_write_by_layer, _read_by_layer))
    return Rule((*keys, "window_rope_theta"), write, read)
