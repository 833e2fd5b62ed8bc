"""Functions that call a custom module, or a slice of it, whatever arguments and result its
`forward` has.

Shapes: B batch rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Literal

import torch
from torch import Tensor, nn

from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.model.loss import loss_sum
from pentameter.parallel.sources.model_source import Call
from pentameter.tree import Tree

Gives = Literal["logits", "loss", "both"]


def gives(module: nn.Module) -> Gives:
    """Return which results `module(…)` can compute, by its `forward` signature: `logits` if it
    takes inputs alone, `loss` if it also requires targets, `both` if targets are optional."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [each for each in parameters if each.kind in kinds]
    if len(positional) < 2:
        return "logits"
    return "loss" if positional[1].default is inspect.Parameter.empty else "both"


def custom_call(
    model: nn.Module, config: Config, built_by: str, *, is_last: bool, reads_inputs: bool
) -> Call:
    """Return the Call (slice, x, targets, keys → tensor) for `model`, a slice of the module that
    the function named `built_by` builds. The slice that `is_last` returns a loss or logits, any
    other the residual stream. If it `reads_inputs`, x is (stream, inputs).

    Losses and streams have the parameters' dtype. The Call raises ConfigError for a module that
    does not return one tensor, for a loss that is not 0-dim, and for logits with targets that are
    not one integer tensor.
    """
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    vocab_size = config.model.vocab_size
    assert vocab_size is not None  # resolved

    def run(model: nn.Module, x: Tree, *targets: Tree) -> Tensor:
        """Call the module, and return the tensor that it returns, unchanged. x is the inputs (B, …)
        or, if a later stage reads them too, a pair: the residual stream (B, T, D) and the inputs.
        `targets` (B, …), if any, is passed on."""
        if reads_inputs:
            stream, inputs = x
            found = model(stream, *targets, inputs=inputs)
        else:
            found = model(x, *targets)
        if not isinstance(found, Tensor):
            due = "the summed loss, 0-dim," if targets else "logits" if is_last else "the stream"
            raise ConfigError(
                f"the module that {built_by} builds returned {type(found).__name__}, called with "
                f"{'inputs and targets' if targets else 'inputs'}; it is to return {due} alone, as "
                "one tensor"
            )
        return found

    def call_for_stream(
        model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
    ) -> Tensor:
        """Call the slice, and return the residual stream (B, T, D) for the next stage."""
        return run(model, x).to(dtype)

    def call_for_logits(
        model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
    ) -> Tensor:
        """Call a slice that returns logits. Return them, (B, T, V), if there are no `targets`, else
        their cross-entropy summed over the targets, 0-dim."""
        logits = run(model, x)
        if targets is None:
            return logits
        if not isinstance(targets, Tensor) or targets.is_floating_point():
            raise ConfigError(
                f"the loss of logits is known of one tensor of integer targets; let the module "
                f"that {built_by} builds take (inputs, targets) and return its summed loss"
            )
        n_classes = vocab_size if logits.ndim == 3 else logits.shape[-1]
        return loss_sum(logits, targets, min(n_classes, logits.shape[-1]))

    def call_for_loss(
        model: nn.Module, x: Tree, targets: Tree | None, keys: Tensor | None
    ) -> Tensor:
        """Call a slice that computes its own loss. Return the summed loss, 0-dim; without
        `targets`, the logits."""
        if targets is None:
            return run(model, x)
        loss = run(model, x, targets)
        if loss.ndim:
            raise ConfigError(
                f"the module that {built_by} builds, called with inputs and targets, returned "
                f"{tuple(loss.shape)}; it is to return the summed loss, 0-dim. One that gives "
                "logits takes inputs alone"
            )
        return loss.to(dtype)

    if not is_last:
        return call_for_stream
    return call_for_logits if gives(model) == "logits" else call_for_loss
