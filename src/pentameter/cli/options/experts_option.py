"""`sample --experts`: which experts the tokens of a text are sent to, as a table."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from pentameter.errors import ConfigError, printable

if TYPE_CHECKING:
    from pentameter.checkpoint.folders.load_model import LoadedModel
    from pentameter.evaluate.expert_choices import LayerChoices

MOST_TOKENS_NAMED = 12
"""Most different tokens that are listed for an expert."""


def print_expert_choices(loaded: LoadedModel, text: str, *, as_json: bool) -> None:
    """Print, for each layer with experts, how many tokens of the text each expert was chosen for
    and which, most frequent first; with `as_json` every token's experts and their weights.

    Raises ConfigError for a model without experts, and for a text that is empty or cannot be
    encoded.
    """
    from pentameter.evaluate.expert_choices import expert_choices

    if not text:
        raise ConfigError("--experts needs a text: --prompt TEXT, or --prompt-file FILE")
    tokens = loaded.tokenizer.encode_document(text)
    layers = expert_choices(loaded.model, tokens)
    shown = [loaded.tokenizer.decode([token]) for token in tokens]
    if as_json:
        print(json.dumps(_record(text, tokens.tolist(), shown, layers)), flush=True)
    else:
        _print_tables(shown, layers)


def _record(
    text: str, ids: list[int], shown: list[str], layers: list[LayerChoices]
) -> dict[str, Any]:
    return {
        "prompt": text,
        "tokens": [{"id": id_, "text": word} for id_, word in zip(ids, shown, strict=True)],
        "layers": [
            {
                "layer": each.layer,
                "experts": each.experts.tolist(),
                "weights": each.weights.tolist(),
            }
            for each in layers
        ],
    }


def _print_tables(shown: list[str], layers: list[LayerChoices]) -> None:
    """Print a table for each layer; `shown` are the tokens' texts (N,)."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for each in layers:
        n_chosen = each.experts.shape[1]
        table = Table(box=None, pad_edge=False, title_justify="left")
        table.title = f"layer {each.layer}: {len(shown):,} tokens, {n_chosen} experts for each"
        for heading in ("expert", "tokens", "share"):
            table.add_column(heading, justify="right")
        table.add_column("which, the most frequent first", no_wrap=True, overflow="ellipsis")
        for expert in range(each.n_experts):
            takes = (each.experts == expert).any(1)
            words = Counter(word for word, taken in zip(shown, takes, strict=True) if taken)
            share = f"{takes.sum() / each.experts.size:.1%}"
            table.add_row(str(expert), f"{takes.sum():,}", share, Text(_listed(words)))
        console.print(table)
        if n_left := int((each.experts == each.n_experts).sum()):
            console.print(f"no room (model.expert_capacity) for {n_left:,}")
        console.print()


def _listed(words: Counter[str]) -> str:
    """Return the most frequent texts, quoted, each with how often it occurs if more than once."""
    named = [
        f"{printable(repr(word))}{f' ×{count}' if count > 1 else ''}"
        for word, count in words.most_common(MOST_TOKENS_NAMED)
    ]
    return "  ".join([*named, "…"] if len(words) > MOST_TOKENS_NAMED else named)
