"""Sampling loop, with several samples as one batch through the key/value cache, and ids to text.

A model's positions end at its context length. The visible part of a longer text depends on its
length alone (`window_tokens`): everything while it fits; each time the window is full, its last
half is encoded anew and grows again. With the cache, a token therefore costs one pass over one
token, except one in context_length/2 that costs a pass over half a window; and resuming a text
gives the same as an uninterrupted run.

Shapes: B samples, T sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from pentameter.data.shards.dataset import TokenSplit
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.chat import ChatTemplate, escaped, without_marks
from pentameter.data.tokenizers.renderer import RenderRequest
from pentameter.data.tokenizers.rendering import ends_of_answers, render
from pentameter.errors import ConfigError
from pentameter.generation.sampling import Floats, Sampling, Tokens, choose, uniform_numbers
from pentameter.machine.on_host import on_host
from pentameter.model.attention.cache import KVCache
from pentameter.model.gpt import GPT

if TYPE_CHECKING:
    from pentameter.parallel.engine import Engine

_PREFILL_LOGITS = 2**25
"""Maximum logits (B · T · V) in one pass over a prompt: 128 MiB in fp32. Longer prompts take
several passes."""
_DRAWS_AT_ONCE = 1024
"""Text positions for which uniform numbers are drawn at once."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MOST_PARTS = 4
"""Most tokens that one character is cut into: one for each byte of its UTF-8."""
_MOST_BEFORE = 64
"""Most tokens that are looked at for those behind which to decode; else all are kept."""


@dataclass(frozen=True)
class Generation(Sampling):
    """Settings for continuing a prompt: those for drawing a token, and how many are drawn. Raises
    ConfigError for values out of range."""

    max_new_tokens: int = 256
    """Tokens per sample. A drawn end of text is one of them, reads `<|endoftext|>`, and another
    text follows it."""
    num_samples: int = 1
    """Texts generated at once."""
    seed: int = 0
    """Each token is drawn from bits keyed by (seed, sample, position in the text), so sample 0 in
    16 is the same as a single one."""
    context_length: int | None = None
    """Tokens that a module other than GPT can see, which it requires; a GPT ignores it."""

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
    """Return continuations for `prompt` (without it), one text per sample. Arguments and errors are
    those of `stream`."""
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
    """Return an iterator over (sample index, text chunk), chunks in order within a sample. The
    model is in `eval()` until the iterator ends.

    model: a GPT, or any other module that maps tokens (B, T) to logits (B, T, V). For each token,
        the other module takes a pass over the last tokens in the text, at most `context_length`.
    prompt: text to continue; an empty one becomes the tokenizer's end-of-text token.
    settings, changes: a `Generation`, or its fields by name: `max_new_tokens=256` tokens per
        sample; `temperature=1.0`, where 0 takes the likeliest token; `top_k=None` and `top_p=None`,
        which keep the k likeliest tokens alone, then the likeliest with total probability p;
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
    """Return an iterator over new tokens: ids (B,) int64 per position, B = `settings.num_samples`.
    The model is in `eval()` until the iterator ends.

    model: a GPT, or a module that maps tokens (B, T) to logits (B, T, V), which needs
    `settings.context_length`. prompt: ids (n,), at least one, or (B, n), one prompt for each
    sample. vocab_size: ids from there on (padding) are never chosen. samples: B numbers that, with
    the seed, key each sample's draws; None for 0 … B - 1.

    Raises ConfigError at once for an empty prompt and a context that is not given, CorruptError if
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
                next_logits = _Window(model, settings.num_samples, vocab_size).next_logits
            else:
                assert context_length is not None
                next_logits = partial(_full_pass, model, context_length, vocab_size)
            yield from _sampled(next_logits, prompt, settings, samples)
        finally:
            model.train(was_training)
            for module in kept:  # such as frozen layers with dropout
                module.training = False

    return tokens()


@dataclass(frozen=True)
class Prompt:
    """A text for the model to continue."""

    text: str
    """Text printed before the continuation; empty to print none."""
    ids: Tokens
    """Token ids (n,), at least one."""
    ends: Collection[int] = ()
    """Token ids that end the sample when drawn, as at an answer's end."""


