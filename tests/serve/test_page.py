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


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_the_models_and_the_settings_of_the_link(tmp_path):
    for name in ("first", "second"):
        save_run(tmp_path / name)
    server = Server(str(tmp_path / "first"), str(tmp_path / "second"))
    try:
        url = server.url.removesuffix("v1") + "#beside=second&prompt=abc&seed=5"
        done = subprocess.run(
            [str(BROWSER), "--headless=new", "--no-sandbox", "--virtual-time-budget=5000",
             f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", url],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    finally:
        server.process.terminate()
        server.process.communicate(timeout=30)
    assert done.stdout.count('<option value="first">') == 2  # it, and the other beside it
    assert done.stdout.count('<option value="second">') == 2
    assert re.search(r'id="state"[^>]*>ready<', done.stdout)
