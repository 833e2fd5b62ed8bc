"""Translation between config.json and pentameter's `[model]` section, by the tables in `families`
(a family is a Hugging Face architecture, such as Llama)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pentameter.checkpoint.hugging_face.families.table import families, not_read
from pentameter.checkpoint.hugging_face.family import Family
from pentameter.config.choices import look_up
from pentameter.config.fields import nested
from pentameter.config.messages import shown
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.config.section import Depth
from pentameter.errors import ConfigError


def choose_family(model: ModelConfig) -> str:
    """Return the `model_type` of the first family that can express a model.

    Raises ConfigError if none can, naming every key and value that the nearest one lacks.
    """
    problems = {name: list(_inexpressible(family, model)) for name, family in families().items()}
    nearest = min(problems, key=lambda name: len(problems[name]))
    if problems[nearest]:
        others = ", ".join(name for name in families() if name != nearest)
        raise ConfigError(
            f"a Hugging Face {families()[nearest].label} cannot express "
            f"{'; '.join(problems[nearest])}; nor can {others}; "
            "`export --to safetensors` writes any model"
        )
    return nearest


def _inexpressible(family: Family, model: ModelConfig) -> Iterator[str]:
    """Yield a phrase for each `[model]` key, with its value, that the family cannot express, and
    the reason."""
    values, plain = architecture(model), architecture(simplest(model))
    for key, (possible, reason) in family.fixed.items():
        if plain[key] != possible:
            yield f"model.{key}={shown(values[key])} ({reason})"
    key = "feed_forward.activation"
    if values[key] not in family.activations.values():
        yield f"model.{key}={shown(values[key])} ({family.label} has no such function)"
    for rule in family.rules:
        try:
            rule.write(model)
        except ValueError as error:
            yield str(error)
    defaults, known = architecture(type(model)()), accounted_keys(family)
    for key in values.keys() - known:
        if values[key] != defaults[key]:
            yield f"model.{key}={shown(values[key])} (its config.json has no such key)"


def accounted_keys(family: Family) -> list[str]:
    """List the `[model]` keys that a family's description accounts for (written, fixed, not needed
    or in a rule), with repetitions."""
    of_rules = [key for rule in family.rules for key in rule.keys]
    return [*family.written, *family.fixed, *family.not_needed, *of_rules]


def simplest(model: ModelConfig) -> ModelConfig:
    """Return a copy whose redundant values are None: `n_kv_heads` equal to `n_heads`, `head_size`
    equal to d_model / n_heads, `score_size` equal to that, `out_bias` equal to `bias`."""
    same: dict[str, None] = {}
    if model.attention.score_size == model.head_channels:
        same["attention.score_size"] = None
    if model.attention.out_bias == model.bias:
        same["attention.out_bias"] = None
    if model.attention.n_kv_heads == model.attention.n_heads:
        same["attention.n_kv_heads"] = None
    if (
        model.attention.head_size is not None
        and model.attention.head_size * model.attention.n_heads == model.d_model
    ):
        same["attention.head_size"] = None
    return model.updated(same)


def to_their_config(
    name: str, model: ModelConfig, *, vocab_size: int, token_ids: Mapping[str, Any], dtype: str
) -> dict[str, Any]:
    """Return the content of config.json for a model. `name` is the `model_type` of a family that
    can express it, as `choose_family` returns. Nothing is written.

    vocab_size: rows in the written embedding, without padding. token_ids: `bos_token_id`,
    `eos_token_id` and `pad_token_id`. dtype: the weights' dtype (`float32`).
    """
    family = families()[name]
    theirs = {ours: theirs for theirs, ours in reversed(list(family.activations.items()))}
    activation = look_up(
        theirs, model.feed_forward.activation, "model.feed_forward.activation", family.label
    )
    values = {
        **architecture(model.resolved),
        "feed_forward.width": model.feed_forward_width,
        "embedding_dropout": model.embedding_dropout_rate,
        "vocab_size": vocab_size,
        "feed_forward.activation": activation,
    }
    content: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": name,
        **{key: values[ours] for ours, (key, _) in family.written.items()},
        **{key: default for key, (default, _) in family.not_ours.items() if default is not None},
    }
    for rule in family.rules:
        content |= rule.write(model)
    if family.extra_layers is not None:
        content[family.extra_layers[0]] = 0
    return {
        **content,
        **token_ids,
        "use_cache": True,
        "torch_dtype": dtype,  # the name that old and new versions of transformers read
    }


def from_their_config(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the values for the `[model]` section, not yet validated, that config.json (`content`,
    its JSON object) expresses. `path` is for messages.

    Raises ConfigError for an unsupported architecture, and for a setting that pentameter cannot
    express.
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in families():
        why = not_read().get(kind) if isinstance(kind, str) else None
        raise ConfigError(
            f"{path}: model_type={shown(kind)} is not supported{'' if why is None else f': {why}'}"
            f"; these are read: {', '.join(families())}"
        )
    family = families()[kind]
    for key, (default, reason) in family.not_ours.items():
        value = content.get(key, default)
        if value not in (default, None):
            raise ConfigError(f"{path}: {key}={shown(value)} is not supported: {reason}")
    quantization = content.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if quantization is not None and method not in family.quantizations:
        raise ConfigError(
            f"{path}: quantization_config={shown(quantization)} is not supported: quantised "
            "weights are not read; save it dequantised"
        )
    section = {
        ours: content.get(key, content.get(family.other_names.get(key, key), default))
        for ours, (key, default) in family.written.items()
    }
    activation, possible = section["feed_forward.activation"], family.activations
    if not isinstance(activation, str) or activation not in possible:
        key, _ = family.written["feed_forward.activation"]
        raise ConfigError(
            f"{path}: {key}={shown(activation)} is not supported; possible: {', '.join(possible)}"
        )
    section["feed_forward.activation"] = possible[activation]
    section |= {key: value for key, (value, _) in family.fixed.items()} | dict(family.read)
    if not _is_depth(section["n_layers"]):
        return nested(section)  # the schema refuses it later; rules look at each layer
    for rule in family.rules:
        try:
            section |= rule.read(content, section)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
    return nested(section)


def _is_depth(n_layers: object) -> bool:
    try:
        TypeAdapter(Depth).validate_python(n_layers)
    except ValidationError:
        return False
    return True


def read_n_extra_layers(content: Mapping[str, Any], family: Family, path: Path) -> int:
    """Return the number of layers for multi-token prediction that a folder may hold behind the
    model's own, as config.json (`content`) says; 0 if the family has none. They are not read.
    `path` is for messages. Raises ConfigError if the entry is not a number of layers."""
    if family.extra_layers is None:
        return 0
    key, default = family.extra_layers
    found = content.get(key, content.get(family.other_names.get(key, key), default))
    if type(found) is not int or not (found == 0 or _is_depth(found)):
        raise ConfigError(f"{path}: {key}={shown(found)} must be a whole number from 0 to 10000")
    return found
