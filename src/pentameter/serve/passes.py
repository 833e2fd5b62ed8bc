"""A GPT's passes over the slots of one cache, in which no token's result depends on other slots.

A text must not change with the texts beside it, to the last bit. Matmul kernels round differently
with the number of rows (their blocks are other ones), and so does attention with the number of keys
that it reads. So a pass has one of few shapes:

- `read` takes a piece of one text. Its shape follows from the text's length alone.
- `write` takes the newest token of each text, one for each slot. Its rows are padded to a batch
  size, its keys to a number, of which `find_shapes` has seen on this machine, with this model, that
  they give the same bits. Where not even a single shape does, each text has a pass of its own.

Shapes: B slots, T tokens, H heads, G KV heads, S keys, K head size, V vocabulary (unpadded).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from pentameter.generation.loop import chosen_kernels
from pentameter.generation.sampling import Floats
from pentameter.keyed import bits, make_key
from pentameter.model.attention import Attention
from pentameter.model.dropout import AttentionDropout
from pentameter.model.gpt import GPT
from pentameter.model.positions import Positions, rotation

PIECE_TOKENS = 64
"""Most tokens of a text that one pass reads, so that texts being written wait little for it."""
_PIECE_UNIT = 16
"""Divisor of a pass's padded tokens; a shorter rest goes to the next multiple."""
_LEAST_PIECE = 4
"""Tokens from which on the rest of a text has a pass of its own; fewer go with those written."""
_KEY_UNIT, _MOST_KEY_SIZES = 64, 16
"""Divisor of the keys that a piece reads; most numbers of keys that `write` chooses from, multiples
of _PIECE_UNIT."""
_CHECKED_SEEDS = 2


@dataclass(frozen=True)
class Shapes:
    """Shapes between which `write` may choose without changing a bit, ascending."""

    batch_sizes: tuple[int, ...]
    """Numbers of slots, the largest being all; (1,) for a pass to each text."""
    key_sizes: tuple[int, ...]
    """Numbers of keys, the largest being all."""


