"""Forms of conversations: recognized by their keys, made to messages, and refused where two fit."""

import json

import pytest
from cache_of_a_folder import cache_of_a_test  # noqa: F401

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.conversations import Chat, Conversations, Exchange
from pentameter.data.corpora.records.forms import AUTO, forms, missing_key, record_fields
from pentameter.data.corpora.registry import corpus_of
from pentameter.data.corpora.text import Text
from pentameter.data.open_dataset import open_dataset
from pentameter.errors import ConfigError, CorruptError


def array(path, records):
    path.write_text(json.dumps(records, indent=2))
    return str(path)


def opened(tmp_path, *records, **settings):
    return corpus_of(DataConfig(path=array(tmp_path / "x.json", records), **settings))


def only(tmp_path, record, **settings):
    """The one conversation of a file with one record."""
    corpus = opened(tmp_path, record, **settings)
    assert isinstance(corpus, Conversations)
    ((conversation, _),) = corpus.records()
    return conversation


def said(tmp_path, record, **settings):
    """The messages of the one conversation: (first letter of the role, content)."""
    messages = only(tmp_path, record, **settings).messages
    return [(each["role"][0], each["content"]) for each in messages]


PAIRS = {
    name: form
    for name, form in forms().items()
    if form.answer and not form.is_plain and not form.refused
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_a_question_and_an_answer(tmp_path, name):
    form = PAIRS[name]
    record = {**{key: key.upper() for key in form.asked}, form.answer: "yes", "id": 3}
    question = "\n".join(key.upper() for key in form.asked)
    assert said(tmp_path, record) == [("u", question), ("a", "yes")]
    needed = {key: value for key, value in record.items() if key not in form.optional}
    absent = dict.fromkeys(form.optional)
    question = "\n".join(key.upper() for key in form.asked if key not in form.optional)
    assert said(tmp_path, {**needed, **absent}) == [("u", question), ("a", "yes")]
    beside = {**needed, "system_prompt": "be kind"}
    assert said(tmp_path, beside)[0] == ("s", "be kind")


def test_alpacas_form_with_all_that_it_may_have(tmp_path):
    record = {
        "instruction": "add",
        "input": "",
        "output": "4",
        "system": "count",
        "history": [["a", "b"], ["c", "d"]],
    }
    asked = only(tmp_path, record)
    assert [each["content"] for each in asked.messages] == ["count", *"abcd", "add", "4"]
    assert asked.targets == [2, 4, 6]  # earlier answers are learned, too
    assert asked.form == "Alpaca's form"


@pytest.mark.parametrize("as_text", [False, True])
def test_share_gpts_form_with_calls_and_tools(tmp_path, as_text):
    call = {"name": "look", "arguments": {"at": 1}}
    turns = [
        ("Human", "hi"),
        ("function_call", json.dumps(call)),
        ("observation", "seen"),
        ("chatgpt", "so it is"),
    ]
    messages = [{"from": role, "value": text} for role, text in turns]
    tools = json.dumps([{"name": "look"}])
    listed = json.dumps(messages) if as_text else messages
    found = only(tmp_path, {"conversations": listed, "tools": tools, "system": "s"})
    assert [each["role"] for each in found.messages] == [
        "system", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert found.messages[2]["tool_calls"] == [{"type": "function", "function": call}]
    assert found.targets == [2, 4]
    assert found.tools == [{"name": "look"}]


def test_a_message_may_be_in_parts_with_values(tmp_path):
    """As LLaMA-Factory's later form has them."""
    call = json.dumps({"name": "look", "arguments": {}})
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "value": "I look"},
        {"type": "tool_call", "value": call},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "value": "hi"}], "loss_weight": 0.0},
        {"role": "assistant", "content": parts, "loss_weight": 1.0},
        {"role": "assistant", "content": "only read", "loss_weight": 0.0},
    ]
    found = only(tmp_path, {"messages": messages})
    assert found.messages[0]["content"] == "hi"
    assert found.messages[1]["content"] == "I look"
    assert found.messages[1]["reasoning_content"] == "hm"
    assert found.messages[1]["tool_calls"][0]["function"]["name"] == "look"
    assert found.targets == [1]


def test_prompt_and_completion_stay_plain(tmp_path):
    record = {"prompt": "a", "completion": "b"}
    assert only(tmp_path, record) == Exchange("a", "b")
    messages = [{"role": "assistant", "content": "b"}]
    found = only(tmp_path, {"prompt": messages, "completion": messages, "system": "s"})
    assert isinstance(found, Chat)
    assert found.targets == [2]


