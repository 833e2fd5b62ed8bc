"""The HTTP interface, without a network: answers, streams, limits, errors, who may ask."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from fastapi.testclient import TestClient
from tiny import TOKENIZER, make_model

from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.errors import ConfigError
from pentameter.generation.loop import generate
from pentameter.machine.address import LOOPBACK
from pentameter.model.gpt import GPT
from pentameter.serve.app import create_app
from pentameter.serve.continuation import Continuation, TextRequest
from pentameter.serve.endpoints.chat import ChatRequest
from pentameter.serve.endpoints.completions import CompletionRequest
from pentameter.serve.endpoints.requests import Limits, other_fields
from pentameter.serve.guard import Access
from pentameter.serve.passes import Slots
from pentameter.serve.worker import ServedModel, ServerBusyError, Worker, served_model

V = TOKENIZER.vocab_size
LIMITS = Limits(max_tokens=2000, texts=4, seconds=60, body_bytes=10_000)
TALKER = CharTokenizer("\n abcdefgh")
TALKER.chat = ChatTemplate(
    "{% for m in messages %}{% if 'x' in m.role %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "{{ m.content }}\n{% endfor %}"
)


def served(name: str, tokenizer: CharTokenizer = TOKENIZER, n_slots: int = 4) -> ServedModel:
    return ServedModel(name, tokenizer, Slots(make_model(), V, n_slots))


def client_of(
    *models: ServedModel,
    limits: Limits = LIMITS,
    waiting: int = 8,
    access: Access = Access(LOOPBACK),  # noqa: B008  (frozen)
) -> TestClient:
    worker = Worker(most_waiting=waiting)
    for model in models:
        worker.add(model)
    app = create_app(worker, limits, access)
    return TestClient(app, base_url="http://127.0.0.1:8000")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with client_of(served("plain"), served("talker", TALKER)) as client:
        yield client


def events(text: str) -> list[Any]:
    """The JSON of a stream's events, without its end."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found.pop() == "[DONE]"
    return [json.loads(line) for line in found]


def complete(client: TestClient, **fields: Any) -> Any:
    answer = client.post("/v1/completions", json={"model": "plain", "prompt": "ab"} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_completion_is_what_sample_writes(client: TestClient) -> None:
    (expected,) = generate(make_model(), TOKENIZER, "ab", max_new_tokens=30, seed=4, top_k=5)
    answer = complete(client, max_tokens=30, seed=4, top_k=5)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "plain"
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": expected, "finish_reason": "length", "logprobs": None}
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 30, "total_tokens": 32}
    assert complete(client)["choices"][0]["text"] == complete(client)["choices"][0]["text"]


def test_without_settings_a_model_s_own_are_taken() -> None:
    tokenizer = CharTokenizer("\n abcdefgh")
    said = {"do_sample": True, "temperature": 0.5, "top_k": 3}
    tokenizer.published = {"generation_config.json": json.dumps(said)}
    with client_of(served("plain", tokenizer)) as client:
        for asked, meant in (
            ({}, {"temperature": 0.5, "top_k": 3}),
            ({"temperature": None, "top_p": 0.9}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}),
            ({"temperature": 2, "top_k": 0}, {"temperature": 2}),
        ):
            settings = {"max_new_tokens": 30, "seed": 4, **meant}
            (expected,) = generate(make_model(), TOKENIZER, "ab", **settings)
            answer = complete(client, max_tokens=30, seed=4, **asked)
            assert answer["choices"][0]["text"] == expected, asked


