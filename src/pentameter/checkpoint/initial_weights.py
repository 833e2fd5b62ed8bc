"""`train --init-from MODEL`: another model's weights as the first ones of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.checkpoint.load_model import open_model
from pentameter.checkpoint.safetensors_writer import read_region
from pentameter.checkpoint.state_dicts import model_state
from pentameter.config.messages import shown
from pentameter.config.schema import Config
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError
from pentameter.parallel.local_parts import common_part
from pentameter.planning.architecture import has_position_table, parameter_table, resolved

if TYPE_CHECKING:
    from torch import nn

    from pentameter.checkpoint.model_folder import StoredModel

NOT_THE_ARCHITECTURE = {
    "vocab_multiple": "rows that pad the vocabulary are left as they are",
    "context_length": "a learned position table can give up its end; checked apart",
    "dropout": "acts in training only",
    "attention_dropout": "as above",
    "embedding_dropout": "as above",
    "init": "how weights begin that are replaced",
    "init_std": "as above",
    "residual_init_scale": "as above",
}
"""Keys of `[model]` that may differ there and here, and why. Every other key must be the same: the
weights mean nothing in another architecture."""


@dataclass(frozen=True)
class InitialWeights:
    """A model on disk that was found to fit a configuration."""

    path: Path
    """As it was given."""
    stored: StoredModel
    warnings: tuple[str, ...]
    """What was passed over or left out in reading it, one line each."""

    @property
    def origin(self) -> dict[str, str]:
        """What a run records of where it began, for `check_origin`, and for its exports the Hugging
        Face model, if it was one."""
        origin = {"path": str(self.path.resolve()), "identity": self.stored.identity}
        base = self.stored.base_model
        return origin if base is None else {**origin, "base_model": base}

    def load_into(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Copy the weights into a model of the configuration, or a slice of one, in place.

        Of a sharded parameter, each process reads and copies its own part. Of a longer context the
        first positions are taken; rows that pad the vocabulary here stay as they are. Values are
        rounded to the dtype of the model.
        """
        axes = {spec.name: spec.axes for spec in parameter_table(self.stored.config.model)}
        vocab_size = self.stored.config.model.vocab_size
        for name, own in model_state(model).items():
            if name not in axes:  # an adapter's, which begins with this run
                continue
            theirs = self.stored.weights[name]
            n_rows = vocab_size if axes[name][0] == "vocab" else None
            shape = tuple(theirs.shape) if n_rows is None else (n_rows, *theirs.shape[1:])
            local, region = common_part(own, shape)
            if local.numel():
                local.copy_(read_region(theirs, region))


def initial_weights(path: Path | str, config: Config, tokenizer: Tokenizer) -> InitialWeights:
    """The weights of MODEL (a run, checkpoint or Hugging Face folder) for a run of `config`.

    `config` is resolved (its vocab_size is set), `tokenizer` is the data's. Nothing is loaded
    yet. Raises ConfigError when the architecture differs, naming each key and both values, when
    MODEL was trained with another tokenizer, or for fewer positions than the context has; else
    what `open_model` raises.
    """
    warnings: list[str] = []
    stored = open_model(path, warnings=warnings)
    there, here = stored.config.model, config.model
    whole_there, whole_here = resolved(there), resolved(here)
    wrong = [
        f"model.{key}: {shown(getattr(there, key))} there, {shown(getattr(here, key))} here"
        for key in type(here).model_fields
        if key not in NOT_THE_ARCHITECTURE
        and getattr(there, key) != getattr(here, key)
        and getattr(whole_there, key) != getattr(whole_here, key)
    ]
    if has_position_table(here) and here.context_length > there.context_length:
        wrong.append(
            f"model.context_length: {there.context_length} there, {here.context_length} here "
            "(positions that were never learned; it may be shorter, not longer)"
        )
    if wrong:
        raise ConfigError(
            f"--init-from {path}: the architecture differs; {'; '.join(wrong)}. {_remedy(stored)}"
        )
    if stored.tokenizer.hash != tokenizer.hash:
        raise ConfigError(
            f"--init-from {path}: its tokenizer ({stored.tokenizer.kind}, "
            f"{stored.tokenizer.vocab_size} tokens, hash {stored.tokenizer.hash[:12]}…) is not the "
            f"data's ({tokenizer.kind}, {tokenizer.vocab_size} tokens, hash "
            f"{tokenizer.hash[:12]}…), so the same ids mean other text. {_tokenizer_remedy(stored)}"
        )
    return InitialWeights(Path(path), stored, tuple(warnings))


def check_origin(
    recorded: Mapping[str, str] | None, given: Path | str | None, run_dir: Path
) -> None:
    """Raise ConfigError unless `--init-from given` is how the run in `run_dir` began.

    `recorded` is the `origin` of its weights, None where they were random. The same path is the
    same command line, whatever lies there by now: the run has its own weights since. Another path
    must hold the same weights.
    """
    other = "another --run-dir or --name starts anew"
    if recorded is None and given is not None:
        raise ConfigError(
            f"--init-from {given}: {run_dir} holds a run that began with random weights; {other}"
        )
    if recorded is None:
        return
    if given is None:
        raise ConfigError(
            f"{run_dir} holds a run that began with the weights of {recorded['path']}; add "
            f"--init-from {recorded['path']} to continue it, or {other}"
        )
    if str(Path(given).resolve()) == recorded["path"]:
        return
    if open_model(given).identity != recorded["identity"]:
        raise ConfigError(
            f"--init-from {given}: {run_dir} holds a run that began with other weights, those of "
            f"{recorded['path']}; {other}"
        )


def _remedy(stored: StoredModel) -> str:
    if stored.checkpoint is None:
        return (
            f"Start from its own configuration: `pentameter import {stored.path} --out DIR`, then "
            "`pentameter train DIR/config.toml --init-from DIR --data.path FILE`"
        )
    return (
        f"Start from its own configuration: `pentameter train {stored.path / 'config.toml'} "
        f"--init-from {stored.path} --name NAME --data.path FILE`"
    )


def _tokenizer_remedy(stored: StoredModel) -> str:
    if stored.config.data.tokenizer == "gpt2":
        return "Set --data.tokenizer gpt2"
    if stored.checkpoint is None:
        return (
            f"`pentameter import {stored.path} --out DIR`, then set --data.tokenizer "
            "DIR/tokenizer.json"
        )
    return f"Set --data.tokenizer {stored.path / 'tokenizer.json'}"
