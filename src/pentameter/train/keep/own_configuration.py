"""The configuration by which a model is trained on: a MODEL's own, where no other is named."""

from __future__ import annotations

from functools import partial
from hashlib import sha256
from pathlib import Path

from pentameter.checkpoint.folders.opening import check_sizes, find_model, is_hugging_face
from pentameter.config.files.command_source import configuration_of
from pentameter.config.files.load import Overrides, flat_overrides, load_config
from pentameter.config.schema import Config
from pentameter.data.tokenizers.setting import is_made_from_text, load_tokenizer
from pentameter.disk.atomic import make_folder, write_atomic
from pentameter.disk.cache import cache_folder, telling_of_the_cache
from pentameter.estimating.bytes.plan_estimates import plan_memory
from pentameter.planning.plan import make_plan

CONFIG_FILE, TOKENIZER_FILE = "config.toml", "tokenizer.json"
ACTIVATION_BYTES = 2e9
"""Whole batches are micro-batches if their planned activations are at most this."""


def configuration_to_train(
    source: str | Path | Config | None, overrides: Overrides, init_from: Path | None
) -> tuple[str | Path | Config, Overrides]:
    """Return (source, overrides) to pass to `load_config`, as `configuration_of` does. A run that
    begins from the model in the folder `init_from` (None: from random weights) takes that model's
    own configuration, with its tokenizer and chat template, where `source` is None or data.

    Raises ConfigError if `source` and `init_from` are None, and for a folder that holds no model.
    """
    own = None if init_from is None else partial(own_configuration, init_from)
    chosen, given = configuration_of(source, overrides, own)
    if init_from is None or chosen is source or not isinstance(chosen, Path):
        return chosen, given
    if not is_made_from_text(load_config(chosen).data.tokenizer):
        return chosen, given
    if (checkpoint := find_model(init_from, check=check_sizes)) is None:
        return chosen, given
    # The same setting would make another tokenizer from the new text.
    kept = _kept(load_tokenizer(checkpoint.path / TOKENIZER_FILE).to_bytes())
    return chosen, {"data.tokenizer": str(kept), **flat_overrides(given)}


def own_configuration(model: Path) -> Path | Config:
    """Return the configuration of the model in a folder: its config.toml, or for a Hugging Face
    folder a gentle one for fine-tuning, with its architecture and tokenizer. The tokenizer is then
    saved in the cache folder, by its content, as a configuration names it by a file."""
    if (file := model / CONFIG_FILE).is_file():
        return file
    if not is_hugging_face(model) and (checkpoint := find_model(model)) is not None:
        return checkpoint.path / CONFIG_FILE
    from pentameter.checkpoint.hugging_face.folder import read_hf

    stored = read_hf(model)
    config = with_micro_batch(stored.config)
    if config.data.tokenizer == "gpt2":  # which is found beside the model
        return config
    return config.updated({"data.tokenizer": str(_kept(stored.tokenizer.to_bytes()))})


def _kept(tokenizer: bytes) -> Path:
    """Return the file in the cache folder that holds a tokenizer, written if it is not there."""
    folder = cache_folder() / "tokenizers" / sha256(tokenizer).hexdigest()[:24]
    file = folder / TOKENIZER_FILE
    with telling_of_the_cache():
        if not file.is_file():
            make_folder(folder)
            write_atomic(file, tokenizer)
    return file


def with_micro_batch(config: Config) -> Config:
    """Return a Hugging Face model's configuration, which has micro-batches of one sequence, with
    whole batches instead if their activations take at most ACTIVATION_BYTES. A size in between
    would have to divide every batch size that a user asks for."""
    whole = config.updated({"train.micro_batch_size": None})
    fits = plan_memory(make_plan(whole)).activations_bytes <= ACTIVATION_BYTES
    return whole if fits else config
