"""Answers in a form that a request demands: JSON by a schema, or a call of a tool."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("openai", reason="the client is not installed")
pytest.importorskip("llguidance", reason="llguidance, of the extra `serve`, is not installed")

from fastapi.testclient import TestClient
from scripted import TEMPLATE, Speaker
from spoken_to import openai_client, serving

QUESTION = {"role": "user", "content": "Is it wet?"}
OBJECT = {
    "role": "user",
    "content": "Give me any object that you like, with a list of whatever in it.",
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("weather", "time")
]
UNTHINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class Weather(BaseModel):
    kind: Literal["rain", "sun"]
    wet: bool


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    speaker = Speaker("speaker", TEMPLATE)
    speaker.answers('{"kind": "snow", "wet": 1}<|im_end|>', [QUESTION])
    speaker.answers('{"a": [1, "é"]} And so on.<|im_end|>', [OBJECT])
    with serving(speaker) as found:
        yield found


@pytest.fixture(scope="module")
def completions(client: TestClient) -> Any:
    return openai_client(client).chat.completions


def test_an_answer_is_parsed_by_the_client(completions: Any) -> None:
    asked = {"model": "speaker", "messages": [QUESTION], "temperature": 0, "max_tokens": 60}
    free = completions.create(**asked).choices[0].message.content
    assert free == '{"kind": "snow", "wet": 1}'
    (choice,) = completions.parse(response_format=Weather, **asked).choices
    assert choice.finish_reason == "stop"
    assert choice.message.parsed == Weather(kind="sun", wet=False)


def test_an_object_is_any_object_and_nothing_behind_it(completions: Any) -> None:
    answer = completions.create(
        model="speaker",
        messages=[OBJECT],
        temperature=0,
        response_format={"type": "json_object"},
        logprobs=True,
        max_tokens=60,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content) == {"a": [1, "é"]}
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    assert completions.create(
        model="speaker", messages=[OBJECT], max_tokens=60, response_format={"type": "text"},
        temperature=0,
    ).choices[0].message.content.endswith(" And so on.")  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", "time"),  # of the first letters that may follow, greedy takes the lowest
        ({"type": "function", "function": {"name": "weather"}}, "weather"),
    ],
)
def test_a_tool_that_is_demanded_is_called(
    completions: Any, choice: Any, expected: str, is_stream: bool
) -> None:
    asked = {"model": "speaker", "messages": [QUESTION], "temperature": 0, "max_tokens": 90}
    answer = completions.create(
        tools=TOOLS, tool_choice=choice, extra_body=UNTHINKING, stream=is_stream, **asked
    )
    if is_stream:
        pieces = [each.choices[0] for each in answer]
        calls = [call for each in pieces for call in each.delta.tool_calls or []]
        assert not any(each.delta.content for each in pieces)
        finish_reason = pieces[-1].finish_reason
    else:
        calls, finish_reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert answer.choices[0].message.content is None
    (call,) = calls
    assert finish_reason == "tool_calls"
    assert call.function.name == expected
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


def test_a_form_with_tools_lets_the_model_choose(completions: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"const": "dry"}}}
    answer = completions.create(
        model="speaker", messages=[QUESTION], temperature=0, max_tokens=60, tools=TOOLS,
        response_format=schema, extra_body=UNTHINKING,
    )  # fmt: skip
    assert answer.choices[0].message.content == '"dry"'  # the lowest of what may come first


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing", "response_format"),
        ({"response_format": {"type": "grammar"}}, "'json_object'", "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"not": {}}},
                }
            },
            'response_format: Unimplemented keys: ["not"]',
            "response_format",
        ),
        ({"tool_choice": "required"}, "without tools", "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "none of the tools: weather, time",
            "tool_choice",
        ),
    ],
)
def test_what_is_refused(client: TestClient, fields: Any, said: str, param: str) -> None:
    body = {"model": "speaker", "messages": [QUESTION], "max_tokens": 5} | fields
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    assert error["param"] == param


def test_a_vocabulary_that_cannot_write_it_is_told(client: TestClient) -> None:
    endless = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "string", "pattern": "[^\\s\\S]"}},
    }
    body = {"messages": [QUESTION], "response_format": endless, "max_tokens": 5}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


def test_without_the_package_it_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with serving(Speaker("speaker", TEMPLATE)) as api:
        body = {"messages": [QUESTION], "response_format": {"type": "json_object"}}
        answer = api.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "pip install 'pentameter[serve]'" in answer.json()["error"]["message"]
        plain = api.post("/v1/chat/completions", json={"messages": [QUESTION], "max_tokens": 2})
        assert plain.status_code == 200
