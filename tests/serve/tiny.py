"""A small model for the tests of the server, and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.checkpoint.state.state_dicts import model_state
from pentameter.config.data_schema import DataConfig
from pentameter.config.files.write import to_toml
from pentameter.config.schema import Config, ModelConfig, TrainConfig
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.model.gpt import GPT, build_model

TOKENIZER = CharTokenizer("\n abcdefgh")


def make_model(context_length: int = 80, **settings: Any) -> GPT:
    """A model whose next token depends on all it sees: large weights, so that no two logits tie."""
    values: dict[str, Any] = {
        "vocab_size": TOKENIZER.vocab_size,
        "vocab_multiple": 16,
        "context_length": context_length,
        "n_layers": 2,
        "n_heads": 4,
        "d_model": 32,
        "init_std": 0.3,
    }
    model = build_model(ModelConfig(**(values | settings)), seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    return model


def save_run(folder: Path, **settings: Any) -> GPT:
    """Write a run folder with one checkpoint of such a model, and return the model."""
    model = make_model(**settings)
    config = Config(
        model=model.config, data=DataConfig(corpus="stdlib"), train=TrainConfig(batch_size=1)
    )
    files = {"config.toml": to_toml(config).encode(), "tokenizer.json": TOKENIZER.to_bytes()}
    store = CheckpointStore(folder / "checkpoints", run_id="r", config_hash="h")
    store.save(Contents(7, {"model": model_state(model)}, {"step": 7}, files))
    return model
