"""Model passes over a key-value cache with a slot per text, in which no token's result depends on
other slots.

A text must not change with the texts beside it, to the last bit. But matmul kernels round
differently with the number of rows (they choose other blocks), and so does attention with the
number of keys that it reads. So only a few shapes are used:

- `read` takes a piece of one text. Its shape follows from the text's length alone.
- `write` takes one new token for each text. On a CPU a TokenPass computes them, whose rows do not
  depend on each other. Elsewhere, and for a model that it does not know, rows and keys are padded
  to numbers for which `find_shapes` has found, on this machine and with this model, that they give
  the same bits. If there are none, each text has a pass of its own.

Shapes: B slots, T tokens, H heads, G KV heads, S keys, K channels of a head (head size), V
vocabulary (unpadded).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from pentameter.config.schema import ModelConfig
from pentameter.generation.captured import Captured, can_be_captured
from pentameter.generation.few_rows import few_rows, multiply_by
from pentameter.generation.loop import chosen_kernels
from pentameter.generation.sampling import Floats
from pentameter.generation.token_pass import token_pass
from pentameter.keyed import bits, make_key
from pentameter.machine.kernel_checks import LEAST_COMPARED
from pentameter.machine.on_host import on_host
from pentameter.model.attention.attention import attend_by
from pentameter.model.attention.cache import choice_numbers
from pentameter.model.attention.dot_product import ALL_KEYS, DotProductAttention, Weighting
from pentameter.model.experts import Compute, Exchange, Experts
from pentameter.model.gpt import GPT
from pentameter.model.grouped_matmul import ROWS_PER_BLOCK
from pentameter.model.positions import Positions, rotations

PIECE_TOKENS = 64
"""Maximum number of prompt tokens in one pass. It is small, so that other texts do not wait
long."""
_PIECE_UNIT = 16
"""A piece is padded to a multiple of this many tokens."""
_LEAST_PIECE = 4
"""Minimum number of tokens in the last piece of a prompt; fewer are processed one by one."""
_KEY_UNIT, _MOST_KEY_SIZES = 64, 16
"""The keys that a piece reads are padded to a multiple of the first; the second is the largest
number of key counts that `write` chooses from."""


@dataclass(frozen=True)
class Shapes:
    """The padded shapes (numbers of rows and of keys) that a decoding pass may have: `write` takes
    the smallest that fits. Whichever it takes, a text's logits have the same bits. Both tuples
    ascend."""

    batch_sizes: tuple[int, ...]
    """Numbers of slots in a pass, the last being all; (1,) if each text has its own pass."""
    key_sizes: tuple[int, ...]
    """Numbers of keys read, the last being all."""


def hiding(
    hidden_after: Tensor, distance: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the attention mask (T, S) to add to scores, in `dtype` but at least fp32: -∞ for keys
    that `hidden_after` (T, S, bool) hides, and for those at a `distance` (T, S) ≥ `window` (None:
    no window); else 0."""
    hidden = hidden_after if window is None else hidden_after | (distance >= window)
    precise = torch.promote_types(dtype, torch.float32)
    zeros = torch.zeros(hidden.shape, device=hidden.device, dtype=precise)
    return zeros.masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True)