def hiding(
    hidden_after: Tensor, distance: Tensor, window: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the attention mask (T, S) to add to scores: -∞ for keys in `hidden_after` (T, S) and
    those whose `distance` (T, S) reaches the window, else 0."""
    hidden = hidden_after if window is None else hidden_after | (distance >= window)
    zeros = torch.zeros(hidden.shape, device=hidden.device, dtype=dtype)
    return zeros.masked_fill_(hidden, float("-inf"))


class Slots:
    """A GPT and a cache with a slot for each text. It takes the model over: its attention reads
    these slots from now on."""

    def __init__(self, model: GPT, vocab_size: int, n_slots: int) -> None:
        weight = next(model.parameters())
        self._model = model.eval()
        self._device, self._dtype = weight.device, weight.dtype
        self._vocab_size = vocab_size
        self._kernels = partial(chosen_kernels, weight.device, weight.dtype)
        self.context_length = context_length = model.config.context_length
        self.n_slots = n_slots
        # A slot's memory begins at the same alignment as every other's. Its last key takes what a
        # padded row writes.
        self._n_keys = _rounded_up(context_length, _KEY_UNIT) + _KEY_UNIT
        shape = (n_slots, model.config.kv_heads, self._n_keys, model.config.head_channels)
        make = partial(torch.zeros, shape, device=self._device, dtype=self._dtype)
        layers = range(*model.layers)
        self._keys, self._values = [make() for _ in layers], [make() for _ in layers]
        for module in model.modules():
            if isinstance(module, Attention):
                module.attend = self._attend
        unit = _rounded_up(-(-self._n_keys // _MOST_KEY_SIZES), _PIECE_UNIT)
        sizes = range(unit, self._n_keys, unit)
        self.shapes = Shapes((n_slots,), (*sizes, self._n_keys))
        self._slots, self._write_rows = slice(0), torch.empty(0)  # of the pass under way
        self._is_piece, self._first, self._n_seen = False, 0, 0

    @property
    def cache_bytes(self) -> int:
        """Bytes in all cached keys and values."""
        return sum(each.numel() * each.element_size() for each in (*self._keys, *self._values))

    def clear(self, slot: int, n_tokens: int) -> None:
        """Zero the first n_tokens in a slot, for its next text: masked keys count 0 times, and a
        NaN would outlive that."""
        for each in (*self._keys, *self._values):
            each[slot, :, : _rounded_up(n_tokens, _KEY_UNIT)] = 0

    @torch.inference_mode()
    def read(self, slot: int, tokens: Sequence[int], start: int) -> Floats:
        """Read a text's `tokens`, numbered from `start` in its window, into a slot, and return the
        logits (V,) after the last."""
        T, n_real = passed_tokens(len(tokens)), len(tokens)
        padded = torch.zeros((1, T), dtype=torch.int64)
        padded[0, :n_real] = torch.tensor(tokens)
        numbers = torch.arange(start, start + T, device=self._device)
        self._slots, self._first, self._is_piece = slice(slot, slot + 1), start, True
        self._n_seen = _rounded_up(start + T, _KEY_UNIT)
        positions = numbers.clamp(max=self.context_length - 1)
        return self._pass(padded, positions, numbers, slice(n_real - 1, n_real))[0]

    @torch.inference_mode()
    def write(self, rows: dict[int, tuple[int, int]]) -> dict[int, Floats]:
        """Take one more token for several texts, {slot: (token, its position in the window)}, and
        return each slot's logits (V,)."""
        if self.shapes.batch_sizes == (1,):
            return {slot: self._write({slot: row}, slot, 1)[0] for slot, row in rows.items()}
        size = next(size for size in self.shapes.batch_sizes if size > max(rows))
        logits = self._write(rows, 0, size)
        return {slot: logits[slot] for slot in rows}

    def _write(self, rows: dict[int, tuple[int, int]], first: int, n_rows: int) -> Floats:
        """Return logits (n_rows, V) for consecutive slots from `first` on; slots missing in `rows`
        are padding, and keep nothing."""
        tokens, numbers, write_at = [0] * n_rows, [0] * n_rows, [self._n_keys - 1] * n_rows
        for slot, (token, number) in rows.items():
            tokens[slot - first], numbers[slot - first] = token, number
            write_at[slot - first] = number
        last = max(numbers)
        self._n_seen = next(size for size in self.shapes.key_sizes if size > last)
        self._slots, self._is_piece = slice(first, first + n_rows), False
        n_heads, n_keys = self._keys[0].shape[1:3]
        of_head = torch.arange(first, first + n_rows)[:, None] * n_heads + torch.arange(n_heads)
        write_rows = of_head * n_keys + torch.tensor(write_at)[:, None]
        self._write_rows = write_rows.flatten().to(self._device)
        positions = torch.tensor(numbers, device=self._device)
        return self._pass(torch.tensor([tokens]), positions, positions, slice(None))

    def _pass(self, tokens: Tensor, positions: Tensor, numbers: Tensor, asked: slice) -> Floats:
        """Return logits (n, V) for the slice `asked` in tokens (1, T). Each token has its number
        among `positions` (T,), and sees keys up to its own entry in `numbers` (T,)."""
        key = torch.arange(self._n_seen, device=self._device)
        self._masks: dict[int | None, Tensor] = {}
        self._hidden_after = key > numbers[:, None]  # (T, S)
        self._distance = numbers[:, None] - key
        model = self._model
        with self._kernels():
            x = model.embed(tokens.to(self._device), positions)
            rotary = rotation(positions, model.config, x.dtype)
            for block in model.blocks.values():
                # The slots stand in for a cache: `append` is all that attention asks of one.
                x = block(x, Positions(positions, positions, rotary), None, self)
            x = x[:, asked]
            if model.has_final_norm:
                x = model.final_norm(x)
            logits = model.logits(x)[0, :, : self._vocab_size]
        return logits.to("cpu", torch.float64).numpy()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store this pass's k and v (1, G, T, K), and return all keys and values that its slots
        hold, (B, G, S, K) each."""
        seen = []
        for stored, new in ((self._keys[layer], k), (self._values[layer], v)):
            of_pass = stored[self._slots]
            if self._is_piece:
                of_pass[:, :, self._first : self._first + new.shape[2]] = new
            else:
                rows = new[0].transpose(0, 1).reshape(-1, new.shape[3])  # (B · G, K)
                stored.view(-1, new.shape[3]).index_copy_(0, self._write_rows, rows)
            seen.append(of_pass[:, :, : self._n_seen])
        return seen[0], seen[1]

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: AttentionDropout,
        dropout_keys: Tensor | None,
        positions: Tensor,
        window: int | None,
    ) -> Tensor:
        """Return attention's output (1, H, T, K): a piece attends to its own text, other tokens
        each to their own slot."""
        if not self._is_piece:
            q = q.transpose(0, 2)  # (B, H, 1, K)
        n_sharing, T = q.shape[1] // k.shape[1], q.shape[2]
        grouped = q.unflatten(1, (-1, n_sharing)).flatten(2, 3) * q.shape[3] ** -0.5
        # PyTorch's fused attention rounds by the thread that happens to compute a head.
        scores = (grouped @ k.transpose(2, 3)).unflatten(2, (n_sharing, T))
        precise = torch.promote_types(scores.dtype, torch.float32)
        weights = torch.softmax(scores.to(precise) + self._mask(window, precise), dim=-1)
        y = (weights.to(v.dtype).flatten(2, 3) @ v).unflatten(2, (n_sharing, T)).flatten(1, 2)
        return y if self._is_piece else y.transpose(0, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return `hiding` for layers with this window, broadcastable to scores (B, G, n, T, S)."""
        if window not in self._masks:
            mask = hiding(self._hidden_after, self._distance, window, dtype)
            self._masks[window] = mask if self._is_piece else mask[:, None, None, None]
        return self._masks[window]

    # -- which shapes give the same bits ---------------------------------------------------------

    @torch.inference_mode()
    def find_shapes(self) -> Shapes:
        """Find by trial the shapes for which `write` gives every row the same bits, in any slot and
        beside any rows, and use only these from now on. All slots are zero afterwards."""
        whole, everyone = self.shapes, self.n_slots
        _make_up([*self._keys, *self._values])
        seeds, moves = range(_CHECKED_SEEDS), (0, 1, everyone // 2)
        if everyone == 1 or not self._agree([everyone], self._n_keys, seeds, moves):
            self.shapes = Shapes((1,), whole.key_sizes)
        else:
            smaller = [2**n for n in range(1, 10) if 2**n < everyone]
            batches = [n for n in smaller if self._agree([n], self._n_keys, seeds, moves)]
            batches.append(everyone)
            keys = [n for n in whole.key_sizes[:-1] if self._agree(batches, n, (0,), moves[2:])]
            self.shapes = Shapes(tuple(batches), (*keys, self._n_keys))
        for each in (*self._keys, *self._values):
            each.zero_()
        return self.shapes

    def _agree(
        self, batch_sizes: Sequence[int], n_keys: int, seeds: Iterable[int], moves: Sequence[int]
    ) -> bool:
        """Return whether passes with these shapes reproduce, bit for bit, the logits that the
        largest shape gives made-up rows, also with rows moved by each number in `moves`."""
        last = min(n_keys, self.context_length) - 1
        for seed in seeds:
            rows = _made_up_rows(self.n_slots, self._vocab_size, last, seed)
            expected = self._tried(rows, self._n_keys)
            for size, moved_by in product(batch_sizes, moves):
                order = [(slot + moved_by) % self.n_slots for slot in range(size)]
                found = self._tried([rows[row] for row in order], n_keys)
                if not (found == expected[order]).all():
                    return False
        return True

    def _tried(self, rows: Sequence[tuple[int, int]], n_keys: int) -> Floats:
        """Return logits (n, V) from a pass over n rows padded to n_keys keys, and leave the slots
        as they were."""
        slots = torch.arange(len(rows), device=self._device)
        numbers = torch.tensor([number for _, number in rows], device=self._device)
        stored = [*self._keys, *self._values]
        before = [each[slots, :, numbers].clone() for each in stored]
        shapes, self.shapes = self.shapes, Shapes((len(rows),), (n_keys,))
        logits = self._write(dict(enumerate(rows)), 0, len(rows))
        self.shapes = shapes
        for each, was in zip(stored, before, strict=True):
            each[slots, :, numbers] = was
        return logits


def _make_up(stored: Sequence[Tensor]) -> None:
    """Fill keys and values (B, G, S, K) with made-up numbers, the same for each block along S."""
    index = torch.arange(len(stored) * stored[0][0, :, :_KEY_UNIT].numel())
    drawn = bits(make_key("serve", "keys"), index.int()).view(len(stored), -1)
    for each, pattern in zip(stored, drawn, strict=True):
        blocks = each.unflatten(2, (-1, _KEY_UNIT))
        blocks.copy_(pattern.view(-1, 1, _KEY_UNIT, each.shape[3]) * 2.0**-31)


def _made_up_rows(n_rows: int, vocab_size: int, last: int, seed: int) -> list[tuple[int, int]]:
    """Return made-up (token, position) pairs for n_rows texts, with positions up to `last`, the
    highest and 0 included."""
    drawn = bits(make_key("serve", "rows", seed), torch.arange(2 * n_rows).int())
    tokens, lengths = drawn.view(2, -1).tolist()
    numbers = [last, 0, *(length % (last + 1) for length in lengths)]
    return [(t % vocab_size, n) for t, n in zip(tokens, numbers, strict=False)]


def n_read_in_pieces(n_tokens: int) -> int:
    """Return how many leading tokens `Slots.read` takes; the rest, fewer than _LEAST_PIECE, are
    written one at a time."""
    rest = n_tokens % PIECE_TOKENS
    return n_tokens - rest if rest < _LEAST_PIECE else n_tokens


def passed_tokens(n_tokens: int) -> int:
    """Return the padded number of tokens that a pass for n_tokens computes."""
    return _rounded_up(n_tokens, _PIECE_UNIT)


def _rounded_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit
