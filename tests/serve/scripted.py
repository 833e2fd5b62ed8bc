"""A model whose weights make it say given texts, and a tokenizer of bytes with special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pentameter.config.schema import ModelConfig
from pentameter.data.messages import normalized
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.generation.prompts import encode_messages
from pentameter.model.gpt import GPT, build_model
from pentameter.serve.passes import Slots
from pentameter.serve.worker import ServedModel

CONTEXT = 640
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if reasoning_effort %}Effort {{ reasoning_effort }}: {% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
"""A chat template that shows tools, writes calls as Hermes does, and may think."""


def byte_tokenizer(template: str, *, has_special: bool = True) -> BpeTokenizer:
    """A token for each byte and, with `has_special`, for each special token `<|NAME|>` in the
    template."""
    chat = ChatTemplate(template)
    tokenizer = BpeTokenizer([*BYTE_CHARACTERS, *(chat.special_texts if has_special else [])], [])
    tokenizer.chat = chat
    return tokenizer


def model_that_says(script: Mapping[int, Sequence[int]], tokenizer: Tokenizer) -> GPT:
    """A model that says the tokens `script[n]` after a prompt of n tokens: each position has a
    channel of its own, by which the head knows the token that comes next."""
    model = build_model(
        ModelConfig(
            vocab_size=tokenizer.vocab_size,
            vocab_multiple=1,
            context_length=CONTEXT,
            n_layers=1,
            n_heads=4,
            d_model=CONTEXT,
            tied_head=False,
            norm="rmsnorm",
        ),
        seed=0,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        weights = dict(model.named_parameters())
        weights["position_embedding.weight"].copy_(torch.eye(CONTEXT))
        for n_tokens, tokens in script.items():
            for number, token in enumerate(tokens):
                weights["head.weight"][token, n_tokens - 1 + number] = 10.0
    return model


class Speaker:
    """A served model that says given answers to given conversations. Its tokenizer has the special
    tokens in the template if `has_special`."""

    def __init__(self, name: str, template: str, *, has_special: bool = True) -> None:
        self.name = name
        self.tokenizer = byte_tokenizer(template, has_special=has_special)
        self.script: dict[int, Sequence[int]] = {}
        self.served = self._served()

    def answers(
        self, text: str, messages: object, tools: object = None, **variables: object
    ) -> None:
        """Have it answer `messages`, with `tools` and variables of the template, with a text, whose
        special tokens are recognized."""
        prompt = encode_messages(
            self.tokenizer,
            normalized(messages),
            self.served.render,
            tools,
            variables,  # type: ignore[arg-type]
        )
        ((ids, _),) = self.tokenizer.encode_segments([[(text, False)]], is_rendered=True)
        assert all(
            n + len(said) < len(prompt) or len(prompt) + len(ids) <= n
            for n, said in self.script.items()
        )
        self.script[len(prompt)] = ids.tolist()
        self.served.close()
        self.served = self._served()

    def _served(self) -> ServedModel:
        slots = Slots(model_that_says(self.script, self.tokenizer), self.tokenizer.vocab_size, 4)
        return ServedModel(self.name, self.tokenizer, slots)
