"""Questions from a file: both forms, the join of context and choice, and what is wrong where."""

import json

import pytest

from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError, CorruptError
from pentameter.evaluate.multiple_choice import Question, encode_questions, read_questions

HELLASWAG = {
    "ind": 24,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "split": "val",
    "label": 3,
    "endings": ["is using wrap.", "is ripping tiles off.", "holds a cube.", "pulls up roofing."],
}
PLAIN = {"context": "two and two", "choices": ["are four", "is a crowd"], "answer": 0}
LETTERS = CharTokenizer("abcd \n")


def write(path, *records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def question(context, *choices):
    return Question("f.jsonl:1", context, choices, 0)


def texts(tokenizer, context, *choices, context_length=100):
    rows = encode_questions([question(context, *choices)], tokenizer, context_length).choices
    return [
        (
            tokenizer.decode(row.tokens[: -row.n_scored]),
            tokenizer.decode(row.tokens[-row.n_scored :]),
        )
        for row in rows
    ]


def test_both_forms_are_read(tmp_path):
    parts = {key: value for key, value in HELLASWAG.items() if key != "ctx"}
    file = write(
        tmp_path / "q.jsonl",
        HELLASWAG,
        "",
        {**parts, "label": "2"},
        {**parts, "ctx_b": ""},
        {**PLAIN, "answer": "1"},
    )
    questions = read_questions(file)
    assert [q.source for q in questions] == [f"{file}:{line}" for line in (1, 3, 4, 5)]
    assert [q.answer for q in questions] == [3, 2, 3, 1]
    assert questions[0].context == questions[1].context == HELLASWAG["ctx"]
    assert questions[0].choices == tuple(HELLASWAG["endings"])
    assert questions[2].context == HELLASWAG["ctx_a"]
    assert questions[3] == Question(f"{file}:5", "two and two", ("are four", "is a crowd"), 1)


def test_a_byte_order_mark_and_windows_line_ends_are_no_matter(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(PLAIN).encode() + b"\r\n\r\n")
    assert len(read_questions(file)) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1, 2]", "is no object with"),
        ({"question": "?"}, '"choices" is missing'),
        ({**PLAIN, "choices": "four"}, "\"choices\" is 'four'; a list of at least two"),
        ({**PLAIN, "choices": ["one"]}, "a list of at least two texts"),
        ({**PLAIN, "choices": ["one", 2]}, r"choices\[1\] is 2; a text"),
        ({**PLAIN, "choices": ["", "two"]}, r"choices\[0\] is empty"),
        ({**PLAIN, "choices": ["\ud800", "two"]}, "lone surrogate"),
        ({**PLAIN, "answer": 2}, r'"answer" is 2; one of 0 … 1'),
        ({**PLAIN, "answer": -1}, "one of 0 … 1"),
        ({**PLAIN, "answer": True}, "one of 0 … 1"),
        ({**PLAIN, "answer": 0.0}, "one of 0 … 1"),
        ({**PLAIN, "answer": "four"}, "one of 0 … 1"),
        ({**PLAIN, "answer": "9" * 5000}, "one of 0 … 1"),
        ({"context": "a", "choices": ["b", "c"]}, '"answer" is missing'),
        ({**HELLASWAG, "label": ""}, '"label" is missing.*validation file'),
        ({**HELLASWAG, "ctx": 3}, '"ctx" is 3; a text'),
        ({"endings": ["a", "b"], "label": 0}, '"ctx" is missing'),
        ({"choices": ["a", "b"], "answer": 0}, '"context" is missing'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, says):
    file = write(tmp_path / "q.jsonl", PLAIN, line, PLAIN)
    with pytest.raises(CorruptError, match=rf"q\.jsonl:2: .*{says}"):
        read_questions(file)


def test_bytes_that_are_no_text_are_named(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_bytes(b'\n{"context": "\xff"}')
    with pytest.raises(CorruptError, match=r"q\.jsonl:2: not UTF-8 text \(byte 14\)"):
        read_questions(file)


def test_a_file_without_a_question_and_no_file_are_refused(tmp_path):
    with pytest.raises(CorruptError, match="is empty"):
        read_questions(write(tmp_path / "q.jsonl", "", " "))
    with pytest.raises(ConfigError, match="is no file"):
        read_questions(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="is no file"):
        read_questions(tmp_path)


def test_one_space_joins_context_and_choice_where_there_is_none():
    assert texts(LETTERS, "ab", "cd", " cd", "\nc") == [("ab", " cd"), ("ab", " cd"), ("ab", "\nc")]
    assert texts(LETTERS, "ab ", "cd", " cd") == [("ab", " cd"), ("ab", "  cd")]


def test_bytes_are_those_of_the_choice_without_the_joining_space():
    tokenizer = CharTokenizer("aé ")
    rows = encode_questions([question("a", "é", "aa", " a")], tokenizer, 10).choices
    assert [(row.n_scored, row.n_bytes) for row in rows] == [(2, 2), (3, 2), (2, 2)]


def test_words_and_byte_pairs_join_as_they_encode():
    words = WordTokenizer.from_documents(["the cat sat on the mat ."])
    assert texts(words, "The cat", "sat on") == [("the cat", "sat on")]
    with pytest.raises(ConfigError, match=r"choice 0 has 0 tokens"):
        texts(words, "the cat", '"', "sat")
    pairs = train_bpe(["the cat sat on the mat"] * 9, 280)
    assert texts(pairs, "the cat", "sat on") == [("the cat", " sat on")]
    end = pairs.decode([pairs.end_of_text])
    assert texts(pairs, "", "the cat", "sat") == [(end, "the cat"), (end, "sat")]


def test_a_long_context_loses_its_beginning():
    # 6 inputs and 7 tokens: the last is only predicted.
    got = texts(LETTERS, "abcdabcd", "b", "bcda", "bcdab", context_length=6)
    assert got == [("dabcd", " b"), ("cd", " bcda"), ("d", " bcdab")]
    with pytest.raises(ConfigError, match=r"f\.jsonl:1: choice 0 has 7 tokens.* 1 … 6"):
        texts(LETTERS, "ab", "bcdabc", "a", context_length=6)


def test_a_character_outside_the_vocabulary_is_named_with_its_line():
    with pytest.raises(ConfigError, match=r"f\.jsonl:1: choice 1, ' az'.*'z'"):
        texts(LETTERS, "ab", "c", "az")
    with pytest.raises(ConfigError, match=r"f\.jsonl:1: the context, 'xy'.*'x'"):
        texts(LETTERS, "xy", "c", "a")


def test_an_empty_context_needs_an_end_of_text():
    with pytest.raises(ConfigError, match=r"f\.jsonl:1: the context '' has no token.*char"):
        texts(LETTERS, "", "c", "a")

    class WithEnd(CharTokenizer):
        end_of_text = 0

    tokenizer = WithEnd("|abc ")
    end = tokenizer.decode([0])
    assert texts(tokenizer, "", "c", " a") == [(end, "c"), (end, " a")]
