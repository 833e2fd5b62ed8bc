"""The interface through which `lm-eval` calls a GPT: log-probabilities for texts, and
continuations.

Shapes: B batch rows, T tokens, D channels, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from pentameter import keyed
from pentameter.config.messages import shown
from pentameter.data.tokenizers.base import Ends, Ids, Tokenizer
from pentameter.errors import ConfigError
from pentameter.generation.detokenizer import Detokenizer
from pentameter.generation.loop import Generation, sampled_tokens
from pentameter.generation.prompts import encode_prompt
from pentameter.model.gpt import GPT
from pentameter.model.loss import loss_sum
from pentameter.parallel.engine import Engine

MAX_NEW_TOKENS = 256
"""Maximum number of tokens in a continuation if the task gives none, as with the harness's other
models."""

OBEYED = frozenset(
    ("until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks", "max_new_tokens")
) | {"max_tokens", "max_completion_tokens"}
"""Settings for continuations that have an effect here; a warning names all others that a task
has."""


class ScoredRow(NamedTuple):
    """A row of token ids for one pass of the model, of which the last `n_scored` are scored: how
    likely each is after all before it. A named tuple."""

    tokens: Ids
    """(n,) token ids; the last is only predicted."""
    n_scored: int


class HarnessModel(TemplateLM):
    """A GPT, in one process, as an `lm_eval` model.

    The base class `TemplateLM` splits context and continuation as for all models: both are encoded
    as one text, and the continuation has the tokens after the context's. A text begins with the
    tokenizer's prefix; if it has none, the end-of-text token stands for an empty context.
    `batch_size`: rows per pass.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, batch_size: int) -> None:
        super().__init__()
        assert isinstance(engine.model, GPT)
        self._engine = engine
        self._model = engine.model.eval()
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._context_length = engine.plan.config.model.context_length

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token's id, which stands for an empty context. Raises ConfigError if the
        tokenizer has none."""
        if self._tokenizer.end_of_text is None:
            raise ConfigError(
                f"the task scores a text without context, and the {self._tokenizer.kind} tokenizer "
                "has no end-of-text token to stand for it: the first token cannot be predicted "
                "from nothing"
            )
        return self._tokenizer.end_of_text

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context: the last one of the tokenizer's
        prefix, or end-of-text if it has none."""
        return self._tokenizer.prefix[-1] if self._tokenizer.prefix else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's hash, which the harness uses as a key for its caches."""
        return self._tokenizer.hash

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Return a text's token ids, behind the tokenizer's prefix unless `add_special_tokens` is
        False; other arguments are ignored. Raises ConfigError, with the text, if the tokenizer
        cannot encode it."""
        tokenizer = self._tokenizer
        encode = tokenizer.encode if add_special_tokens is False else tokenizer.encode_document
        try:
            ids: list[int] = encode(string).tolist()
        except ConfigError as error:
            raise ConfigError(f"the task's text {shown(string)}: {error}") from error
        return ids

    # -- log-probabilities ----------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Return, for each continuation given its context, (log-probability in nats, whether every
        token is the likeliest).

        requests: (texts, context ids, continuation ids); the texts are for messages. A context that
        is too long loses its beginning. One without tokens (white space counts as part of the
        continuation) becomes end-of-text. Raises ConfigError for an empty continuation, one longer
        than context_length tokens, or an empty context if the tokenizer has no end-of-text.
        """
        longest = self._context_length
        rows = []
        for texts, context, continuation in requests:
            if not 1 <= len(continuation) <= longest:
                raise ConfigError(
                    f"a continuation of {len(continuation)} tokens cannot be scored; the model can "
                    f"score 1 … {longest} (its context_length): {shown(texts and texts[1])}"
                )
            before = context or [self.prefix_token_id]
            ids = np.array([*before, *continuation][-(longest + 1) :], dtype=np.int64)
            rows.append(ScoredRow(ids, len(continuation)))
        return self._scores(rows)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return each text's log-probability in nats, after end-of-text. Windows of context_length
        tokens are adjacent; the last reaches back so that it is full.

        Raises ConfigError for a text that the tokenizer cannot encode, or if it has no end-of-text
        token.
        """
        windows: list[ScoredRow] = []
        first_windows = []
        for request in requests:
            (text,) = request.args
            first_windows.append(len(windows))
            for pair in get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False),
                self.prefix_token_id,
                self._context_length,
                context_len=1,
            ):
                context, scored = make_disjoint_window(pair)
                windows.append(ScoredRow(np.array([*context, *scored]), len(scored)))
        scores = np.array([score for score, _ in self._scores(windows)])
        texts = np.split(scores, first_windows[1:]) if first_windows else []
        return [float(each.sum()) for each in texts]

    def _scores(self, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether every token is the likeliest) for each row, in
        order. Rows with similar lengths run together, the longest first: if memory does not
        suffice, the first pass shows it."""
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens))
        for first in range(0, len(order), self._batch_size):
            together = order[first : first + self._batch_size]
            scores = self._scores_together([rows[index] for index in together])
            found |= zip(together, scores, strict=True)
        return [found[index] for index in range(len(rows))]

    @torch.inference_mode()
    def _scores_together(self, rows: Sequence[ScoredRow]) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether every token is the likeliest) for each row, from
        one pass.

        Shorter rows are padded at their end, which a causal model cannot see. Logits take most of
        the memory if the vocabulary is large, so they are computed for the scored tokens of one row
        at a time.
        """
        model, device = self._model, self._engine.device
        vocab_size = self._tokenizer.vocab_size
        inputs = np.zeros((len(rows), max(len(row.tokens) for row in rows) - 1), np.int64)
        for row, (tokens, _) in enumerate(rows):
            inputs[row, : len(tokens) - 1] = tokens[:-1]
        losses, are_likeliest = [], []
        with self._engine.arithmetic.autocast(device):
            hidden = model.hidden_states(torch.from_numpy(inputs).to(device))  # (B, T, D)
            for row, (tokens, n_scored) in enumerate(rows):
                end = len(tokens) - 1
                logits = model.logits(hidden[row : row + 1, end - n_scored : end])[..., :vocab_size]
                targets = torch.from_numpy(tokens[None, -n_scored:]).to(device)
                losses.append(loss_sum(logits, targets, vocab_size))
                are_likeliest.append((logits.argmax(-1) == targets).all())
        sums, flags = torch.stack(losses).tolist(), torch.stack(are_likeliest).tolist()
        return [(-loss, flag) for loss, flag in zip(sums, flags, strict=True)]

    # -- continuations --------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the first stop text, end of text, or the
        task's maximum number of tokens. The stop text is not part of it.

        Contexts with equally many tokens and the same settings run together. A drawn text depends
        on its context, its settings, and how often both were requested before, so that a task's
        `repeats` differ; texts in the same batch have no influence. Once a text exceeds
        context_length, the model sees only its last tokens (see `window_tokens`). Settings that are
        not in OBEYED, such as `num_beams`, have no effect, and a warning says so.
        """
        if others := {name for each in requests for name in each.args[1]} - OBEYED:
            logging.getLogger(__name__).warning(
                "generation settings of the tasks that are not obeyed: %s",
                ", ".join(sorted(others)),
            )
        groups: dict[tuple[int, _Settings], list[int]] = defaultdict(list)
        n_asked: Counter[tuple[str, _Settings]] = Counter()
        prompts, samples = [], []
        for index, request in enumerate(requests):
            context, options = request.args
            settings = _Settings.of(options)
            prompts.append(encode_prompt(self._tokenizer, context))
            groups[len(prompts[-1]), settings].append(index)
            samples.append(_sample(context, n_asked[context, settings]))
            n_asked[context, settings] += 1
        found: dict[int, str] = {}
        for (_, settings), members in groups.items():
            for first in range(0, len(members), self._batch_size):
                together = members[first : first + self._batch_size]
                texts = self._continued(
                    np.stack([prompts[each] for each in together]),
                    [samples[each] for each in together],
                    settings,
                )
                found |= zip(together, texts, strict=True)
        return [found[index] for index in range(len(requests))]

    def _continued(self, prompts: Ids, samples: Sequence[int], settings: _Settings) -> list[str]:
        """Return one continuation for each of the prompts (B, n), as text without the stop text;
        `samples` (B numbers) key the draws."""
        ends = Ends(self._tokenizer.end_ids, settings.stops)
        pieces = [Detokenizer(self._tokenizer, prompt.tolist(), ends) for prompt in prompts]
        texts = [""] * len(prompts)
        asked = replace(settings.generation, num_samples=len(prompts))
        vocab_size = self._tokenizer.vocab_size
        for tokens in sampled_tokens(self._model, prompts, vocab_size, asked, samples):
            for row, token in enumerate(tokens.tolist()):
                texts[row] += pieces[row].push(token)
            if all(each.is_ended for each in pieces):
                break
        return [text + each.flush() for text, each in zip(texts, pieces, strict=True)]


def _sample(context: str, n_before: int) -> int:
    """Return the number from which, with the seed, the random draws of a continuation of `context`
    follow. `n_before` is how many continuations of the same context were drawn before, so that each
    differs."""
    low, high = keyed.make_key("continuation", context, n_before)
    return (high << 32) | (low & keyed.WORD)


@dataclass(frozen=True)
class _Settings:
    """A task's settings for continuations: how tokens are drawn, and the stop texts, before the
    first of which a text ends."""

    stops: tuple[str, ...]
    generation: Generation

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> _Settings:
        """Read the settings from a request's `gen_kwargs`. The temperature is 0 (greedy) unless
        `do_sample` is true."""
        kwargs = normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS)
        temperature = float(kwargs.get("temperature", 1.0)) if kwargs["do_sample"] else 0.0
        generation = Generation(
            temperature,
            kwargs.get("top_k") or None,
            kwargs.get("top_p"),
            max_new_tokens=int(kwargs["max_gen_toks"]),
        )
        return cls(tuple(stop for stop in kwargs["until"] if stop), generation)
