"""Experts: feed-forward layers of which a router chooses some for each token.

No token is dropped unless `experts.capacity` says so, and nothing depends on the other sequences of
a batch. A token's rows, one for each of its chosen experts, are sorted by expert, multiplied with
one grouped matmul per matrix, put back, and added in the order in which they were chosen: without
atomic additions, so that every device gives the same sums each time.

Shapes: B batch, T tokens, D d_model, E experts, k experts per token, F an expert's inner width; N =
B · T tokens and R = N · k rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pentameter.config.choices import look_up, refuse_unknown
from pentameter.config.schema import ModelConfig
from pentameter.model.attention.cache import Cache, choice_numbers
from pentameter.model.dropout import StreamDropout, mlp_output_site
from pentameter.model.feed_forward import FeedForward, activation_of
from pentameter.model.grouped_matmul import Groups, groups_of
from pentameter.model.loss import AuxiliaryLoss
from pentameter.model.matmul import PLAIN, Matmul, exact_linear, matmul_dtype
from pentameter.model.positions import Positions
from pentameter.planning.sub_layers.experts import BALANCE_STATE


class Routing(NamedTuple):
    """The experts that each token is sent to, in the order in which they were chosen. A token's
    *rows* are its copies, one for each of its k experts.

    A tuple, since FSDP gathers a router's weight for the backward pass by hooks on the tensors that
    the router returns, and torch 2.11 finds none in a dataclass.
    """

    experts: Tensor
    """Numbers of the experts, int64 (N, k); E for a row that its expert has no capacity for."""
    weights: Tensor
    """Factors by which the experts' outputs are multiplied (N, k), float32 or float64."""
    n_experts: int

    def order(self) -> tuple[Tensor, Tensor]:
        """Return (order, ends). order, int64 (R,): the rows sorted by expert, then by token, as
        indices into the rows (N, k) flattened; rows for which there is no capacity come last. ends,
        int64 (E,): the index in `order` after each expert's last row."""
        experts = self.experts.flatten()
        counts = torch.zeros(self.n_experts + 1, dtype=torch.int64, device=experts.device)
        counts.scatter_add_(0, experts, torch.ones_like(experts))
        return experts.argsort(stable=True), counts[: self.n_experts].cumsum(0)


Numbers = Callable[[Tensor, int], Tensor]
"""Type of `choice_numbers` without its last argument: (chosen experts (B, T, k), E) → which one
each is, counted from 1, among the choices of the same expert in its sequence (B, T, k)."""


