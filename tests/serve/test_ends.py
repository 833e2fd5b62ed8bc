"""Answers of a model whose tokenizer lacks the template's special tokens: they end at a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("openai", reason="the client is not installed")

from fastapi.testclient import TestClient
from scripted import TEMPLATE, Speaker
from spoken_to import openai_client, serving

MARK = "<|im_end|>"
QUESTION = {"role": "user", "content": "Is it wet?"}
FORMED = {"role": "user", "content": "Answer in JSON. " * 25}
TOOL = {
    "type": "function",
    "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}},
}
SAID = "Yes, <|it| is."
CALLED = '<tool_call>\n{"name": "rain", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    speaker = Speaker("speaker", TEMPLATE, has_special=False)
    speaker.answers(f"{SAID}{MARK}\nYes", [QUESTION])
    speaker.answers(f"I look.\n{CALLED}{MARK}\n{CALLED}", [QUESTION], [TOOL])
    speaker.answers(json.dumps({"a": f"x{MARK}y"}) + MARK, [FORMED])
    with serving(speaker) as found:
        yield found


@pytest.fixture(scope="module")
def completions(client: TestClient) -> Any:
    return openai_client(client).chat.completions


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "speaker", "messages": [QUESTION], "temperature": 0, "max_tokens": 90} | fields


def test_an_answer_ends_before_the_text_that_its_template_writes(completions: Any) -> None:
    (choice,) = completions.create(**asked(logprobs=True)).choices
    assert (choice.message.content, choice.finish_reason) == (SAID, "stop")
    assert "".join(each.token for each in choice.logprobs.content) == SAID


def test_no_part_of_that_text_is_streamed(completions: Any) -> None:
    deltas = [
        each.choices[0].delta.content or "" for each in completions.create(**asked(stream=True))
    ]
    assert "".join(deltas) == SAID


def test_the_request_s_own_stop_texts_count_beside_it(completions: Any) -> None:
    (choice,) = completions.create(**asked(stop=["it|", "never"])).choices
    assert choice.message.content == "Yes, <|"
    (choice,) = completions.create(**asked(stop="never")).choices
    assert choice.message.content == SAID


def test_an_answer_goes_on_if_a_request_ignores_its_end(completions: Any) -> None:
    n_tokens = len(f"{SAID}{MARK}\n")
    found = completions.create(**asked(max_tokens=n_tokens, extra_body={"ignore_eos": True}))
    (choice,) = found.choices
    assert (choice.message.content, choice.finish_reason) == (f"{SAID}{MARK}\n", "length")


def test_a_response_ends_there(client: TestClient) -> None:
    body = {"model": "speaker", "input": QUESTION["content"], "temperature": 0}
    found = client.post("/v1/responses", json=body).json()
    assert found["output"][0]["content"][0]["text"] == SAID
    assert found["status"] == "completed"


def test_a_call_is_read_from_an_answer_that_ends_there(completions: Any) -> None:
    (choice,) = completions.create(**asked(tools=[TOOL])).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("rain", "{}")


def test_a_form_ends_an_answer_by_itself_and_may_hold_that_text(completions: Any) -> None:
    pytest.importorskip("llguidance", reason="llguidance, of the extra `serve`, is not installed")
    form = {"type": "json_object"}
    (choice,) = completions.create(**asked(messages=[FORMED], response_format=form)).choices
    assert json.loads(choice.message.content) == {"a": f"x{MARK}y"}
