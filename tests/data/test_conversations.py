"""JSONL of conversations: their tokens, the answers among them, and the batches made of both."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from cache_of_a_folder import cache_of_a_test  # noqa: F401

from pentameter.config.data_schema import DataConfig
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.open_dataset import open_dataset
from pentameter.data.shards.dataset import AssistantRanges, concatenated, first_tokens
from pentameter.data.shards.format import find_header, header_hash
from pentameter.data.shards.opening import open_shards
from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import ConfigError, CorruptError
from pentameter.evaluate.split import evaluation_batches
from pentameter.planning.architecture import IGNORED_TARGET

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BPE = BpeTokenizer([*BYTE_CHARACTERS, *SPECIAL], [])


@pytest.fixture
def tokenizer_file(tmp_path):
    BPE.save(tmp_path / "tokenizer.json")
    return str(tmp_path / "tokenizer.json")


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def chat(*contents):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def opened(path, **settings):
    return open_dataset(DataConfig(path=path, order="documents", **settings))


def learnt(split):
    """The text of each answer."""
    return [decoded(split.tokens[a:b]) for a, b in split.assistant.bounds.tolist()]


def decoded(ids):
    return BPE.decode(ids)


def test_messages_become_tokens_and_answers(tmp_path, tokenizer_file):
    records = [chat("hi", "hello"), chat("a<|im_end|>", "b", "c", "d")]
    path = jsonl(tmp_path / "chat.jsonl", records)
    dataset = opened(
        path, tokenizer=tokenizer_file, chat_template="chatml", validation_fraction=0.0
    )
    train = dataset.split("train")
    assert len(train.document_starts) == 2
    assert learnt(train) == ["hello<|im_end|>\n", "b<|im_end|>\n", "d<|im_end|>\n"]
    text = "<|im_start|>user\na<|im_end|><|im_end|>\n"
    ids = train.tokens[int(train.document_starts[1]) :]
    assert decoded(ids).startswith(text)
    assert [n for n in ids.tolist() if n >= 256][:2] == [257, 258]  # of two `<|im_end|>` the second
    assert train.assistant.n_tokens == sum(len(BPE.encode(t)) - 9 for t in learnt(train))
    assert train.assistant.n_bytes == sum(map(len, learnt(train)))
    assert dataset.tokenizer.chat is not None
    saved = tmp_path / "saved.json"
    dataset.tokenizer.save(saved)
    again = load_tokenizer(saved)
    assert again.chat == dataset.tokenizer.chat
    assert again.hash == BPE.hash
    # With its own template, a tokenizer needs no setting; the cache has the same shards.
    assert (
        open_dataset(DataConfig(path=path, validation_fraction=0.0), tokenizer=again).hash
        == dataset.hash
    )


def test_a_tokenizer_made_of_conversations_has_the_templates_tokens(tmp_path):
    """So an answer ends where one was learnt to; what somebody wrote ends nothing."""
    records = [chat("hi " * n, "hello <|im_end|> " * n) for n in range(1, 20)]
    path = jsonl(tmp_path / "chat.jsonl", records)
    dataset = opened(
        path, tokenizer="bpe:270", chat_template="chatml", validation_fraction=0.0, packing=True
    )
    tokenizer = dataset.tokenizer
    assert list(tokenizer.special_tokens) == list(SPECIAL)
    assert tokenizer.vocab_size == 270
    train = dataset.split("train")
    start, end = (tokenizer.special_tokens[text] for text in SPECIAL[1:])
    counts = np.bincount(np.asarray(train.tokens), minlength=270)
    assert (counts[start], counts[end]) == (38, 38)
    for first, last in train.assistant.bounds.tolist():
        answer = train.tokens[first:last].tolist()
        assert answer.index(end) == len(answer) - 2  # before the template's newline
    # With the tokenizer that a training has made, these shards are opened again.
    settings = DataConfig(path=path, tokenizer="bpe:270", validation_fraction=0.0)
    assert open_dataset(settings, tokenizer=tokenizer).folders == dataset.folders


def test_a_tokenizer_made_of_the_text_beside_conversations_has_them_too(tmp_path):
    (tmp_path / "text.txt").write_text("it was a dark and stormy night; the rain fell. " * 20)
    path = jsonl(tmp_path / "chat.jsonl", [chat("hi", "hello")] * 9)
    sources = [
        {"path": str(tmp_path / "text.txt"), "weight": 1.0},
        {"path": path, "weight": 1.0},
    ]
    settings = {"sources": sources, "order": "documents", "tokenizer": "bpe:280"}
    data = DataConfig(corpus=None, chat_template="chatml", **settings)
    tokenizer = open_dataset(data).tokenizer
    assert list(tokenizer.special_tokens) == list(SPECIAL)
    assert tokenizer.chat is not None


def test_a_vocabulary_without_room_for_the_templates_tokens_is_refused(tmp_path):
    path = jsonl(tmp_path / "chat.jsonl", [chat("hi", "hello")])
    with pytest.raises(ConfigError, match=r"must be at least 259: 256 bytes and .*<\|im_start\|>"):
        opened(path, tokenizer="bpe:258", chat_template="chatml")


def test_prompts_and_completions_stay_as_they_are(tmp_path, tokenizer_file):
    records = [{"prompt": "2+2=", "completion": "4<|im_end|>"}, {"prompt": "", "completion": "x"}]
    path = jsonl(tmp_path / "pairs.jsonl", records)
    train = opened(path, tokenizer=tokenizer_file, validation_fraction=0.0).split("train")
    assert learnt(train) == ["4<|im_end|><|endoftext|>", "x<|endoftext|>"]
    assert train.n_tokens == len("2+2=4<|im_end|>") + 1 + 2
    characters = opened(path, validation_fraction=0.0)  # a tokenizer of characters has no end
    assert characters.tokenizer.characters == tuple(sorted(set("2+=4<|im_end>x")))
    assert characters.split("train").assistant.bounds.tolist() == [[4, 15], [15, 16]]


def test_lists_of_messages_learn_the_completion_alone(tmp_path, tokenizer_file):
    messages = chat("a", "b", "c", "d")["messages"]
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": messages[:3], "completion": messages[3:]}])
    train = opened(
        path, tokenizer=tokenizer_file, chat_template="chatml", validation_fraction=0.0
    ).split("train")
    assert learnt(train) == ["d<|im_end|>\n"]


def test_answers_that_are_only_read_are_not_learned(tmp_path, tokenizer_file):
    marks = ({}, {"weight": 0}, {"train": False}, {"weight": 1, "train": True})
    messages = [
        each
        for n, mark in enumerate(marks)
        for each in (
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": f"answer {n}", **mark},
        )
    ]
    path = jsonl(tmp_path / "chat.jsonl", [{"messages": messages}] * 4)
    settings = {"tokenizer": tokenizer_file, "chat_template": "chatml"}
    train = opened(path, validation_fraction=0.25, **settings).split("train")
    assert {text[: len("answer 0")] for text in learnt(train)} == {"answer 0", "answer 3"}
    assert "answer 1" in decoded(train.tokens[: train.n_tokens])


def test_whole_conversations_are_held_out(tmp_path):
    records = [{"prompt": f"{n}", "completion": "ab"} for n in range(10)]
    path = jsonl(tmp_path / "x.jsonl", records)
    split = opened(path, validation_fraction=0.2, test_fraction=0.1).splits
    assert [len(each.document_starts) for each in split.values()] == [7, 2, 1]
    assert [len(each.assistant.bounds) for each in split.values()] == [7, 2, 1]
    assert split["val"].assistant.bounds.tolist() == [[1, 3], [4, 6]]
    by_text = opened(path, validation_fraction=0.5, split_by="document").splits
    assert sum(len(each.document_starts) for each in by_text.values()) == 10
    other = jsonl(tmp_path / "val.jsonl", records[:1])
    assert len(opened(path, validation_path=other).split("val").document_starts) == 1
    few = opened(path, validation_fraction=0.0, max_bytes=8).split("train")
    assert len(few.document_starts) == 2


@pytest.mark.parametrize("split_by", ["position", "document"])
def test_no_conversation_lies_in_two_splits_where_a_template_rewrites_turns(
    tmp_path, tokenizer_file, split_by
):
    """Each answer is a document then, up to it, and four of them are one conversation."""
    template = tmp_path / "forgets.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role + ':' }}"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    records = [
        chat(*(text for n in range(4) for text in (f"c{number:02d}", f"hm</think>{n}")))
        for number in range(40)
    ]
    path = jsonl(tmp_path / "x.jsonl", records)
    settings = {"chat_template": str(template), "tokenizer": tokenizer_file}
    settings |= {"validation_fraction": 0.25, "test_fraction": 0.25, "split_by": split_by}
    splits = opened(path, **settings).splits
    found = []
    for split in splits.values():
        bounds = split.document_bounds.tolist()
        texts = [decoded(split.tokens[a:b]) for a, b in pairwise(bounds)]
        found.append([text.removeprefix("user:c")[:2] for text in texts])
    assert sum(map(len, found)) == 160
    assert sum(len(set(numbers)) for numbers in found) == 40
    if split_by == "position":
        assert [len(numbers) for numbers in found] == [80, 40, 40]
    assert min(map(len, found)) > 0


def test_answers_alone_are_targets(tmp_path):
    records = [
        {"prompt": "aaaa", "completion": "bb"},
        {"prompt": "c" * 9, "completion": "d"},  # begins behind a row of 8 + 1 tokens
        {"prompt": "ef", "completion": "gh"},
    ]
    path = jsonl(tmp_path / "x.jsonl", records)
    dataset = opened(path, validation_fraction=0.0)
    train, letters = dataset.split("train"), dataset.tokenizer
    batches = TrainingBatches(train, "documents", seed=1, batch_size=4, context_length=8)
    assert batches.rows_per_epoch == 2
    batch = batches.batch(0)
    assert batch.n_targets == 8
    targets = [letters.decode(row[row != IGNORED_TARGET]) for row in batch.targets]
    assert sorted(targets) == ["bb", "bb", "gh", "gh"]
    for row, text in zip(batch.inputs, targets, strict=True):
        assert letters.decode(row[:6]).startswith({"bb": "aaaab", "gh": "efg"}[text])
    some = batches.batch(0, np.array([2]))
    assert (some.targets == batch.targets[2:3]).all()
    packed = TrainingBatches(
        train, "documents", seed=1, batch_size=1, context_length=8, packing=True
    )
    text = "".join(letters.decode(packed.batch(n).inputs[0]) for n in range(2))
    found = np.concatenate([packed.batch(n).targets[0] for n in range(2)])
    assert [letters.decode([n]) for n in found if n != IGNORED_TARGET] == [
        c for c in text if c in "bdgh"
    ]
    evaluated = list(
        evaluation_batches(train, context_length=8, batch_size=3, within_documents=True)
    )
    assert sum(each.n_targets for each in evaluated) == 5
    assert train.tokens_per_byte == 1.0
    with pytest.raises(ConfigError, match=r"data\.order='documents'"):
        TrainingBatches(train, "random", seed=1, batch_size=4, context_length=8)
    with pytest.raises(ConfigError, match="no answer within"):
        TrainingBatches(train, "documents", seed=1, batch_size=4, context_length=1)


def test_joined_splits_and_their_beginnings_keep_answers(tmp_path):
    records = [{"prompt": "ab", "completion": "cd"}, {"prompt": "e", "completion": "fgh"}]
    chat_split = opened(jsonl(tmp_path / "x.jsonl", records), validation_fraction=0.0).split(
        "train"
    )
    (tmp_path / "t.txt").write_text("hello world")
    text = open_dataset(DataConfig(path=str(tmp_path / "t.txt"), validation_fraction=0.0)).split(
        "train"
    )
    both = concatenated("both", [chat_split, text, chat_split])
    assert both.n_tokens == 8 + 11 + 8
    assert both.document_starts.tolist() == [0, 4, 8, 19, 23]
    runs = [[2, 4], [5, 8], [8, 19], [21, 23], [24, 27]]
    assert both.assistant.bounds.tolist() == runs
    assert both.assistant.n_tokens == both.assistant.n_bytes == 5 + 11 + 5
    assert both.tokens[6:10].tolist() == [*chat_split.tokens[6:8], *text.tokens[:2]]
    start = first_tokens(both, 9)
    assert [part.n_tokens for part in start.parts] == [4, 4, 4]
    assert start.assistant.bounds.tolist() == [[2, 4], [4, 8], [10, 12]]
    assert first_tokens(text, 5).tokens[:].tolist() == text.tokens[:5].tolist()
    assert first_tokens(text, 50) is text


def test_the_beginning_of_a_single_conversation_is_all_of_it(tmp_path):
    """Cut in its answer, it taught so much of what follows in a mixture; before it, nothing."""
    records = [{"prompt": "ab", "completion": "cdefgh"}]
    alone = opened(jsonl(tmp_path / "x.jsonl", records), validation_fraction=0.0).split("train")
    for n_tokens in range(1, 9):
        start = first_tokens(concatenated("both", [alone, alone]), 2 * n_tokens)
        assert start.n_tokens == 16
        assert start.assistant.bounds.tolist() == [[2, 8], [10, 16]]
        assert start.assistant.n_tokens == start.assistant.n_bytes == 12


def test_mask_and_count():
    answers = AssistantRanges(np.array([[2, 4], [7, 8]]), 3, 3)
    expected = [False, False, True, True, False, False, False, True, False]
    for start in range(9):
        for stop in range(start, 9):
            mask = answers.mask(start, stop)
            assert mask.tolist() == expected[start:stop]
            counts = answers.count(np.array([start]), np.array([stop]))
            assert counts.tolist() == [sum(expected[start:stop])]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": []}, "no message of role"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no message of role"),
        ({"messages": {}}, "not a list"),
        ({"messages": [3]}, "not an object"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0}]}, "nothing to learn"),
        ({"messages": [{"role": "assistant", "content": "a", "train": False}]}, "nothing to learn"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 0.5}]}, "weight=0.5"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
            "only parts of text",
        ),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "a"}, "'tools' is str"),
        ({"messages": [], "chat_template_kwargs": "a"}, "'chat_template_kwargs' is 'a', not an"),
        ({"conversations": [{"from": "gpt"}, {"role": "assistant", "content": True}]}, "type bool"),
        ({"prompt": "a", "completion": ""}, "is empty"),
        ({"prompt": "a", "completion": ["b"]}, "'prompt' is str"),
        ({"other": "a"}, "no conversation: its keys"),
        ({"prompt": "a", "completion": "\ud800"}, "half a surrogate"),
    ],
)
def test_a_record_that_is_no_conversation_is_named(tmp_path, record, words):
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "a", "completion": "b"}, record])
    with pytest.raises(CorruptError, match=f"x.jsonl, line 2.*{words}"):
        opened(path, chat_template="chatml")


@pytest.mark.parametrize("n_levels", [490, 700, 990, 5_000])
def test_a_record_that_is_nested_deep_is_named(tmp_path, n_levels):
    good = json.dumps(chat("a", "b"))
    deep = '{"a":' * n_levels + "1" + "}" * n_levels
    bad = good.replace('"content": "a"', f'"content": "a", "x": {deep}')
    (tmp_path / "x.jsonl").write_text(f"{good}\n{bad}\n")
    with pytest.raises(CorruptError, match=r"x\.jsonl, line (1, or soon|2).* (nested|recursion)"):
        opened(str(tmp_path / "x.jsonl"), chat_template="chatml")


def test_refusals(tmp_path):
    path = jsonl(tmp_path / "chat.jsonl", [chat("a", "b")])
    with pytest.raises(ConfigError, match="no chat template"):
        opened(path)
    (tmp_path / "t.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"data\.chat_template='chatml' is for conversations"):
        opened(str(tmp_path / "t.txt"), chat_template="chatml")
    records = [chat("a", "b"), chat("c", "d")]
    alternates = tmp_path / "t.jinja"
    alternates.write_text(
        "{% if messages[0].content == 'c' %}{{ raise_exception('no c') }}{% endif %}"
    )
    path = jsonl(tmp_path / "two.jsonl", records)
    with pytest.raises(CorruptError, match="line 1: the chat template leaves nothing"):
        opened(path, chat_template=str(alternates))
    alternates.write_text(
        alternates.read_text() + "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    named = f"the chat template {alternates}"
    with pytest.raises(CorruptError, match=f"line 2: {named} refuses it: no c"):
        opened(path, chat_template=str(alternates))
    alternates.write_text("{{ 'a' * 3 * 10**9 }}")
    with pytest.raises(CorruptError, match=f"line 1: {named} takes more than .* MiB of memory"):
        opened(path, chat_template=str(alternates))
    alternates.write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(CorruptError, match=f"line 1, or soon after: {named} takes more than 1 s"):
        opened(path, chat_template=str(alternates))


def test_shards_with_answers_are_version_3_and_checked(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"prompt": "ab", "completion": "cd"}] * 3)
    opened(path, validation_fraction=0.0)
    (folder,) = (tmp_path / "cache/pentameter/prepared").iterdir()
    header_file = find_header(folder)
    header = json.loads(header_file.read_text())
    assert header["version"] == 3
    assert sorted(file.name for file in folder.iterdir()) == [
        "tokenizer.json", "x-00000.bin", "x-answers.bin", "x-documents.bin", "x.json",
    ]  # fmt: skip
    answers = folder / "x-answers.bin"
    whole = np.fromfile(answers, "<u8")
    assert whole.tolist() == [2, 4, 6, 8, 10, 12]
    for wrong in ([2, 4, 3, 8, 10, 12], [2, 2, 6, 8, 10, 12], [2, 4, 6, 8, 10, 13]):
        np.array(wrong, "<u8").tofile(answers)
        with pytest.raises(CorruptError, match="answers of 'train' are not in order"):
            open_shards(header_file)
    np.array([1, 4, 6, 8, 10, 12], "<u8").tofile(answers)
    with pytest.raises(CorruptError, match="have 7 tokens"):
        open_shards(header_file)
    whole.tofile(answers)
    header["version"] = 2
    header["sha256"] = header_hash(header)
    header_file.write_text(json.dumps(header))
    assert open_shards(header_file).split("train").assistant is not None


def test_the_day_that_a_template_is_told_decides_the_data(tmp_path, tokenizer_file):
    template = tmp_path / "dated.jinja"
    each = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + each)
    path = jsonl(tmp_path / "chat.jsonl", [chat("a", "b")])
    kept = {"tokenizer": tokenizer_file, "chat_template": str(template), "validation_fraction": 0.0}
    found = [opened(path, **kept), opened(path, **kept, template_date="2025-01-02")]
    texts = [decoded(each.split("train").tokens).partition("<")[0] for each in found]
    assert texts == ["26 Jul 2024", "02 Jan 2025"]
    assert found[0].hash != found[1].hash
    shards = str(found[0].folders[0])
    with pytest.raises(ConfigError, match=r"data\.template_date='2025-01-02' cannot change"):
        open_dataset(DataConfig(path=shards, template_date="2025-01-02"))
    for wrong in ("2025-02-30", "today"):
        with pytest.raises(ValueError, match="template_date"):
            DataConfig(path=path, template_date=wrong)


def test_messages_in_openais_forms_are_learnt(tmp_path, tokenizer_file):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    answers = [
        {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"content": None, "tool_calls": [call]},
        {"content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"content": None},
    ]
    asked = {"role": "user", "content": None}
    records = [{"messages": [asked, {"role": "assistant", **each}]} for each in answers]
    path = jsonl(tmp_path / "chat.jsonl", records)
    train = opened(
        path, tokenizer=tokenizer_file, chat_template="chatml", validation_fraction=0.0
    ).split("train")
    called = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'.format
    ends = [f"{text}<|im_end|>\n" for text in ("ab", called('{"a": 1}'), called("{}"), "")]
    assert learnt(train) == ends
    assert "None" not in decoded(train.tokens)


def test_tools_of_a_row_choose_the_template_for_them(tmp_path, tokenizer_file):
    each = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    several = {"default": each, "tool_use": "{% for t in tools %}{{ t.name }}{% endfor %}" + each}
    listed = [{"name": name, "template": source} for name, source in several.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    record, tools = chat("a", "b"), [{"name": "weather"}]
    records = [{**record, "tools": each} for each in (None, tools, json.dumps(tools))]
    path = jsonl(tmp_path / "chat.jsonl", records)
    found = opened(
        path, tokenizer=tokenizer_file, chat_template=str(tmp_path), validation_fraction=0.0
    )
    said = "<|im_start|>a<|im_end|><|im_start|>b<|im_end|>"
    assert decoded(found.split("train").tokens) == said + f"weather{said}" * 2


def test_what_a_template_leaves_out_or_asks_for_otherwise_is_said(tmp_path, tokenizer_file):
    """As DeepSeek-R1's, which asks with `<think>` and leaves thinking out of what was said."""
    each = "{{ m.role }}: {{ m.content.split('</think>')[-1] }}<|im_end|>"
    prompt = "{% if add_generation_prompt %}assistant: <think>{% endif %}"
    template = tmp_path / "r1.jinja"
    template.write_text(f"{{% for m in messages %}}{each}{{% endfor %}}{prompt}")
    call = {"function": {"name": "weather", "arguments": "{}"}}
    answers = [
        {"content": "b"},
        {"content": "<think>so</think>b", "reasoning": "so it is", "tool_calls": [call]},
    ]
    asked = {"role": "user", "content": "a"}
    records = [{"messages": [asked, {"role": "assistant", **each}]} for each in answers]
    records[1]["tools"] = [{"name": "weather"}]
    data = {"path": jsonl(tmp_path / "chat.jsonl", records), "tokenizer": tokenizer_file}
    for _ in range(2):  # made, and found in the cache
        warnings = []
        open_dataset(DataConfig(**data, chat_template=str(template)), warnings=warnings)
        prompted, *left_out = sorted(warnings, key=lambda text: "asks" not in text)
        assert f"{template} asks for an answer with 'assistant: <think>'" in prompted
        assert "writes answers, 2 times (first in" in prompted
        assert [re.search(r"nothing of (.*) in conv", text)[1] for text in left_out] == [
            "the `tools`",
            "the `tool_calls` of answers",
            "the reasoning",
        ]
        assert all("1 time (first in" in text and "line 2)" in text for text in left_out)
    warnings = []
    records[1].pop("tools")
    data["path"] = jsonl(tmp_path / "fine.jsonl", [records[0], chat("a", "b", "c", "d")])
    open_dataset(DataConfig(**data, chat_template="chatml"), warnings=warnings)
    assert warnings == []


def test_records_of_share_gpt_and_what_trl_gives_a_template_beside(tmp_path, tokenizer_file):
    template = tmp_path / "thinks.jinja"
    said = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    template.write_text("{{ enable_thinking | default('?') }} {{ bos_token }}" + said)
    record = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    beside = [None, {"enable_thinking": False}, json.dumps({"messages": 3, "bos_token": "<s>"})]
    records = [{**record, "chat_template_kwargs": each} for each in beside]
    found = opened(
        jsonl(tmp_path / "chat.jsonl", records),
        tokenizer=tokenizer_file,
        chat_template=str(template),
        validation_fraction=0.0,
    ).split("train")
    each = "user: a<|im_end|>assistant: b<|im_end|>"
    assert decoded(found.tokens) == f"? {each}False {each}? <s>{each}"
    assert len(learnt(found)) == 3
