"""Prompts, as token ids, for a model to continue."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from pentameter.data.shards.dataset import TokenSplit
from pentameter.data.tokenizers.base import NO_ENDS, Ends, Tokenizer
from pentameter.data.tokenizers.chat import ChatTemplate, escaped, without_marks
from pentameter.data.tokenizers.render_client import Rendering, ends_of_answers
from pentameter.data.tokenizers.renderer import RenderRequest
from pentameter.errors import ConfigError
from pentameter.generation.sampling import Tokens


@dataclass(frozen=True)
class Prompt:
    """A text for the model to continue."""

    text: str
    """Text printed before the continuation; empty to print none."""
    ids: Tokens
    """Token ids (n,), at least one."""
    ends: Ends = NO_ENDS
    """The tokens and texts that end the sample, such as the end of an answer."""


def text_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """Return a text as a Prompt, whose tokens are those of `encode_prompt`."""
    return Prompt(text, encode_prompt(tokenizer, text))


def question_prompt(
    tokenizer: Tokenizer, split: TokenSplit, message: str, date: str
) -> Prompt | None:
    """Return a Prompt that asks for an answer. A `message` is put into the chat template, which is
    told the day `date`; if it is empty, the prompt is the first conversation in `split` up to its
    first answer.

    Return None for a message if the tokenizer has no chat template, and for an empty message if the
    split has no conversation. The answer ends as `ends_of_answers` says. Raises ConfigError if the
    template refuses the message.
    """
    if message:
        if tokenizer.chat is None:  # prompts and completions that are texts
            return None
        prompt = chat_prompt(tokenizer, message, date)
    elif len(ids := split.first_prompt):
        prompt = Prompt("", ids, ends_of_answers(tokenizer))
    else:
        return None
    return replace(prompt, text=tokenizer.decode(prompt.ids))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> Tokens:
    """Return the prompt's token ids (n,), n ≥ 1.

    It begins as a document does, with the tokenizer's prefix. A prompt without any token (empty, or
    without words) becomes the tokenizer's opening. Without one, it becomes the prefix, else the end
    of text, which precedes texts in training. If the tokenizer has none, it becomes a newline, or
    token 0 if that cannot be encoded. Raises ConfigError for a prompt that the tokenizer cannot
    encode.
    """
    ids = tokenizer.encode_document(prompt)
    if len(ids) == len(tokenizer.prefix):
        ids = np.array([*tokenizer.prefix, *tokenizer.opening], dtype=np.int64)
    if len(ids):
        return ids
    if tokenizer.end_of_text is not None:
        return np.array([tokenizer.end_of_text], dtype=np.int64)
    try:
        newline = tokenizer.encode("\n")
    except ConfigError:
        newline = ids
    return newline if len(newline) else np.zeros(1, dtype=np.int64)


def chat_prompt(
    tokenizer: Tokenizer, message: str, date: str | None = None, *, system: str = ""
) -> Prompt:
    """Return a user's message in the tokenizer's chat template as a Prompt that prints nothing: its
    ids lead up to where the answer starts, after the message `system` if there is one. `date`
    (YYYY-MM-DD) is the day that the template is told; None for today. The answer ends as
    `ends_of_answers` says.

    Raises ConfigError if the tokenizer has no template, or the template refuses the messages.
    """
    roles = {"system": system, "user": message}
    messages = [{"role": r, "content": said} for r, said in roles.items() if said or r == "user"]
    with Rendering(template_of(tokenizer)) as rendering:
        ids = encode_messages(
            tokenizer, messages, lambda on: rendering.text(replace(on, date=date))
        )
        return Prompt("", ids, ends_of_answers(tokenizer, rendering.text))


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
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> Tokens:
    """Return the ids (n,) for a conversation, up to the next answer's start. Each message is a
    mapping with "role" and "content"; `render` turns them into text by the tokenizer's chat
    template, with the `tools` that the model may call and further `variables` of the template.
    Special tokens in what a message, tool or variable says are not encoded as such.

    Raises TemplateRefusalError if the template refuses the messages.
    """
    messages, tools, known = (
        escaped(each, tokenizer.special_tokens) for each in (messages, tools, dict(variables))
    )
    asked = RenderRequest(messages, tools, add_generation_prompt=True, variables=known)
    text = without_marks(render(asked))
    ((ids, _),) = tokenizer.encode_segments([[(text, False)]], is_rendered=True)
    return ids if len(ids) else encode_prompt(tokenizer, "")
