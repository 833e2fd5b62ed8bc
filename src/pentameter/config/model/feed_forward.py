"""The schema of the feed-forward layers: `[model.feed_forward]`, and `[model.experts]` with the
`[model.router]` that chooses among them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, Self

from pydantic import model_validator

from pentameter.config.choices import GATES, look_up
from pentameter.config.section import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Switch,
    Width,
)
from pentameter.errors import divisors, listed


class FeedForwardConfig(Section):
    """The feed-forward layer; experts have its non-linearity, too."""

    width: Width | None = None
    """Width of the feed-forward layer; 4 × d_model when absent."""
    activation: Literal[
        "relu", "relu2", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh", "swiglu_clamped"
    ] = "gelu"
    """Feed-forward non-linearity; `gelu` is exact, `gelu_tanh` GPT-2's approximation, `relu2` the
    square of `relu`. `swiglu`, `geglu` and `geglu_tanh` are SiLU, GELU or `gelu_tanh` of a gate, a
    matrix of its own, times the layer's inner width (Shazeer 2020). `swiglu_clamped`: gate ·
    sigmoid(swiglu_alpha · gate) · (inner width + 1), the gate at most swiglu_limit, the inner width
    within ± swiglu_limit (gpt-oss)."""
    swiglu_alpha: PositiveFloat = 1.702
    """`swiglu_clamped`: factor of the gate in the sigmoid."""
    swiglu_limit: PositiveFloat = 7.0
    """`swiglu_clamped`: bound of the gate and the inner width."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        keys = ("swiglu_alpha", "swiglu_limit")
        self.check_effect("model.feed_forward", keys, "activation", "swiglu_clamped")
        return self

    @property
    def has_gate(self) -> bool:
        """Whether the layer has a gate, a further matrix with the shape of `up`: with the
        activations `swiglu`, `geglu`, `geglu_tanh` and `swiglu_clamped`."""
        key = "model.feed_forward.activation"
        return look_up(GATES, self.activation, key, "the parameter table")


