"""One more token for each of several texts on a CPU, in one call: the model, read once into a list
of operations, which C++ runs over buffers that are made once.

A pass over one token is hundreds of small operations, and calling them one by one takes PyTorch
several times as long as the processor needs to compute them. Weights and cache are the model's own,
where they lie; matrices of bf16 numbers are read from FewRows' copies. `cpp/token_pass.cpp` says in
which order it adds: a text's logits do not depend on the texts beside it, nor on the number of
threads. They round otherwise than PyTorch's; so a model's first layer is tried first, on this
machine: its results must be as close to those in fp64 as PyTorch's are.

Of a model in bf16, matrices, embeddings, keys and values are read as they lie; inputs of matmuls
are rounded to bf16, and all else is fp32.

Shapes: R rows, one for each text; D d_model, H heads, G KV heads, K head size, V vocabulary
(padded).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from math import nan
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pentameter.config.choices import refuse_unknown
from pentameter.config.model.architecture import RotationKind
from pentameter.errors import ConfigError
from pentameter.fused_cpu import native
from pentameter.generation.few_rows import FewRows, gather_in_huge_pages
from pentameter.model.attention.attention import Attention, Sinks, read
from pentameter.model.attention.dot_product import PLAIN_ATTENTION
from pentameter.model.dropout import AttentionDropout, StreamDropout
from pentameter.model.feed_forward import MLP
from pentameter.model.gpt import GPT, Block, TiedHead
from pentameter.model.loss import HeadLoss, softcapped
from pentameter.model.matmul import Matmul
from pentameter.model.positions import Positions, rotations, sinusoidal_positions

_MOST_CHANNELS = 256
"""Largest head size, as in `cpp/token_pass.cpp`."""
_ACTIVATIONS = {
    **{"relu": 0, "relu2": 1, "gelu": 2, "gelu_tanh": 3},
    **{"swiglu": 4, "geglu": 2, "geglu_tanh": 3},
}
"""`model.feed_forward.activation` → the function's number in `cpp/token_pass.cpp`."""
_MODULES = {
    *(GPT, Block, Attention, MLP, TiedHead, Sinks, StreamDropout, AttentionDropout, HeadLoss),
    *(nn.ModuleDict, nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm),
}
"""Classes of the modules that are computed here."""
_BY_LENGTH = ("dynamic", "longrope")
"""Values of `model.rope_scaling.type` by which frequencies go by the length of a text."""
_FIRST_TURNED = 1024
"""Positions for which rotations are computed at first; then always twice as many."""
_BLOCK, _ACTIVATED_BLOCK = 24, 48
"""Outputs of a linear layer that a thread takes at once: what 6 and 8 divide, which C++ multiplies
together; before an activation 16 as well, the numbers of a register."""
_LEAST_WORK = 2**20
"""Fewest weights times rows for which more than one thread computes."""
_FIRST_ALONE, _EVERY_ALONE, _MOST_ALONE = 2, 256, 128
"""Passes that are computed by one thread to learn how long that takes: the first, and then one of
so many; and the most in a row after a slow one of all threads."""
_TRIED_TEXTS, _TRIED_TOKENS = 4, 3
"""Most texts that are tried at once, as fewer are too: more are multiplied four by four."""
_MOST_TIMES = 2.0
"""A pass may be as many times as far from fp64 as PyTorch's operations are, in root mean square:
two roundings that are equally good differ by some tenths."""
_ROUNDOFF = 2.0**-24


class _Embedding(native.Struct):
    kind: ClassVar = 0
    _fields_ = native.fields("tokens positions y", int64="width narrow", float32="factor")


class _Norm(native.Struct):
    kind: ClassVar = 1
    _fields_ = native.fields("x weight bias y", int64="width centres adds", float32="eps")


class _Linear(native.Struct):
    kind: ClassVar = 2
    _fields_ = native.fields("x weight bias y", int64="n_in n_out narrow rounds adds block")


