"""Models as SentencePiece trains them, on text in ten languages and more."""

from __future__ import annotations

import io
import random
from functools import cache

import pytest

sentencepiece = pytest.importorskip("sentencepiece")

LANGUAGES = {
    "English": "The old cat sat on the warm mat and looked at the rain outside. It's 3,141 metres.",
    "German": "Die größte Übung für schöne Straßen ist, dass man früh aufsteht und fleißig läuft.",
    "French": "L'été dernier, nous avons mangé des crêpes à la plage de l'hôtel où naquit Zoé.",
    "Spanish": "¿Dónde está el niño? Mañana iremos al mercado para comprar pan, leche y piñas.",
    "Russian": "Старый кот лежал на тёплом коврике и смотрел на дождь за окном, ни о чём не думая.",
    "Greek": "Η γάτα κάθεται στο παράθυρο και κοιτάζει τη βροχή που πέφτει στους δρόμους.",
    "Arabic": "القط العجوز جلس على السجادة الدافئة ونظر إلى المطر في الخارج دون أن يفكر.",
    "Hindi": "बूढ़ी बिल्ली गर्म चटाई पर बैठी थी और बाहर बारिश को देख रही थी।",
    "Chinese": "老猫坐在温暖的垫子上，望着窗外的雨，什么也不想。今天天气很好，我们去公园吧。",
    "Japanese": "年老いた猫は暖かいマットの上に座って、外の雨を眺めていました。カタカナも漢字も。",
    "Korean": "늙은 고양이는 따뜻한 매트 위에 앉아 창밖의 비를 바라보며 아무 생각도 하지 않았다.",
}
AS_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
FORMS = {
    "Llama 2's: BPE, a token for each byte": {
        **AS_IS, "model_type": "bpe", "vocab_size": 700, "byte_fallback": True,
        "split_digits": True, "character_coverage": 0.99,
    },
    "BPE without a space before": {
        **AS_IS, "model_type": "bpe", "vocab_size": 700, "byte_fallback": True,
        "add_dummy_prefix": False, "character_coverage": 0.98,
    },
    "T5's: unigram, normal forms, unknown tokens": {
        "model_type": "unigram", "vocab_size": 500, "pad_id": 0, "eos_id": 1, "unk_id": 2,
        "bos_id": -1, "character_coverage": 0.98, "hard_vocab_limit": False,
    },
    "Gemma's: unigram, symbols of its own": {
        **AS_IS, "model_type": "unigram", "vocab_size": 900, "byte_fallback": True,
        "add_dummy_prefix": False, "hard_vocab_limit": False, "pad_id": 0, "eos_id": 1,
        "bos_id": 2, "unk_id": 3,
        "user_defined_symbols": ["<start_of_turn>", "<end_of_turn>", "\n\n", "  "],
    },
    "BPE with a space before and symbols": {
        "model_type": "bpe", "vocab_size": 500, "character_coverage": 0.98,
        "user_defined_symbols": ["[INST]", "[/INST]"],
    },
}  # fmt: skip
"""Arguments of its trainer, by what such models are."""


@cache
def trained(form: str) -> bytes:
    """Return the content of a tokenizer.model."""
    drawn = random.Random(1)
    texts = []
    for _ in range(400):
        words = drawn.choice(list(LANGUAGES.values())).split(" ")
        drawn.shuffle(words)
        texts.append(" ".join(words))
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=out, minloglevel=2, num_threads=1, **FORMS[form]
    )
    return out.getvalue()