LISTED = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_a_list_of_messages_goes_before_what_stands_beside_it(tmp_path):
    for beside in (
        {"problem": "p", "solution": "s"},  # as NuminaMath's
        {"prompt": "p", "chosen": [], "rejected": []},  # as UltraFeedback's
        {"prompt": "p", "prompt_id": "3"},
    ):
        assert said(tmp_path, {"messages": LISTED, **beside}) == [("u", "a"), ("a", "b")]


def test_two_forms_that_fit_are_refused_unless_one_is_named(tmp_path):
    record = {"question": "q", "answer": "a", "response": "r"}
    with pytest.raises(CorruptError, match=r"record 1 \(line 2\) fits 2 forms: question-answer \("):
        opened(tmp_path, record)
    assert said(tmp_path, record, form="question-response") == [("u", "q"), ("a", "r")]
    for wrong in ("questionanswer", "preferences"):
        with pytest.raises(ConfigError, match=rf"data\.form='{wrong}' is no form .*known: auto"):
            opened(tmp_path, record, form=wrong)
    with pytest.raises(CorruptError, match=r"its keys are .*not those of the form 'alpaca'"):
        only(tmp_path, record, form="alpaca")


def test_a_form_whose_keys_another_has_too_does_not_count(tmp_path):
    record = {"instruction": "i", "input": "j", "output": "o"}  # input and output are a pair
    assert said(tmp_path, record) == [("u", "i\nj"), ("a", "o")]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"conversations": [], "chosen": {}, "rejected": {}},
        {"instruction": "a", "chosen": "b", "rejected": "c"},
    ],
)
def test_preferences_are_recognized_and_refused(tmp_path, record):
    with pytest.raises(CorruptError, match=r"x\.json, record 1 .*preferences.*not trained on yet"):
        opened(tmp_path, record)


def test_records_of_no_form_are_refused_with_those_that_are_read(tmp_path):
    with pytest.raises(CorruptError) as raised:
        opened(tmp_path, {"a": "b"})
    message = str(raised.value)
    assert "record 1 (line 2) has no field 'text' (its keys are ['a'])" in message
    for name in (name for name, form in forms().items() if not form.refused):
        assert f"\n  {name} " in message
    assert "alpaca                instruction, [input], output, [history]" in message


@pytest.mark.parametrize("key", ["label", "kto_tag"])
def test_judged_answers_are_learned_and_this_is_said(tmp_path, key):
    corpus = opened(tmp_path, {"messages": LISTED, key: False})
    assert isinstance(corpus, Conversations)
    (warning,) = corpus.warnings
    assert f"has {key!r}, true or false" in warning
    assert opened(tmp_path, {"messages": LISTED, key: "a word"}).warnings == ()


def test_what_describes_a_data_set_is_not_read_beside_its_records(tmp_path):
    (tmp_path / "README.md").write_text("# Questions")
    (tmp_path / "dataset_infos.json").write_text("{}")
    array(tmp_path / "x.json", [{"instruction": "a", "output": "b"}])

    def names(path):
        return [file.name for file in corpus_of(DataConfig(path=str(path))).files]

    assert names(tmp_path) == ["x.json"]
    (tmp_path / "x.json").unlink()
    (tmp_path / "x.jsonl").write_text('{"instruction": "a", "output": "b"}')
    assert names(tmp_path) == ["x.jsonl"]
    (tmp_path / "x.jsonl").write_text('{"text": "a"}')  # as ever
    assert names(tmp_path) == ["README.md", "dataset_infos.json", "x.jsonl"]


