"""Bytes that forward passes keep for their backward passes.

After Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models"),
section 4, with what our modules keep: their attention has dropout and writes out its weights,
ours by default neither.

Shapes: N tokens of a micro-batch (B · T), D d_model, F width of the feed-forward layer, V padded
vocabulary (or this process's part of it), H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.schema import Config
from pentameter.planning.architecture import (
    embedding_dropout,
    feed_forward_width,
    has_final_norm,
    padded_vocab_size,
)
from pentameter.planning.chunks import MAX_LOGITS, row_chunks
from pentameter.planning.layout import Layout, part_size
from pentameter.planning.sizes import StepSizes
from pentameter.planning.timeline import Pass

KEPT_OF_MLP = {"relu": 1, "gelu": 2, "gelu_tanh": 2}
"""`model.activation` → tensors of the feed-forward width kept for backward: the activation's
result, which the next product reads, and its input, where the slope is computed from that."""

PLACE = "the planner's memory"


@dataclass(frozen=True)
class _Sizes:
    """Bytes of what a micro-batch makes on its way: `e` of a weight's number, `p` of a product's;
    on the stream between shared matrices, and in them."""

    config: Config
    layout: Layout
    step: StepSizes

    @property
    def e(self) -> int:
        return self.step.element_bytes

    @property
    def p(self) -> int:
        return self.step.product_bytes

    @property
    def n_tokens(self) -> int:
        return self.step.micro_batch_size * self.config.model.context_length

    @property
    def stream(self) -> int:
        """Numbers of the residual stream, (N, D), that this process has."""
        cut = self.layout.tensor if self.layout.sequence else 1
        return self.n_tokens * self.config.model.d_model // cut

    def layer(self) -> int:
        """Of a block: the inputs of both norms, of the four matrices, of attention and of the
        activation, the masks of dropout, and the matrices where they are rounded for products (and
        not gathered so)."""
        model = self.config.model
        whole, t = self.n_tokens * model.d_model, self.layout.tensor
        inner = self.n_tokens * feed_forward_width(model) // t
        kept = 2 * self.e * self.stream  # inputs of the norms
        kept += 2 * self.p * whole  # inputs of qkv and up, gathered
        kept += self.p * (4 * whole // t)  # q, k, v and what attention gathers
        kept += self.p * inner * look_up(KEPT_OF_MLP, model.activation, "model.activation", PLACE)
        if model.dropout:
            kept += 2 * self.stream
        if self.p < self.e and not self.layout.zero:
            kept += (
                self.p * 2 * model.d_model * (2 * model.d_model + feed_forward_width(model)) // t
            )
        return kept + self.attention()

    def attention(self) -> int:
        """Of attention weights: the sums of their exponentials, or where some are dropped the
        weights, before and after, the mask, and queries times a factor."""
        model, t = self.config.model, self.layout.tensor
        sums = self.n_tokens * model.n_heads // t
        if not model.attention_dropout:
            return 4 * sums
        weights = sums * model.context_length
        return weights * (max(4, self.e) + 1 + self.p) + self.p * self.n_tokens * model.d_model // t

    def kept_layer(self) -> int:
        """Of a block, with activation checkpointing where it is on."""
        model, t = self.config.model, self.layout.tensor
        kept = self.e * self.stream
        match self.config.train.activation_checkpoint:
            case None:
                return self.layer()
            case "full":
                return kept
            case "selective":
                whole = self.n_tokens * model.d_model
                products = (3 if model.attention_dropout else 4) * whole // t
                inner = self.n_tokens * feed_forward_width(model) // t
                return kept + self.p * (products + 2 * whole + inner)
            case unknown:
                refuse_unknown(unknown, "train.activation_checkpoint", PLACE)

    def split_layer(self) -> int:
        """Of a block whose input's gradient is there and whose weights' is not: the gradients of
        its norms' outputs and of the results of its matrices."""
        model, t = self.config.model, self.layout.tensor
        inner = self.n_tokens * feed_forward_width(model) // t
        whole = self.n_tokens * model.d_model
        return self.p * (3 * whole // t + 2 * whole + inner) + 2 * self.e * self.stream

    def recomputed(self) -> int:
        """While a block is computed again: what was not kept of it, and the gradients of the
        activation's input and output and of the stream."""
        kept = self.kept_layer() - self.e * self.stream
        inner = self.n_tokens * feed_forward_width(self.config.model) // self.layout.tensor
        return self.layer() - kept + 2 * self.p * inner + 2 * self.e * self.stream

    def ends(self, *, is_first: bool, is_last: bool) -> int:
        """Of embedding and head: a mask, and the input of the final norm and of the head."""
        model, kept = self.config.model, 0
        if is_first and embedding_dropout(model):
            kept += self.stream
        if is_last:
            kept += self.e * self.stream * has_final_norm(model)
            kept += self.p * self.n_tokens * model.d_model
        return kept

    def loss(self) -> int:
        """While the loss is computed: logits as probabilities with two gradients of theirs, or the
        chunk of them at hand, and the weight and its gradient where they are rounded for it."""
        model, t = self.config.model, self.layout.tensor
        width = part_size(padded_vocab_size(model), t, 0)
        rounded = 2 * self.p * width * model.d_model if self.p < self.e else 0
        if t == 1 and self.n_tokens * width <= MAX_LOGITS:
            return rounded + 3 * max(4, self.e) * self.n_tokens * width
        n_rows = row_chunks(self.n_tokens, width, MAX_LOGITS)[0].stop
        logits = n_rows * width * (self.p if self.p == self.e else self.p + 4)
        return rounded + logits + self.p * self.n_tokens * model.d_model


def kept_activations_bytes(
    config: Config,
    layout: Layout,
    stages: Sequence[range],
    passes: Sequence[Pass],
    step: StepSizes,
) -> tuple[int, int]:
    """The most that a process keeps at a time which makes these passes, in order, and the most
    once it has gradients, after its first backward pass.

    Each forward pass adds what its stage keeps, until the backward pass is done, and what is in
    between its halves where it is split. Added is what one block needs that is computed again, and
    what the loss needs.
    """
    sizes = _Sizes(config, layout, step)
    last = layout.n_stages - 1
    held_stages = {one.stage for one in passes}
    kept = {
        stage: len(stages[stage]) * sizes.kept_layer()
        + sizes.ends(is_first=stage == 0, is_last=stage == last)
        + (sizes.e * sizes.stream if stage < last else 0)  # its output, which was sent
        for stage in held_stages
    }
    split = {stage: len(stages[stage]) * sizes.split_layer() for stage in held_stages}
    at_once = 0 if config.train.activation_checkpoint is None else sizes.recomputed()
    at_once = max(at_once, sizes.loss() if last in kept else 0)
    held = most = later = 0
    has_gradients = False
    for one in passes:
        if one.kind == "forward":
            held += kept[one.stage]
        elif one.kind == "backward_input":
            held += split[one.stage]
        else:
            held -= kept[one.stage] + (split[one.stage] if one.kind == "backward_weight" else 0)
            has_gradients = True
        most = max(most, held)
        later = max(later, held) if has_gradients else 0
    return most + at_once, later + at_once if later else 0
