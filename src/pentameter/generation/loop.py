"""Sampling loop, with several samples as one batch through the key/value cache.

A model's positions end at its context length. The visible part of a longer text depends on its
length alone (`window_tokens`): everything while it fits; each time the window is full, its last
half is encoded anew and grows again. With the cache, a token therefore costs one pass over one
token, except one in context_length/2 that costs a pass over half a window; and resuming a text
gives the same as an uninterrupted run.

Shapes: B samples, T sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError
from pentameter.generation.captured import Captured, can_be_captured
from pentameter.generation.detokenizer import Detokenizer
from pentameter.generation.few_rows import few_rows, multiplying_by
from pentameter.generation.prompts import Prompt, encode_prompt
from pentameter.generation.sampling import Floats, Sampling, Tokens, choose, uniform_numbers
from pentameter.generation.token_pass import token_pass
from pentameter.machine.on_host import on_host
from pentameter.model.attention.attention import attending_by
from pentameter.model.attention.cache import KVCache, NewestTokenCache
from pentameter.model.attention.dot_product import NewestTokenAttention
from pentameter.model.gpt import GPT
from pentameter.model.matmul import PLAIN, Matmul

if TYPE_CHECKING:
    from pentameter.parallel.engine import Engine

_PREFILL_LOGITS = 2**25
"""Maximum logits (B · T · V) in one pass over a prompt: 128 MiB in fp32. Longer prompts take
several passes."""
_LEAST_KEYS = 256
"""Least number of keys that a captured step reads; else the next power of two."""
_GPU_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_DRAWS_AT_ONCE = 1024
"""Text positions for which uniform numbers are drawn at once."""


@dataclass(frozen=True)
class Generation(Sampling):
    """Settings for continuing a prompt: how tokens are drawn, and how many. Raises ConfigError for
    values out of range."""

    max_new_tokens: int = 256
    """Tokens per sample. An end of text counts as one of them: it reads `<|endoftext|>`, and
    another text follows."""
    num_samples: int = 1
    """Number of texts to generate, as one batch."""
    seed: int = 0
    """Each token is drawn from random bits keyed by (seed, sample, position in the text), so sample
    0 of 16 is the same as a single sample."""
    context_length: int | None = None
    """Number of tokens that the model can see; required if it is a module other than GPT. A GPT
    ignores it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_new_tokens", "num_samples"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")


USUAL = Generation()


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str = "",
    settings: Generation = USUAL,
    **changes: Any,
) -> list[str]:
    """Return the continuations of `prompt` (without the prompt), one text per sample. Arguments and
    errors are those of `stream`."""
    settings = replace(settings, **changes)
    texts = [""] * settings.num_samples
    for sample, piece in stream(model, tokenizer, prompt, settings):
        texts[sample] += piece
    return texts


def stream(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str = "",
    settings: Generation = USUAL,
    **changes: Any,
) -> Iterator[tuple[int, str]]:
    """Return an iterator over (sample index, text chunk); a sample's chunks come in order. The
    model is in `eval()` until the iterator ends.

    model: a GPT, or any other module that maps tokens (B, T) to logits (B, T, V). The latter runs
    once per token over the last tokens of the text, at most `context_length`.

    prompt: text to continue; if it is empty, what takes its place is said at `encode_prompt`.

    settings, changes: a `Generation`, or some of its fields by name: `max_new_tokens=256` tokens
    per sample; `temperature=1.0`, where 0 takes the likeliest token; `top_k=None` keeps only the k
    likeliest tokens; `top_p=None` then keeps only the likeliest with total probability p;
    `num_samples=1` texts; `seed=0`, which keys the draws; `context_length=None`.

    Raises ConfigError at once for arguments out of range and for a prompt that the tokenizer cannot
    encode, CorruptError if the model's logits are not finite.
    """
    settings = replace(settings, **changes)
    ids = encode_prompt(tokenizer, prompt)
    steps = sampled_tokens(model, ids, tokenizer.vocab_size, settings)
    return _decoded(steps, tokenizer, settings.num_samples, ids.tolist() if prompt else [])


