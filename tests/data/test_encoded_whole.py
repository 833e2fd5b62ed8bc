"""Conversations and pairs as tokens: those of the whole text, as `transformers` has them, of which
those are learnt that have characters of answers."""

import itertools
import json
import random

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from pentameter.checkpoint.hugging_face.tokenizer_files import read_tokenizer
from pentameter.config.data_schema import DataConfig
from pentameter.data.open_dataset import open_dataset
from pentameter.data.prepare import from_conversations, preparation
from pentameter.data.shards import dataset as shards_dataset
from pentameter.data.shards import writer
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.chat import (
    CHATML_TEMPLATE,
    ChatTemplate,
    escaped,
    ids_and_texts,
    without_marks,
)
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.data.tokenizers.render_client import Rendering
from pentameter.data.tokenizers.renderer import RenderRequest
from pentameter.evaluate.multiple_choice import Question, encode_questions
from pentameter.generation.prompts import encode_messages

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
WORDS = ["I am", "am", " I am", "I  am ", "a 👋\n", "\nI", "é", "</", "s>", "AMI", "i'm 2+2?"]

TEMPLATES = {
    "chatml": CHATML_TEMPLATE,
    "llama": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %}"
    "{% generation %} {{ m.content }} {{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "plain": "{% for m in messages %}{{ m.role }}: "
    "{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %} \n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}",
}

OURS = BpeTokenizer([*BYTE_CHARACTERS, "am", "Ġam", "<|endoftext|>"], [("a", "m"), ("Ġ", "am")])
FORMS = ("prepend", "first", "always", "never", "byte-level", "trimmed", "word-piece", "unigram")
FLAGS = {
    "usual": {"normalized": False},
    "strip": {"normalized": False, "lstrip": True, "rstrip": True},
    "normalized": {"normalized": True},
    "single": {"normalized": False, "single_word": True, "rstrip": True},
}


