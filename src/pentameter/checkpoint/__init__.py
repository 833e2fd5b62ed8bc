"""Checkpoints: the commit protocol, save and load by name, the run lock. Imports torch late."""

from pentameter.checkpoint.files import write_atomic
from pentameter.checkpoint.lock import RunLock
from pentameter.checkpoint.model import LoadedModel, load_model, open_model
from pentameter.checkpoint.opening import Checkpoint, open_checkpoint
from pentameter.checkpoint.resolve import find_model
from pentameter.checkpoint.state import (
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
)
from pentameter.checkpoint.store import CheckpointStore, Saved

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "LoadedModel",
    "RunLock",
    "Saved",
    "find_model",
    "load_model",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "open_checkpoint",
    "open_model",
    "optimizer_state",
    "write_atomic",
]