def sampled_tokens(
    model: nn.Module,
    prompt: Tokens,
    vocab_size: int,
    settings: Generation,
    samples: Sequence[int] | None = None,
) -> Iterator[Tokens]:
    """Return an iterator over positions that yields the new token of each sample: ids (B,) int64, B
    = `settings.num_samples`. The model is in `eval()` until the iterator ends.

    model: a GPT; or a module that maps tokens (B, T) to logits (B, T, V), for which
    `settings.context_length` is required. prompt: ids (n,), at least one, or (B, n), one prompt for
    each sample. vocab_size: ids from this one on (padding) are never drawn. samples: B numbers
    that, with the seed, key each sample's draws; None for 0 … B - 1.

    Raises ConfigError at once for an empty prompt or a missing `context_length`, CorruptError if
    the logits are not finite.
    """
    if prompt.shape[-1] < 1:
        raise ConfigError("prompt=[] must hold at least one token to continue from")
    context_length = settings.context_length
    if not isinstance(model, GPT) and context_length is None:
        raise ConfigError(
            f"context_length is not given: how many tokens a {type(model).__name__} can see is not "
            "known; give that of its configuration, config.model.context_length"
        )

    def tokens() -> Iterator[Tokens]:
        was_training = model.training
        kept = [module for module in model.modules() if not module.training]
        model.eval()
        try:
            if isinstance(model, GPT):
                matmul = few_rows(model)
                window = _Window(model, settings.num_samples, vocab_size, matmul)
                next_logits = window.next_logits
            else:
                assert context_length is not None
                next_logits = partial(_full_pass, model, context_length, vocab_size)
                matmul = PLAIN
            with multiplying_by(model, matmul):
                yield from _sampled(next_logits, prompt, settings, samples)
        finally:
            model.train(was_training)
            for module in kept:  # such as frozen layers with dropout
                module.training = False

    return tokens()


def sample_text(
    engine: Engine, tokenizer: Tokenizer, prompt: Prompt, settings: Generation, sample: int
) -> str | None:
    """Return a prompt with its continuation by the model in training, in any layout. The main
    process returns the text, all others None. Collective.

    settings: for one sample. sample: a number that keys its draws. The continuation ends early at
    what `prompt.ends` names.

    If each process has the whole model, the main one samples alone, with a key-value cache. If not,
    all processes compute each token together, without a cache. Raises CorruptError if the logits
    are not finite.
    """
    context_length, vocab_size = engine.plan.config.model.context_length, tokenizer.vocab_size
    if engine.is_whole:
        if not engine.world.is_main:
            return None
        known = replace(settings, context_length=context_length)
        steps = sampled_tokens(engine.model, prompt.ids, vocab_size, known, [sample])
    else:

        def next_logits(seen: Tokens) -> Floats:
            window = seen[:, -window_tokens(seen.shape[1], context_length) :]
            return engine.next_logits(window)[:, :vocab_size]

        steps = _sampled(next_logits, prompt.ids, settings, [sample])
    pieces = Detokenizer(tokenizer, prompt.ids.tolist() if prompt.text else [], prompt.ends)
    found = [prompt.text]
    for tokens in steps:  # in each process the same
        found.append(pieces.push(int(tokens[0])))
        if pieces.is_ended:
            break
    del steps  # and with it what it changed in the model
    return "".join([*found, pieces.flush()]) if engine.world.is_main else None


