"""The key/value cache: keys and values of past tokens, so that generation need not compute them
again; and, where experts have a capacity, the experts that past tokens chose.

Shapes: B batch, T tokens, H KV heads, K head size, k experts per token.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pentameter.config.schema import ModelConfig


class Cache(Protocol):
    """Interface of a key/value cache, as attention layers and experts call it."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the new tokens' keys and values, (B, H, T, K) each for H KV heads, in the block
        with index `layer` in the whole model. Return all keys and values that its attention is to
        read, the cached and the new ones, (B, H, S, K) each. Latent attention appends a latent
        (B, 1, T, C) and a rotated key (B, 1, T, R) in their place."""

    def number_choices(self, layer: int, chosen: Tensor, n_experts: int) -> Tensor:
        """Append the experts that the new tokens chose in the block with index `layer`: `chosen`,
        int64 (B, T, k), numbers below `n_experts`. Return for each choice which one it is, counted
        from 1, among the choices of the same expert in its sequence, cached ones included: int64
        (B, T, k). Only experts with a capacity call it."""


def choice_numbers(chosen: Tensor, n_experts: int, before: Tensor | None = None) -> Tensor:
    """Return for each of the `chosen` experts, int64 (B, T, k) below `n_experts`, which one it is,
    counted from 1, among the choices of the same expert in its sequence: int64 (B, T, k). `before`,
    int64 (B, S), has the choices of the sequence's earlier tokens, which are counted first;
    `n_experts` in it stands for no choice."""
    flat = chosen.flatten(1)  # (B, T · k)
    numbers = F.one_hot(flat, n_experts).cumsum(1)
    if before is not None:
        counts = numbers.new_zeros(len(flat), n_experts + 1)
        counts.scatter_add_(1, before, torch.ones_like(before))
        numbers = numbers + counts[:, None, :n_experts]
    return numbers.gather(-1, flat[..., None]).view_as(chosen)


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
        *,
        zeroed: bool = False,
    ) -> None:
        """zeroed: fill the memory with zeros, as a NewestTokenCache of it needs."""
        n_heads, *channels = config.cached_per_token
        # A host gives memory once it is written to: a short text takes little of a long context.
        make = torch.zeros if zeroed else torch.empty
        self.keys, self.values = (
            [
                make((batch_size, n_heads, config.context_length, n), device=device, dtype=dtype)
                for _ in range(config.n_layers)
            ]
            for n in channels
        )
        self._chosen = [
            torch.zeros(shape, dtype=torch.int64, device=device)
            for shape in [(batch_size, config.context_length, config.experts.n_chosen)]
            * config.n_layers
            if config.experts.capacity is not None
        ]
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

    def number_choices(self, layer: int, chosen: Tensor, n_experts: int) -> Tensor:
        """Append the new tokens' `chosen` experts (B, T, k) in one layer, and return their numbers,
        as `Cache.number_choices` describes them."""
        stored = self._chosen[layer]
        stored[:, self.length : self.length + chosen.shape[1]] = chosen
        return choice_numbers(chosen, n_experts, stored[:, : self.length].flatten(1))

    def advance(self, n_tokens: int) -> None:
        """Add `n_tokens`, which every layer has appended by now, to `length`."""
        self.length += n_tokens

    def reset(self) -> None:
        """Set `length` to 0, so that new tokens overwrite the old ones; the memory stays
        allocated."""
        self.length = 0


class NewestTokenCache(KVCache):
    """The memory of a `cache` for one more token per sequence at `position`, a tensor (1,) on the
    device. All layers read the first n_keys positions; the cache must be `zeroed`, as attention
    hides those that hold no token, and 0 times NaN is NaN."""

    def __init__(self, cache: KVCache, position: Tensor, n_keys: int) -> None:
        self.keys, self.values, self.length = cache.keys, cache.values, 0
        self._position, self._n_keys = position, n_keys

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, H, 1, K) at the position, and return (B, H, n_keys, K) of each."""
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, self._position, k.to(keys.dtype))
        values.index_copy_(2, self._position, v.to(values.dtype))
        return keys[:, :, : self._n_keys], values[:, :, : self._n_keys]

    def advance(self, n_tokens: int) -> None:
        """Leave `length` at 0: the position says where the token is."""
