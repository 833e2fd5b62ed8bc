"""Initialization from another model's weights: `train --init-from MODEL`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.folders.load_model import open_model
from pentameter.checkpoint.folders.opening import Check, check_content
from pentameter.checkpoint.format.lazy_tensors import copy_region
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.checkpoint.state.upcycling import (
    dense_architecture,
    dense_name,
    fill_experts,
    needed_settings,
)
from pentameter.config.messages import shown
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.config.schema import Config
from pentameter.config.tables import packaged_table
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError
from pentameter.parallel.local_shards import common_region
from pentameter.planning.gpt import parameter_table

if TYPE_CHECKING:
    from torch import nn

    from pentameter.checkpoint.folders.model_folder import StoredModel


@dataclass(frozen=True)
class InitialWeights:
    """A model on disk that fits a run's configuration (architecture and tokenizer), ready to
    initialize its weights."""

    path: Path
    """The path as the user gave it."""
    config: Config
    """The run's configuration. Its architecture is the stored one, or has experts in place of the
    stored feed-forward layers, of which they begin as copies."""
    stored: StoredModel
    warnings: tuple[str, ...]
    """One line for each thing that was skipped or left out while reading the model."""

    @property
    def origin(self) -> dict[str, Any]:
        """The record that a run keeps about its initial weights: `path` and `identity` (sha256 over
        the weight files), which `check_origin` compares; and if known the `base_model`, the Hugging
        Face model that they descend from, and the `step` and `tokens` up to which they were
        trained."""
        checkpoint = self.stored.checkpoint
        known = {
            "base_model": self.stored.base_model,
            "step": self.stored.step or None,
            "tokens": None if checkpoint is None else checkpoint.state.get("tokens"),
        }
        return {
            "path": str(self.path.resolve()),
            "identity": self.stored.identity,
            **{key: value for key, value in known.items() if value is not None},
        }

    def load_into(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Copy the weights, in place, into a model that matches the configuration, or into the
        slices (pipeline stages) that this rank holds.

        For a sharded parameter, each rank reads and copies its own shard, without communication. If
        the stored context is longer, the first positions are taken. Some values stay as they are:
        rows that pad the vocabulary, adapters, routers if the stored model has none, and the state
        by which training balances experts. Values are rounded to the model's dtype.
        """
        there = self.stored.config.model
        specs = {spec.name: spec for spec in parameter_table(self.config.model)}
        axes = {spec.name: spec.axes for spec in parameter_table(there) if not spec.is_state}
        for name, own in model_state(model).items():
            source = dense_name(name) if there.experts.count is None else name
            if source not in axes:  # an adapter's, a router's, a state's: it begins with this run
                continue
            theirs = self.stored.weights[source]
            n_rows = there.vocab_size if axes[source][0] == "vocab" else None
            shape = tuple(theirs.shape) if n_rows is None else (n_rows, *theirs.shape[1:])
            is_stack = own.ndim > len(shape)
            local, region = common_region(own, (own.shape[0], *shape) if is_stack else shape)
            if not local.numel():
                continue
            if is_stack:
                fill_experts(local, region, theirs, specs[name], self.config)
            else:
                copy_region(local, theirs, region)


def not_the_architecture() -> dict[str, str]:
    """Return the keys in `[model]` that may differ between the stored model and the configuration,
    each with the reason. Every other key must be equal: the weights mean nothing in another
    architecture."""
    return packaged_table("checkpoint/state/not_the_architecture.toml")


def initial_weights(
    path: Path | str, config: Config, tokenizer: Tokenizer, check: Check = check_content
) -> InitialWeights:
    """Open the weights in the model `path` (a run, checkpoint or Hugging Face folder, or
    `hf://OWNER/NAME`) for a run with `config`.

    `config` is resolved (its vocab_size is set); `tokenizer` is the data's. No tensor is loaded
    yet. `check` verifies a checkpoint's files.

    Raises ConfigError if the architecture differs, naming each key and both values (experts may
    begin as copies of a feed-forward layer, if they then compute the same); if the model was
    trained with another tokenizer; or if its context is too short for a learned position table.
    Also raises ConfigError if `path` is no model folder, CorruptError if none of its checkpoints is
    intact.
    """
    warnings: list[str] = []
    stored = open_model(path, warnings=warnings, check=check)
    there, here = stored.config.model, config.model
    if there.experts.count is None and here.experts.count is not None:
        _check_experts(path, there, here)
        here = dense_architecture(here)
    theirs, ours = architecture(there), architecture(here)
    whole_theirs, whole_ours = architecture(there.resolved), architecture(here.resolved)
    may_differ = not_the_architecture()
    wrong = [
        f"model.{key}: {shown(theirs[key])} there, {shown(value)} here"
        for key, value in ours.items()
        if key not in may_differ and theirs[key] != value and whole_theirs[key] != whole_ours[key]
    ]
    if here.has_position_table and here.context_length > there.context_length:
        wrong.append(
            f"model.context_length: {there.context_length} there, {here.context_length} here "
            "(positions that were never learned; it may be shorter, not longer)"
        )
    if there.router.balance == "bias" and here.router.balance != "bias":
        wrong.append(
            f"model.router.balance: 'bias' there, {shown(here.router.balance)} here (what it adds "
            "to the scores decides there which experts are chosen)"
        )
    if wrong:
        raise ConfigError(
            f"--init-from {path}: the architecture differs; {'; '.join(wrong)}. {_remedy(stored)}"
        )
    if stored.tokenizer.hash_of_ids != tokenizer.hash_of_ids:
        raise ConfigError(
            f"--init-from {path}: its tokenizer ({stored.tokenizer.kind}, "
            f"{stored.tokenizer.vocab_size} tokens, hash {stored.tokenizer.hash[:12]}…) is not the "
            f"data's ({tokenizer.kind}, {tokenizer.vocab_size} tokens, hash "
            f"{tokenizer.hash[:12]}…), so the same ids mean other text. {_tokenizer_remedy(stored)}"
        )
    if stored.tokenizer.hash != tokenizer.hash:
        warnings.append(
            f"--init-from {path}: its tokenizer begins each document with "
            f"{stored.tokenizer.shown_prefix}, the data's with {tokenizer.shown_prefix}; to have "
            f"them alike: {_tokenizer_remedy(stored)}"
        )
    return InitialWeights(Path(path), config, stored, tuple(warnings))


def _check_experts(path: Path | str, there: ModelConfig, here: ModelConfig) -> None:
    """Raise ConfigError, naming the settings to change, unless the model `here`, with experts,
    computes what the dense model `there` does when its experts are copies of that one's
    feed-forward layers."""
    if needed := needed_settings(there, here):
        raise ConfigError(
            f"--init-from {path}: model.experts.count: {shown(there.experts.count)} there, "
            f"{here.experts.count} here. Experts begin as copies of the feed-forward layer there, "
            f"and compute the same with {'; '.join(needed)}"
        )


def check_origin(
    recorded: Mapping[str, Any] | None,
    given: Path | str | None,
    run_dir: Path,
    check: Check = check_content,
) -> None:
    """Raise ConfigError unless the run in `run_dir` began with `--init-from given`.

    `recorded` is the `origin` of its initial weights, None if they were random. The same path as
    recorded is accepted without reading it, even if its content has changed: the run has its own
    weights since. Another path must hold the same weights; `check` verifies the files of a
    checkpoint there.
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
    if open_model(given, check=check).identity != recorded["identity"]:
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