def test_several_prompts_and_samples(client: TestClient) -> None:
    expected = [
        text
        for prompt in ("a", "bc")
        for text in generate(make_model(), TOKENIZER, prompt, max_new_tokens=9, num_samples=2)
    ]
    answer = complete(client, prompt=["a", "bc"], n=2, max_tokens=9)
    assert [choice["text"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 3
    ids = [TOKENIZER.encode(prompt).tolist() for prompt in ("a", "bc")]
    by_id = complete(client, prompt=ids, n=2, max_tokens=9)
    assert by_id["choices"] == answer["choices"]
    assert complete(client, prompt=ids[1])["choices"] == complete(client, prompt="bc")["choices"]


def test_a_stream_is_the_answer_in_pieces(client: TestClient) -> None:
    asked = {"model": "plain", "prompt": "ab", "n": 2, "max_tokens": 40, "logprobs": 2}
    whole = complete(client, **asked)
    streamed = client.post(
        "/v1/completions",
        json=asked | {"stream": True, "stream_options": {"include_usage": True}},
    )
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, last = events(streamed.text)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [c for each in chunks for c in each["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts][-1] == "length"
        for key, values in choice["logprobs"].items():
            assert [v for part in parts for v in part["logprobs"][key]] == values


def test_logprobs_are_the_models_own(client: TestClient) -> None:
    (choice,) = complete(client, max_tokens=6, logprobs=V, temperature=0)["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [0, 1, 2, 3, 4, 5]
    for token, logprob, rivals in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert rivals[token] == logprob == max(rivals.values())  # greedy
        assert sum(np.exp(list(rivals.values()))) == pytest.approx(1, abs=1e-12)
    (bare,) = complete(client, max_tokens=6, logprobs=0, temperature=0)["choices"]
    assert bare["logprobs"] == found | {"top_logprobs": [{}] * 6}


def own_logprobs(ids: list[int], model: GPT) -> list[float]:
    """The model's log-probability of each id after the first, in one pass."""
    with torch.no_grad():
        logits = model.logits(model.hidden_states(torch.tensor([ids])))[0, :-1, :V].double()
    chances = logits.log_softmax(-1)
    return [float(chances[place, token]) for place, token in enumerate(ids[1:])]


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 64, 66, 80])
def test_an_echo_shows_the_prompt_with_the_models_probabilities(
    client: TestClient, n_tokens: int
) -> None:
    prompt = ("abc def gha\nbcd" * 6)[:n_tokens]
    ids = TOKENIZER.encode(prompt).tolist()
    asked = {"prompt": ids, "logprobs": 1, "max_tokens": 3, "seed": 2}
    (plain,) = complete(client, **asked)["choices"]
    answer = complete(client, **asked, echo=True)
    (choice,) = answer["choices"]
    assert choice["text"] == prompt + plain["text"]
    assert answer["usage"]["completion_tokens"] == 3
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == list(range(n_tokens + 3))
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    expected = own_logprobs(ids, make_model())
    assert found["token_logprobs"][1:n_tokens] == pytest.approx(expected, abs=1e-4)
    for key in ("tokens", "token_logprobs", "top_logprobs"):  # to the last bit
        assert found[key][n_tokens:] == plain["logprobs"][key]
    for token, own, best in zip(
        found["tokens"][1:], found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True
    ):
        ((likeliest, most),) = best.items()
        assert own <= most
        assert (own == most) == (token == likeliest)
    # The same in a stream, without a continuation, from the text, without probabilities.
    streamed = client.post(
        "/v1/completions", json={"model": "plain", **asked, "echo": True, "stream": True}
    )
    parts = [each["choices"][0] for each in events(streamed.text)]
    assert "".join(part["text"] for part in parts) == choice["text"]
    for key, values in found.items():
        assert [v for part in parts for v in part["logprobs"][key]] == values
    (alone,) = complete(client, **asked | {"max_tokens": 0, "prompt": prompt}, echo=True)["choices"]
    assert (alone["text"], alone["finish_reason"]) == (prompt, "length")
    assert alone["logprobs"] == {key: values[:n_tokens] for key, values in found.items()}
    bare = asked | {"logprobs": None}
    assert complete(client, **bare, echo=True)["choices"][0]["text"] == choice["text"]
    assert complete(client, **bare, echo=True)["choices"][0]["logprobs"] is None


def test_an_echo_is_the_prompt_that_was_given_and_is_told_once(client: TestClient) -> None:
    begins = CharTokenizer("\n abcdefgh")
    begins.prefix = [3]
    with client_of(served("begins", begins)) as other:
        asked = {"prompt": ["ab", ""], "echo": True, "logprobs": 0, "max_tokens": 0}
        first, empty = other.post("/v1/completions", json=asked).json()["choices"]
        assert first["text"] == "ab"
        assert first["logprobs"]["tokens"] == ["", "a", "b"]
        assert first["logprobs"]["token_logprobs"][0] is None
        assert (empty["text"], empty["logprobs"]["tokens"]) == ("", [""])
    # A text that outgrows the context is read anew, not shown anew; a prompt has no stops.
    long = {"prompt": "ab", "max_tokens": 200, "n": 2, "stop": "ab", "ignore_eos": True}
    plain, shown = (complete(client, **long, echo=echo)["choices"] for echo in (False, True))
    assert [each["text"] for each in shown] == ["ab" + each["text"] for each in plain]


def test_a_stop_string_ends_the_text_and_is_never_shown(client: TestClient) -> None:
    whole = complete(client, max_tokens=60)["choices"][0]["text"]
    stop = whole[20:23]
    at = whole.index(stop)
    asked = {"model": "plain", "prompt": "ab", "max_tokens": 60, "stop": ["Zz", stop]}
    answer = complete(client, logprobs=1, **asked)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[:at], "stop")
    assert "".join(choice["logprobs"]["tokens"]) == whole[:at]
    assert answer["usage"]["completion_tokens"] == at + 3
    streamed = events(client.post("/v1/completions", json=asked | {"stream": True}).text)
    assert "".join(each["choices"][0]["text"] for each in streamed) == whole[:at]


def test_a_conversation(client: TestClient) -> None:
    messages = [
        {"role": "system", "content": "abc", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "d"}, {"type": "text", "text": "e"}]},
        {"role": "assistant", "content": None, "refusal": "f", "tool_calls": None},
    ]
    asked = {"model": "talker", "messages": messages, "max_completion_tokens": 12}
    answer = client.post("/v1/chat/completions", json=asked).json()
    (expected,) = generate(make_model(), TALKER, "abc\nde\nf\n", max_new_tokens=12)
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": expected}
    asked |= {"stream": True, "logprobs": True, "top_logprobs": 2}
    first, *rest = events(client.post("/v1/chat/completions", json=asked).text)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [each["choices"][0]["delta"].get("content", "") for each in rest]
    assert "".join(deltas) == expected
    tokens = [t for each in rest for t in each["choices"][0]["logprobs"]["content"]]
    assert "".join(token["token"] for token in tokens) == expected
    assert [len(token["top_logprobs"]) for token in tokens] == [2] * 12
    assert tokens[0]["bytes"] == list(tokens[0]["token"].encode())


