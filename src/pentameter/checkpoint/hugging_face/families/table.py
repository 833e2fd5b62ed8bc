"""The Hugging Face architectures ("families") that can be read and written, each a `Family` in a
file of its own: its differences from a decoder like Llama.

Keys in config.json and their defaults are those in `transformers`' configuration classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pentameter.checkpoint.hugging_face.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from pentameter.checkpoint.hugging_face.families.gpt2 import GPT2
from pentameter.checkpoint.hugging_face.families.gpt_neox import GPT_NEOX
from pentameter.checkpoint.hugging_face.families.gpt_oss import GPT_OSS
from pentameter.checkpoint.hugging_face.families.llama import LLAMA
from pentameter.checkpoint.hugging_face.families.mistral import MISTRAL
from pentameter.checkpoint.hugging_face.families.mixtral import MIXTRAL
from pentameter.checkpoint.hugging_face.families.olmo import OLMO2, OLMOE
from pentameter.checkpoint.hugging_face.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from pentameter.checkpoint.hugging_face.family import Family

FAMILIES: Mapping[str, Family] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt_neox": GPT_NEOX,
    "olmo2": OLMO2,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen2_moe": QWEN2_MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
}
"""`model_type` in config.json → its family. If several families can express a model, the first one
is written."""

NOT_OURS: Mapping[str, tuple[Any, str]] = {
    "pruned_heads": ({}, "every layer here has all of its heads"),
}
"""Entries that every family has in addition to its own `not_ours`."""