class _Memory:
    """Key-value cache for all texts that are written at the same time, one slot for each. `keys`
    and `values` have one tensor per layer, (n_slots, G, S, K), with G KV heads, S positions and K
    channels per head."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    chosen: Sequence[Tensor]
    """The experts that each token chose, one int64 tensor (n_slots, 1, S, k) per layer, k experts
    per token; empty unless experts have a capacity."""

    @property
    def all(self) -> list[Tensor]:
        """All tensors of the cache: keys, values and chosen experts of every layer."""
        return [*self.keys, *self.values, *self.chosen]


def _zeroed_memory(config: ModelConfig, n_slots: int, n_keys: int, like: Tensor) -> _Memory:
    """Return the memory of `n_slots` texts of up to n_keys tokens, zeros, in the dtype and on the
    device of `like`."""
    n_heads, *channels = config.cached_per_token
    keys, values = (
        [like.new_zeros((n_slots, n_heads, n_keys, n)) for _ in range(config.n_layers)]
        for n in channels
    )
    if config.experts.capacity is None:
        return _Memory(keys, values, ())
    shape = n_slots, 1, n_keys, config.experts.n_chosen
    chosen = [like.new_zeros(shape, dtype=torch.int64) for _ in keys]
    return _Memory(keys, values, chosen)


@dataclass(eq=False)
class _Pass:
    """The cache object that the model's layers use during one forward pass: it writes the keys and
    values of the pass's tokens to slots, and reads earlier ones from them.

    A pass computes either T tokens of one text (a piece of its prompt; `first` is the position of
    the first of them) or one token for each of B slots (`write_at` has their positions; T = B).
    """

    memory: _Memory
    slots: slice
    """The B slots that are read."""
    numbers: Tensor
    """Position (T,) of each token in its text's window."""
    n_seen: int
    """Number S of stored positions that are read."""
    first: int | None = None
    """Position of the piece's first token."""
    write_at: Tensor | None = None
    """Position (B,) at which each slot's token is stored."""

    def __post_init__(self) -> None:
        key = torch.arange(self.n_seen, device=self.numbers.device)
        self._is_piece = self.first is not None
        self._masks: dict[int | None, Tensor] = {}
        self._hidden_after = key > self.numbers[:, None]  # (T, S)
        self._distance = self.numbers[:, None] - key

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, (1, G, T, K) each with K channels per head. Return
        all that the pass's slots hold, (B, G, S, K) each. Called by attention."""
        memory = self.memory
        return self._stored(memory.keys[layer], k), self._stored(memory.values[layer], v)

    def number_choices(self, layer: int, chosen: Tensor, n_experts: int) -> Tensor:
        """Store the experts (1, T, k) that the new tokens chose in a layer. Return, as (1, T, k),
        the number of each choice among all choices of the same expert in its text (see
        `model.cache.Cache`). Called by experts with a capacity."""
        seen = self._stored(self.memory.chosen[layer], chosen[:, None])[:, 0]  # (B, S, k)
        distance = self._distance[:1] if self._is_piece else self._distance  # (B, S)
        before = seen.masked_fill((distance <= 0)[..., None], n_experts).flatten(1)
        of_texts = chosen if self._is_piece else chosen.transpose(0, 1)  # (B, T, k)
        return choice_numbers(of_texts, n_experts, before).view_as(chosen)

    def _stored(self, stored: Tensor, new: Tensor) -> Tensor:
        """Write the new tokens' keys or values, `new` (1, G, T, K), into `stored` (n_slots, G,
        S_max, K), the tensor of all slots. Return the part of it that this pass reads, (B, G, S,
        K)."""
        of_pass = stored[self.slots]
        if self.first is not None:
            of_pass[:, :, self.first : self.first + new.shape[2]] = new
        else:
            assert self.write_at is not None
            rows = torch.arange(len(of_pass), device=new.device)
            of_pass[rows, :, self.write_at] = new[0].transpose(0, 1)
        return of_pass[:, :, : self.n_seen]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, how: Weighting) -> Tensor:
        """Return attention's output (1, H, T, K) for queries (1, H, T, K) and keys and values (B,
        G, S, K). All T tokens of a piece attend to one slot; otherwise each token attends to its
        own slot."""
        if not self._is_piece:
            q = q.transpose(0, 2)  # (B, H, 1, K)
        n_sharing, T = q.shape[1] // k.shape[1], q.shape[2]
        grouped = q.unflatten(1, (-1, n_sharing)).flatten(2, 3) * q.shape[3] ** -0.5
        # PyTorch's fused attention rounds by the thread that happens to compute a head.
        scores = (grouped @ k.transpose(2, 3)).unflatten(2, (n_sharing, T))
        weights = _softmax(scores + self._mask(how.window, scores.dtype), how.sinks)
        y = (weights.to(v.dtype).flatten(2, 3) @ v).unflatten(2, (n_sharing, T)).flatten(1, 2)
        return y if self._is_piece else y.transpose(0, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the attention mask for layers with a window of this many tokens (None: no window),
        to be added to scores (B, G, n, T, S), with n query heads per KV head; it broadcasts to that
        shape. It is in `dtype`, but at least fp32."""
        if window not in self._masks:
            mask = hiding(self._hidden_after, self._distance, window, dtype)
            self._masks[window] = mask if self._is_piece else mask[:, None, None, None]
        return self._masks[window]


class SlotAttention(DotProductAttention):
    """The attention of a served model, whose texts are in cache slots, a DotProductAttention: it
    hands its arguments to the `_Pass` that is being computed."""

    under_way: _Pass | None = None
    """The pass that is being computed; set before each one."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, how: Weighting = ALL_KEYS) -> Tensor:
        """Return attention's output (1, H, T, K), computed by the current pass (see
        `_Pass.attend`)."""
        assert self.under_way is not None
        return self.under_way.attend(q, k, v, how)


class Slots:
    """A GPT with a key-value cache for `n_slots` texts. The model's attention is replaced by one
    that reads these slots, so the model must not be used for anything else. Logits beyond
    `vocab_size` (padding) are left out."""

    def __init__(self, model: GPT, vocab_size: int, n_slots: int) -> None:
        weight = next(model.parameters())
        self._model = model.eval()
        self._device = weight.device
        self._vocab_size = vocab_size
        self._kernels = partial(chosen_kernels, weight.device, weight.dtype)
        self._steps = Captured(weight.device, is_on=False)
        self.context_length = context_length = model.config.context_length
        self.begins_anew_at = model.config.rope_scaling.begins_anew_at
        self.n_slots = n_slots
        # The memory of every slot begins at the same alignment. Padding rows write to its last
        # key.
        self._n_keys = _rounded_up(context_length, _KEY_UNIT) + _KEY_UNIT
        self._memory = memory = _zeroed_memory(model.config, n_slots, self._n_keys, weight)
        self._matmul, self._like_rows = few_rows(model), n_slots
        self.in_one_call = token_pass(model, self._matmul, memory.keys, memory.values)
        """The TokenPass that writes, if there is one."""
        self._attention = SlotAttention()
        attend_by(model, self._attention)
        multiply_by(model, self._matmul)
        unit = _rounded_up(-(-self._n_keys // _MOST_KEY_SIZES), _PIECE_UNIT)
        sizes = range(unit, self._n_keys, unit)
        self.shapes = Shapes((n_slots,), (*sizes, self._n_keys))

    @property
    def cache_bytes(self) -> int:
        """Size of the cache in bytes."""
        return sum(each.numel() * each.element_size() for each in self._memory.all)

    def clear(self, slot: int, n_tokens: int) -> None:
        """Zero the first n_tokens positions of a slot for its next text. Masked keys have weight 0,
        but 0 times a NaN that is left there would still be NaN."""
        for each in self._memory.all:
            each[slot, :, : _rounded_up(n_tokens, _KEY_UNIT)] = 0

    @torch.inference_mode()
    def read(self, slot: int, tokens: Sequence[int], start: int, length: int) -> Floats:
        """Process `tokens`, at most PIECE_TOKENS, at the positions `start`, `start` + 1, … of the
        window, with `length` tokens, of the text in `slot`; earlier positions must be cached.
        Return the logits (V,) after the last token, float64."""
        n = len(tokens)
        return self._read(slot, tokens, start, length, slice(n - 1, n))[0][0]

    @torch.inference_mode()
    def read_with_all(
        self, slot: int, tokens: Sequence[int], start: int, length: int
    ) -> tuple[Floats, Floats]:
        """Do as `read`, and return beside its result, which has the same bits, the logits (n, V)
        after each of the n tokens."""
        n = len(tokens)
        last, rows = self._read(slot, tokens, start, length, slice(n - 1, n), slice(n))
        return last[0], rows

    def _read(
        self, slot: int, tokens: Sequence[int], start: int, length: int, *asked: slice
    ) -> list[Floats]:
        """Process tokens as `read` does, and return logits (n, V) for each slice of them."""
        T, n_real = passed_tokens(len(tokens)), len(tokens)
        padded = torch.zeros((1, T), dtype=torch.int64)
        padded[0, :n_real] = torch.tensor(tokens)
        numbers = torch.arange(start, start + T, device=self._device)
        n_seen = _rounded_up(start + T, _KEY_UNIT)
        under_way = _Pass(self._memory, slice(slot, slot + 1), numbers, n_seen, first=start)
        positions = numbers.clamp(max=self.context_length - 1)
        found = self._pass(padded.to(self._device), positions, length, under_way, *asked)
        return [on_host(each) for each in found]

    @torch.inference_mode()
    def write(self, rows: dict[int, tuple[int, int, int]]) -> dict[int, Floats]:
        """Add one token to each of several texts, in one forward pass; if no padded shapes were
        found that give equal bits, in a pass for each text. With a TokenPass no row depends on
        another, and nothing is padded. `rows` maps a slot to (token, its position in the window,
        how many tokens the window has). Return slot → logits (V,) after that token."""
        if self.in_one_call is not None:
            tokens, numbers, _ = zip(*rows.values(), strict=True)
            found = on_host(self.in_one_call(tokens, numbers, list(rows))[:, : self._vocab_size])
            return dict(zip(rows, found, strict=True))
        if self.shapes.batch_sizes == (1,):
            return {slot: self._write({slot: row}, slot, 1)[0] for slot, row in rows.items()}
        size = next(size for size in self.shapes.batch_sizes if size > max(rows))
        logits = self._write(rows, 0, size)
        return {slot: logits[slot] for slot in rows}

    def _write(self, rows: dict[int, tuple[int, int, int]], first: int, n_rows: int) -> Floats:
        """Return logits (n_rows, V) from one pass over the n_rows slots from `first` on. `rows` is
        as in `write`; slots that it lacks are padding, and store nothing."""
        tokens, numbers, write_at = [0] * n_rows, [0] * n_rows, [self._n_keys - 1] * n_rows
        lengths = [1] * n_rows
        for slot, (token, number, length) in rows.items():
            tokens[slot - first], numbers[slot - first] = token, number
            write_at[slot - first], lengths[slot - first] = number, length
        last = max(numbers)
        n_seen = next(size for size in self.shapes.key_sizes if size > last)
        inputs = torch.tensor([tokens, numbers, write_at, lengths])
        compute = partial(self._written, slice(first, first + n_rows), n_seen)
        return on_host(self._steps((first, n_rows, n_seen), inputs, compute))

    def _written(self, slots: slice, n_seen: int, inputs: Tensor) -> Tensor:
        """Return logits (n_rows, V) on the device after one more token for each of the `slots`.
        `inputs` (4, n_rows) are tokens, their positions, where each is stored, and how many tokens
        its window has."""
        tokens, positions, write_at, lengths = inputs
        under_way = _Pass(self._memory, slots, positions, n_seen, write_at=write_at)
        # A text alone then need not go through a pass of several rows.
        with self._matmul.adding_like(self._like_rows):
            (logits,) = self._pass(tokens[None], positions, lengths, under_way, slice(None))
        return logits

    def _pass(
        self,
        tokens: Tensor,
        positions: Tensor,
        length: int | Tensor,
        under_way: _Pass,
        *asked: slice,
    ) -> list[Tensor]:
        """Return logits (n, V) on the device for each slice of `tokens` (1, T) that is `asked`,
        computed by itself, as its size decides the rounding. `positions` (T,) are their positions
        in the model, `length` how many tokens their windows have; `under_way` is their pass."""
        model, self._attention.under_way = self._model, under_way
        with self._kernels():
            x = model.embed(tokens, positions)
            rotary = rotations(positions, model.config, x.dtype, length)
            for block in model.blocks.values():
                x = block(x, Positions(positions, positions, rotary), None, under_way)
            found = []
            for rows in (x[:, each] for each in asked):
                normed = model.final_norm(rows) if model.has_final_norm else rows
                found.append(model.logits(normed)[0, :, : self._vocab_size])
            return found

    # -- which shapes give the same bits ---------------------------------------------------------

    @torch.inference_mode()
    def find_shapes(self) -> Shapes:
        """Find by trial the padded shapes with which `write` gives every row the same bits, in any
        slot and beside any other rows. They are used from now on, and returned. All slots are zero
        afterwards. A TokenPass needs none."""
        if self.in_one_call is not None:
            return self.shapes
        whole, everyone = self.shapes, self.n_slots
        self._steps = Captured(self._device, is_on=False)
        _make_up([*self._memory.keys, *self._memory.values])
        moves = 0, 1, everyone // 2
        is_alike = everyone > 1 and _experts_agree(self._model, everyone)
        if not is_alike or not self._agree([everyone], self._n_keys, moves):
            self.shapes, self._like_rows = Shapes((1,), whole.key_sizes), 1
        else:
            smaller = [2**n for n in range(10) if 2**n < everyone]
            batches = [n for n in smaller if self._agree([n], self._n_keys, moves)]
            batches.append(everyone)
            keys = [n for n in whole.key_sizes[:-1] if self._agree(batches, n, moves[2:])]
            self.shapes = Shapes(tuple(batches), (*keys, self._n_keys))
        for each in self._memory.all:
            each.zero_()
        self._steps = Captured(
            self._device, is_on=can_be_captured(self._device, self._model.config)
        )
        return self.shapes

    def _agree(self, batch_sizes: Sequence[int], n_keys: int, moves: Sequence[int]) -> bool:
        """Return True if passes of these padded shapes give the same bits for made-up texts as a
        pass of the largest shape. Tried are all `batch_sizes` with `n_keys` keys, and texts moved
        to other slots by each number in `moves`: as many texts a slot as there are moves, in 16
        bits until LEAST_COMPARED are compared."""
        last = min(n_keys, self.context_length) - 1
        n_left = LEAST_COMPARED if self._memory.keys[0].itemsize == 2 else 0
        seed = 0
        while seed < len(moves) or n_left > 0:
            rows = _made_up_rows(self.n_slots, self._vocab_size, last, seed)
            expected = self._tried(rows, self._n_keys)
            for size, moved_by in product(batch_sizes, moves):
                order = [(slot + moved_by) % self.n_slots for slot in range(size)]
                found = self._tried([rows[row] for row in order], n_keys)
                if not torch.equal(found, expected[order]):
                    return False
                n_left -= found.numel()
            seed += 1
        return True

    def _tried(self, rows: Sequence[tuple[int, int]], n_keys: int) -> Tensor:
        """Return what a pass over n rows (token, position), padded to n_keys keys, computes of
        each: what its linear layers read, attention's output for one, and the logits, (n, …),
        float64. The slots' content is restored afterwards."""
        slots = torch.arange(len(rows), device=self._device)
        numbers = torch.tensor([number for _, number in rows], device=self._device)
        before = [each[slots, :, numbers].clone() for each in self._memory.all]
        shapes, self.shapes = self.shapes, Shapes((len(rows),), (n_keys,))
        lengths = {slot: (*row, row[1] + 1) for slot, row in enumerate(rows)}
        with _inputs_of_linears(self._model) as inputs:
            logits = self._write(lengths, 0, len(rows))
        self.shapes = shapes
        for each, was in zip(self._memory.all, before, strict=True):
            each[slots, :, numbers] = was
        of_rows = [x[0] for x in inputs if x.dim() == 3]  # those of experts are in their order
        return torch.cat([*of_rows, torch.from_numpy(logits).to(self._device)], dim=1)


@contextmanager
def _inputs_of_linears(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context manager that yields a list to which each call of a linear layer in the model adds a
    copy of its input, in float64."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _, given: found.append(given[0].double()))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class _PaddedRows(Exchange):
    """An Exchange on a CPU that pads each expert's rows with zeros to a multiple of `n_rows`."""

    def __init__(self, n_rows: int) -> None:
        self._n_rows = n_rows

    def outputs(self, compute: Compute, dispatched: Any) -> Tensor:
        """Return all experts' outputs (R, D) for the rows that were `dispatched`; 0 for rows behind
        the last expert's, which found no room."""
        rows, ends = dispatched
        counts = ends.diff(prepend=ends.new_zeros(1))
        padded = -(-counts // self._n_rows) * self._n_rows
        shifts = (padded.cumsum(0) - padded) - (ends - counts)  # of each expert's first row
        n_taken = int(ends[-1])
        places = torch.arange(n_taken) + shifts.repeat_interleave(counts)
        spread = rows.new_zeros(int(padded.sum()), rows.shape[1])
        spread[places] = rows[:n_taken]
        found = torch.zeros_like(rows)
        found[:n_taken] = compute(spread, padded.cumsum(0))[places]
        return found


def _experts_agree(model: GPT, n_rows: int) -> bool:
    """Return True if the model's experts give each of up to `n_rows` rows the same bits however
    many an expert gets, or if it has none. On a CPU they pad their rows from now on, where that
    alone makes it so."""
    experts = [each for each in model.modules() if isinstance(each, Experts)]
    if not experts or _layer_agrees(experts[0], n_rows):
        return True
    weight = experts[0].up.weight
    if weight.device.type != "cpu":
        return False
    unit = ROWS_PER_BLOCK if weight.itemsize == 2 else 1  # to which those are padded anyway
    plain, padding = experts[0].exchange, _PaddedRows(_rounded_up(n_rows, unit))
    experts[0].exchange = padding
    agrees = _layer_agrees(experts[0], n_rows)
    for each in experts:
        each.exchange = padding if agrees else plain
    return agrees


def _layer_agrees(experts: Experts, n_rows: int) -> bool:
    """Return True if a layer of experts gives each of n_rows made-up rows the same bits, whether
    its expert gets all of them or only the first or the last, and another expert the others. In 16
    bits it is tried until LEAST_COMPARED are compared."""
    weight = experts.router.weight
    n_values = n_rows * weight.shape[1]
    n_trials = max(1, LEAST_COMPARED // (n_rows * n_values)) if weight.itemsize == 2 else 1

    def outputs(rows: Tensor, n_first: int) -> Tensor:
        ends = torch.full((len(weight),), n_first)
        ends[-1] = n_rows
        return experts.exchange.outputs(experts.expert_outputs, (rows, ends))

    for seed in range(n_trials):
        drawn = bits(make_key("serve", "experts", seed), torch.arange(n_values).int())
        rows = (drawn.view(n_rows, -1) * 2.0**-31).to(weight)
        of_first, of_last = outputs(rows, n_rows), outputs(rows, 0)
        for n in range(1, n_rows):
            if not torch.equal(outputs(rows, n), torch.cat((of_first[:n], of_last[n:]))):
                return False
    return True


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over S keys of attention scores (B, G, n, T, S). `sinks` (H,), if given,
    are each head's score for one more key, which takes part in the sum and is left out of the
    result; H = G · n."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sink = sinks.to(scores.dtype).view(*scores.shape[1:3], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]


def _make_up(stored: Sequence[Tensor]) -> None:
    """Fill keys and values (B, G, S, K) with made-up numbers that repeat along S every
    _KEY_UNIT."""
    sizes = [each[0, :, :_KEY_UNIT].numel() for each in stored]
    drawn = bits(make_key("serve", "keys"), torch.arange(sum(sizes)).int()).split(sizes)
    for each, pattern in zip(stored, drawn, strict=True):
        blocks = each.unflatten(2, (-1, _KEY_UNIT))
        blocks.copy_(pattern.view(-1, 1, _KEY_UNIT, each.shape[3]) * 2.0**-31)


def _made_up_rows(n_rows: int, vocab_size: int, last: int, seed: int) -> list[tuple[int, int]]:
    """Return made-up (token, position) pairs, one per row, with positions from 0 to `last`, both
    included."""
    drawn = bits(make_key("serve", "rows", seed), torch.arange(2 * n_rows).int())
    tokens, lengths = drawn.view(2, -1).tolist()
    numbers = [last, 0, *(length % (last + 1) for length in lengths)]
    return [(t % vocab_size, n) for t, n in zip(tokens, numbers, strict=False)]


def n_read_in_pieces(n_tokens: int) -> int:
    """Return how many tokens, of a prompt window with `n_tokens`, are read in pieces of several
    tokens, from the first on. If the last piece would have fewer than _LEAST_PIECE tokens, these
    are processed one by one instead and not counted."""
    rest = n_tokens % PIECE_TOKENS
    return n_tokens - rest if rest < _LEAST_PIECE else n_tokens


def passed_tokens(n_tokens: int) -> int:
    """Return the padded token count for a pass over n_tokens: a multiple of _PIECE_UNIT."""
    return _rounded_up(n_tokens, _PIECE_UNIT)


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