class Router(nn.Module):
    """Linear layer in float32 (float64 for float64 weights) whose logits (N, E) choose each token's
    experts.

    `balance` (E,) is a state that the engine updates after each step from `counts`. Its meaning
    depends on `model.router.balance`: for `bias`, a number added to the scores by which experts are
    chosen; for `batch`, each expert's tokens in the last step ÷ their mean over experts; else there
    is none, and it is None.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E = config.experts.count
        assert E is not None
        self.config = config
        self.weight = nn.Parameter(torch.empty(E, config.d_model))
        self.bias = nn.Parameter(torch.empty(E)) if config.router.bias else None
        state = look_up(BALANCE_STATE, config.router.balance, "model.router.balance", "the router")
        self.balance = None if state is None else nn.Parameter(torch.empty(E), requires_grad=False)
        self.count_sequence: Callable[[Tensor], Tensor] | None = None
        """Function that sums counts (B, E) over the ranks that each have a part of every sequence;
        None if this rank has whole sequences."""
        self.auxiliary_loss = AuxiliaryLoss()
        self.register_buffer("counts", torch.zeros(E), persistent=False)
        self.counts: Tensor
        """Tokens that chose each expert, float32 (E,), over the step's backward passes on this
        rank."""
        self.register_buffer("logit_sums", torch.zeros(2), persistent=False)
        self.logit_sums: Tensor
        """Sums over the same tokens, float32 (2,): the squared log-sum-exp of a token's logits, and
        its squared logits."""

    def start_step(self) -> None:
        """Zero what was counted."""
        self.counts.zero_()
        self.logit_sums.zero_()

    def forward(self, x: Tensor, numbers: Numbers = choice_numbers) -> Routing:
        """Choose experts for the tokens in x (B, T, D), and return the Routing: which experts each
        token goes to, with which weights. `numbers` is passed on to `route`; it counts the earlier
        choices of an expert, which decide whether a token still finds room there."""
        precise = torch.promote_types(self.weight.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(precise)
        with torch.autocast(x.device.type, enabled=False):
            logits = exact_linear(x.to(precise), self.weight.to(precise), bias)
        return self.route(logits, numbers)

    def route(self, logits: Tensor, numbers: Numbers = choice_numbers) -> Routing:
        """Choose experts by logits (B, T, E), in float32 or float64, and return the Routing of the
        tokens. `numbers` counts earlier choices, as for `routing`. In training, the backward pass
        through the Routing's weights includes the auxiliary losses, and adds to `counts` and
        `logit_sums`."""
        config = self.config
        scores = _scores(logits, config)
        is_softmax = config.router.score_function == "softmax"
        chosen = self._choose(logits if is_softmax else scores, scores)
        weights = self._weights(logits, scores, chosen)
        loss = self._loss(logits, scores, chosen)
        weights = self.auxiliary_loss(weights, loss) if loss is not None else weights
        if self.training:
            sums = _logit_sums(logits, scores, config)
            weights = _Counted.apply(weights, chosen, sums, (self.counts, self.logit_sums))
        return self.routing(chosen, weights, numbers)

    def routing(
        self, chosen: Tensor, weights: Tensor, numbers: Numbers = choice_numbers
    ) -> Routing:
        """Return the Routing of tokens, given the experts that they chose, int64 (B, T, k), and the
        factors on these experts' outputs, `weights` (B, T, k).

        An expert takes no more rows of a sequence than its capacity: ⌈`experts.capacity` ·
        `context_length` · k / E⌉, the first ones, whatever tokens follow. `numbers` counts the rows
        of a sequence that chose the same expert; a cache's counts earlier tokens too.
        """
        config = self.config
        E, capacity = config.experts.count, config.experts.capacity
        assert E is not None
        if capacity is not None:
            n_most = -int(-(capacity * config.context_length * config.experts.n_chosen) // E)
            chosen = chosen.masked_fill(numbers(chosen, E) > n_most, E)
        return Routing(chosen.flatten(0, 1), weights.flatten(0, 1), E)

    @torch.no_grad()
    def _choose(self, ranked: Tensor, scores: Tensor) -> Tensor:
        """Return the chosen experts, int64 (B, T, k), the best first; of equal ones the lower
        number.

        Experts are compared by `ranked` (B, T, E), or by `scores` (B, T, E) plus the balance state
        if `model.router.balance` is `bias`. With `router.groups`, only experts in the best
        `router.open_groups` groups can be chosen. Groups are compared by the sum of their
        `router.group_scores` highest scores, to which the balance state is added for `bias`, too.
        """
        config = self.config
        if config.router.balance == "bias":
            assert self.balance is not None
            ranked = scores + self.balance
        if config.router.groups is not None:
            assert config.router.open_groups is not None
            of_group = ranked if config.router.balance == "bias" else scores
            grouped = of_group.unflatten(-1, (config.router.groups, -1))
            best = grouped.topk(config.router.group_scores).values.sum(-1)
            opened = _best(best, config.router.open_groups)
            is_closed = torch.ones_like(best, dtype=torch.bool).scatter_(-1, opened, False)
            n_each = ranked.shape[-1] // config.router.groups
            ranked = ranked.masked_fill(is_closed.repeat_interleave(n_each, -1), -torch.inf)
        return chosen_experts(ranked, config.experts.n_chosen)

    def _weights(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the factors (B, T, k) on the chosen experts' outputs, given logits and scores (B,
        T, E) and the chosen experts' numbers (B, T, k). They are the chosen scores, or with
        `router.top_k_first` a softmax over the chosen logits; then divided by their sum if
        `router.renormalize`, and multiplied by `router.scale`."""
        config = self.config
        if config.router.top_k_first:
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = scores.gather(-1, chosen)
        if config.router.renormalize:
            # Nothing is added to the sum: a sigmoid router learns to use what is added.
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * config.router.scale if config.router.scale != 1.0 else weights

    def _loss(self, logits: Tensor, scores: Tensor, chosen: Tensor) -> Tensor | None:
        """Return the auxiliary losses (`router.z_loss`, and the balance loss for `sequence` and
        `batch`), summed over tokens, 0-dim, for logits and scores (B, T, E) and the chosen experts'
        numbers (B, T, k). None if no such loss is configured, and outside of training."""
        config, found = self.config, []
        if not self.training:
            return None
        if config.router.z_loss:
            found.append(config.router.z_loss * logits.logsumexp(-1).square().sum())
        relative: Tensor | None = None  # each expert's tokens ÷ their mean
        match config.router.balance:
            case "none" | "bias":
                pass
            case "sequence":
                counts = _counts(chosen, logits.shape[-1])
                if self.count_sequence is not None:
                    counts = self.count_sequence(counts)
                relative = (counts / counts.mean(-1, keepdim=True))[:, None]
            case "batch":
                relative = self.balance
            case unknown:
                refuse_unknown(unknown, "model.router.balance", "the router")
        if relative is not None:
            is_share = config.router.score_function == "softmax"  # sums to 1 over the experts
            shares = scores if is_share else scores / scores.sum(-1, keepdim=True)
            found.append(config.router.balance_weight * (relative * shares).sum())
        return sum(found[1:], found[0]) if found else None


