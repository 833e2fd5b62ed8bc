"""A text sample in the middle of a run, whatever the layout."""

from __future__ import annotations

from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError
from pentameter.generation.loop import generate, generate_by
from pentameter.parallel.engine import Engine


def sample_text(
    engine: Engine, tokenizer: Tokenizer, prompt: str, *, max_new_tokens: int, seed: int
) -> str | None:
    """The prompt and what the model makes of it, in the main process; None in the others.

    Where each process has the whole model the main one samples alone, with a cache; else all
    compute each token together.
    """
    if engine.is_whole:
        if not engine.world.is_main:
            return None
        return (
            prompt
            + generate(engine.model, tokenizer, prompt, max_new_tokens=max_new_tokens, seed=seed)[0]
        )
    text = generate_by(
        engine.next_logits,
        tokenizer,
        prompt,
        context_length=engine.plan.config.model.context_length,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    return prompt + text if engine.world.is_main else None


def encodable_prompt(tokenizer: Tokenizer, prompt: str, warnings: list[str]) -> str:
    """The prompt, or nothing, with a line in `warnings`, where the tokenizer lacks one of its
    characters: a preset's prompt need not suit the user's text."""
    try:
        tokenizer.encode(prompt)
    except ConfigError as error:
        warnings.append(f"train.sample_prompt is left out: {error}")
        return ""
    return prompt