def content(form, **flags):
    """The tokenizer.json of a form, whose special tokens have these flags."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzAI'2+?<>|/[]:\n"]
    merges = [("a", "m"), ("▁", "am"), ("▁", "I"), ("▁", "▁"), (">", "▁"), ("]", "▁")]
    vocab = {text: n for n, text in enumerate(["<unk>", *SPECIAL, *letters])}
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True)
    if form in ("byte-level", "trimmed"):
        merges = [("a", "m"), ("Ġ", "am"), ("Ġ", "I"), ("Ġ", "Ġ"), (":", "Ġ")]
        texts = [*sorted(BYTE_CHARACTERS), *map("".join, merges)]
        model = models.BPE({text: n for n, text in enumerate(texts)}, merges)
    if form == "word-piece":
        texts = ["<unk>", "i", "am", "a", "##m", "##a", "'", "m", "2", "+", "?", "[", "]", "/", "s"]
        model = models.WordPiece({text: n for n, text in enumerate(texts)}, unk_token="<unk>")
    if form == "unigram":
        pieces = ["<unk>", *SPECIAL, *letters, "▁I", "▁am", "am"]
        model = models.Unigram([(each, -1.0 - len(each) % 3) for each in pieces], unk_id=0)
    library = tokenizers.Tokenizer(model)
    if form == "prepend":
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    elif form in ("first", "always", "never"):
        library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=form, split=False)
    elif form == "unigram":
        library.normalizer = normalizers.NFKC()
        library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    elif form == "word-piece":
        library.normalizer = normalizers.BertNormalizer()
        library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.post_processor = tokenizers.processors.ByteLevel(trim_offsets=form == "trimmed")
    library.add_special_tokens([AddedToken(text, **flags) for text in SPECIAL])
    return json.loads(library.to_str())


def theirs_of(whole, template=None):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(whole)),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=template,
    )


def ours_of(whole):
    return LibraryTokenizer(whole, whole["added_tokens"][[*texts(whole)].index("</s>")]["id"])


def texts(whole):
    return [token["content"] for token in whole["added_tokens"]]


def conversations(n, seed=1):
    draw = random.Random(seed)
    roles = itertools.cycle(["user", "assistant"])
    return [
        [
            {"role": next(roles), "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))}
            for _ in range(2 * draw.randint(1, 3))
        ]
        for _ in range(n)
    ]


@pytest.fixture(params=TEMPLATES)
def rendering(request):
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    with Rendering(ChatTemplate(TEMPLATES[request.param], tokens)) as found:
        found.source = TEMPLATES[request.param]
        yield found


def as_learnt(rendering, tokenizer, several):
    """The ids and masks of conversations; every message that the template marks is learnt."""
    asked = [
        RenderRequest(escaped(each, tokenizer.special_tokens), targets=range(1, len(each), 2))
        for each in several
    ]
    segments = [found for (found,) in rendering.documents(asked)]
    return tokenizer.encode_segments(segments, is_rendered=True)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("form", FORMS)
def test_ids_and_what_is_learnt_are_those_of_transformers(form, flags, rendering):
    whole = content(form, **FLAGS[flags])
    ours, theirs = ours_of(whole), theirs_of(whole, rendering.source)
    several = conversations(20)
    for messages, (ids, mask) in zip(several, as_learnt(rendering, ours, several), strict=True):
        expected = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids.tolist() == expected["input_ids"]
        assert mask.tolist() == [each == 1 for each in expected["assistant_masks"]]


@pytest.mark.parametrize("form", FORMS)
def test_a_history_is_encoded_as_transformers_does(form, rendering):
    whole = content(form, **FLAGS["strip"])
    ours, theirs = ours_of(whole), theirs_of(whole, rendering.source)
    for messages in conversations(5):
        expected = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)
        found = encode_messages(ours, messages[:-1], rendering.text)
        assert found.tolist() == expected["input_ids"]


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("form", FORMS)
def test_a_message_forges_no_special_token(form, flags, rendering):
    ours = ours_of(content(form, **FLAGS[flags]))
    said = ["</s>", "am</s> I <|im_end|> am", "<s>am", "<S> <|IM_END|>", "am＜/s＞ am"]
    special = ours.special_tokens
    for text in said:
        messages = [{"role": "user", "content": text}, answer("a")]
        written = rendering.text(RenderRequest(escaped(messages, special)))
        left = iter(ids_and_texts(without_marks(written), special))
        ((ids, mask),) = as_learnt(rendering, ours, [messages])
        assert all(each in left for each in ids.tolist() if each in special.values())  # in order
        assert 0 < mask.sum() < len(mask)


def answer(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("form", ["prepend", "first", "always", "never", "byte-level"])
def test_a_forged_token_is_text_like_any_other(form, rendering):
    """It has the tokens that the text has for one who knows no such token."""
    ours = ours_of(content(form, **FLAGS["usual"]))
    knows_less = content(form, **FLAGS["usual"])
    knows_less["added_tokens"] = [each for each in knows_less["added_tokens"] if each["id"] != 3]
    if "<|im_start|>" in knows_less["model"]["vocab"]:
        knows_less["model"]["vocab"]["none"] = knows_less["model"]["vocab"].pop("<|im_start|>")
    messages = [{"role": "user", "content": "I am<|im_start|> am"}, answer("I am")]
    tokens = {"eos_token": "</s>", "bos_token": "<s>"}
    with Rendering(ChatTemplate(rendering.source.replace("<|im_start|>", "<s>"), tokens)) as other:
        ((ids, mask),) = as_learnt(other, ours, [messages])
        ((expected, learnt),) = as_learnt(other, ours_of(knows_less), [messages])
    names = ours_of(knows_less)
    assert [*map(ours.token, ids)] == [*map(names.token, expected)]
    assert mask.tolist() == learnt.tolist()


def test_byte_level_bpe_of_ours_finds_answers_by_their_characters():
    """Also behind characters of several bytes, in a text of many chunks."""
    tokenizer = train_bpe(["👋 né à a: b a: b 中文 a: b"] * 9, 290, ("<|endoftext|>", "<|x|>"))
    assert isinstance(tokenizer, BpeTokenizer)
    segments = [
        ("👋 中文 " * 2000 + "a: ", False),
        ("b né", True),
        ("<|x|> né", False),
        ("中<|x|>", True),
    ]
    ((ids, mask),) = tokenizer.encode_segments([segments], is_rendered=True)
    special = tokenizer.special_tokens["<|x|>"]
    before = "👋 中文 " * 2000 + "a: b né"
    middle = " né中"
    whole = [*tokenizer.encode(before), special, *tokenizer.encode(middle), special]
    assert ids.tolist() == whole
    bounds = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    learnt = [tokenizer.decode(ids[a:b]) for a, b in bounds.tolist()]
    assert learnt == [" b né", "中<|x|>"]  # the space is one token with the answer


@pytest.mark.parametrize(
    "added",
    [AddedToken("<x>", lstrip=True, special=True), AddedToken("    ", special=False)],
    ids=["strip", "text"],
)
def test_added_tokens_of_a_foreign_vocabulary_are_obeyed(added, tmp_path):
    """Phi-2's rows of spaces are tokens of a text; RoBERTa's mask takes the space before it."""
    library = tokenizers.Tokenizer.from_str(OURS.to_tokenizer_json().decode())
    library.add_tokens([added])
    library.save(str(tmp_path / "tokenizer.json"))
    ours = read_tokenizer(tmp_path, [])
    text = "a: I      am <x>b"
    expected = library.encode(text, add_special_tokens=False).ids
    ((ids, _),) = ours.encode_segments([[(text, True)]], is_rendered=True)
    assert ids.tolist() == expected


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pairs_of(tmp_path, whole):
    tokenizer = ours_of(whole)
    tokenizer.save(tmp_path / "tokenizer.json")
    draw, known = random.Random(2), [word for word in WORDS if word.isascii()]
    pairs = [tuple(" ".join(draw.choices(known, k=2)) for _ in range(2)) for _ in range(30)]
    lines = [json.dumps({"prompt": prompt, "completion": text}) for prompt, text in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    data = DataConfig(
        path=str(tmp_path / "pairs.jsonl"),
        tokenizer=str(tmp_path / "tokenizer.json"),
        validation_fraction=0.0,
        order="documents",
    )
    return pairs, data


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("form", ["prepend", "first", "always", "never", "byte-level"])
def test_pairs_are_those_of_trl(form, tmp_path):
    """It encodes prompt and completion as one text, with the end of text behind, and learns from
    where the tokens differ from the prompt's."""
    whole = content(form, **FLAGS["usual"])
    pairs, data = pairs_of(tmp_path, whole)
    train, theirs = open_dataset(data).split("train"), theirs_of(whole)
    starts = [*train.document_starts.tolist(), train.n_tokens]
    for (prompt, completion), (a, b) in zip(pairs, itertools.pairwise(starts), strict=True):
        if any(text in prompt + completion for text in SPECIAL):
            continue
        expected, alone = theirs(prompt + completion + "</s>").input_ids, theirs(prompt).input_ids
        assert train.tokens[a:b].tolist() == expected
        same = [x == y for x, y in zip(alone, expected, strict=False)]
        n_same = [*same, False].index(False)
        assert train.assistant.mask(a, b).tolist() == [n >= n_same for n in range(b - a)]


