"""From a folder on disk to a model: as it is stored, or loaded so that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pentameter.checkpoint.opening import Checkpoint
from pentameter.checkpoint.resolve import find_model, is_hugging_face
from pentameter.checkpoint.safetensors_writer import materialize
from pentameter.checkpoint.state_dicts import load_model_state
from pentameter.errors import PentameterError

if TYPE_CHECKING:
    import torch

    from pentameter.checkpoint.stored import StoredModel
    from pentameter.config.schema import Config
    from pentameter.data.tokenizers.base import Tokenizer
    from pentameter.model.gpt import GPT

_N_TRIES = 5


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, and what belongs to it."""

    model: GPT
    tokenizer: Tokenizer
    config: Config
    checkpoint: Checkpoint | None
    """None of a Hugging Face folder."""

    @property
    def step(self) -> int:
        """Optimizer steps completed; 0 where nobody counted."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def load_model(
    path: Path | str,
    *,
    device: torch.device | str = "cpu",
    warnings: list[str] | None = None,
) -> LoadedModel:
    """The model of MODEL: a run folder (its best checkpoint, else its last), a checkpoint folder,
    or a Hugging Face GPT-2 folder.

    A checkpoint's weights have the dtype they were saved with; half-precision ones of a Hugging
    Face folder become fp32. Raises what `find_model` and `read_hf` raise; what was passed over or
    left out adds a line to `warnings`.
    """
    for n_tries in range(1, _N_TRIES + 1):
        stored = open_model(path, warnings=warnings)
        try:
            return _load(stored, device)
        except PentameterError:
            if not _is_pruned(stored.checkpoint) or n_tries == _N_TRIES:
                raise
    raise AssertionError("unreachable")


def open_model(path: Path | str, *, warnings: list[str] | None = None) -> StoredModel:
    """What `load_model` loads, still on disk: configuration, tokenizer and weights to be read."""
    from pentameter.checkpoint.hugging_face.reading import read_hf

    path = Path(path)
    if is_hugging_face(path):
        return read_hf(path, warnings=warnings)
    for n_tries in range(1, _N_TRIES + 1):
        checkpoint = find_model(path, warnings)
        try:
            return _open(checkpoint)
        except PentameterError:
            if not _is_pruned(checkpoint) or n_tries == _N_TRIES:
                raise
    raise AssertionError("unreachable")


def _is_pruned(checkpoint: Checkpoint | None) -> bool:
    """Whether training removed the checkpoint between our finding and our reading it."""
    return checkpoint is not None and not checkpoint.path.is_dir()


def _open(checkpoint: Checkpoint) -> StoredModel:
    from pentameter.checkpoint.stored import StoredModel, check_weights
    from pentameter.config.load import load_config
    from pentameter.data.tokenizers.load import load_tokenizer

    path = checkpoint.path
    config = load_config(path / "config.toml")
    tokenizer = load_tokenizer(path / "tokenizer.json")
    tensors = checkpoint.tensors("model")
    check_weights(config, tensors, path)
    files = tuple(path / name for name in checkpoint.manifest.groups["model"])
    return StoredModel(path, config, tokenizer, tensors, files, checkpoint)


def _load(stored: StoredModel, device: torch.device | str) -> LoadedModel:
    import torch

    from pentameter.model.gpt import GPT

    weights = stored.weights
    with torch.device("meta"):  # no memory and no random numbers for weights about to be replaced
        model = GPT(stored.config.model)
    dtypes = {tensor.dtype for tensor in weights.values() if tensor.dtype.is_floating_point}
    if len(dtypes) == 1:
        model.to(dtypes.pop())
    model.to_empty(device=device)
    if stored.checkpoint is not None:
        load_model_state(model, stored.checkpoint.tensors("model"))
    else:
        for name, own in model.state_dict().items():  # names and shapes were checked on opening
            own.copy_(materialize(weights[name]))
    return LoadedModel(model.eval(), stored.tokenizer, stored.config, stored.checkpoint)
