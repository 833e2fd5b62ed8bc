"""The page at `/`: it is one file that loads nothing else, and a browser fills it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from test_app import client_of, served
from test_server import Server
from tiny import save_run

from pentameter.serve import app

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


def test_the_page_is_one_file_that_speaks_to_this_server_alone():
    with client_of(served("plain")) as client:
        answer = client.get("/")
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"https?://|src=|@import|innerHTML", answer.text)
    assert set(re.findall(r'"(/v1/[a-z/]+)"', answer.text)) == {
        "/v1/models", "/v1/completions", "/v1/chat/completions"
    }  # fmt: skip


def dom(folder: Path, url: str) -> str:
    """The page at `url` as the browser, with its profile in `folder`, has filled it."""
    command = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--virtual-time-budget=5000",
        f"--user-data-dir={folder / 'browser'}", "--dump-dom", url,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def page_with(folder: Path, script: str) -> str:
    """The URL of a copy in `folder` of the page, whose script begins with `script`."""
    page = (Path(app.__file__).parent / "templates" / "page.html").read_text(encoding="utf-8")
    begins = '"use strict";\n'
    assert page.count(begins) == 1
    file = folder / "page.html"
    file.write_text(page.replace(begins, begins + script), encoding="utf-8")
    return file.as_uri()


WRITES_WHILE_WRITING = """
window.fetch = async (path) => path === "/v1/models"
  ? {json: async () => ({data: [{id: "talker", has_chat_template: true}]})} : new Promise(() => {});
setTimeout(() => {
  $("mode").value = "chat";
  const key = () => document.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", ctrlKey: true}));
  $("prompt").value = "first"; key();
  $("prompt").value = "second"; key();
  document.title = `box: ${$("prompt").value}, turns: ${panes[0].turns.map((t) => t.asked)}`;
}, 1000);
"""  # noqa: E501


ANSWERS_WITH_AN_IMAGE = """
const asked = [];
const event = {choices: [{index: 0, delta: {content: "![x](http://evil.example/a.png) <img src=b>"},
  finish_reason: "stop", logprobs: null}]};
const body = () => new Response(`data: ${JSON.stringify(event)}\\n\\ndata: [DONE]\\n\\n`).body;
window.fetch = async (path, options) => {
  if (path === "/v1/models") return {json: async () => ({data: [{id: "talker", has_chat_template: true}]})};
  asked.push(JSON.parse(options.body).messages.map((m) => `${m.role}=${m.content}`).join());
  return {ok: true, body: body()};
};
setTimeout(() => {
  $("system").value = "short"; $("prompt").value = "hi"; $("go").click();
  setTimeout(() => { document.title = [
    `mode: ${$("mode").value}`, `asked: ${asked}`, `images: ${document.images.length}`,
    `said: ${panes[0].turns[0].said.length}`, `legend: ${!$("legend").hidden}`,
  ].join(" "); }, 500);
}, 500);
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_chat_model_is_chatted_with_and_an_image_in_an_answer_is_text(tmp_path):
    shown = dom(tmp_path, page_with(tmp_path, ANSWERS_WITH_AN_IMAGE))
    (title,) = re.findall("<title>(.*)</title>", shown)
    assert title == "mode: chat asked: system=short,user=hi images: 0 said: 43 legend: true"


REFUSES_THE_FIRST = """
const asked = [];
const event = {choices: [{index: 0, delta: {content: "ok"}, finish_reason: "stop", logprobs: null}]};
window.fetch = async (path, options) => {
  if (path === "/v1/models") return {json: async () => ({data: [{id: "talker", has_chat_template: true}]})};
  asked.push(JSON.parse(options.body).messages.map((m) => m.content).join("+"));
  return asked.length === 1 ? {ok: false, json: async () => ({error: {message: "too long"}})}
    : {ok: true, body: new Response(`data: ${JSON.stringify(event)}\\n\\ndata: [DONE]\\n\\n`).body};
};
const send = (text) => { $("prompt").value = text; $("go").click(); };
setTimeout(() => { send("long"); setTimeout(() => { send("short"); setTimeout(() => {
  document.title = `${asked}; errors: ${document.querySelectorAll(".error").length}`; }, 500); }, 500); }, 500);
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_refused_message_is_not_sent_again_with_the_next(tmp_path):
    shown = dom(tmp_path, page_with(tmp_path, REFUSES_THE_FIRST))
    assert "<title>long,short; errors: 1</title>" in shown


WANTS_A_KEY = """
window.fetch = async (path, {headers}) => headers.Authorization === "Bearer k"
  ? {json: async () => ({data: [{id: "talker", has_chat_template: true}]})} : {status: 401};
setTimeout(() => {
  const said = [$("keyed").hidden, $("state").textContent];
  $("key").value = "k"; $("key").dispatchEvent(new Event("change", {bubbles: true}));
  setTimeout(() => { document.title = [...said, $("state").textContent, $("mode").value,
    location.hash.includes("k=")].join(); }, 500);
}, 500);
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_the_page_asks_for_the_key_keeps_it_out_of_the_link_and_chats_with_a_chat_model(tmp_path):
    shown = dom(tmp_path, page_with(tmp_path, WANTS_A_KEY))
    assert "<title>false,this server wants its API key,ready,chat,false</title>" in shown


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_message_sent_while_an_answer_is_written_stays_in_its_box(tmp_path):
    shown = dom(tmp_path, page_with(tmp_path, WRITES_WHILE_WRITING))
    assert "<title>box: second, turns: first</title>" in shown


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_the_models_and_the_settings_of_the_link(tmp_path):
    for name in ("first", "second"):
        save_run(tmp_path / name)
    server = Server(str(tmp_path / "first"), str(tmp_path / "second"))
    try:
        url = server.url.removesuffix("v1") + "#beside=second&prompt=abc&seed=5"
        shown = dom(tmp_path, url)
    finally:
        server.process.terminate()
        server.process.communicate(timeout=30)
    assert shown.count('<option value="first">') == 2  # it, and the other beside it
    assert shown.count('<option value="second">') == 2
    assert re.search(r'id="state"[^>]*>ready<', shown)
