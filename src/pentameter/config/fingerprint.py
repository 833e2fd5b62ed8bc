"""A hash that is equal for configurations that train alike, and the differences between two that do
not."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pentameter.config.choices import DECAY_KEYS, TEMPLATE_DATE
from pentameter.config.fields import leaves, values_of
from pentameter.config.messages import shown
from pentameter.config.model.former_keys import former_path
from pentameter.config.schema import CheckpointConfig, Config, LogConfig

NOT_THE_TRAINING = {
    "name": "only names the run folder",
    "train.steps": "where the run ends; the cosine's end is schedule.decay_steps",
    "train.epochs": "as above",
    "train.micro_batch_size": "cuts the same batch into other pieces; sums agree to rounding",
    "train.device": "a run may move to another machine",
    "train.activation_checkpoint": "the same arithmetic, done twice",
    "train.offload": "the same arithmetic, with its numbers kept elsewhere",
    "train.compile": "the same arithmetic, compiled",
    "train.patience": "where the run ends",
    "train.check_copies": "comparing reads, it changes nothing",
    "train.check_every": "as above; the gradients that it computes are dropped",
    "guard.rollbacks": "where the run ends",
    **dict.fromkeys(
        ("train.eval_interval", "train.eval_train_tokens", "data.evaluations"),
        "evaluation reads, it changes nothing",
    ),
    **dict.fromkeys(
        (f"train.sample_{key}" for key in ("interval", "tokens", "prompt", "temperature")),
        "samples are drawn with their own keys",
    ),
    **dict.fromkeys(
        (f"checkpoint.{key}" for key in CheckpointConfig.model_fields),
        "saving reads, it changes nothing",
    ),
    **dict.fromkeys(
        (f"log.{key}" for key in LogConfig.model_fields), "logging reads, it changes nothing"
    ),
}
"""Keys that a resumed run may change, and why. Every other key defines the weights after each step,
except those in `[parallel]`: a layout changes no number beyond its last digits.

`train.steps` is free because step N does not depend on later ones, with one exception that
`defining_values` makes: a decay without `decay_steps` ends at `train.steps`.
"""


def defining_values(config: Config) -> dict[str, Any]:
    """Return dotted path → value for the settings on which the weights after a given step depend:
    all but those in NOT_THE_TRAINING and [parallel], and keys without effect."""
    values = {
        path: value
        for path, value in values_of(config).items()
        if path not in NOT_THE_TRAINING and not path.startswith("parallel.")
    }
    schedule, used = config.schedule, config.schedule.decay_keys
    for key in {key for keys in DECAY_KEYS.values() for key in keys}.difference(used):
        del values[f"schedule.{key}"]
    if "decay_steps" in used and schedule.decay_steps is None:
        steps = config.train.steps
        values["schedule.decay_steps"] = None if steps is None else steps - schedule.start_step
    if schedule.start_step == 0:  # as before there was such a key
        del values["schedule.start_step"]
    for path in ("data.sources", "data.chat_template"):  # as above
        if not values[path]:
            del values[path]
    if config.data.template_date == TEMPLATE_DATE:  # as above
        del values["data.template_date"]
    if config.lora.rank is None:  # as above
        values = {path: value for path, value in values.items() if not path.startswith("lora.")}
    guard = config.guard
    if guard.spike_factor is None:
        del values["guard.spike_factor"], values["guard.window"]
    if guard.rollback_interval is None:  # so many skips only say where the run ends
        del values["guard.rollback_interval"], values["guard.skips"]
    if config.optimizer.default_momentum is None:
        del values["optimizer.momentum"]
    return values


def config_hash(config: Config) -> str:
    """Return the sha256, in hex, over `defining_values`. A run may be resumed by any configuration
    with the same one. Keys enter by their former names (`former_path`), so that it does not change
    with names.

    Compare like with like: a configuration whose derived values were filled in (the vocabulary
    size, say) hashes differently from its source.
    """
    values = {former_path(path): value for path, value in defining_values(config).items()}
    return hashlib.sha256(_canonical(values).encode()).hexdigest()


def diff_configs(old: Config, new: Config) -> list[str]:
    """Return "path: old → new" for each defining value that differs; empty if and only if the
    hashes are equal."""
    before, after = defining_values(old), defining_values(new)
    return [
        f"{path}: {_side(before, path)} → {_side(after, path)}"
        for path in leaves()
        if (path in before) != (path in after)
        or _canonical(before.get(path)) != _canonical(after.get(path))
    ]


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _side(values: dict[str, Any], path: str) -> str:
    return shown(values[path]) if path in values else "unused"