def text_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Return a text as a Prompt; one without tokens becomes the end-of-text token."""
    return Prompt(text, encode_prompt(tokenizer, text))


def question_prompt(
    tokenizer: Tokenizer, split: TokenSplit, message: str, date: str
) -> Prompt | None:
    """Return the Prompt for a user's message in the chat template, which is told the day `date`;
    for an empty message, the first conversation in `split` up to its first answer. None for a
    message if the tokenizer has no chat template, and for an empty one if the split has no
    conversation.

    The answer ends as `ends_of_answers` says. Raises ConfigError if the template refuses the
    message.
    """
    if message:
        if tokenizer.chat is None:  # prompts and completions that are texts
            return None
        ids = encode_chat(tokenizer, message, date)
    else:
        ids = split.first_prompt
    if not len(ids):
        return None
    return Prompt(tokenizer.decode(ids), ids, ends_of_answers(tokenizer))


def sample_text(
    engine: Engine, tokenizer: Tokenizer, prompt: Prompt, settings: Generation, sample: int
) -> str | None:
    """Return a prompt with its continuation by the model in training, on any layout; None except in
    the main process. Collective.

    `settings` are those of one sample, and `sample`, a number, keys its draws; fewer tokens are
    drawn if one in `prompt.ends` comes. If each process has the whole model, the main one samples
    alone, with a key/value cache. If not, all processes compute each token together, without a
    cache. Raises CorruptError if the logits are not finite.
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


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> Tokens:
    """Return the prompt's token ids (n,), n ≥ 1.

    It begins as a document does, with the tokenizer's prefix. A prompt without any token (empty, or
    without words) becomes the end of text, which precedes texts in training. If the tokenizer has
    none, it becomes a newline, or token 0 if that cannot be encoded. Raises ConfigError for a
    prompt that the tokenizer cannot encode.
    """
    if len(ids := tokenizer.encode_document(prompt)):
        return ids
    if tokenizer.end_of_text is not None:
        return np.array([tokenizer.end_of_text], dtype=np.int64)
    try:
        newline = tokenizer.encode("\n")
    except ConfigError:
        newline = ids
    return newline if len(newline) else np.zeros(1, dtype=np.int64)


def encode_chat(tokenizer: Tokenizer, message: str, date: str | None = None) -> Tokens:
    """Return the ids (n,) for a user's message in the tokenizer's chat template, up to the answer's
    start. The template is told the day `date`, YYYY-MM-DD, or today's (None).

    Raises ConfigError if the tokenizer has no template, or the template refuses the message.
    """
    messages = [{"role": "user", "content": message}]
    template = template_of(tokenizer)
    return encode_messages(tokenizer, messages, lambda on: render(template, replace(on, date=date)))


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """Return the tokenizer's chat template; ConfigError, naming `--chat`, if it has none."""
    if tokenizer.chat is None:
        raise ConfigError(
            f"the model's tokenizer ({tokenizer.kind}) has no chat template; leave --chat out, and "
            "write the prompt as the model knows it"
        )
    return tokenizer.chat


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    render: Callable[[RenderRequest], str],
) -> Tokens:
    """Return the ids (n,) for a conversation, up to the next answer's start. Each message is a
    mapping with "role" and "content"; `render` turns them into text by the tokenizer's chat
    template. Special tokens in a message's own text are not encoded as such.

    Raises TemplateRefusalError if the template refuses the messages.
    """
    special = tokenizer.special_tokens
    messages = escaped(messages, special)
    text = without_marks(render(RenderRequest(messages, add_generation_prompt=True)))
    ((ids, _),) = tokenizer.encode_segments([[(text, False)]], is_rendered=True)
    return ids if len(ids) else encode_prompt(tokenizer, "")


