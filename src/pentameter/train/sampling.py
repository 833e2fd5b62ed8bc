"""A text sample in the middle of a run, whatever the layout."""

from __future__ import annotations

from pentameter.data.tokenizer import Tokenizer
from pentameter.errors import ConfigError
from pentameter.generate.loop import generate, generate_by
from pentameter.parallel.stage import Stage


def sample_text(
    stage: Stage, tokenizer: Tokenizer, prompt: str, *, max_new_tokens: int, seed: int
) -> str | None:
    """The prompt and what the model makes of it, in the main process; None in the others.

    Where each process has the whole model the main one samples alone, with a cache; else all
    compute each token together.
    """
    if stage.is_whole:
        if not stage.world.is_main:
            return None
        return (
            prompt
            + generate(stage.model, tokenizer, prompt, max_new_tokens=max_new_tokens, seed=seed)[0]
        )
    text = generate_by(
        stage.next_logits,
        tokenizer,
        prompt,
        context_length=stage.plan.config.model.context_length,
        max_new_tokens=max_new_tokens,
        seed=seed,
    )
    return prompt + text if stage.world.is_main else None


def encodable_prompt(tokenizer: Tokenizer, prompt: str, warnings: list[str]) -> str:
    """The prompt, or nothing, with a line in `warnings`, where the tokenizer lacks one of its
    characters: a preset's prompt need not suit the user's text."""
    try:
        tokenizer.encode(prompt)
    except ConfigError as error:
        warnings.append(f"train.sample_prompt is left out: {error}")
        return ""
    return prompt