def test_an_answer_without_a_limit_ends_with_the_context(client: TestClient) -> None:
    asked = {"model": "talker", "messages": [{"role": "user", "content": "abcabc"}]}
    answer = client.post("/v1/chat/completions", json=asked).json()
    assert answer["usage"] == {
        "prompt_tokens": 7, "completion_tokens": 74, "total_tokens": 81,
    }  # fmt: skip
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_template_that_asks_with_what_it_does_not_write_is_said() -> None:
    asks = CharTokenizer("\n abcdefgh")
    assert TALKER.chat is not None
    asks.chat = ChatTemplate(TALKER.chat.source + "{% if add_generation_prompt %}abc{% endif %}")
    for tokenizer, words in ((asks, ["asks: ", "asks for an answer with 'abc'"]), (TALKER, [])):
        model = served("asks", tokenizer)
        said = model.remarks()
        model.close()
        assert len(said) == bool(words)
        assert all(each in said[0] for each in words)


def test_models_and_health(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [each["id"] for each in listed["data"]] == ["plain", "talker"]
    assert client.get("/v1/models/talker").json()["has_chat_template"]
    assert client.get("/health").json() == {
        "status": "ok",
        "models": ["plain", "talker"],
        "texts": {"plain": 0, "talker": 0},
    }


@pytest.mark.parametrize("n_levels", [400, 480, 490, 500, 800, 985, 1600])
def test_messages_that_are_nested_deep(client: TestClient, n_levels: int) -> None:
    deep = '{"a":' * n_levels + "1" + "}" * n_levels
    body = f'{{"model":"talker","messages":[{{"role":"user","content":"a","x":{deep}}}]}}'
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code in ((200, 400) if n_levels < 490 else (400,))
    if answer.status_code == 400:
        assert "nested" in answer.json()["error"]["message"] or n_levels >= 985


@pytest.mark.parametrize(
    ("path", "fields", "status", "said", "param"),
    [
        ("completions", {"model": "plane"}, 404, "did you mean plain", "model"),
        ("completions", {"model": None}, 404, "Served: plain, talker", "model"),
        ("completions", {"\ud800": 1}, 400, "\\ud800 is no field", "\\ud800"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a", "\ud800": 1}]},
            400,
            "\\ud800 is no field's name: it has half a surrogate pair",
            "\\ud800",
        ),
        ("completions", {"stream_options": {"\ud800": 1}}, 400, "surrogate", "\\ud800"),
        ("completions", {"prompt": ["a", 5]}, 400, "prompt[1]: ", "prompt"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}, {"role": 7, "content": "a"}]},
            400,
            "message 1 is ",
            "messages",
        ),
        ("completions", {"temprature": 1}, 400, "did you mean temperature", "temprature"),
        ("completions", {"temperature": -1}, 400, "greater than or equal to 0", "temperature"),
        ("completions", {"temperature": "hot"}, 400, "valid number", "temperature"),
        ("completions", {"max_tokens": 0}, 400, "with echo: true it shows", "max_tokens"),
        ("completions", {"max_tokens": -1}, 400, "greater than or equal to 0", "max_tokens"),
        ("completions", {"max_tokens": "9"}, 400, "valid integer", "max_tokens"),
        ("completions", {"n": 5}, 400, "1 × 5 texts", "n"),
        ("completions", {"prompt": []}, 400, "0 × 1 texts", "prompt"),
        ("completions", {"prompt": ["a"] * 5}, 400, "5 × 1 texts", "prompt"),
        ("completions", {"prompt": "a" * 81}, 400, "81 tokens", "prompt"),
        ("completions", {"prompt": "xyz"}, 400, "U+0078", "prompt"),
        ("completions", {"prompt": [99]}, 400, "outside the vocabulary", "prompt"),
        ("completions", {"prompt": [2**70]}, 400, "", "prompt"),
        ("completions", {"prompt": 5}, 400, "prompt", "prompt"),
        ("completions", {"logprobs": 21}, 400, "less than or equal to 20", "logprobs"),
        ("completions", {"stop": ["a"] * 17}, 400, "at most 16", "stop"),
        ("completions", {"stop": ""}, 400, "1 to 256", "stop"),
        ("completions", {"presence_penalty": 0.5}, 400, "penalty=0.5 is not", "presence_penalty"),
        ("completions", {"repetition_penalty": 1.1}, 400, "not supported", "repetition_penalty"),
        ("completions", {"guided_regex": "a+"}, 400, 'guided_regex="a+"', "guided_regex"),
        ("completions", {"top_k": -2}, 400, "greater than or equal to 1", "top_k"),
        ("completions", {"top_p": 0}, 400, "greater than 0", "top_p"),
        ("completions", {"seed": 2**64}, 400, "", "seed"),
        ("chat/completions", {"messages": []}, 400, "at least 1", "messages"),
        ("chat/completions", {}, 400, "required", "messages"),
        (
            "chat/completions",
            {"model": "plain", "messages": [{"role": "user", "content": "a"}]},
            400,
            "no chat template",
            "messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "x", "content": "a"}]},
            400,
            "no x",
            "messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "message 0 has a part {'type': 'image_url'}; only parts of text can be read",
            "messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "\ud800x", "content": "a"}]},
            400,
            "no \\ud800x",
            "messages",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "functions": [{}]},
            400,
            "not supported",
            "functions",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "top_logprobs": 2},
            400,
            "without logprobs",
            "top_logprobs",
        ),
    ],
)
def test_wrong_requests(
    client: TestClient, path: str, fields: dict[str, Any], status: int, said: str, param: str
) -> None:
    model = "talker" if path.startswith("chat") else "plain"
    body = json.dumps({"model": model} | fields)
    answer = client.post(f"/v1/{path}", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_standard_fields_that_ask_for_nothing_pass(client: TestClient) -> None:
    plain = complete(client, max_tokens=5)["choices"]
    neutral = {"user": "me", "metadata": {"a": "b"}, "presence_penalty": 0, "logit_bias": None}
    assert complete(client, max_tokens=5, **neutral, seed=None, n=None)["choices"] == plain
    others = {
        "best_of": 1, "frequency_penalty": 0.0, "logit_bias": {}, "repetition_penalty": 1.0,
        "min_p": 0, "top_k": -1, "guided_json": None, "stop_token_ids": [], "min_tokens": 0,
        "mirostat": 0, "cache_prompt": True,
    }  # fmt: skip
    assert complete(client, max_tokens=5, **others)["choices"] == plain
    assert complete(client, max_tokens=5, top_k=0)["choices"] == plain


def test_a_longer_text_than_there_is_room_for_is_shortened_and_a_header_says_so(
    client: TestClient,
) -> None:
    asked = {"model": "plain", "prompt": "a", "max_tokens": 2001}
    answer = client.post("/v1/completions", json=asked)
    assert answer.headers["X-Max-Tokens-Clamped"] == "2001 to 2000"
    assert answer.json()["usage"]["completion_tokens"] == 2000
    messages = [{"role": "user", "content": "abcabc"}]
    for field in ("max_tokens", "max_completion_tokens"):
        chat = {"model": "talker", "messages": messages, field: 100_000, "stream": True}
        answer = client.post("/v1/chat/completions", json=chat)
        assert answer.headers["X-Max-Tokens-Clamped"] == "100000 to 74"
        assert events(answer.text)[-1]["choices"][0]["finish_reason"] == "length"
    answer = client.post("/v1/completions", json=asked | {"max_tokens": 3})
    assert "X-Max-Tokens-Clamped" not in answer.headers


def test_null_is_a_field_that_is_left_out(client: TestClient) -> None:
    """As OpenAI's clients send what their callers leave open."""
    others = {*other_fields()["neutral"], *other_fields()["ignored"]}
    fields = {*CompletionRequest.model_fields, *others} - {"model", "max_tokens"}
    assert complete(client, max_tokens=5, **dict.fromkeys(fields - {"prompt"}))["choices"]
    fields = {*ChatRequest.model_fields, *others} - {"messages", "model"}
    asked = {"model": "talker", "messages": [{"role": "user", "content": "a"}]}
    nulls = dict.fromkeys(sorted(fields))
    answer = client.post("/v1/chat/completions", json=asked | nulls)
    assert answer.status_code == 200, answer.json()
    answer = client.post("/v1/chat/completions", json={"model": "talker", "messages": None})
    assert answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("headers", "body", "status", "said"),
    [
        ({}, b"{", 400, "not JSON"),
        ({}, b"\xff", 400, "not JSON"),
        ({}, b"[]", 400, "not a JSON object"),
        ({}, b"[" * 9_999, 400, "not JSON"),
        ({}, b'{"prompt": "' + b"a" * 10_000 + b'"}', 413, "10,000 bytes"),
        ({"Content-Type": "text/plain"}, b"{}", 415, "application/json"),
        ({"Origin": "https://evil.example"}, b"{}", 403, "other sites"),
        ({"Origin": "null"}, b"{}", 403, "other sites"),
        ({"Origin": "http://["}, b"{}", 403, "other sites"),
        ({"Host": "evil.example:8000"}, b"{}", 403, "not this server's"),
        ({"Host": ""}, b"{}", 403, "not this server's"),
    ],
)
def test_who_may_ask_and_how(
    client: TestClient, headers: dict[str, str], body: bytes, status: int, said: str
) -> None:
    sent = {"Content-Type": "application/json"} | headers
    answer = client.post("/v1/completions", content=body, headers=sent)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_a_page_of_the_server_itself_may_ask(client: TestClient) -> None:
    asked = {"model": "plain", "prompt": "a", "max_tokens": 2}
    for host in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000"):
        headers = {"Origin": f"http://{host}", "Host": host}
        assert client.post("/v1/completions", json=asked, headers=headers).status_code == 200