class ExpertsConfig(Section):
    """A mixture of experts in place of the feed-forward layer."""

    count: Positive | None = None
    """Experts (E) in a layer: feed-forward layers, of which a router chooses some for each token.
    When absent, a layer has one feed-forward layer for all tokens."""
    per_token: Positive | None = None
    """Experts that the router chooses for a token; 2 when absent."""
    width: Width | None = None
    """Width of an expert; the feed-forward layer's when absent."""
    n_shared: NonNegative = 0
    """Experts that every token passes through beside its chosen ones. They are computed as one
    feed-forward layer, n_shared times as wide as an expert."""
    shared_gate: Switch = False
    """Multiply the shared experts' output by a learned number per token, a sigmoid (Qwen2-MoE)."""
    dense_layers: NonNegative | tuple[NonNegative, ...] = 0
    """Layers with one feed-forward layer instead of experts: the number of first layers, or a list
    of layers, counted from 0."""
    capacity: PositiveFloat | None = None
    """Most tokens that an expert takes from a sequence, as a multiple of an equal share of them,
    context_length · per_token ÷ count. The expert leaves out the sequence's later tokens. No limit
    when absent."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        key = self.first_set(type(self).model_fields)
        if self.count is None and key is not None:
            raise ValueError(without_experts(f"model.experts.{key}"))
        if self.count is not None and self.n_chosen > self.count:
            raise ValueError(
                f"model.experts.per_token={self.n_chosen} must be at most model.experts.count="
                f"{self.count}"
            )
        if self.shared_gate and not self.n_shared:
            raise ValueError(
                "model.experts.shared_gate=true gates shared experts, and there are none; set "
                "model.experts.n_shared, or leave it out"
            )
        return self

    def check_layers(self, n_layers: int) -> None:
        """Raise ValueError unless `dense_layers` leaves one of `n_layers` layers with experts."""
        if not any(map(self.are_in, range(n_layers))):
            raise ValueError(
                f"model.experts.dense_layers={self.dense_layers} leaves none of model.n_layers="
                f"{n_layers} with experts; name fewer, or leave model.experts.count out"
            )
        last = max(self._dense, default=0)
        if last >= n_layers:
            raise ValueError(
                f"model.experts.dense_layers has layer {last}, and the last of model.n_layers="
                f"{n_layers} is {n_layers - 1}"
            )

    @property
    def n_chosen(self) -> int:
        """The number of experts that a token is sent to (k): `per_token`, or 2 if that is None."""
        return 2 if self.per_token is None else self.per_token

    def are_in(self, layer: int) -> bool:
        """Return whether layer number `layer`, from 0, has experts instead of one feed-forward
        layer: with `count`, all layers except `dense_layers` (the first so many, or those
        listed)."""
        return self.count is not None and layer not in self._dense

    @property
    def _dense(self) -> Collection[int]:
        dense = self.dense_layers
        return range(dense) if isinstance(dense, int) else dense


class RouterConfig(Section):
    """The router, which chooses a token's experts and weighs their outputs."""

    score_function: Literal["softmax", "sigmoid"] = "softmax"
    """A token's scores of the experts: a softmax of its router logits, or the sigmoid of each
    (DeepSeek-V3). The k highest are chosen, of equal ones the lower expert, and weigh the
    experts' outputs."""
    top_k_first: Switch = False
    """`softmax` of the chosen experts' logits alone (gpt-oss), which sums to 1."""
    renormalize: Switch = False
    """Divide the chosen scores by their sum."""
    scale: PositiveFloat = 1.0
    """Factor of the chosen scores."""
    bias: Switch = False
    """A bias on the router's logits (gpt-oss)."""
    groups: Positive | None = None
    """Groups into which the experts are divided, in order. A token chooses its experts within
    `open_groups` of them: the groups whose `group_scores` highest scores have the largest sums."""
    open_groups: Positive | None = None
    """Groups within which a token chooses its experts; needs `groups`."""
    group_scores: Positive = 2
    """Number of highest scores in a group whose sum is compared with other groups': 2 (DeepSeek-V3)
    or 1 (DeepSeek-V2)."""
    balance: Literal["none", "bias", "sequence", "batch"] = "none"
    """Method of balancing experts. `bias`: a number is added to each expert's score for
    choosing alone, and moves by balance_rate each step, up where the step's batch gave the expert
    fewer tokens than the mean (DeepSeek-V3). `sequence`: a loss for each sequence. `batch`: a loss
    over the step's batch, with the fractions of tokens of the step before."""
    balance_rate: PositiveFloat = 0.001
    """`bias`: how far an expert's number moves in a step."""
    balance_weight: PositiveFloat = 0.01
    """`sequence`, `batch`: the loss's factor. It is 1 where experts get equally many tokens."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the mean squared log-sum-exp of a token's router logits (Zoph et al. 2022)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_softmax = self.score_function == "softmax"
        if self.top_k_first and (self.renormalize or not is_softmax):
            other = "renormalize=true" if is_softmax else "score_function='sigmoid'"
            raise ValueError(
                "model.router.top_k_first=true is a softmax of the chosen logits, which sums to 1: "
                f"model.router.{other} does not go with it; leave one out"
            )
        if self.top_k_first and self.balance == "bias":
            raise ValueError(
                "model.router.balance='bias' is added to scores before experts are chosen, and "
                "model.router.top_k_first=true has scores of the chosen ones alone; leave one out"
            )
        if (self.groups is None) != (self.open_groups is None):
            raise ValueError(
                "model.router.groups and model.router.open_groups say how many groups there are "
                "and how many a token chooses from; set both, or neither"
            )
        if self.groups is None and self.first_set(("group_scores",)):
            raise ValueError(
                f"model.router.group_scores={self.group_scores} compares groups, and "
                "model.router.groups is not set; set it, or leave both out"
            )
        self.check_effect("model.router", ["balance_rate"], "balance", "bias")
        self.check_effect("model.router", ["balance_weight"], "balance", "sequence", "batch")
        return self

    def check_experts(self, experts: ExpertsConfig) -> None:
        """Raise ValueError unless these settings fit `experts`: there are some if one is set, they
        form groups of equal sizes, and the open ones hold as many as a token chooses."""
        E, k = experts.count, experts.n_chosen
        if E is None:
            key = self.first_set(type(self).model_fields)
            if key is not None:
                raise ValueError(without_experts(f"model.router.{key}"))
            return
        groups, n_open = self.groups, self.open_groups
        if groups is None or n_open is None:
            return
        if E % groups or E // groups < self.group_scores:
            possible = [n for n in divisors(E) if E // n >= self.group_scores]
            remedy = f"possible: {listed(possible)}" if possible else f"set that to at most {E}"
            raise ValueError(
                f"model.router.groups={groups} must divide model.experts.count={E} into groups of "
                f"at least model.router.group_scores={self.group_scores}; {remedy}"
            )
        if n_open > groups or n_open * E // groups < k:
            raise ValueError(
                f"model.router.open_groups={n_open} of {groups} groups of {E // groups} experts "
                f"must hold model.experts.per_token={k}, and be at most {groups}"
            )


def without_experts(path: str) -> str:
    """Return the error message for a setting of experts, the key at `path`, in a model that has
    none."""
    return f"{path} is of experts, and model.experts.count is not set; set it, or leave both out"