def window_tokens(n_tokens: int, context_length: int) -> int:
    """Return how many of a text's last tokens the model sees when the text has n_tokens (≥ 1).

    It sees all, up to context_length. With one more token, only the last context_length // 2 (at
    least one) stay visible, and the window grows to context_length again.
    """
    if n_tokens <= context_length:
        return n_tokens
    kept = max(1, context_length // 2)
    return kept + (n_tokens - context_length - 1) % (context_length - kept + 1)


def _decoded(
    steps: Iterator[Tokens], tokenizer: Tokenizer, num_samples: int, prompt: list[int]
) -> Iterator[tuple[int, str]]:
    """Yield (sample index, text chunk) from the token ids (B,) of each position, B = `num_samples`.
    `prompt` has the ids that are shown already, the same for all samples."""
    samples = [Detokenizer(tokenizer, prompt) for _ in range(num_samples)]
    for tokens in steps:
        for sample, token in enumerate(tokens.tolist()):
            if piece := samples[sample].push(token):
                yield sample, piece
    for sample, pieces in enumerate(samples):
        if piece := pieces.flush():
            yield sample, piece


def _sampled(
    next_logits: Callable[[Tokens], Floats],
    prompt: Tokens,
    settings: Generation,
    samples: Sequence[int] | None = None,
) -> Iterator[Tokens]:
    """Yield new tokens (B,) for each position behind the prompt (n,), or behind B prompts (B, n).
    `next_logits` maps the ids so far (B, t) to logits (B, V). `settings` and `samples` are as for
    `sampled_tokens`."""
    n_prompt, n_samples = prompt.shape[-1], settings.num_samples
    n_total = n_prompt + settings.max_new_tokens
    text = np.empty((n_samples, n_total), dtype=np.int64)
    text[:, :n_prompt] = prompt
    samples = range(n_samples) if samples is None else samples
    for start in range(n_prompt, n_total, _DRAWS_AT_ONCE):
        positions = np.arange(start, min(start + _DRAWS_AT_ONCE, n_total), dtype=np.int32)
        draws = uniform_numbers(settings.seed, samples, positions).T
        for n_tokens, uniforms in zip(positions.tolist(), draws, strict=True):
            chosen = choose(next_logits(text[:, :n_tokens]), settings, uniforms)
            text[:, n_tokens] = chosen
            yield chosen


@torch.inference_mode()
def _full_pass(model: nn.Module, context_length: int, vocab_size: int, text: Tokens) -> Floats:
    """Return logits (B, V) for the token after `text` (B, n), V = `vocab_size`, by a pass over the
    window that the model sees."""
    seen = text[:, -window_tokens(text.shape[1], context_length) :]
    device = next(model.parameters()).device
    logits = model(torch.from_numpy(np.ascontiguousarray(seen)).to(device))
    return on_host(logits[:, -1, :vocab_size])


class _Window:
    """A GPT with a key-value cache, for a text that grows and may become longer than the context.
    The cache holds the text's last tokens, as many as `window_tokens` says; when that number falls
    back to half the context, or rotary frequencies change, the cache is computed anew."""

    def __init__(self, model: GPT, n_samples: int, vocab_size: int, matmul: Matmul = PLAIN) -> None:
        """matmul: the one by which the model is going to multiply."""
        weight = next(model.parameters())
        self._model = model
        self._device = weight.device
        self._vocab_size = vocab_size
        self._context_length = model.config.context_length
        self._pass_tokens = max(1, _PREFILL_LOGITS // (n_samples * vocab_size))
        self._kernels = partial(chosen_kernels, weight.device, weight.dtype)
        self._steps = Captured(weight.device, is_on=can_be_captured(weight.device, model.config))
        with torch.inference_mode():
            self._cache = KVCache(
                model.config, n_samples, weight.device, weight.dtype, zeroed=self._steps.is_on
            )
        self._in_one_call = token_pass(model, matmul, self._cache.keys, self._cache.values)

    def next_logits(self, text: Tokens) -> Floats:
        """Return logits (B, V) for the token after `text` (B, n). Call it with n one larger each
        time: tokens already in the cache are not computed again."""
        n_seen = window_tokens(text.shape[1], self._context_length)
        n_cached = n_seen - 1
        is_anew = self._model.config.rope_scaling.begins_anew_at(n_seen)
        if self._cache.length != n_cached or is_anew:  # the first call, or the window starts anew
            self._cache.reset()
            n_cached = 0
        unread = text[:, text.shape[1] - n_seen + n_cached :]
        if n_cached and self._steps.is_on:
            return self._captured(unread[:, 0])
        if self._in_one_call is not None and unread.shape[1] == 1:
            n_samples = len(unread)
            found = self._in_one_call(unread[:, 0], [n_cached] * n_samples, range(n_samples))
            self._cache.advance(1)
            return on_host(found[:, : self._vocab_size])
        for start in range(0, unread.shape[1], self._pass_tokens):
            logits = self._pass(unread[:, start : start + self._pass_tokens], n_seen)
        return logits

    @torch.inference_mode()
    def _pass(self, tokens: Tokens, n_seen: int) -> Floats:
        batch = torch.from_numpy(np.ascontiguousarray(tokens)).to(self._device)
        with self._kernels():
            logits = self._model(batch, cache=self._cache, length=n_seen)
            logits = logits[:, -1, : self._vocab_size]
        return on_host(logits)

    @torch.inference_mode()
    def _captured(self, tokens: Tokens) -> Floats:
        """Return logits (B, V) after one more token per sample, `tokens` (B,). The step runs as a
        CUDA graph, which reads a fixed number of keys, a power of two or the context length; each
        is recorded when it is first needed."""
        cache = self._cache
        n_keys = min(self._context_length, max(_LEAST_KEYS, 1 << cache.length.bit_length()))
        inputs = torch.tensor([*tokens.tolist(), cache.length])
        logits = self._steps(n_keys, inputs, partial(self._one_more, n_keys))
        cache.advance(1)
        return on_host(logits)

    def _one_more(self, n_keys: int, inputs: Tensor) -> Tensor:
        """Return logits (B, V) on the device after one more token per sample. `inputs` (B + 1,) are
        the tokens and their position, below n_keys."""
        tokens, position = inputs[:-1, None], inputs[-1:]
        cache = NewestTokenCache(self._cache, position, n_keys)
        with self._kernels(), attending_by(self._model, NewestTokenAttention(position)):
            logits: Tensor = self._model(
                tokens, cache=cache, positions=position, length=position + 1
            )
        return logits[:, -1, : self._vocab_size]


def chosen_kernels(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return the context manager in which a model on `device` with weights of `dtype` computes
    fastest: without oneDNN for fp32 on the CPU; on a GPU without cuDNN's attention, which makes a
    plan for each new number of keys, in 50 ms; else unchanged."""
    if device.type == "cuda":
        return sdpa_kernel(_GPU_KERNELS)
    is_plain = device.type == "cpu" and dtype == torch.float32
    return _without_onednn() if is_plain else nullcontext()


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Run fp32 on the CPU without oneDNN, whose GELU sets itself up anew at every call.

    On one token that costs ten times the GELU itself, 8 % of the character GPT's step at batch 1;
    fp32 matmuls do not go through oneDNN anyhow.
    """
    settings: Any = torch.backends.mkldnn
    before = settings.enabled
    settings.enabled = False
    try:
        yield
    finally:
        settings.enabled = before
