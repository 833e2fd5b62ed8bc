"""The GPT: plain, sliceable by layers, with keyed initial weights and keyed dropout."""

from pentameter.model.cache import KVCache
from pentameter.model.chunked_loss import (
    chunked_loss_sum,
    elementwise_row_loss,
    exceeds_chunk,
    row_loss,
)
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import GPT, build_model
from pentameter.model.initial import initial_values, initialize
from pentameter.model.loss import loss_sum

__all__ = [
    "GPT",
    "KVCache",
    "build_model",
    "chunked_loss_sum",
    "dropout_keys",
    "elementwise_row_loss",
    "exceeds_chunk",
    "initial_values",
    "initialize",
    "loss_sum",
    "row_loss",
]
