"""Chat templates: where they come from, and what messages may not hold."""

import json

import pytest

from pentameter.data.tokenizers.bpe import BpeTokenizer
from pentameter.data.tokenizers.byte_level.alphabet import BYTE_CHARACTERS
from pentameter.data.tokenizers.chat import (
    BEGIN,
    CHATML_TEMPLATE,
    ChatTemplate,
    TemplateRefusalError,
    chosen_chat_template,
    escaped,
    read_chat_template,
)
from pentameter.data.tokenizers.render_client import ends_of_answers
from pentameter.errors import ConfigError, CorruptError


def test_a_message_may_not_hold_marks_of_ours():
    with pytest.raises(TemplateRefusalError, match="U\\+FDD1"):
        escaped([{"role": "user", "content": f"x{BEGIN}"}], {})


def test_where_a_template_comes_from(tmp_path):
    assert read_chat_template(tmp_path) is None
    with pytest.raises(ConfigError, match="does not exist"):
        chosen_chat_template(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="neither"):
        chosen_chat_template(str(tmp_path))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(CorruptError, match="chat_template"):
        read_chat_template(tmp_path)
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    tokens = {"eos_token": {"content": "</s>"}, "bos_token": None, "pad_token": "<pad>"}
    settings.write_text(json.dumps({"chat_template": several, **tokens}))
    found = read_chat_template(tmp_path)
    tokens = {"eos_token": "</s>", "pad_token": "<pad>"}
    assert found == ChatTemplate("D", tokens, named={"tool_use": "T"})
    assert chosen_chat_template(str(settings)) == found
    (tmp_path / "chat_template.jinja").write_text("J")
    assert read_chat_template(tmp_path) == ChatTemplate("J", tokens)  # the files alone
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert read_chat_template(tmp_path) == ChatTemplate("J", tokens, named={"rag": "R"})
    (tmp_path / "chat_template.jinja").unlink()
    assert read_chat_template(tmp_path).named == {"tool_use": "T", "rag": "R"}
    settings.unlink()
    with pytest.raises(CorruptError, match=r"\['rag'\], but no default"):
        read_chat_template(tmp_path)
    assert ChatTemplate.from_json(json.loads(json.dumps(found.to_json())), "x") == found
    assert chosen_chat_template("chatml") == ChatTemplate(CHATML_TEMPLATE)


def test_a_name_from_a_stranger_leaves_its_folder_alone(tmp_path):
    names = ("default", "../../x", ".x", "a/b", "tool_use")
    several = [{"name": name, "template": name} for name in names]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    written = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"}
    assert read_chat_template(tmp_path).files().keys() == written


def test_special_tokens_that_a_template_writes():
    source = (
        "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|><|user|>{% endfor %}"
    )
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    assert ChatTemplate(source, tokens).special_texts == ["<|user|>", "<|end|>", "<s>"]
    both = ChatTemplate(source, tokens, named={"tool_use": "<|call|>{{ eos_token }}"})
    assert both.special_texts == ["<|user|>", "<|end|>", "<|call|>", "<s>", "</s>"]
    assert ChatTemplate(source + "</s>", tokens).special_texts[-1] == "</s>"
    assert ChatTemplate(CHATML_TEMPLATE).special_texts == ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("{{ messages[0].content }}{{ bos_token }}", {"bos_token": "#"}),
        ("{{ bos_token }}", {"bos_token": "<\uff5cbegin\uff5c>"}),
        ("<|{{ messages[0].role }}|>{{ '<|' + 'a' + '|>' }}", {}),
        ("(a", {"(a+)+$[_token": "<s>", "eos_token": "\ud800"}),  # from a stranger
    ],
)
def test_texts_that_are_no_special_tokens(source, tokens):
    assert ChatTemplate(source, tokens).special_texts == []


MARKS = ("<|endoftext|>", "<|im_start|>", "<|channel|>", "<|im_end|>", "<|call|>")
EACH = "{% for m in messages %}"
SPOKEN = EACH + "<|im_start|>{{ m.role }}<|channel|>{{ m.content }}<|im_end|>\n{% endfor %}"
CALLS = (
    EACH + "{% if m.tool_calls %}<|channel|>{{ m.tool_calls[0].function.arguments | tojson }}"
    "<|im_end|><|call|>{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
PLAIN = EACH + "{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "ends"),
    [
        (SPOKEN, {256, 259}),
        (CHATML_TEMPLATE, {256, 259}),
        (CALLS, {256, 259, 260}),  # as gpt-oss ends a call otherwise than an answer
        (PLAIN, set(range(256, 261))),
        ("{{ raise_exception('three messages') }}", set(range(256, 261))),
        (None, set(range(256, 261))),
    ],
)
def test_an_answer_ends_where_the_template_ends_one(source, ends):
    tokenizer = BpeTokenizer([*BYTE_CHARACTERS, *MARKS], [])
    tokenizer.chat = None if source is None else ChatTemplate(source)
    assert ends_of_answers(tokenizer) == (ends, ())


TURNS = EACH + "{% if m.role == 'user' %}Q: {% endif %}{{ m.content }} \n</turn>\n\n{% endfor %}"


@pytest.mark.parametrize(
    ("source", "texts"),
    [
        (CHATML_TEMPLATE, ("<|im_end|>",)),
        (SPOKEN, ("<|im_end|>",)),
        (TURNS, ("</turn>",)),
        (PLAIN, ()),  # white space alone
        (PLAIN + "<bot>", ()),  # which asks for an answer, and ends none
        ("{{ raise_exception('three messages') }}", ()),
        (None, ()),
    ],
)
def test_an_answer_ends_at_a_text_where_the_tokenizer_lacks_the_template_s_tokens(source, texts):
    tokenizer = BpeTokenizer([*BYTE_CHARACTERS, MARKS[0]], [])
    tokenizer.chat = None if source is None else ChatTemplate(source)
    assert ends_of_answers(tokenizer) == ({256}, texts)
