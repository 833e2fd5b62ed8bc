"""OpenAI's forms of messages: what they become, and that templates write them as transformers."""

import json
from contextlib import nullcontext, suppress
from itertools import product

import pytest
from templates_of_families import FAMILIES

from pentameter.data.messages import normalized, normalized_tools
from pentameter.data.tokenizers.chat import (
    CHATML_TEMPLATE,
    ChatTemplate,
    TemplateRefusalError,
    escaped,
    ids_and_texts,
    unescaped,
    without_marks,
)
from pentameter.data.tokenizers.render_client import Rendering, render, unlike_its_prompt
from pentameter.data.tokenizers.renderer import RenderRequest
from pentameter.errors import ConfigError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für <eine> Stadt",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def says(role, content, **more):
    return {"role": role, "content": content, **more}


def calls(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "abcdefgh1", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call], **more}


def of_tool(text):
    return says("tool", text, tool_call_id="abcdefgh1", name="weather")


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


ASKED = says("user", "Zürich?")
CALL = [ASKED, calls({"city": "Zürich"}), of_tool("9 °C"), says("assistant", "9 °C.")]
FORMS = {
    "plain": [ASKED, says("assistant", "cold"), says("user", "and <b>?"), says("assistant", "no ")],
    "system": [says("system", " be kind "), ASKED, says("assistant", "cold")],
    "begins": [says("assistant", "hello"), ASKED, says("assistant", "cold")],
    "null": [ASKED, says("assistant", None, tool_calls=None), ASKED, says("assistant", "cold")],
    "calls": CALL,
    "null calls": [ASKED, calls({"city": "Zürich"}, content=None), *CALL[2:]],
    "text arguments": [ASKED, calls('{"city":"Zürich"}', content=None), *CALL[2:]],
    "parts": [says("user", parts(" a ", " b")), says("assistant", parts("c", "d ", "e"))],
    "system parts": [says("system", parts("a", "b")), ASKED, says("assistant", "c")],
    **{
        name: [ASKED, says("assistant", "cold", **{name: "it is winter"})]
        for name in ("reasoning_content", "thinking", "reasoning")
    },
    "reasons for calls": [ASKED, calls({"city": "Zürich"}, thinking="I look"), of_tool("9 °C")],
}
"""Maps a name to messages in a form of OpenAI's interface."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def theirs(family):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    library = Tokenizer(models.BPE({"a": 0}, []))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, chat_template=FAMILIES[family], **TOKENS
    )


@pytest.fixture(scope="module")
def ours(family):
    sources = dict(FAMILIES[family])
    with Rendering(ChatTemplate(sources.pop("default"), TOKENS, named=sources)) as rendering:
        yield rendering


def rendered(ours, messages, tools=None, asks=False):
    asked = RenderRequest(normalized(messages), normalized_tools(tools), (), asks)
    return unescaped(without_marks(ours.text(asked)))


def expected(theirs, messages, tools=None, asks=False):
    """The text of transformers; None for what their templates refuse."""
    try:
        return theirs.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=asks
        )
    except Exception:  # of Jinja, and of Python in a template
        return None


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_rendered_as_in_transformers(family, theirs, ours, form):
    messages = [
        # Other templates print Python's lists, or write the first part alone.
        {**each, "content": joined(each["content"])}
        if "content" in each and each["role"] not in TAKE_PARTS.get(family, ())
        else each
        for each in FORMS[form]
    ]
    if form == "text arguments" and family != "qwen3":  # others write a text in a text
        messages = FORMS["null calls"]
    for tools, asks in product((None, TOOLS), (False, True)):
        text = expected(theirs, messages, tools, asks)
        with nullcontext() if text is not None else suppress(TemplateRefusalError):
            found = rendered(ours, FORMS[form], tools, asks)
            assert text in (None, found)


TAKE_PARTS = {"gemma3": ("user", "assistant"), "mistral small": ("user",)}


def joined(content):
    return "".join(each["text"] for each in content) if isinstance(content, list) else content


def learnt(family, messages, targets, tools=None):
    """The answers of messages, as they are learned, of each document."""
    sources = dict(FAMILIES[family])
    template = ChatTemplate(sources.pop("default"), TOKENS, named=sources)
    asked = RenderRequest(normalized(messages), tools, targets, date="2026-01-02")
    with Rendering(template) as rendering:
        (found,) = rendering.documents([asked])
    if isinstance(found, TemplateRefusalError):
        raise found
    return ["|".join(text for text, is_target in each if is_target) for each in found]


IM = "<|im_start|>assistant\n{}<|im_end|>\n".format
BEGINNINGS = {
    "chatml": "hello<|im_end|>\n|cold<|im_end|>\n",
    "qwen2": "hello<|im_end|>\n|cold<|im_end|>\n",
    "llama3": "hello<|eot_id|>|cold<|eot_id|>",
    "mistral tools": " hello</s>| cold</s>",
    "mistral small": "hello</s>|cold</s>",
    "gemma": "hello<end_of_turn>\n|cold<end_of_turn>\n",
    "phi4": "hello<|im_end|>|cold<|im_end|>",
    "granite": "hello<|end_of_text|>\n|cold<|end_of_text|>\n",
    "smollm3": f"{IM('hello')}|{IM('cold')}",  # as it is marked
    "command-r": "hello<|END_OF_TURN_TOKEN|>|cold<|END_OF_TURN_TOKEN|>",
    "r1": "<|Assistant|>hello</s>|<|Assistant|>cold</s>",
}
"""What families learn of a conversation that the assistant begins."""


@pytest.mark.parametrize("family", BEGINNINGS)
def test_no_preamble_is_learnt_where_the_assistant_begins(family):
    assert learnt(family, FORMS["begins"], [0, 2]) == [BEGINNINGS[family]]


def test_no_preamble_is_learnt_where_answers_are_rewritten():
    cold = "<think>\n\n</think>\n\ncold"
    assert learnt("qwen3", FORMS["begins"], [0, 2]) == [f"hello<|im_end|>\n|{cold}<|im_end|>\n"]
    channel = "<|channel|>final<|message|>{}<|return|>".format
    assert learnt("gpt-oss", FORMS["begins"], [0, 2]) == [channel("hello"), channel("cold")]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"city": "Bern"}', {"city": "Bern"}])
def test_answers_of_calls_alone_are_learnt(arguments, content):
    messages, object = [ASKED, calls(arguments, **content)], '{"city": "Bern"}'
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    assert learnt("qwen2", messages, [1]) == [f"{call}<|im_end|>\n"]
    (found,) = learnt("r1", messages, [1])  # writes arguments that are a text, of no content
    assert (
        found == f"<|Assistant|><|call|>function<|sep|>weather\n```json\n{object}\n```<|end|></s>"
    )
    (found,) = learnt("gpt-oss", messages, [1])
    assert found.endswith(
        f" to=functions.weather<|channel|>commentary json<|message|>{object}<|call|>"
    )
    (found,) = learnt("command-r", messages, [1], TOOLS)
    assert found.startswith("Action: ```json")
    assert '"city": "Bern"' in found
    asked = RenderRequest(normalized(messages), targets=[1])
    with Rendering(ChatTemplate(CHATML_TEMPLATE)) as rendering:
        (((_, (answer, is_target)),),) = rendering.documents([asked])
    assert (answer, is_target) == (f"{call}<|im_end|>\n", True)


def test_arguments_that_are_no_object_stay_as_they_are():
    (_, found) = normalized([ASKED, calls("{", content=None)])
    assert found["tool_calls"][0]["function"]["arguments"] == "{"
    (_, found) = normalized([ASKED, calls("")])
    assert found["tool_calls"][0]["function"]["arguments"] == {}


def test_older_forms():
    function = {"name": "weather", "arguments": {"city": "Bern"}}
    (_, found) = normalized([ASKED, says("assistant", None, function_call=function)])
    assert found["tool_calls"] == [{"type": "function", "function": function}]
    (found,) = normalized([says("assistant", None, refusal="no", tool_calls=[])])
    assert found == {"role": "assistant", "refusal": "no", "content": "no"}
    assert normalized_tools(json.dumps(TOOLS)) == TOOLS == normalized_tools([json.dumps(TOOLS[0])])
    assert normalized_tools("") is None is normalized_tools(None)
    with pytest.raises(ConfigError, match="'tools' is dict, not a list"):
        normalized_tools({})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "message 1 has a part .*image_url.*text",
        ),
        ([*parts("a"), {"type": "input_audio"}], "a part .*input_audio.*only parts of text"),
        ([{"type": "text"}], "a part .*only parts of text"),
        (["a"], "a part 'a'; only parts of text"),
        ({"a": 1}, "message 1 has content of type dict"),
    ],
)
def test_other_content_is_refused_in_words(content, words):
    with pytest.raises(ConfigError, match=words):
        normalized([ASKED, says("assistant", content)])


def test_what_a_tool_found_may_be_anything():
    for found in ({"a": 1}, [{"a": 1}], [1]):
        assert normalized([says("tool", found)]) == [says("tool", found)]


@pytest.mark.parametrize("family", ["gemma3", "chatml"])
def test_parts_forge_no_special_token_together(family):
    special = {"<end_of_turn>": 0, "<|im_end|>": 0}
    said = escaped(normalized([says("user", parts("<end_of_ ", "turn><|im_", "end|>"))]), special)
    text = render(ChatTemplate(FAMILIES[family]["default"], TOKENS), RenderRequest(said))
    pieces = ids_and_texts(text, special)
    assert pieces.count(0) == 1  # the template's own


def test_templates_that_ask_with_what_they_do_not_write_are_known():
    found = {}
    for family, sources in FAMILIES.items():
        template = ChatTemplate(sources["default"], TOKENS)
        with Rendering(template) as rendering:
            found[family] = unlike_its_prompt(template, rendering.text)
    assert "asks for an answer with '<|Assistant|><think>\\n'" in found.pop("r1")
    assert set(found.values()) == {None}


def test_a_call_without_content_is_written_where_its_result_follows():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
        "{{ m.content.split('</think>')[-1] }}{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{{ m.content }};{% endfor %}"
    )
    messages = normalized([ASKED, calls({"city": "Bern"}, content=None), says("tool", "rain")])
    with Rendering(ChatTemplate(source)) as rendering:
        assert '{"city": "Bern"};rain;' in rendering.text(RenderRequest(messages))
