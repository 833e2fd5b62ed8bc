"""Sizes of a configuration's data that its Plan needs: vocabulary, and batch rows in an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pentameter.config.schema import Config
from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import needs_no_download, open_dataset
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.setting import known_vocab_size
from pentameter.planning.plan import UNKNOWN_EPOCH, needs_data


@dataclass(frozen=True)
class DataSizes:
    """Two sizes of a data set that a plan needs: the entries of the vocabulary, and the batch rows
    per epoch. Each is None if the configuration does not need it, or if it is not known
    (`unknown`)."""

    vocab_size: int | None
    rows_per_epoch: int | None
    unknown: tuple[str, ...] = ()
    """Keys in a Plan's JSON whose values are unknown, because an epoch's length is."""

    @property
    def warning(self) -> str | None:
        """A sentence on why sizes are unknown; None if all are known."""
        if not self.unknown:
            return None
        return (
            "an epoch's length is not known: GPT-2's tokenizer, which cuts the text, is not on "
            f"this machine; null are {', '.join(self.unknown)}"
        )

    def without_unknown(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return `record`, a Plan as JSON values, with None for the keys in `unknown`."""
        return {**record, **dict.fromkeys(self.unknown)}


def data_sizes(config: Config, gpt2: Tokenizer | None = None) -> DataSizes:
    """Return the sizes of `config`'s data, which is opened (and prepared) only for an unknown
    vocabulary or epoch length.

    `gpt2` is GPT-2's tokenizer if the caller has loaded it. If it would have to be downloaded for
    an epoch's length, the length stays unknown. Raises the errors that `open_dataset` does.
    """
    vocab_size = config.model.vocab_size or known_vocab_size(config.data.tokenizer)
    if not needs_data(config.updated({"model.vocab_size": vocab_size})):
        return DataSizes(vocab_size, None)
    if gpt2 is None and not needs_no_download(config.data):
        of_length = ("steps", "total_tokens", "total_flops")
        unknown = ("rows_per_epoch", *(of_length if config.train.epochs is not None else ()))
        return DataSizes(vocab_size, UNKNOWN_EPOCH, unknown)
    # The hashes are left to the run; but the beginning of a stream must be there.
    is_streamed = config.data.order == "streamed"
    dataset = open_dataset(config.data, tokenizer=gpt2, verify=is_streamed)
    rows_per_epoch = training_batches(config, dataset.split("train")).rows_per_epoch
    dataset.close()
    return DataSizes(dataset.vocab_size, rows_per_epoch)
