"""The router of a sub-layer of experts in the fused step: its logits, and the choice of experts by
them, computed by the C++ kernels in `cpp/router.cpp`, or by the plain model's operations.

Shapes: B batch, T sequence, D d_model, N = B · T tokens, E experts, k experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.config.choices import look_up
from pentameter.fused_cpu.functions import FoldedLinear
from pentameter.fused_cpu.kernels import precise
from pentameter.fused_cpu.native import CHANNELS, Struct, call, fields, serves
from pentameter.model.experts import Router, Routing

IS_SIGMOID = {"softmax": False, "sigmoid": True}
"""Maps a value of `model.router.score_function` to whether scores are sigmoids."""
HAS_LOSS = {"none": False, "bias": False, "sequence": True, "batch": True}
"""Maps a value of `model.router.balance` to whether it is an auxiliary loss."""
MOST_WEIGHTS = 1 << 16
"""Largest number of elements in a router's weight that the C++ kernel multiplies: up to it, the
sums of its gradient stay in a core's cache. For larger ones PyTorch's matmuls are as fast."""
TOKENS_PER_SUM, MOST_SUMS = 64, 256
"""Least tokens per partial sum in the gradient of the router's weight, and most such sums, which
take memory."""


def router_logits(h: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Return the logits (B, T, E), in at least fp32, without a bias: h · (weight · scale)ᵀ for the
    normalised h (B, T, D) in any dtype, the preceding norm's weight `scale` (D,), and the router's
    `weight` (E, D)."""
    takes = serves("vector", weight.dtype, h.dtype) and h.is_contiguous()
    if takes and h.shape[-1] % CHANNELS == 0 and weight.numel() <= MOST_WEIGHTS:
        return _RouterLogits.apply(h, scale, weight)
    return FoldedLinear.apply(precise(h), scale, weight)


def route(router: Router, logits: Tensor) -> Routing:
    """Return the Routing of tokens with these logits (B, T, E), as `router.route` does. The C++
    kernels compute it, unless the router has groups of experts, or an auxiliary loss that this pass
    needs."""
    if not serves("vector", logits.dtype, logits.dtype) or not _can_choose(router):
        return router.route(logits)
    experts, weights = _ChosenExperts.apply(logits, router)
    return router.routing(experts, weights)


def _can_choose(router: Router) -> bool:
    """Return whether the kernels support the router's settings, in its present mode (training or
    not)."""
    config = router.config
    has_loss = look_up(HAS_LOSS, config.router.balance, "model.router.balance", "the fused router")
    has_loss = has_loss or bool(config.router.z_loss)
    return config.router.groups is None and not (router.training and has_loss)


class _LogitsJob(Struct):
    """ctypes form of the C++ struct `Logits` in cpp/router.cpp: the arguments of the kernel that
    computes a router's logits."""

    _fields_ = fields("scale weight", int64="N D E rows low")


class _ChoiceJob(Struct):
    """ctypes form of the C++ struct `Choice` in cpp/router.cpp: the arguments of the kernel that
    chooses experts."""

    _fields_ = fields("balance", int64="N E k sigmoid top_k_first renormalize", float32="factor")


class _RouterLogits(Function):
    """Autograd function: a router's logits x · (weight · scale)ᵀ in fp32, by a C++ kernel for a
    weight with few rows (one for each expert)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        """Return the router's logits (B, T, E) in fp32: x (B, T, D), in fp32 or bf16, normalised
        and scaled by the norm's weight `scale` (D,), times the router's `weight` (E, D). Both
        weights are fp32."""
        ctx.save_for_backward(x, scale, weight)
        logits = weight.new_empty(*x.shape[:-1], len(weight))
        job = _logits_job(x, scale, weight)
        call("vector", "router_logits", job, logits, x)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of x, scale and weight, given the gradient g (B, T, E) of the
        logits."""
        x, scale, weight = ctx.saved_tensors
        job, g = _logits_job(x, scale, weight), g.contiguous()
        g_x, g_scale, g_weight = map(torch.empty_like, (x, scale, weight))
        partial_sums = weight.new_empty(-(-job.N // job.rows), *weight.shape)
        to = (g_x, g_weight, g_scale, partial_sums)
        call("vector", "router_logits_backward", job, *to, g, x)
        return g_x, g_scale, g_weight


def _logits_job(x: Tensor, scale: Tensor, weight: Tensor) -> _LogitsJob:
    """Return the arguments of the C++ kernel that computes a router's logits, for x (B, T, D), the
    norm's weight `scale` (D,) and the router's `weight` (E, D)."""
    E, D = weight.shape
    N = x.numel() // D
    rows = max(TOKENS_PER_SUM, -(-N // MOST_SUMS))  # whatever the number of threads
    return _LogitsJob(scale, weight, N, D, E, rows, x.dtype is torch.bfloat16)


class _ChosenExperts(Function):
    """Autograd function: the choice of experts by their logits, and their weights. In training its
    backward pass also adds to the router's `counts` and `logit_sums`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
        """Return each token's k chosen experts, int64 (B, T, k), and their weights, fp32 (B, T, k),
        for `logits` (B, T, E) in fp32. The best expert comes first; of equal ones the one with the
        lower number. `router` holds k and the rules by which it chooses and weighs."""
        logits = logits.contiguous()
        weights = logits.new_empty(*logits.shape[:-1], router.config.experts.n_chosen)
        experts, sums = torch.empty_like(weights, dtype=torch.int64), logits.new_empty(2)
        job = _choice_job(router, logits)
        call("vector", "choose_experts", job, experts, weights, sums, logits)
        ctx.save_for_backward(logits, experts, sums)
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)
        ctx.router = router
        return experts, weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, g: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits (B, T, E), given the gradient g (B, T, k) of the chosen
        experts' weights; their numbers have no gradient."""
        logits, experts, sums = ctx.saved_tensors
        g, g_logits = g.contiguous(), torch.empty_like(logits)
        counts = ctx.router.counts if ctx.router.training else None
        job = _choice_job(ctx.router, logits)
        call("vector", "choose_experts_backward", job, g_logits, counts, g, logits, experts)
        if counts is not None:
            ctx.router.logit_sums.add_(sums)
        return g_logits, None


def _choice_job(router: Router, logits: Tensor) -> _ChoiceJob:
    """Return the arguments of the C++ kernel that chooses experts, from the router's settings and
    the logits (B, T, E)."""
    config, E = router.config, logits.shape[-1]
    function = config.router.score_function
    return _ChoiceJob(
        router.balance if config.router.balance == "bias" else None,
        *(logits.numel() // E, E, config.experts.n_chosen),
        look_up(IS_SIGMOID, function, "model.router.score_function", "the fused router"),
        config.router.top_k_first,
        config.router.renormalize,
        config.router.scale,
    )