def test_a_key_is_asked_for_and_never_shown() -> None:
    access = Access(LOOPBACK, api_key="secret-1")
    assert "secret" not in repr(access)
    with client_of(served("plain"), access=access) as client:
        asked = {"prompt": "a", "max_tokens": 2}
        for given in (None, "Bearer secret-2", "Bearer", "secret-1", "Basic secret-1", "Bearer é"):
            headers = {} if given is None else {"Authorization": given.encode("latin-1")}
            for path in ("/v1/models", "/v1/models/plain", "/docs"):
                assert client.get(path, headers=headers).status_code == 401
            answer = client.post("/v1/completions", json=asked, headers=headers)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "secret" not in answer.text
        headers = {"Authorization": "Bearer secret-1"}
        assert client.post("/v1/completions", json=asked, headers=headers).status_code == 200
        assert client.get("/v1/models", headers=headers).status_code == 200
        for path in ("/", "/health"):
            assert client.get(path).status_code == 200


def test_pages_of_the_sites_that_are_named_may_ask() -> None:
    site = "https://chat.example"
    access = Access(LOOPBACK, api_key="k", origins=[site])
    with client_of(served("plain"), access=access) as client:
        asked = {
            "Origin": site,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
        }
        first = client.options("/v1/completions", headers=asked)
        assert first.status_code == 200
        assert first.headers["Access-Control-Allow-Origin"] == site
        assert "x-stainless-lang" in first.headers["Access-Control-Allow-Headers"]
        body = {"prompt": "a", "max_tokens": 2}
        headers = {"Origin": site, "Authorization": "Bearer k"}
        answer = client.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == site
        other = {"Origin": "https://other.example"}
        refused = client.post("/v1/completions", json=body, headers=headers | other)
        assert refused.status_code == 403
        assert "Access-Control-Allow-Origin" not in refused.headers
        assert client.options("/v1/completions", headers=asked | other).status_code == 400
    with client_of(served("plain"), access=Access(LOOPBACK, origins=["*"])) as client:
        answer = client.post("/v1/completions", json=body, headers={"Origin": site})
        assert answer.headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("kind", ["Application/JSON", "application/json ; charset=utf-8"])