def test_held_out_arrays_are_read_beside_jsonl(tmp_path):
    held = array(tmp_path / "val.json", [{"text": "a"}, {"text": "b"}])
    (tmp_path / "x.jsonl").write_text('{"text": "c"}')
    corpus = corpus_of(DataConfig(path=str(tmp_path / "x.jsonl"), validation_path=held))
    assert ["".join(each) for each in corpus.held_out["val"].documents()] == ["a", "b"]
    array(tmp_path / "val.json", [{"messages": LISTED}])
    (tmp_path / "x.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}))
    corpus = corpus_of(DataConfig(path=str(tmp_path / "x.jsonl"), validation_path=held))
    assert len([*corpus.held_out["val"].records()]) == 1


def test_a_template_for_what_is_read_as_text_is_refused_with_the_form(tmp_path):
    path = array(tmp_path / "x.json", [{"instruction": "a", "output": "b", "text": "a b"}])
    with pytest.raises(ConfigError, match=r"holds text; leave it out \(.*--data\.form alpaca"):
        open_dataset(DataConfig(path=path, chat_template="chatml"))


def test_text_goes_before_a_form_and_this_is_said(tmp_path):
    """The data set of Alpaca has the whole text, too."""
    record = {"instruction": "a", "output": "b", "text": "a b"}
    corpus = opened(tmp_path, record)
    assert isinstance(corpus, Text)
    assert ["".join(each) for each in corpus.documents()] == ["a b"]
    (warning,) = corpus.warnings
    assert "Alpaca's form" in warning
    assert "--data.form alpaca" in warning
    assert opened(tmp_path, record, form="text").warnings == ()
    assert said(tmp_path, record, form="alpaca") == [("u", "a"), ("a", "b")]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"instruction": "a", "output": ""}, "'output' is empty"),
        ({"instruction": "a", "output": 3}, "'output' is int 3, not a text"),
        ({"instruction": ["a"], "output": "b"}, "'instruction' is list"),
        (
            {"instruction": "a", "output": "b", "history": ["c"]},
            "'history' is .'c'., not a list of pairs",
        ),
        ({"instruction": "a", "output": "b", "system": {}}, None),
        ({"conversations": "hi"}, "'conversations' is str 'hi', not a list"),
        ({"conversations": [{"from": "alice", "value": "a"}]}, "message 0 is from 'alice', not"),
        ({"conversations": [{"from": "function_call", "value": "a"}]}, "message 0 is a call, and"),
        ({"conversations": ["a"]}, "message 0 is 'a', not an object"),
        ({"messages": LISTED, "system": 3}, "'system' is int"),
        ({"messages": [{"role": "system", "content": "a"}, *LISTED], "system": "b"}, "two system"),
    ],
)
def test_a_record_that_is_not_as_its_form_says_is_named(tmp_path, record, words):
    if words is None:  # an empty system message is none
        assert len(said(tmp_path, record)) == 2
        return
    with pytest.raises(CorruptError, match=rf"x\.json, record 1 \(line 2\): {words}"):
        only(tmp_path, record)


@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "x.parquet", "x.jsonl"])
def test_every_kind_of_file_gives_the_same_tokens(tmp_path, name):
    import gzip

    records = [{"instruction": f"add {n}", "input": None, "output": f"{n + 1}"} for n in range(9)]
    path = tmp_path / name
    if name == "x.parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(records), path)
    elif name == "x.jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in records))
    else:
        text = json.dumps(records).encode()
        path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    settings = {"order": "documents", "chat_template": "chatml", "validation_fraction": 0.0}
    found = open_dataset(DataConfig(path=str(path), **settings))
    assert found.holds == ("9 conversations, Alpaca's form",)
    text = found.tokenizer.decode(found.split("train").tokens[:])
    expected = "<|im_start|>user\nadd {}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n".format
    assert text == "".join(expected(n, n + 1) for n in range(9))


def test_files_of_several_forms_are_counted_by_form(tmp_path):
    records = [{"question": "a", "answer": "b"}, {"messages": LISTED}, {"messages": LISTED}]
    data = DataConfig(path=array(tmp_path / "x.json", records), chat_template="chatml")
    held = "3 conversations, 2 OpenAI's form, 1 pairs of question and answer"
    assert open_dataset(data).holds == (held,)


def test_the_table_names_what_it_should():
    fields = record_fields()
    assert len(fields) == len(set(fields))
    assert {"messages", "conversations", "chosen", "tools", "system", "history"} <= {*fields}
    for form in forms().values():
        ways = [form.messages is not None, bool(form.asked and form.answer), bool(form.refused)]
        assert sum(ways) == 1, form.name


@pytest.mark.parametrize(
    ("keys", "chosen", "missing"),
    [
        (
            ["instruction", "input"],
            AUTO,
            "'output' (Alpaca's form) or 'response' (pairs of instruction and response)",
        ),
        (["instruction", "input", "id"], "alpaca", "'output' (Alpaca's form)"),
        (["output"], "alpaca", "'instruction' (Alpaca's form)"),
        (["other"], AUTO, ""),
        (["id"], "problem-solution", ""),
    ],
)
def test_the_key_that_a_record_lacks_is_named(keys, chosen, missing):
    assert missing_key(keys, chosen) == missing


def test_an_answer_without_a_value_is_named_with_its_place(tmp_path):
    good, bad = {"instruction": "a", "output": "b"}, {"instruction": "a", "output": None}
    path = array(tmp_path / "x.json", [good, bad])
    with pytest.raises(CorruptError, match=r"record 2 \(line \d+\).*'output' \(Alpaca's form\)"):
        open_dataset(DataConfig(path=path, chat_template="chatml"))
