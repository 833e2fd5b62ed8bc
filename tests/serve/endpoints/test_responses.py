"""`/v1/responses`: the answers of a chat, in another form, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("openai", reason="the official client is not installed")

import openai
from fastapi.testclient import TestClient
from openai.types.responses import Response
from test_app import TALKER, client_of, served


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(served("plain"), served("talker", TALKER)) as client:
        yield client


def chat(client: TestClient, messages: list[dict[str, str]], **fields: Any) -> Any:
    asked = {"model": "talker", "messages": messages, **fields}
    return client.post("/v1/chat/completions", json=asked).json()


def respond(client: TestClient, **fields: Any) -> Any:
    answer = client.post("/v1/responses", json={"model": "talker", **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_response_is_a_chats_answer(client: TestClient) -> None:
    messages = [{"role": "system", "content": "abc"}, {"role": "user", "content": "de"}]
    expected = chat(client, messages, max_tokens=9, seed=3)
    asked = {"max_output_tokens": 9, "seed": 3}
    found = respond(client, instructions="abc", input="de", **asked)
    (item,) = found["output"]
    assert item["content"][0]["text"] == expected["choices"][0]["message"]["content"]
    assert (found["status"], found["incomplete_details"]) == (
        "incomplete", {"reason": "max_output_tokens"},
    )  # fmt: skip
    assert (found["usage"]["input_tokens"], found["usage"]["output_tokens"]) == (
        expected["usage"]["prompt_tokens"], 9,
    )  # fmt: skip
    assert not found["store"]
    Response.model_validate(found, strict=False)
    # A conversation goes on with the items of its responses.
    items = [
        {"role": "developer", "content": "abc"},
        {"role": "user", "content": [{"type": "input_text", "text": "de"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        item,
        {"type": "message", "role": "user", "content": "ab"},
    ]
    said = item["content"][0]["text"]
    longer = [
        {"role": "developer", "content": "abc"}, messages[1],
        {"role": "assistant", "content": said}, {"role": "user", "content": "ab"},
    ]  # fmt: skip
    expected = chat(client, longer, max_tokens=9, seed=3)
    found = respond(client, input=items, **asked)
    assert found["output"][0]["content"][0]["text"] == expected["choices"][0]["message"]["content"]


def test_a_stream_has_the_events_in_their_order(client: TestClient) -> None:
    asked = {"input": "de", "max_output_tokens": 9}
    whole = respond(client, **asked)
    streamed = client.post("/v1/responses", json={"model": "talker", "stream": True, **asked})
    parts = [part.split("\n") for part in streamed.text.split("\n\n") if part]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {each['type']}" for each in events]
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    deltas = [each for each in events if each["type"] == "response.output_text.delta"]
    text = whole["output"][0]["content"][0]["text"]
    assert "".join(each["delta"] for each in deltas) == text
    before, after = events[:4], events[4 + len(deltas) :]
    assert [each["type"].removeprefix("response.") for each in before + after] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "output_text.done", "content_part.done", "output_item.done", "incomplete",
    ]  # fmt: skip
    last = events[-1]["response"]
    assert last["usage"] == whole["usage"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert {each["item_id"] for each in deltas} == {last["output"][0]["id"]}


def test_the_official_client_reads_it(client: TestClient) -> None:
    official = openai.OpenAI(
        base_url="http://127.0.0.1:8000/v1", api_key="none", http_client=client, max_retries=0
    )
    asked: Any = {"model": "talker", "input": "de", "max_output_tokens": 9}
    answer = official.responses.create(**asked)
    kinds = [event.type for event in official.responses.create(**asked, stream=True)]
    assert (kinds[0], kinds[-1]) == ("response.created", "response.incomplete")
    stop = {"stop": answer.output_text[4:6]}
    with official.responses.stream(**asked, extra_body=stop) as stream:
        kinds = [event.type for event in stream]
        assert answer.output_text.startswith(stream.get_final_response().output_text)
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    with pytest.raises(openai.BadRequestError, match="keeps none"):
        official.responses.create(**asked, previous_response_id="resp_1")


@pytest.mark.parametrize(
    ("fields", "said", "param"),
    [
        ({"store": True}, "store needs responses that are kept", "store"),
        ({"previous_response_id": "resp_1"}, "send the whole conversation", "previous_response_id"),
        ({"conversation": "conv_1"}, "keeps none", "conversation"),
        ({"max_tokens": 5}, "did you mean max_output_tokens", "max_tokens"),
        ({"n": 2}, "one text", "n"),
        ({"tools": [{"type": "function"}]}, "not supported", "tools"),
        ({"truncation": "auto"}, 'truncation="auto" is not supported', "truncation"),
        ({"text": {"format": {"type": "json_schema"}}}, "not supported", "text"),
        ({"input": [{"type": "function_call_output"}]}, "only messages can be read", "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "image", "input"),
        ({"input": []}, "input is empty", "input"),
        ({"input": "a" * 200}, "tokens; talker sees", "input"),
        ({"model": "plain"}, "no chat template", "input"),
    ],
)
def test_what_cannot_be_had_is_refused(
    client: TestClient, fields: dict[str, Any], said: str, param: str
) -> None:
    answer = client.post("/v1/responses", json={"model": "talker", "input": "a"} | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


def test_what_asks_for_nothing_passes(client: TestClient) -> None:
    plain = respond(client, input="a", max_output_tokens=4)["output"][0]["content"]
    neutral = {
        "store": False, "previous_response_id": None, "tools": [], "tool_choice": "auto",
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "include": [],
        "background": False, "metadata": {"a": "b"}, "reasoning": {"effort": None}, "user": "me",
        "parallel_tool_calls": True, "stream_options": {"include_obfuscation": False},
    }  # fmt: skip
    found = respond(client, input="a", max_output_tokens=4, **neutral)
    assert found["output"][0]["content"] == plain