def test_a_media_type_is_json_however_it_is_written(client: TestClient, kind: str) -> None:
    body = b'{"model": "plain", "prompt": "a", "max_tokens": 2}'
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": kind})
    assert answer.status_code == 200, answer.text


def test_a_cache_that_no_memory_holds_is_refused() -> None:
    loaded = SimpleNamespace(model=make_model(), tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match=r"--slots 1000000000000000: .* cache of tiny"):
        served_model("tiny", loaded, 10**15)  # type: ignore[arg-type]


def test_a_body_of_unknown_length_is_counted(client: TestClient) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(20):
            yield b" " * 1000

    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=chunks(), headers=headers)
    assert answer.status_code == 413


def test_unknown_paths_and_methods(client: TestClient) -> None:
    for path in ("/v1/embeddings", "/docs"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "/v1/completions" in answer.json()["error"]["message"]
    assert client.get("/v1/completions").status_code == 405


def test_only_model_need_not_be_named() -> None:
    with client_of(served("one")) as client:
        assert client.post("/v1/completions", json={"prompt": "a"}).json()["model"] == "one"


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    with client_of(served("plain", n_slots=2), waiting=1) as client:
        answer = client.post("/v1/completions", json={"prompt": "a", "n": 4})
        assert answer.status_code == 503
        assert answer.headers["Retry-After"] == "2"
        assert answer.json()["error"]["code"] == "server_busy"
        assert "at most 3 (2 at once and 1 in the queue)" in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "a", "n": 3}).status_code == 200


