"""Chat templates: where they come from, and what messages may not hold."""

import json

import pytest

from pentameter.data.tokenizers.chat import (
    BEGIN,
    CHATML_TEMPLATE,
    ChatTemplate,
    TemplateRefusalError,
    chosen_chat_template,
    escaped,
    read_chat_template,
)
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
    assert found == ChatTemplate("D", {"eos_token": "</s>", "pad_token": "<pad>"})
    assert chosen_chat_template(str(settings)) == found
    (tmp_path / "chat_template.jinja").write_text("J")
    assert read_chat_template(tmp_path) == ChatTemplate("J", found.tokens)
    assert ChatTemplate.from_json(json.loads(json.dumps(found.to_json())), "x") == found
    assert chosen_chat_template("chatml") == ChatTemplate(CHATML_TEMPLATE)