def _scores(logits: Tensor, config: ModelConfig) -> Tensor:
    """Return every expert's score (B, T, E) for logits (B, T, E): their softmax over the experts,
    or each one's sigmoid, as `model.router.score_function` says."""
    match config.router.score_function:
        case "softmax":
            # Over the first dimension: over a short last one PyTorch's CPU kernel is seven times
            # slower (3,072 tokens, 8 experts: 0.46 ms, 0.06 ms).
            return logits.movedim(-1, 0).contiguous().softmax(0).movedim(0, -1)
        case "sigmoid":
            return logits.sigmoid()
        case unknown:
            refuse_unknown(unknown, "model.router.score_function", "the router")


@torch.library.custom_op("pentameter::chosen_experts", mutates_args=())
def chosen_experts(ranked: Tensor, n: int) -> Tensor:
    """Return the indices, int64 (…, n), of the n largest numbers along the last dimension of
    `ranked`, as `_best` does. It is a custom operation of PyTorch, by whose name recomputation
    keeps the result."""
    return _best(ranked, n).contiguous()


@chosen_experts.register_fake
def _(ranked: Tensor, n: int) -> Tensor:
    return ranked.new_empty((*ranked.shape[:-1], n), dtype=torch.int64)


def _best(numbers: Tensor, n: int) -> Tensor:
    """Return the indices, int64 (…, n), of the n largest numbers along the last dimension, the
    largest first; of equal ones the lower index. At least n numbers must be greater than -inf.

    `topk` does not say which of equal numbers it takes, and a stable sort is slower: 0.2 ms for
    3,072 rows of 8 numbers, 0.1 ms here; 6.9 and 2.8 ms for 8 of 128."""
    left, found = numbers.clone(memory_format=torch.contiguous_format), []
    for _ in range(n):
        found.append(left.argmax(-1, keepdim=True))  # the first of equal ones
        left.scatter_(-1, found[-1], -torch.inf)
    return torch.cat(found, -1)


def _counts(chosen: Tensor, n_experts: int) -> Tensor:
    """Return how many tokens of each sequence chose each expert, float32 (B, E), for chosen experts
    (B, T, k)."""
    flat = chosen.flatten(1)
    counts = torch.zeros(len(flat), n_experts, device=chosen.device)
    return counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=counts.dtype))


@torch.no_grad()
def _logit_sums(logits: Tensor, scores: Tensor, config: ModelConfig) -> Tensor:
    """Return two sums over the tokens with these logits and scores (B, T, E), float32 (2,): the
    squared log-sum-exp of the logits, and the squared logits. `Router.logit_sums` collects them."""
    if config.router.score_function == "softmax":  # which holds its log-sum-exp: half of the time
        log_sums = logits.amax(-1) - scores.amax(-1).log()
    else:
        log_sums = logits.logsumexp(-1)
    return torch.stack((log_sums.square().sum(), logits.square().sum())).float()


class _Counted(Function):
    """Autograd function: identity on the router's weights. Its backward pass adds to the router's
    tensors: the number of tokens that chose each expert, and sums over their logits. The forward
    pass adds nothing, since recomputation runs it twice."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, chosen: Tensor, sums: Tensor, totals: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return a view with the shape (B, T, k) and the values of `weights`. The backward pass
        will count the experts' numbers `chosen` (B, T, k), and add the counts and `sums` (2,) to
        the `totals`, (E,) and (2,), in place."""
        ctx.save_for_backward(chosen, sums)
        ctx.totals = totals
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient g (B, T, k) of the weights unchanged, and add the counts and sums to
        the router's totals, in place."""
        chosen, sums = ctx.saved_tensors
        counts, logit_sums = ctx.totals
        counts.add_(_counts(chosen, len(counts)).sum(0))
        logit_sums.add_(sums)
        return g, None, None, None