def test_a_request_whose_time_is_up() -> None:
    limits = replace(LIMITS, max_tokens=10**6, seconds=0.1)
    with client_of(served("plain"), limits=limits) as client:
        asked = {"prompt": "a", "max_tokens": 10**6}
        answer = client.post("/v1/completions", json=asked)
        assert answer.status_code == 408
        assert answer.json()["error"]["code"] == "timeout"
        streamed = client.post("/v1/completions", json=asked | {"stream": True}).text
        *texts, last = [json.loads(line[6:]) for line in streamed.split("\n\n") if line]
        assert texts
        assert last["error"]["code"] == "timeout"
        assert client.get("/health").json()["texts"] == {"plain": 0}


def test_a_failing_pass_fails_its_requests_and_no_later_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = served("plain")
    with client_of(model) as client:
        monkeypatch.setattr(model.slots, "write", lambda rows: 1 / 0)
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert "ZeroDivisionError" in answer.json()["error"]["message"]
        monkeypatch.undo()
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_all_that_computes_is_one_thread() -> None:
    worker = Worker(most_waiting=1)
    first, second = (worker.call(threading.get_ident) for _ in range(2))
    assert first == second != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0)
    worker.close()


def test_cancelled_jobs_free_their_slots_and_stopping_refuses() -> None:
    async def main() -> None:
        model = served("plain", n_slots=2)
        worker = Worker(most_waiting=100)
        worker.add(model)
        worker.use_running_loop()
        long, short = TextRequest(np.array([1]), 10**6), TextRequest(np.array([1]), 5)
        jobs = [worker.submit(model, [long, long]) for _ in range(10)]
        assert model.n_texts == 20
        for job in jobs:
            worker.cancel(job)
            worker.cancel(job)  # once is enough
        assert model.n_texts == 0
        job = worker.submit(model, [short])
        found = [piece async for pieces in job.pieces(30) for _, piece in pieces]
        assert found[-1].n_tokens == 5
        last = worker.submit(model, [long])
        worker.is_stopping = True
        with pytest.raises(ServerBusyError, match="stopping"):
            worker.submit(model, [short])
        worker.fail_all("time is up")
        with pytest.raises(ServerBusyError, match="time is up"):
            async for _ in last.pieces(30):
                pass
        assert model.n_texts == 0
        await asyncio.to_thread(worker.close)

    asyncio.run(main())


