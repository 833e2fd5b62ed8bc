"""The embedding and the head of a Hugging Face folder whose config.json, weights and tokenizer
disagree about them: whether they are one matrix, and how many tokens they have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pentameter.checkpoint.format.lazy_tensors import LazyTensor, copy_region
from pentameter.checkpoint.hugging_face.family import Family
from pentameter.config.messages import shown
from pentameter.config.model.architecture import ModelConfig
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError, CorruptError
from pentameter.planning.gpt import parameter_table

if TYPE_CHECKING:
    import torch

_ROWS_AT_ONCE = 4096


def has_tied_head(
    tensors: dict[str, LazyTensor],
    family: Family,
    content: Mapping[str, Any],
    is_tied: bool,
    where: Path,
    warnings: list[str],
) -> bool:
    """Return whether the head of a folder's weights is its embedding. Where `is_tied`, which
    config.json says, and the weights disagree, the weights count, and `warnings` gets a line.

    A head that equals the embedding, of which some programs save a copy, is taken out of `tensors`
    (the family's names), if the two are one. Without a head in the weights they are one, unless
    config.json (`content`) says in so many words that they are not: then a CorruptError is raised.
    `where`, the weights' file or folder, is for messages.
    """
    import torch

    head, embedding = family.head, f"{family.body}{family.names['token_embedding']}.weight"
    key, _ = family.written["tied_head"]
    if head not in tensors and not is_tied and embedding in tensors:
        if content.get(key) is not None:
            raise CorruptError(
                f"{where} lacks {head}, and config.json says {key}={shown(content[key])}: the "
                f"output projection has no weights; set {key} to true if it is the embedding "
                f"({embedding}), or complete the files"
            )
        warnings.append(
            f"{where} lacks {head}, and config.json does not say {key}: the embedding is the "
            "output projection, too"
        )
        return True
    if not (is_tied and {head, embedding} <= tensors.keys()):
        return is_tied
    if torch.equal(tensors[head][...], tensors[embedding][...]):
        del tensors[head]
        return True
    warnings.append(
        f"{where}: {head} differs from {embedding}, and config.json says that they are one "
        f"({key}); the output projection has its own weights, as in the file"
    )
    return False


def check_vocabulary(vocab_size: int | None, tokenizer: Tokenizer, path: Path) -> None:
    """Raise ConfigError if `tokenizer` has more tokens than the `vocab_size` that config.json, at
    `path`, gives, unless all of those beyond were added to its vocabulary later."""
    if vocab_size is None or not tokenizer.added_ids.issuperset(
        range(vocab_size, tokenizer.vocab_size)
    ):
        raise ConfigError(
            f"{path}: vocab_size={shown(vocab_size)} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} tokens; they do not belong together"
        )


def grown_to(
    n_tokens: int,
    model: ModelConfig,
    weights: dict[str, LazyTensor],
    where: Path,
    warnings: list[str],
) -> dict[str, LazyTensor]:
    """Return the `weights` of `model` with rows for all of a tokenizer's `n_tokens`. A row beyond
    the model's vocab_size is the mean of those before: a logit of 0 may be the highest of all, the
    mean of the logits is not. `warnings` gets a line if there are any. `where` is for messages."""
    known = model.vocab_size
    assert known is not None  # check_vocabulary has seen it
    if n_tokens <= known:
        return weights
    warnings.append(
        f"{where}: the tokenizer has {n_tokens} tokens, the embedding {known} rows; it is grown, "
        f"and each new row is the mean of the others{'' if model.tied_head else ', as in the head'}"
    )
    rows = {spec.name for spec in parameter_table(model) if spec.axes[0] == "vocab"}
    return {
        name: _Grown(tensor, n_tokens).lazy if name in rows else tensor
        for name, tensor in weights.items()
    }


class _Grown:
    """A tensor (V, …) with more rows, each the mean of the first V, which is computed when it is
    first asked for."""

    def __init__(self, tensor: LazyTensor, n_rows: int) -> None:
        self._tensor, self._shape = tensor, (n_rows, *tensor.shape[1:])

    @property
    def lazy(self) -> LazyTensor:
        return LazyTensor(self._shape, self._tensor.dtype, self._fill)

    @cached_property
    def _mean(self) -> torch.Tensor:
        import torch

        n, *others = self._tensor.shape
        total = torch.zeros(others, dtype=torch.float64)
        for start in range(0, n, _ROWS_AT_ONCE):
            rows = slice(start, min(n, start + _ROWS_AT_ONCE))
            total += self._tensor[rows, *(slice(0, size) for size in others)].double().sum(0)
        return (total / n).to(self._tensor.dtype)

    def _fill(self, target: torch.Tensor, region: tuple[slice, ...]) -> None:
        rows, *others = region
        n_known = max(0, min(rows.stop, self._tensor.shape[0]) - rows.start)
        if n_known:
            known = (slice(rows.start, rows.start + n_known), *others)
            copy_region(target[:n_known], self._tensor, known)
        if n_known < len(target):
            target[n_known:] = self._mean[tuple(others)]