class SortedRows(Function):
    """Autograd function: copies each token's row once for each of its experts, sorted by expert.
    Backward adds the copies' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, n_chosen: int) -> Tensor:
        """Return a row (one copy of a token) for each expert that each token chose, sorted by
        expert: (R, D) for tokens x (N, D). `order` (R,), from `Routing.order`, says which row
        stands where; `n_chosen` is k, the experts of a token."""
        ctx.save_for_backward(order)
        ctx.n_chosen = n_chosen
        return x[order // n_chosen]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient (N, D) of x: its rows' gradients g (R, D), added one by one."""
        (order,) = ctx.saved_tensors
        rows = _restored(g, order).unflatten(0, (-1, ctx.n_chosen))
        return rows.sum(1), None, None


class RestoredRows(Function):
    """Autograd function: puts rows that are sorted by expert back into the order of their
    tokens."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        """Return the rows (R, D) in the order of their tokens, k adjacent rows for each. `order`
        (R,), from `Routing.order`, is the order that they have now."""
        ctx.save_for_backward(order)
        return _restored(rows, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient (R, D) of the rows sorted by expert, given the gradient g (R, D) of
        the rows in the order of their tokens."""
        (order,) = ctx.saved_tensors
        return g[order], None


def _restored(rows: Tensor, order: Tensor) -> Tensor:
    """Return the rows (R, D) unsorted: row i becomes row `order[i]` of the result, for `order`
    (R,). Nothing is written in place: compiled code of torch 2.11 loses the gradient of a Function
    whose forward pass changes what it returns (pytorch #180642)."""
    places = torch.arange(len(order), device=order.device)
    return rows[torch.empty_like(order).scatter(0, order, places)]


class GroupedLinear(nn.Module):
    """A linear layer for each expert: one weight (E, outputs, inputs), and one bias (E, outputs) or
    none."""

    def __init__(self, n_experts: int, n_inputs: int, n_outputs: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, n_outputs, n_inputs))
        self.bias = nn.Parameter(torch.empty(n_experts, n_outputs)) if bias else None

    def forward(self, x: Tensor, groups: Groups, matmul: Matmul = PLAIN) -> Tensor:
        """Multiply each row by its expert's weight: return (R, outputs) for rows x (R, inputs),
        sorted by expert. `groups` says where each expert's rows end; rows behind the last give 0.
        `matmul` does the multiplication."""
        return matmul.grouped_linear(x, self.weight, self.bias, groups)


Compute = Callable[[Tensor, Tensor], Tensor]
"""Type of the function that applies this rank's experts: (rows (R, D) sorted by expert, index (E,)
after each expert's last row, on their device or on the CPU) → outputs (R, D)."""


class Exchange:
    """Brings rows to their experts, and the outputs back, in two calls: `dispatch`, then `outputs`.
    This one is for experts that are all on this rank, and sends nothing;
    `parallel/experts/expert_parallel.py` has the one for sharded experts."""

    sent_bytes = 0
    """Bytes of rows, outputs and their gradients that this rank has sent to others in passes whose
    backward pass is done. Whoever reads it resets it."""

    def dispatch(self, rows: Tensor, ends: Tensor) -> Any:
        """Start to send rows (R, D) to their experts, and return a handle for `outputs`. The rows
        are sorted by expert, and `ends` (E,) is the index after each expert's last."""
        return rows, ends

    def outputs(self, compute: Compute, dispatched: Any) -> Tensor:
        """Wait for the rows that were `dispatched`, and return all experts' outputs (R, D) for
        them. `compute` applies this rank's experts."""
        output: Tensor = compute(*dispatched)
        return output


class Tokens:
    """Decides which tokens this rank takes through the experts. This one takes all;
    `parallel/experts/expert_parallel.py` has another one for ranks that hold the same tokens, each
    of which takes a shard."""

    def shard(self, x: Tensor, routing: Routing) -> tuple[Tensor, Routing]:
        """Return (the tokens that this rank takes through the experts, their Routing), out of all
        tokens x (N, D) and theirs."""
        return x, routing

    def gather(self, y: Tensor, n_tokens: int) -> Tensor:
        """Return the outputs (N, D) of all N = `n_tokens` tokens, given those of this rank's shard
        of them."""
        return y


