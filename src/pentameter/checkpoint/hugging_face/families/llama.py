"""Llama, the decoder from which all other families are described by their differences."""

from __future__ import annotations

from pentameter.checkpoint.hugging_face.families.entries import OF_LLAMA
from pentameter.checkpoint.hugging_face.family import Family
from pentameter.checkpoint.hugging_face.rotary_rules import WHOLE_HEADS_TURN
from pentameter.checkpoint.hugging_face.rules import HEADS_DIVIDE_WIDTH, ONE_SWITCH_FOR_BIASES

LLAMA = Family(
    label="Llama",
    architecture="LlamaForCausalLM",
    written=OF_LLAMA,
    rules=(WHOLE_HEADS_TURN, ONE_SWITCH_FOR_BIASES, HEADS_DIVIDE_WIDTH),
)
