"""Multi-head latent attention: keys and values of all heads are computed from a few numbers per
token, the latent, which is cached in their place (DeepSeek-AI 2024, "DeepSeek-V2").

Shapes: B batch, T tokens, D d_model, H heads, K head size without the rotated channels, R rotated
channels, V value size, C latent size; S all tokens (keys), the last T being the new ones.
"""

from __future__ import annotations

from functools import reduce
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.model.adapter import weight_terms
from pentameter.model.attention.attention import CausalAttention, normed
from pentameter.model.attention.cache import Cache
from pentameter.model.attention.dot_product import cuda_capability, wants_equal_widths
from pentameter.model.positions import Positions


class Gather(Protocol):
    """Type of the function that brings tensors of the residual stream to attention. Under tensor
    parallelism a rank may have only some tokens, and attention needs all: then it all-gathers.
    Without, it is `whole`, which returns its arguments."""

    def __call__(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return each of `parts` for all T tokens, (B, T, N), given this rank's t tokens of it, (B,
        t, N)."""


class LatentAttention(CausalAttention):
    """Causal multi-head latent attention.

    `kv_down` computes the latent (C) and the rotated key (R) that all heads share; `kv`, from the
    normed latent, each head's key and value, rows (H, K + V). `q` computes queries (H, K + R) from
    the stream or, with `model.attention.q_rank`, from a normed latent of their own.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        D, H, C = config.d_model, config.attention.n_heads, config.latent_channels
        self.head_size, self.value_size = config.head_channels, config.value_channels
        self.n_rotated, self.n_latent = config.rope_channels, C
        self.score_factor = config.rope_scaling.score_factor
        q_inputs = D if config.attention.q_rank is None else config.attention.q_rank
        self.q_down: nn.Linear | None = None
        if config.attention.q_rank is not None:
            self.q_down = nn.Linear(D, config.attention.q_rank, bias=config.attention.qkv_bias)
            self.q_norm = nn.RMSNorm(config.attention.q_rank, eps=config.norm_eps)
        self.q = nn.Linear(q_inputs, H * config.query_channels, bias=False)
        self.kv_down = nn.Linear(D, C + self.n_rotated, bias=config.attention.qkv_bias)
        self.kv_norm = nn.RMSNorm(C, eps=config.norm_eps)
        self.kv = nn.Linear(C, H * (self.head_size + self.value_size), bias=False)
        self.gather: Gather = whole
        """Function that brings latents to attention. Tensor parallelism replaces it by one that
        all-gathers them over the sequence, and sums their gradients over heads."""
        self.out = nn.Linear(H * self.value_size, D, bias=config.out_bias)

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return (B, T, D), without the residual sum: for each token of x (B, T, D), the attention
        over itself and the tokens before it, projected by `out`.

        positions: the tokens' positions and rotation. dropout_keys: int32 (B, n_sites, 2), None for
        no dropout. With a `cache`, x's latents and rotated keys are appended to it, and attention
        also sees the cached ones.
        """
        rotation = positions.rotation(self.rotates_by)
        assert rotation is not None  # the configuration asks for rotary positions
        q_input = x if self.q_down is None else normed(self.q_norm, self.q_down(x))
        down = self.kv_down(x)
        latent = normed(self.kv_norm, down[..., : self.n_latent])
        q_input, latent, key = self.gather(q_input, latent, down[..., self.n_latent :])
        key = rotation(key[:, :, None])  # (B, T, 1, R), for all heads
        q = self.q(q_input).unflatten(-1, (-1, self.head_size + self.n_rotated))
        q = q if self.score_factor == 1.0 else q * self.score_factor
        q_plain, q_rotated = q[..., : self.head_size], rotation(q[..., self.head_size :])
        if cache is None:
            y = self._expanded(q_plain, q_rotated, latent, key, positions, dropout_keys)
        else:
            y = self._absorbed(q_plain, q_rotated, latent, key, positions, cache)
        return self.project_out(y, positions, dropout_keys)

    def _expanded(
        self,
        q_plain: Tensor,
        q_rotated: Tensor,
        latent: Tensor,
        key: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None,
    ) -> Tensor:
        """Return each head's attention result (B, T, H, V), values averaged by attention weights.
        Every head's keys and values are computed from the latent (B, T, C), as in training. q_plain
        is (B, T, H, K), q_rotated (B, T, H, R), key (B, T, 1, R). dropout_keys: int32 (B, n_sites,
        2), None for no dropout."""
        kv = self.kv(latent).unflatten(-1, (-1, self.head_size + self.value_size))
        k_plain, v = kv.split((self.head_size, self.value_size), dim=-1)
        q = torch.cat((q_plain, q_rotated), dim=-1)
        k = torch.cat((k_plain, key.expand(*k_plain.shape[:-1], -1)), dim=-1)
        widths = (q.shape[-1], self.value_size)
        if self.attend.equal_widths or wants_equal_widths(
            cuda_capability(v.device), v.dtype, widths
        ):
            v = F.pad(v, (0, widths[0] - widths[1]))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return self.means(q, k, v, positions, dropout_keys)[..., : self.value_size]

    def _absorbed(
        self,
        q_plain: Tensor,
        q_rotated: Tensor,
        latent: Tensor,
        key: Tensor,
        positions: Positions,
        cache: Cache,
    ) -> Tensor:
        """Return each head's attention result (B, T, H, V) over the cached tokens and these, whose
        latent and key are appended to `cache`. The other arguments, and the result up to rounding,
        are those of `_expanded` without dropout.

        No cached token is expanded into keys and values: queries are multiplied by the keys'
        matrix, and averaged latents by the values'. So attention has one key and value per token
        for all heads.
        """
        latents, keys = cache.append(self.layer, latent[:, None], key.transpose(1, 2))
        q_latents, values = [], []
        for left, right in weight_terms(self.kv):
            rows = left.unflatten(0, (-1, self.head_size + self.value_size))  # (H, K + V, …)
            k_rows, v_rows = rows.split((self.head_size, self.value_size), dim=1)
            of_keys = torch.einsum("bthk,hkc->bthc", q_plain, k_rows)
            q_latents.append(of_keys if right is None else of_keys @ right)
            values.append((v_rows, right))
        q = torch.cat((reduce(torch.add, q_latents), q_rotated), dim=-1)
        # `means` divides by the root of the width that it sees.
        q = q * (q.shape[-1] / (self.head_size + self.n_rotated)) ** 0.5
        k = torch.cat((latents, keys), dim=-1)  # (B, 1, S, C + R)
        y = self.means(q.transpose(1, 2), k, latents, positions, None)  # (B, T, H, C)
        results = [
            torch.einsum("bthc,hvc->bthv", y if right is None else y @ right.t(), v_rows)
            for v_rows, right in values
        ]
        return reduce(torch.add, results)


def whole(*parts: Tensor) -> tuple[Tensor, ...]:
    """Return the parts unchanged: the `Gather` to use where each rank has all tokens already."""
    return parts
