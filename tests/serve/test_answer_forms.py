"""What answers say beside content: reasoning and calls of tools, in each family's form."""

from __future__ import annotations

import pytest

from pentameter.data.tokenizers.chat import CHATML_TEMPLATE, ChatTemplate
from pentameter.data.tokenizers.render_client import Rendering
from pentameter.serve.answer_forms.calls import FORMS
from pentameter.serve.answer_forms.readers import ChannelReader, TaggedReader
from pentameter.serve.answer_forms.recognizing import AnswerForm, Writing, recognized
from pentameter.serve.answer_forms.said import Call, Reads, Said

THINK = ("<think>", "</think>")
HERMES, MISTRAL, LLAMA = FORMS
WEATHER = '{"city": "Oslo"}'
CALL = Call("weather", WEATHER)
OBJECT = f'{{"name": "weather", "arguments": {WEATHER}}}'
TAGGED = f"<tool_call>\n{OBJECT}\n</tool_call>"
PARAMETERS = f'{{"name": "weather", "parameters": {WEATHER}}}'
CHANNELS = "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant"


def form(calls: object) -> Reads:
    return TaggedReader(None, calls)  # type: ignore[arg-type]


ANSWERS: dict[str, tuple[Reads, str, Said]] = {
    "plain": (TaggedReader(), " It rains.\n", Said(" It rains.\n")),
    "plain, with tools": (form(HERMES), " 1 < 2 <tool\n", Said(" 1 < 2 <tool\n")),
    "thinking": (
        TaggedReader(THINK), "<think>\nHm. \n</think>\n\nYes.\n", Said("Yes.\n", "Hm."),
    ),
    "thinking has begun": (
        TaggedReader(THINK, None, True), "Hm.\n</think>\nYes", Said("Yes", "Hm."),
    ),
    "thinking is said again": (
        TaggedReader(THINK, None, True), "<think>Hm.</think>Yes", Said("Yes", "Hm."),
    ),
    "thinking without an end": (TaggedReader(THINK), "<think>Hm. </thi", Said("", "Hm. </thi")),
    "no thinking": (TaggedReader(THINK), " <b>Yes</b>", Said(" <b>Yes</b>")),
    "Hermes": (form(HERMES), TAGGED, Said(calls=[CALL])),
    "Hermes, two": (
        TaggedReader(THINK, HERMES),
        f"<think>\nBoth.\n</think>\n\nI look.\n{TAGGED}\n{TAGGED}\n",
        Said("I look.", "Both.", [CALL, CALL]),
    ),
    "Hermes, text behind": (form(HERMES), f"A\n{TAGGED}\nB ", Said("A\nB", "", [CALL])),
    "Hermes, without an end": (form(HERMES), f"<tool_call>{OBJECT}", Said(calls=[CALL])),
    "Hermes, cut in its end": (form(HERMES), TAGGED[:-3], Said(calls=[CALL])),
    "Hermes, cut": (form(HERMES), "A <tool_call>{'na", Said("A <tool_call>{'na")),
    "Hermes, brackets in text": (
        form(HERMES),
        '<tool_call>{"name": "f", "arguments": {"x": "}</tool_call>\\"{"}}</tool_call>',
        Said(calls=[Call("f", '{"x": "}</tool_call>\\"{"}')]),
    ),
    "Hermes, no JSON": (
        form(HERMES), "<tool_call>{weather}</tool_call>", Said("<tool_call>{weather}</tool_call>"),
    ),
    "Hermes, no name": (form(HERMES), '<tool_call>{"x": 1}', Said('<tool_call>{"x": 1}')),
    "Mistral, a list": (
        form(MISTRAL),
        f'[TOOL_CALLS] [{OBJECT[:-1]}, "id": "abcdefghi"}}, {OBJECT}]',
        Said(calls=[Call("weather", WEATHER, "abcdefghi"), CALL]),
    ),
    "Mistral, names": (
        form(MISTRAL),
        f"Both: [TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]"
        + WEATHER,
        Said("Both:", "", [CALL, Call("weather", WEATHER, "123456789")]),
    ),
    "Mistral, no call": (form(MISTRAL), "[TOOL_CALLS]!", Said("[TOOL_CALLS]!")),
    "Llama": (form(LLAMA), f"\n\n{PARAMETERS}", Said(calls=[CALL])),
    "Llama, two": (form(LLAMA), f"{PARAMETERS}; {PARAMETERS}", Said(calls=[CALL, CALL])),
    "Llama, tag": (form(LLAMA), f"<|python_tag|>{PARAMETERS}", Said(calls=[CALL])),
    "Llama, Python": (
        form(LLAMA),
        '<|python_tag|>brave_search.call(query="a \\"(b)\\"", count=2)',
        Said(calls=[Call("brave_search", '{"query": "a \\"(b)\\"", "count": 2}')]),
    ),
    "Llama, an answer": (form(LLAMA), 'Say {"name": 1}', Said('Say {"name": 1}')),
    "Llama, an object": (form(LLAMA), '{"name": "Bob"}', Said('{"name": "Bob"}')),
    "gpt-oss": (
        ChannelReader(True),
        f"{CHANNELS}<|channel|>final<|message|>It rains.",
        Said("It rains.", "Look it up."),
    ),
    "gpt-oss, a call": (
        ChannelReader(True),
        f"{CHANNELS}<|channel|>commentary to=functions.weather "
        f"<|constrain|>json<|message|>{WEATHER}",
        Said("", "Look it up.", [CALL]),
    ),
    "gpt-oss, a call by its role": (
        ChannelReader(True),
        f" to=functions.weather<|channel|>commentary json<|message|>{WEATHER}<|call|>",
        Said(calls=[CALL]),
    ),
    "gpt-oss, without tools": (
        ChannelReader(), f"<|channel|>commentary to=functions.f<|message|>{WEATHER}", Said(WEATHER),
    ),
    "gpt-oss, no channel": (ChannelReader(), "It rains.", Said("It rains.")),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_what_an_answer_says(name: str) -> None:
    reader, text, expected = ANSWERS[name]
    assert reader.read(text, is_whole=True) == expected


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_streamed_is_the_beginning_of_what_is_said(name: str) -> None:
    reader, text, expected = ANSWERS[name]
    said = Said()
    for end in range(len(text) + 1):
        before, said = said, reader.read(text[:end], is_whole=False)
        assert said.content.startswith(before.content)
        assert said.reasoning.startswith(before.reasoning)
        assert said.calls[: len(before.calls)] == before.calls
    assert expected.content.startswith(said.content)
    assert expected.reasoning.startswith(said.reasoning)
    assert expected.calls[: len(said.calls)] == said.calls


def test_content_and_reasoning_are_streamed_as_they_come() -> None:
    reader = TaggedReader(THINK, HERMES)
    assert reader.read("<think>\nSo we l", is_whole=False) == Said("", "So we l")
    assert reader.read("<think>a</think>\nIt r", is_whole=False) == Said("It r", "a")
    assert reader.read(f"{TAGGED}\n<tool", is_whole=False) == Said(calls=[CALL])


def template_of(turns: str, *, tools: str = "{{ tools | tojson }}", prompt: str = "A:") -> str:
    """A template that shows tools, and writes an answer as `turns` does."""
    return (
        f"{{% if tools %}}{tools}{{% endif %}}"
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{prompt}{turns}<|end|>{{% else %}}Q:{{{{ m.content }}}}<|end|>{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


EACH_CALL = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
FIELDS = '{"name": "{{ f.name }}", "KEY": {{ f.arguments | tojson }}}'


def written(call: str, key: str = "arguments") -> str:
    call = call.replace("@", FIELDS).replace("KEY", key)
    return f"{{{{ m.content }}}}{EACH_CALL}{call}{{% endfor %}}"


TEMPLATES = {
    "Hermes": (
        template_of("<think>\n\n</think>\n\n" + written("<tool_call>\n@\n</tool_call>")),
        AnswerForm(
            THINK, False, HERMES,
            Writing('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), True,
        ),
    ),
    "Mistral": (
        template_of(written("[TOOL_CALLS][@]")),
        AnswerForm(
            None, False, MISTRAL,
            Writing('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]"), True,
        ),
    ),
    "Mistral, names": (
        template_of(
            written("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}")
        ),
        AnswerForm(
            None, False, MISTRAL, Writing("[TOOL_CALLS]", "[CALL_ID]abcdefghi[ARGS]", ""), True
        ),
    ),
    "Llama 3": (
        template_of(written("@", "parameters")),
        AnswerForm(None, False, LLAMA, Writing('{"name": "', '", "parameters": ', "}"), True),
    ),
    "gpt-oss": (
        template_of(
            "{% if m.content %}<|channel|>final<|message|>{{ m.content }}{% endif %}" + EACH_CALL
            + "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
            "{{ f.arguments | tojson }}<|call|>{% endfor %}"
        ),
        AnswerForm(
            None, True, None,
            Writing(
                "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"
            ),
            True,
        ),
    ),
    "none": (template_of("{{ m.content }}"), AnswerForm(shows_tools=True)),
    "no tools": (
        CHATML_TEMPLATE,
        AnswerForm(
            None, False, HERMES,
            Writing('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"), False,
        ),
    ),
    "elements": (
        template_of(written("<tool_call><function={{ f.name }}>{{ f.arguments }}</tool_call>")),
        AnswerForm(shows_tools=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_familys_form_is_recognized_by_what_its_template_writes(name: str) -> None:
    source, expected = TEMPLATES[name]
    template = ChatTemplate(source)
    with Rendering(template) as rendering:
        found = recognized(template, rendering.text, ["<|end|>", "<|im_end|>"])
    assert found == expected


def test_whether_an_answer_begins_in_reasoning() -> None:
    form = AnswerForm(THINK)
    assert form.begins_in_reasoning("Q: why?\nA: <think>\n")
    assert not form.begins_in_reasoning("Q: <think>\nA: ")
    assert not AnswerForm().begins_in_reasoning("<think>")


def test_what_is_recognized_is_said() -> None:
    assert TEMPLATES["Hermes"][1].described() == " (tools Hermes, reasoning <think>)"
    assert TEMPLATES["gpt-oss"][1].described() == " (tools gpt-oss, reasoning analysis)"
    assert TEMPLATES["no tools"][1].described() == ""


def test_a_long_text_that_is_no_call_is_read_at_once() -> None:
    text = "<|python_tag|>f.call(" + "a=bbbb" * 4000
    assert form(LLAMA).read(text, is_whole=True) == Said(text)
    assert form(HERMES).read("<tool_call>{" * 2000, is_whole=True).content.startswith("<tool_call>")
