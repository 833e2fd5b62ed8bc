"""A model as another training program stored it, and the reader of its files of tensors."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.format.lazy_tensors import LazyTensor
from pentameter.checkpoint.hugging_face.family import Family
from pentameter.checkpoint.hugging_face.folder import config_to_tune, weights_of
from pentameter.config.fields import nested
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    import torch

COMPILED_PREFIX = "_orig_mod."
"""The prefix that `torch.compile` gives to the names of a module's tensors."""


@dataclass(frozen=True)
class ProgramModel:
    """A model of another program: its sizes, its tensors by the program's names, its tokenizer."""

    family: Family
    """The program's names of tensors."""
    section: Mapping[str, Any]
    """Its sizes as keys of `[model]`, such as `attention.n_heads`."""
    tensors: Mapping[str, torch.Tensor | LazyTensor]
    """Name in the program → tensor, mapped from the file or computed from it at access."""
    tokenizer: Tokenizer
    file: Path
    """The file with the tensors."""

    def stored(self) -> StoredModel:
        """Return the model with its configuration for fine-tuning, and weights that are read at
        access. Raises ConfigError for sizes that are none, CorruptError unless the file holds the
        tensors of such a model, and no others."""
        config = config_to_tune(self.file, nested(self.section), self.tokenizer)
        passed_over = re.compile(re.escape(self.family.body) + f"({self.family.passed_over})")
        lazy = {
            name: tensor if isinstance(tensor, LazyTensor) else lazily(tensor)
            for name, tensor in self.tensors.items()
            if not passed_over.fullmatch(name)
        }
        weights = weights_of(lazy, self.family, config.model, self.file)
        return StoredModel(
            self.file, config, self.tokenizer, weights, (self.file,), checkpoint=None
        )


def lazily(
    tensor: torch.Tensor, change: Callable[[torch.Tensor, slice], torch.Tensor] | None = None
) -> LazyTensor:
    """Return a tensor as a lazy one; `change` computes the rows asked for from the stored rows and
    their numbers."""

    def fill(target: torch.Tensor, region: tuple[slice, ...]) -> None:
        rows, *columns = region
        found = tensor[rows] if change is None else change(tensor[rows], rows)
        target.copy_(found[(slice(None), *columns)])

    return LazyTensor(tuple(tensor.shape), tensor.dtype, fill)


def load_tensors_file(path: Path) -> Any:
    """Return the content of a file that `torch.save` wrote, with tensors mapped from it. Raises
    ConfigError for one that holds other objects than tensors and plain values, CorruptError for a
    damaged one."""
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than tensors and plain values, and is not read, as a pickle can "
            f"run code; save its tensors alone ({str(error).splitlines()[0]:.120})"
        ) from error
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise CorruptError(f"{path} cannot be opened: {str(error).splitlines()[0]:.200}") from error


def tensors_in(content: Any, path: Path) -> dict[str, torch.Tensor]:
    """Return a state dict's tensors by name, without the prefix that `torch.compile` adds. Raises
    CorruptError if `content`, read from `path`, is none."""
    import torch

    if not isinstance(content, Mapping):
        raise CorruptError(f"{path} holds no state dict of tensors by name")
    tensors = {
        str(name).removeprefix(COMPILED_PREFIX): tensor
        for name, tensor in content.items()
        if isinstance(tensor, torch.Tensor)
    }
    if len(tensors) != len(content):
        raise CorruptError(f"{path} holds values that are no tensors among the model's")
    return tensors


class PlainUnpickler(pickle.Unpickler):
    """An unpickler of plain values: it knows no class and no function."""

    def find_class(self, module: str, name: str) -> Any:
        """Raise UnpicklingError: no class is plain."""
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def read_plain_pickle(
    path: Path, limit: int = 1 << 26, unpickler: type[pickle.Unpickler] = PlainUnpickler
) -> Any:
    """Return the content of a pickle of plain values, at most `limit` bytes long. Raises
    ConfigError for one that names any class or function, CorruptError for a damaged one."""
    if path.stat().st_size > limit:
        raise CorruptError(f"{path} has {path.stat().st_size:,} bytes; at most {limit:,} are read")
    try:
        with path.open("rb") as file:
            return unpickler(file).load()
    except pickle.UnpicklingError as error:
        raise ConfigError(f"{path} is not read: {error}, and a pickle can run code") from error
    except Exception as error:  # what damaged bytes raise is any exception
        raise CorruptError(f"{path} is damaged: {error!r:.100}") from error