def test_characters_of_several_tokens_are_shown_whole() -> None:
    class Bytes(CharTokenizer):
        """A tokenizer whose ids are bytes, as far as this test goes."""

        def decode(self, ids: Any) -> str:
            return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    text = "aé€😀b"
    asked = TextRequest(np.array([97]), len(text.encode()), follows_text=False)
    continuation = Continuation(asked, Bytes("ab"))
    pieces = [continuation.push(byte, np.zeros(256)).text for byte in text.encode()]
    assert [piece for piece in pieces if piece] == list(text)


def test_a_stop_string_over_several_tokens_is_held_back() -> None:
    asked = TextRequest(np.array([0]), 50, stop=("abc", "bd"))
    continuation = Continuation(asked, TOKENIZER)
    shown = [continuation.push(int(TOKENIZER.encode(c)[0]), np.zeros(V)).text for c in "eabeabd"]
    assert shown == ["e", "", "", "abe", "", "", "a"]
    assert continuation.finish_reason == "stop"


def test_requests_beside_each_other_get_their_own_texts(client: TestClient) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(seed: int) -> Any:
        return complete(client, max_tokens=30, seed=seed, logprobs=1)["choices"]

    alone = [ask(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(6))) == alone
    deadline = time.monotonic() + 10
    while any(client.get("/health").json()["texts"].values()):
        assert time.monotonic() < deadline