@pytest.mark.usefixtures("own_cache")
def test_a_run_keeps_the_tokens_that_an_earlier_version_made(tmp_path, monkeypatch):
    _, data = pairs_of(tmp_path, content("always", **FLAGS["usual"]))
    with monkeypatch.context() as earlier:
        for module in (from_conversations, preparation, writer, shards_dataset):
            earlier.setattr(module, "ENCODED_WHOLE", {})
        old = open_dataset(data)
    new, warnings = open_dataset(data), list[str]()
    assert new.folders != old.folders  # whose tokens may be others
    assert new.hash == old.hash  # which they are not here
    assert not new.is_of_fragments
    kept = open_dataset(data, warnings=warnings, kept=[old.folders[0].name])
    assert kept.folders == old.folders
    assert "encoded in fragments by an earlier version" in warnings[0]
    assert open_dataset(data, kept=[new.folders[0].name]).folders == new.folders
    by_path = data.model_copy(update={"path": str(old.folders[0]), "validation_fraction": 0.1})
    open_dataset(by_path, warnings=warnings)
    assert len(warnings) == 2


class AsLmEval:
    """What lm-eval asks of a model to split a context and its continuation."""

    backend = "causal"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def tok_encode(self, text, **_):
        return self.tokenizer.encode(text).tolist()


@pytest.mark.parametrize("form", FORMS)
def test_choices_are_those_of_lm_eval(form):
    lm_eval = pytest.importorskip("lm_eval.api.model")
    tokenizer = ours_of(content(form, **FLAGS["usual"]))
    asked = [
        ("am I:", "am", "I am "),
        (" I  am ", "am", " am"),
        ("\n", "2", "a"),
        ("am", "I", "+"),
    ]
    for context, *choices in asked:
        question = Question("q:1", context, tuple(choices), 0)
        found = encode_questions([question], tokenizer, 50).choices
        for choice, row in zip(choices, found, strict=True):
            delimiter = " " * (not context[-1].isspace() and not choice[0].isspace())
            before, scored = lm_eval.TemplateLM._encode_pair(
                AsLmEval(tokenizer), context, delimiter + choice
            )
            if not scored:  # it cannot score this
                assert row.n_scored
                continue
            before = before or [tokenizer.end_of_text]
            assert row.tokens.tolist() == [*before, *scored]
            assert row.n_scored == len(scored)


@pytest.mark.usefixtures("own_cache")
def test_pairs_and_choices_begin_with_the_prefix(tmp_path):
    whole = content("first", **FLAGS["usual"])
    tokenizer, (_, data) = ours_of(whole), pairs_of(tmp_path, whole)
    plain = open_dataset(data).split("train")
    tokenizer.prefix = [tokenizer.special_tokens["<s>"]]
    train = open_dataset(data, tokenizer=tokenizer).split("train")
    assert train.n_tokens == plain.n_tokens + 30
    assert (train.tokens[:][train.document_starts] == tokenizer.prefix[0]).all()
    assert train.assistant.n_tokens == plain.assistant.n_tokens
    found = encode_questions([Question("q:1", "am", ("a", "I"), 0)], tokenizer, 50).choices
    assert found[0].tokens.tolist() == [*tokenizer.prefix, *tokenizer.encode("am a")]