class _Attention(native.Struct):
    kind: ClassVar = 3
    _fields_ = native.fields(
        "q k v keys values y q_norm k_norm sinks cosine sine",
        int64="n_heads n_kv_heads channels q_row q_head kv_row kv_head of_slot of_head window "
        "turning narrow",
        float32="eps factor",
    )


class _Activation(native.Struct):
    kind: ClassVar = 4
    _fields_ = native.fields("x factor y", int64="width kind_of block")


class _Operations:
    """The operations of a GPT's pass over one token for each of at most R texts, in order, with
    their buffers. `keys` and `values` are the cache, (n_slots, G, S, K) for each layer."""

    def __init__(
        self, model: GPT, matmul: FewRows, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        self.all: list[Any] = []
        self.waits: list[bool] = []
        """Whether each thread waits for the others after the operation: if it does not, what
        follows reads the thread's own results alone."""
        self.turned: list[tuple[_Attention, RotationKind]] = []
        """Operations of attention, each with the rotation whose table it is to be given."""
        self.narrowed: list[tuple[_Linear, Tensor]] = []
        """Operations that multiply by a copy in bf16, each with the weight."""
        self.widened: list[tuple[Tensor, Tensor]] = []
        """Vectors of a model in bf16, each with the copy in fp32 that is read in its place."""
        self._config, self._matmul, self._keys, self._values = model.config, matmul, keys, values
        self._n_rows = len(keys[0])
        self._is_bf16 = model.token_embedding.weight.dtype is torch.bfloat16
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._kept: list[Tensor] = []
        D = self._config.d_model
        self.stream = self._buffer("stream", D)
        self._embed(model)
        ends = []
        for block in model.blocks.values():
            self._block(block)
            ends.append(len(self.all))
        self.n_of_first_layer = ends[0]
        hidden = (
            self._normed(self.stream, model.final_norm) if model.has_final_norm else self.stream
        )
        weight, bias = model.head_parameters()
        self.logits = self._linear(hidden, self._buffer("logits", len(weight)), weight, bias)

    def _add(self, operation: native.Struct, *, waits: bool = True) -> None:
        self.all.append(operation)
        self.waits.append(waits)

    def _buffer(self, name: str, width: int) -> Tensor:
        """Return the buffer (R, width) of that name."""
        if (name, width) not in self._buffers:
            self._buffers[name, width] = torch.zeros(self._n_rows, width)
        return self._buffers[name, width]

    def _embed(self, model: GPT) -> None:
        config, table = self._config, None
        weight = model.token_embedding.weight
        match config.positions:
            case "learned":
                table = model.position_embedding.weight
            case "sinusoidal":
                every = torch.arange(config.context_length)
                table = sinusoidal_positions(every, config.d_model, weight.dtype)
                self._kept.append(table)
            case "rotary":
                pass
            case unknown:
                refuse_unknown(unknown, "model.positions", "the pass over one token")
        factor = config.d_model**0.5 if config.embedding_scale else 1.0
        sizes = config.d_model, self._is_bf16
        self._add(_Embedding(weight, table, self.stream, *sizes, factor))

    def _wide(self, vector: Tensor | None) -> Tensor | None:
        """Return a vector in fp32: itself, or a copy."""
        if vector is None or vector.dtype is torch.float32:
            return vector
        self.widened.append((vector, vector.detach().float()))
        return self.widened[-1][1]

    def _norm(self, x: Tensor, y: Tensor | None, norm: Any, *, adds: bool = False) -> None:
        vectors = self._wide(norm.weight), self._wide(getattr(norm, "bias", None))
        centres = isinstance(norm, nn.LayerNorm)
        made = _Norm(x, *vectors, y, x.shape[1], centres, adds, norm.eps)
        self._add(made, waits=y is not None)

    def _normed(self, x: Tensor, norm: Any) -> Tensor | None:
        """Have each thread norm x (R, D) for itself, which the next linear layers then read: sooner
        done than waiting for one that does. Return what stands for the result, None."""
        self._norm(x, None, norm)
        return None

    def _linear(
        self,
        x: Tensor | None,
        y: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        adds: bool = False,
        waits: bool = True,
        block: int = _BLOCK,
    ) -> Tensor:
        """Multiply x (R, K), or what each thread has normed, by a weight (N, K); return y."""
        least = self._matmul.least(weight)
        N, K = weight.shape
        kinds = least.dtype is torch.bfloat16, self._is_bf16
        linear = _Linear(x, least, self._wide(bias), y, K, N, *kinds, adds, block)
        self._add(linear, waits=waits)
        if least is not weight:
            self.narrowed.append((linear, weight))
        return y

    def _apply(self, x: Tensor | None, y: Tensor, linear: nn.Linear, **how: Any) -> Tensor:
        return self._linear(x, y, linear.weight, linear.bias, **how)

    def _block(self, block: Any) -> None:
        D, stream = self._config.d_model, self.stream
        output = self._buffer("output", D)
        pairs = block.sub_layers()
        if block.parallel_residual:
            both = [self._buffer(f"normed by {name}", D) for name in block.names]
            for y, (norm, _) in zip(both, pairs, strict=True):
                self._norm(stream, y, norm)
            for x, (_, sub_layer) in zip(both, pairs, strict=True):
                self._sub_layer(sub_layer, x, stream, adds=True)
            return
        for name, (norm, sub_layer) in zip(block.names, pairs, strict=True):
            match self._config.norm_position:
                case "pre":
                    self._sub_layer(sub_layer, self._normed(stream, norm), stream, adds=True)
                case "post":
                    self._sub_layer(sub_layer, stream, stream, adds=True)
                    self._norm(stream, stream, norm)
                case "both":
                    self._sub_layer(sub_layer, self._normed(stream, norm), output)
                    last = block.get_submodule(f"{name}_output_norm")
                    self._norm(output, stream, last, adds=True)
                case "output":
                    self._sub_layer(sub_layer, stream, output)
                    self._norm(output, stream, norm, adds=True)
                case unknown:
                    refuse_unknown(unknown, "model.norm_position", "the pass over one token")

    def _sub_layer(self, of: Any, x: Tensor | None, y: Tensor, *, adds: bool = False) -> None:
        if isinstance(of, Attention):
            self._apply(self._attention(of, x), y, of.out, adds=adds)
        else:
            self._apply(self._activated(of, x), y, of.down, adds=adds)

    def _activated(self, of: MLP, x: Tensor | None) -> Tensor:
        width, factor = self._config.feed_forward_width, None
        # Each thread activates what it has multiplied: the same blocks.
        how: Any = {"waits": False, "block": _ACTIVATED_BLOCK}
        inner = self._apply(x, self._buffer("up", width), of.up, **how)
        if of.gate is not None:
            inner, factor = self._apply(x, self._buffer("gate", width), of.gate, **how), inner
        number = _ACTIVATIONS[self._config.feed_forward.activation]
        self._add(_Activation(inner, factor, inner, width, number, _ACTIVATED_BLOCK))
        return inner

    def _attention(self, of: Attention, x: Tensor | None) -> Tensor:
        config = self._config
        H, G, K = config.attention.n_heads, config.attention.kv_heads, config.head_channels
        if of.shares_kv:
            q = self._apply(x, self._buffer("q", H * K), of.q, waits=False)
            kv = self._apply(x, self._buffer("kv", 2 * G * K), of.kv)
            k, v, steps = kv, kv[:, K:], (H * K, K, 2 * G * K, 2 * K)
        else:
            q = self._apply(x, self._buffer("qkv", 3 * H * K), of.qkv)
            k, v, steps = q[:, K:], q[:, 2 * K :], (3 * H * K, 3 * K) * 2
        keys, values = self._keys[of.layer], self._values[of.layer]
        assert keys.stride() == values.stride()
        assert keys.stride()[2:] == (K, 1)
        means = self._buffer("means", H * K)
        norms = (None, None) if of.qk_norm is None else (of.q_norm.weight, of.k_norm.weight)
        sinks = None if of.sinks is None else of.sinks.weight
        vectors = (self._wide(each) for each in (*norms, sinks))
        turning = 0 if of.rotates_by is None else config.turning_channels
        attention = _Attention(
            *(q, k, v, keys, values, means, *vectors, None, None),
            *(H, G, K, *steps, *keys.stride()[:2], of.window or 0, turning),
            keys.dtype is torch.bfloat16,
            *(config.norm_eps, K**-0.5 * of.query_factor),
        )
        self._add(attention)
        if of.rotates_by is not None:
            self.turned.append((attention, of.rotates_by))
        return means


class _Team:
    """Decides whether all threads compute a pass, or one alone: threads wait for each other some
    tens of times, and where other programs hold a core, each wait takes milliseconds. So a pass of
    all that took longer than one alone has the next ones computed alone, twice as many after each
    such pass. No number depends on it."""

    def __init__(self) -> None:
        self._alone_seconds: dict[int, float] = {}
        self._n_passes: dict[int, int] = {}
        self._n_left, self._n_next = 0, 1

    def is_alone(self, n_rows: int) -> bool:
        """Return whether one thread is to compute the next pass, over n_rows."""
        n = self._n_passes[n_rows] = self._n_passes.get(n_rows, -1) + 1
        is_measured = n < _FIRST_ALONE or n % _EVERY_ALONE == 0
        self._n_left -= self._n_left > 0
        return is_measured or self._n_left > 0

    def took(self, n_rows: int, seconds: float, *, alone: bool) -> None:
        """Note how long a pass over n_rows took."""
        if alone:
            self._alone_seconds[n_rows] = seconds
        elif seconds <= self._alone_seconds[n_rows]:
            self._n_next = 1
        else:
            self._n_left, self._n_next = 1 + self._n_next, min(2 * self._n_next, _MOST_ALONE)


class TokenPass:
    """A GPT's pass over one token for each of several texts, with a cache of `keys` and `values`,
    (n_slots, G, S, K) for each layer. The library `rows` must be loaded, and `obstacle` have named
    nothing; changes of the weights in place are seen."""

    def __init__(
        self,
        model: GPT,
        matmul: FewRows,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        team: _Team | None = None,
    ) -> None:
        self._run = native.function("rows", "token_pass", n_pointers=6, n_numbers=3)
        self._model, self._matmul, self._cache = model, matmul, (keys, values)
        self._of = _Operations(model, matmul, keys, values)
        self._program = (
            np.array([each.kind for each in self._of.all], dtype=np.int64),
            np.array(self._of.waits, dtype=np.int64),
            np.array([native.address(each) for each in self._of.all], dtype=np.uint64),
        )
        self._addresses = [each.ctypes.data for each in self._program]
        n_positions = min(keys[0].shape[2], model.config.context_length)
        self._limits = np.array(
            [[len(model.token_embedding.weight)], [n_positions], [len(keys[0])]], dtype=np.uint64
        )
        self._tables: dict[RotationKind, Any] = {}
        self._n_turned = 0
        self._team = _Team() if team is None else team
        self._n_weights = sum(each.numel() for each in model.parameters())
        self._copied = [weight for weight, _ in self._of.widened]
        self._copied += [weight for _, weight in self._of.narrowed]
        self._changes = _count_changes(self._copied)

    def __call__(self, tokens: Any, positions: Any, slots: Any) -> Tensor:
        """Return logits (R, V) in fp32 after one more token for each of R texts, `tokens` (R,), at
        these `positions` of the texts in the cache's `slots`, no slot twice: integers on the host.
        The logits are valid until the next call. Raises ConfigError for a number out of range,
        which the kernel would take for an address."""
        rows, n_rows = np.array([tokens, positions, slots], dtype=np.int64), len(tokens)
        if not (rows.view(np.uint64) < self._limits).all():  # those below 0 are large ones
            raise ConfigError(_out_of_range(rows, self._limits))
        if self._n_weights * n_rows < _LEAST_WORK:
            self._compute(rows, len(self._of.all), alone=True)
        else:
            alone, start = self._team.is_alone(n_rows), time.perf_counter()
            self._compute(rows, len(self._of.all), alone=alone)
            self._team.took(n_rows, time.perf_counter() - start, alone=alone)
        logits = self._of.logits[: len(tokens)]
        return softcapped(logits, self._model.config.logit_softcap)

    def _compute(self, rows: npt.NDArray[np.int64], n_operations: int, *, alone: bool) -> None:
        """Run the first operations for `rows` (3, R), which are tokens, positions and slots, by all
        threads or by one `alone`."""
        if self._of.turned and (n_seen := int(rows[1].max()) + 1) > self._n_turned:
            self._turn(n_seen)
        if self._copied and self._changes != _count_changes(self._copied):
            self._copy()
        n = rows.shape[1]
        begin, of_row = rows.ctypes.data, n * rows.itemsize
        inputs = (begin, begin + of_row, begin + 2 * of_row)
        self._run(*self._addresses, *inputs, n_operations, n, not alone)

    def _turn(self, n_seen: int) -> None:
        """Compute rotations for at least n_seen positions."""
        config, n = self._model.config, max(n_seen, _FIRST_TURNED, 2 * self._n_turned)
        n = self._n_turned = min(n, config.context_length)
        self._tables = dict(rotations(torch.arange(n), config, torch.float32, n))
        for attention, kind in self._of.turned:
            cosine, sine = self._tables[kind]
            attention.cosine, attention.sine = cosine.data_ptr(), sine.data_ptr()

    @torch.no_grad()
    def _copy(self) -> None:
        """Have changed weights read where they are now: from a new copy, or as they are."""
        for vector, copy in self._of.widened:
            copy.copy_(vector)
        for linear, weight in self._of.narrowed:
            least = self._matmul.least(weight)
            linear.weight, linear.narrow = least.data_ptr(), least.dtype is torch.bfloat16
        self._changes = _count_changes(self._copied)

    @torch.inference_mode()
    def is_precise(self) -> bool:
        """Return whether the first layer's results for made-up texts are as close to those in fp64
        as PyTorch's. Positions that it writes in the cache hold what they held."""
        model, (keys, values) = self._model, self._cache
        n_texts = min(_TRIED_TEXTS, len(keys[0]))
        n_tokens = min(_TRIED_TOKENS, model.config.context_length)
        texts = torch.arange(n_texts * n_tokens).view(n_texts, n_tokens) * 7 + 1
        texts %= model.config.padded_vocab_size
        written = [each[0][:n_texts, :, :n_tokens] for each in (keys, values)]
        before = [each.clone() for each in written]
        found = [self._first_layer(texts[:n]) for n in range(1, n_texts + 1)]
        for each, was in zip(written, before, strict=True):
            each.copy_(was)
        own, exact = _by_pytorch(model, texts)
        most = max(_MOST_TIMES * _distance(own, exact), _ROUNDOFF * _size(exact))
        return all(_distance(x, exact[: len(x)]) <= most for x in found)

    def _first_layer(self, texts: Tensor) -> Tensor:
        """Return the residual stream (B, T, D) of `texts` (B, T) after the first layer."""
        n_texts, found = len(texts), []
        for position, tokens in enumerate(texts.t().tolist()):
            rows = np.array([tokens, [position] * n_texts, range(n_texts)], dtype=np.int64)
            self._compute(rows, self._of.n_of_first_layer, alone=True)
            found.append(self._of.stream[:n_texts].clone())
        return torch.stack(found, 1)


def _out_of_range(rows: npt.NDArray[np.int64], limits: npt.NDArray[np.uint64]) -> str:
    """Return the error for `rows` (3, R), tokens, positions and slots, that do not lie below
    `limits` (3, 1): a sentence about the first such number."""
    kind, row = np.argwhere(rows.view(np.uint64) >= limits)[0]
    name = ("token id", "position", "slot")[kind]
    remedy = "; encode texts with the model's own tokenizer" if kind == 0 else ""
    last = limits[kind, 0] - 1
    return f"{name} {rows[kind, row]} of text {row} is outside the model's 0 … {last}{remedy}"


def _count_changes(weights: Iterable[Tensor]) -> float:
    """Return a number that a change of one of the weights changes; nan, which equals no number, if
    there is an inference tensor, whose changes PyTorch does not count."""
    return sum(nan if each.is_inference() else each._version for each in weights)


def _by_pytorch(model: GPT, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the residual stream (B, T, D) of whole `texts` (B, T) after the first layer, in the
    model's dtype and in fp64."""
    positions = torch.arange(texts.shape[1])
    x = model.embed(texts, positions)
    block, found = model.blocks["0"], []
    exact = {name: weight.double() for name, weight in block.named_parameters()}
    for weights, y in (({}, x), (exact, x.double())):
        rotary = rotations(positions, model.config, y.dtype, len(positions))
        of_tokens = Positions(positions, positions, rotary)
        found.append(torch.func.functional_call(block, weights, (y, of_tokens)))
    return found[0], found[1]


def _distance(x: Tensor, exact: Tensor) -> float:
    return _size(x.double() - exact)


def _size(x: Tensor) -> float:
    """Return the root of the mean square."""
    return float(x.square().mean().sqrt())


def obstacle(model: GPT, matmul: Matmul) -> str | None:
    """Return why passes over one token of a model that multiplies by `matmul` are PyTorch's, a
    phrase; None if a TokenPass can compute them."""
    config = model.config
    attention, activation = config.attention, config.feed_forward.activation
    widths = (config.d_model, config.head_channels, config.feed_forward_width)
    dtypes, fp32, bf16 = {each.dtype for each in model.parameters()}, torch.float32, torch.bfloat16
    by_length = config.positions == "rotary" and config.rope_scaling.type in _BY_LENGTH
    holds = {
        "PyTorch multiplies": not isinstance(matmul, FewRows),
        "the model is a slice": not (model.is_first and model.is_last),
        "attention is latent": attention.type == "latent",
        "it has experts": config.experts.count is not None,
        "queries are normed over all heads together": attention.qk_norm == "width",
        f"its activation is {activation}": activation not in _ACTIVATIONS,
        "rotary frequencies go by the length of a text": by_length,
        f"a width is no multiple of {native.CHANNELS}": any(n % native.CHANNELS for n in widths),
        f"a head has over {_MOST_CHANNELS} channels": config.head_channels > _MOST_CHANNELS,
        "a module computes in its own way": not all(map(_is_plain, model.modules())),
        "a parameter is not on the CPU, in order": not all(map(_is_in_order, model.parameters())),
        "parameters are neither all fp32 nor all bf16": dtypes not in ({fp32}, {bf16}),
    }
    return next((phrase for phrase, is_so in holds.items() if is_so), None)


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module computes as its class does, and that is one of ours."""
    if type(module) not in _MODULES or ("forward" in vars(module) and type(module) is not HeadLoss):
        return False
    if isinstance(module, Attention) and module.attend is not PLAIN_ATTENTION:
        return False
    return not isinstance(module, (Attention, MLP)) or module.read is read


def _is_in_order(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.is_contiguous()


class _Known:
    """The findings about a model's passes, kept for its next texts: how long they take, and whether
    they were precise when they were `tried`, with which weights and rows."""

    def __init__(self) -> None:
        self.team = _Team()
        self.tried: Any = None
        self.is_precise = False


_known: WeakKeyDictionary[GPT, _Known] = WeakKeyDictionary()


def token_pass(
    model: GPT, matmul: Matmul, keys: Sequence[Tensor], values: Sequence[Tensor]
) -> TokenPass | None:
    """Return the TokenPass of a model with a cache of `keys` and `values`, (n_slots, G, S, K) for
    each layer; None if there is an obstacle, or if it is less precise than PyTorch here. That is
    tried once, and again after a change of the weights."""
    if obstacle(model, matmul) is not None:
        return None
    assert isinstance(matmul, FewRows)
    known = _known.setdefault(model, _Known())
    found = TokenPass(model, matmul, keys, values, known.team)
    weights = _count_changes(model.parameters()), model.token_embedding.weight.dtype
    tried = (*weights, min(_TRIED_TEXTS, len(keys[0])))
    if known.tried != tried:
        gather_in_huge_pages(model.parameters())
        known.is_precise, known.tried = found.is_precise(), tried
    return found if known.is_precise else None