class Experts(nn.Module):
    """A sub-layer of experts: the sum of the chosen experts' outputs, weighted by the router, plus
    the shared experts' output."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        E, D, width = config.experts.count, config.d_model, config.expert_width
        assert E is not None
        self.layer = layer
        self.activation = activation_of(config)
        self.router = Router(config)
        self.gate = (
            GroupedLinear(E, D, width, bias=config.bias) if config.feed_forward.has_gate else None
        )
        self.up = GroupedLinear(E, D, width, bias=config.bias)
        self.down = GroupedLinear(E, width, D, bias=config.bias)
        n_shared = config.experts.n_shared
        self.shared = FeedForward(config, n_shared * width) if n_shared else None
        self.shared_gate = nn.Linear(D, 1, bias=False) if config.experts.shared_gate else None
        self.dropout = StreamDropout(mlp_output_site(layer), config.dropout, config.context_length)
        self.exchange = Exchange()
        self.tokens = Tokens()
        self.at_once = False
        """Whether bf16 matmuls of all experts run at once, which needs a GPU where
        `at_once_obstacle` and `at_once_disagreement` find nothing."""
        self._holds_all = config.experts.capacity is None

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        dropout_keys: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Apply the layer to x (B, T, D), and return (B, T, D), without the residual sum.
        positions: the tokens', for dropout. dropout_keys: int32 (B, n_sites, 2), None for no
        dropout. With a `cache`, x continues sequences whose earlier choices count for an expert's
        capacity."""
        flat = x.flatten(0, 1)
        numbers = choice_numbers if cache is None else partial(cache.number_choices, self.layer)
        tokens, routing = self.tokens.shard(flat, self.router(x, numbers))
        if self._multiplies_at_once(tokens):  # half of the bytes to sort, and one tensor to save
            tokens = tokens.to(torch.bfloat16)
        order, ends = routing.order()
        rows = SortedRows.apply(tokens, order, routing.experts.shape[1])
        dispatched = self.exchange.dispatch(rows, ends)
        shared = self._shared_expert_outputs(x)  # computed while rows are under way
        outputs = RestoredRows.apply(self.exchange.outputs(self.expert_outputs, dispatched), order)
        mixed = _mixed(outputs, routing.weights)
        # Factors are fp32 at least, which made it so: a model may have 16-bit weights throughout.
        mixed = mixed.to(torch.promote_types(x.dtype, self.up.weight.dtype))
        y = self.tokens.gather(mixed, len(flat)).view_as(x)
        y = y if shared is None else y + shared
        return self.dropout(y, dropout_keys, positions.stream)

    def _shared_expert_outputs(self, x: Tensor) -> Tensor | None:
        """Return the shared experts' output (B, T, D) for x (B, T, D), times their gate if they
        have one; None if there are none."""
        if self.shared is None:
            return None
        y: Tensor = self.shared(x)
        return y if self.shared_gate is None else y * self.shared_gate(x).sigmoid()

    def _multiplies_at_once(self, x: Tensor) -> bool:
        """Return True if x (…, D) is multiplied by the matrices of all experts in one operation,
        False if by one expert's after another."""
        return self.at_once and matmul_dtype(x) is torch.bfloat16

    def expert_outputs(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Return the outputs (R, D) of this rank's experts for rows (R, D), sorted by expert.
        `ends` (E,) is the index after each expert's last row, on the rows' device or on the CPU."""
        at_once = self._multiplies_at_once(rows)
        groups = groups_of(rows, ends, at_once=at_once, holds_all=self._holds_all)
        linears = (self.up,) if self.gate is None else (self.gate, self.up)
        inner = self.activation(*(linear(rows, groups) for linear in linears))  # (R, F)
        return self.down(inner, groups)


def _mixed(outputs: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums (N, D) of outputs (R, D), k adjacent rows for each token, whose
    weights are (N, k); added in the order of k."""
    # Not indexed one by one: each index would have a gradient of the size of all rows.
    rows = outputs.unflatten(0, (-1, weights.shape[1])).unbind(1)
    products = (row * weight for row, weight in zip(rows, weights.split(1, 1), strict=True))
    y = next(products)
    for each in products:
        y = y + each
    return y