def window_tokens(n_tokens: int, context_length: int) -> int:
    """Return how many last tokens the model sees when the text has n_tokens (≥ 1).

    All tokens, up to context_length; when one more comes, only the last context_length // 2 (at
    least one) stay visible, and the window grows to context_length again.
    """
    if n_tokens <= context_length:
        return n_tokens
    kept = max(1, context_length // 2)
    return kept + (n_tokens - context_length - 1) % (context_length - kept + 1)


def _decoded(
    steps: Iterator[Tokens], tokenizer: Tokenizer, num_samples: int, prompt: list[int]
) -> Iterator[tuple[int, str]]:
    """Yield (sample index, text chunk) from each step's token ids (B,), B = `num_samples`; `prompt`
    has the ids that are shown already, the same for all samples."""
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
    """Yield the new tokens (B,) of each position behind the prompt (n,) or prompts (B, n).
    `next_logits` maps the ids so far (B, t) to logits (B, V); `settings` and `samples` are as for
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
    visible window: the last tokens that a model with `context_length` positions sees."""
    seen = text[:, -window_tokens(text.shape[1], context_length) :]
    device = next(model.parameters()).device
    logits = model(torch.from_numpy(np.ascontiguousarray(seen)).to(device))
    return on_host(logits[:, -1, :vocab_size])


class _Window:
    """A GPT with a key/value cache for a growing text, which may exceed the context. The cache
    holds the last tokens of the text, as many as `window_tokens` says; when these jump forward, it
    is computed anew."""

    def __init__(self, model: GPT, n_samples: int, vocab_size: int) -> None:
        weight = next(model.parameters())
        self._model = model
        self._device = weight.device
        self._vocab_size = vocab_size
        self._context_length = model.config.context_length
        self._pass_tokens = max(1, _PREFILL_LOGITS // (n_samples * vocab_size))
        self._kernels = partial(chosen_kernels, weight.device, weight.dtype)
        with torch.inference_mode():
            self._cache = KVCache(model.config, n_samples, weight.device, weight.dtype)

    def next_logits(self, text: Tokens) -> Floats:
        """Return logits (B, V) for the token after `text` (B, n). Call it with n one larger each
        time: tokens already in the cache are not computed again."""
        n_seen = window_tokens(text.shape[1], self._context_length)
        n_cached = n_seen - 1
        if self._cache.length != n_cached:  # the first call, or the window starts anew
            self._cache.reset()
            n_cached = 0
        unread = text[:, text.shape[1] - n_seen + n_cached :]
        for start in range(0, unread.shape[1], self._pass_tokens):
            logits = self._pass(unread[:, start : start + self._pass_tokens])
        return logits

    @torch.inference_mode()
    def _pass(self, tokens: Tokens) -> Floats:
        batch = torch.from_numpy(np.ascontiguousarray(tokens)).to(self._device)
        with self._kernels():
            logits = self._model(batch, cache=self._cache)[:, -1, : self._vocab_size]
        return on_host(logits)


def chosen_kernels(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[None]:
    """Return the context manager in which a model on `device` with weights of `dtype` computes
    fastest: without oneDNN for fp32 on the CPU, else unchanged."""
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


class Decodes(Protocol):
    """A tokenizer's decoder, from ids to text."""

    @property
    def byte_ids(self) -> Collection[int]:
        """The ids that are decoded together with those next to them."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text for token ids (n_tokens,)."""


class Detokenizer:
    """Incremental decoding of one sample's ids; all chunks joined equal `decode(all ids)`.

    A tokenizer can end in the middle of a character, which decodes to U+FFFD for now: it is held
    back until the next id settles it. Where each byte is a token (as in Llama's), a row of them is
    decoded whole, or to U+FFFD for each: it is held back until another token ends it. A tokenizer
    may also join its tokens (words with spaces), so each chunk is decoded behind the one before it.

    prompt: ids before the sample, already shown: the chunks are the text added to theirs, so that a
    word is separated from the prompt's last word. ends: token ids that end the sample.
    """

    def __init__(
        self, tokenizer: Decodes, prompt: Iterable[int] = (), ends: Collection[int] = ()
    ) -> None:
        self._decode, self._byte_ids = tokenizer.decode, tokenizer.byte_ids
        self._ends = ends
        self.is_ended = False
        """Whether one of the tokens `ends` came; from it on, nothing is shown."""
        self._n_shown = 0  # characters of the text of `_ids` that were given out
        self._settle([int(token) for token in prompt])

    def push(self, token: int) -> str:
        """Add `token` and return the text that is now complete, perhaps empty; always empty once
        the sample has ended."""
        self.is_ended |= token in self._ends
        if self.is_ended:
            return ""
        self._ids.append(token)
        self._is_settled = False
        if token in self._byte_ids:
            return ""
        text = self._decode(self._ids)
        n_complete = max(self._n_shown, len(text) - text.endswith(_REPLACEMENT))
        piece, self._n_shown = text[self._n_shown : n_complete], n_complete
        if n_complete == len(text):
            self._settle(self._ids)
        return piece

    @property
    def held(self) -> str:
        """The text that is held back, as far as it has whole characters; the next ids may change
        it."""
        if self._is_settled:
            return ""
        ends = range(len(self._ids), len(self._ids) - _MOST_PARTS, -1)
        texts = (self._decode(self._ids[: max(0, end)])[self._n_shown :] for end in ends)
        return next((text for text in texts if not text.endswith(_REPLACEMENT)), "")

    def with_next(self, token: int) -> str:
        """Return the text that `token` would add to what is shown and held, were it the last."""
        if token in self._byte_ids:
            return self._decode([token])
        text = self._decode([*self._ids, token])
        return text[self._n_shown + len(self.held) :]

    def flush(self) -> str:
        """Return the text still held back, at the sample's end, and start anew."""
        piece = self._decode(self._ids)[self._n_shown :]
        self._settle([])
        return piece

    def _settle(self, ids: list[int]) -> None:
        """Keep the fewest last `ids` behind which others are decoded as behind all: they have a
        text, and do not begin in the middle of a character or of a row of bytes."""
        possible = (ids[-n:] for n in range(1, min(_MOST_BEFORE, len(ids)) + 1))
        self._ids = next(filter(self._is_whole, possible), ids)
        self._n_shown = len(self._decode(self._ids))
        self._is_settled = True

    def _is_whole(self, ids: list[int]) -> bool:
        text = "" if ids[0] in self._byte_ids else self._decode(ids)
        return bool(text) and not text.startswith(_REPLACEMENT)
