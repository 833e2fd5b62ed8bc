"""From a folder on disk to a model that runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.checkpoint.opening import Checkpoint
from pentameter.checkpoint.resolve import find_model
from pentameter.checkpoint.state import load_model_state
from pentameter.errors import PentameterError

if TYPE_CHECKING:
    import torch

    from pentameter.config.schema import Config
    from pentameter.data.tokenizer import Tokenizer
    from pentameter.model import GPT

_N_TRIES = 5


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, and what belongs to it."""

    model: GPT
    tokenizer: Tokenizer
    config: Config
    checkpoint: Checkpoint


def load_model(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    warnings: list[str] | None = None,
) -> LoadedModel:
    """The model of a run folder (its best checkpoint, else its last) or of a checkpoint folder.

    Its weights have the dtype they were saved with. Raises what `find_model` raises; a damaged
    checkpoint that was passed over adds a line to `warnings`.
    """
    for n_tries in range(1, _N_TRIES + 1):
        checkpoint = find_model(Path(path), warnings)
        try:
            return _load(checkpoint, device)
        except PentameterError:
            # Training may prune a checkpoint between our finding and our reading it.
            if checkpoint.path.is_dir() or n_tries == _N_TRIES:
                raise
    raise AssertionError("unreachable")


def _load(checkpoint: Checkpoint, device: torch.device | str) -> LoadedModel:
    import torch

    from pentameter.config.load import load_config
    from pentameter.data import load_tokenizer
    from pentameter.model import GPT

    config = load_config(checkpoint.path / "config.toml")
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    tensors = checkpoint.tensors("model")
    with torch.device("meta"):  # no memory and no random numbers for weights about to be replaced
        model = GPT(config.model)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    load_model_state(model.to_empty(device=device), tensors)
    return LoadedModel(model.eval(), tokenizer, config, checkpoint)
