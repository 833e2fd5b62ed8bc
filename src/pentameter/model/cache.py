"""The key/value cache: keys and values for past tokens, so that generation need not recompute them.

Shapes: B batch, T tokens, H KV heads, K head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pentameter.config.schema import ModelConfig


class Cache(Protocol):
    """Interface that attention layers expect from a key/value cache."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values (B, H, T, K) for the block with index `layer` in
        the whole model, H KV heads. Return all those that its attention is to read, the cached and
        the new ones, (B, H, S, K). Latent attention appends a latent (B, 1, T, C) and a rotated key
        (B, 1, T, R) in their place."""


class KVCache:
    """Keys and values of up to `context_length` tokens in `batch_size` sequences, for each
    layer, allocated once.

    `model(tokens, cache=cache)` takes the tokens as the continuation of the cached ones, and
    appends their keys and values. `length` is the number of cached tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        n_heads, *channels = config.cached_per_token
        self.keys, self.values = (
            [
                torch.zeros(
                    (batch_size, n_heads, config.context_length, n), device=device, dtype=dtype
                )
                for _ in range(config.n_layers)
            ]
            for n in channels
        )
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v (B, H, T, K) in one layer, and return all that layer's keys and values,
        (B, H, length + T, K), the new ones included.

        `length` changes only in `advance`, after the last layer has appended.
        """
        end = self.length + k.shape[2]
        keys, values = self.keys[layer], self.values[layer]
        keys[:, :, self.length : end] = k
        values[:, :, self.length : end] = v
        return keys[:, :, :end], values[:, :, :end]

    def advance(self, n_tokens: int) -> None:
        """Add `n_tokens`, which every layer has appended by now, to `length`."""
        self.length += n_tokens

    def reset(self) -> None:
        """Set `length` to 0, so that new tokens overwrite the old ones; the memory stays
        allocated."""
        self.length = 0
