import html
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager

import pytest
from pages import check_page, text_of

from pentameter.disk.lock import RunLock
from pentameter.errors import ConfigError
from pentameter.record import event_reader
from pentameter.record.event_reader import EventReader
from pentameter.record.events import EvalMetrics, StepMetrics
from pentameter.record.reading import read_run
from pentameter.report.watch import board
from pentameter.report.watch.board import SPARK_POINTS, Board, check_runs_folder
from pentameter.report.watch.watch_server import WatchServer


@pytest.fixture
def runs(make_run, run_events, run_end, tmp_path, monkeypatch):
    """A folder with a finished run, one under way of other settings, and the board's haste."""
    monkeypatch.setattr(board, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr(board, "RENDER_SHARE", 1e9)
    folder = tmp_path / "runs"
    whole = make_run([*run_events(400), run_end]).rename(folder / "whole")
    half = shutil.copytree(whole, folder / "half")
    write(half, run_events(400)[:30])
    config = half / "config.toml"
    config.write_text(config.read_text().replace("clip_norm = 1.0", "clip_norm = 0.5"))
    return folder


def write(folder, events, mode="w"):
    with open(folder / "metrics.jsonl", mode, encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


@contextmanager
def served(folder):
    with WatchServer(folder, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=30)
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    body = reply.read().decode()
    connection.close()
    return reply.status, body


def rows(news):
    return {row["name"]: row for row in news["rows"]}


# -- what is read of a run ----------------------------------------------------------------------


def test_a_run_followed_is_the_run_read_whole(make_run, run_events, run_end):
    events = run_events(400)
    folder = make_run(events[:40])
    followed = EventReader(folder)
    assert followed.update()
    assert not followed.update()
    with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"event": "train", "step": 500, "lo')
    assert not followed.update()  # half a line is none yet
    write(folder, [*events, run_end])  # as after a rewind, which writes another file
    assert followed.update()
    assert repr(read_run(folder, followed)) == repr(read_run(folder))  # NaN equals none


def test_only_what_is_new_is_read(make_run, run_events):
    events = run_events(400)
    folder = make_run(events[:40])
    followed = EventReader(folder)
    followed.update()
    taken = []
    followed._take = taken.append
    write(folder, events[40:41], "a")
    followed.update()
    assert taken == [json.dumps(events[40]).encode() + b"\n"]


def test_a_file_that_was_cut_and_grew_again_is_read_anew(make_run, run_events):
    folder = make_run(run_events(400))
    followed = EventReader(folder)
    followed.update()
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    longer = [line.replace('"loss": ', '"loss": 1') for line in lines[20:]]
    with open(path, "r+", encoding="utf-8") as file:  # the same inode, longer than before
        file.truncate(0)
        file.writelines([*lines[:20], *longer, *longer])
    assert followed.update()
    assert repr(read_run(folder, followed)) == repr(read_run(folder))  # NaN equals none


def test_what_is_kept_of_a_long_run_is_bounded_and_no_spike_is_lost(make_run, monkeypatch):
    monkeypatch.setattr(event_reader, "MOST_EVENTS", 100)
    monkeypatch.setattr(event_reader, "READ_BYTES", 5000)
    losses = [2.0 + step % 7 / 100 for step in range(5000)]
    losses[1234], losses[4321] = 9.0, 0.5
    folder = make_run([{"event": "train", "step": i, "loss": v} for i, v in enumerate(losses)])
    followed = EventReader(folder)
    while followed.update() or followed.has_more:
        assert len(followed.of(StepMetrics)) <= 100
    kept = [event.loss for event in followed.of(StepMetrics)]
    assert (max(kept), min(kept)) == (9.0, 0.5)
    assert (kept[0], kept[-1]) == (losses[0], losses[-1])


def test_each_split_of_a_long_run_keeps_its_curve(make_run, monkeypatch):
    monkeypatch.setattr(event_reader, "MOST_EVENTS", 100)
    losses = {"val": 2.0, "news": 1.0, "code": 3.0}
    folder = make_run(
        [
            {"event": "eval", "step": step, "split": split, "loss": loss + step % 7 / 1000}
            for step in range(500)
            for split, loss in losses.items()
        ]
    )
    followed = EventReader(folder)
    while followed.update() or followed.has_more:
        pass
    kept = {split: [e for e in followed.of(EvalMetrics) if e.split == split] for split in losses}
    for split, events in kept.items():
        assert len(events) >= 15
        assert (events[0].step, events[-1].step) == (0, 499)
        assert min(event.loss for event in events) == losses[split]


def test_a_metrics_file_of_another_kind_is_told_once(make_run, monkeypatch):
    monkeypatch.setattr(event_reader, "MOST_UNREADABLE", 10)
    followed = EventReader(make_run("no event\n" * 20))
    followed.update()
    assert followed.unread == "metrics.jsonl has over 10 unreadable lines"
    assert not followed.update()


# -- the table ----------------------------------------------------------------------------------


def test_rows_say_state_progress_and_what_differs(runs):
    with RunLock(runs / "half" / "run.lock"):
        news = Board(runs).news("", -1)
    assert news["addresses"] == ["half", "whole"]
    assert news["columns"] == ["optimizer.clip_norm"]
    half, whole = (rows(news)[name] for name in ("half", "whole"))
    assert (half["state"], whole["state"]) == ("running", "finished")
    assert half["percent"] == half["steps"] / 400
    assert whole["percent"] == 1.0
    assert half["left"] == [1.0, "1 s"]
    assert half["settings"] == {"optimizer.clip_norm": "0.5"}
    assert half["where"] == f"{socket.gethostname()} · Some CPU"
    assert whole["where"] == "Some CPU"
    assert (half["why"], whole["why"]) == ("", "")


def test_only_what_changed_is_sent_and_of_a_curve_only_what_was_appended(runs, run_events):
    followed = Board(runs)
    first = followed.news("", -1)
    assert followed.news(first["session"], first["version"])["rows"] == []
    new = [event for event in run_events(400) if event["step"] > 260][:3]
    write(runs / "half", new, "a")
    second = followed.news(first["session"], first["version"])
    assert list(rows(second)) == ["half"]
    points = [[e["step"], e["loss"]] for e in new if e["event"] == "train"]
    assert rows(second)["half"]["points"] == points
    assert rows(second)["half"]["anew"] is False
    assert len(rows(followed.news("another", 99))["half"]["points"]) == len(
        rows(first)["half"]["points"]
    ) + len(points)


def test_a_sparkline_stays_small(runs, run_events):
    write(runs / "half", run_events(3000, interval=1))
    row = rows(Board(runs).news("", -1))["half"]
    assert 50 < len(row["points"]) <= SPARK_POINTS


def test_a_run_that_was_stopped_or_failed_says_why(runs, run_events):
    end = {"event": "end", "step": 50, "reason": "error: loss is nan", "kind": "error"}
    write(runs / "half", [*run_events(50), end])
    row = rows(Board(runs).news("", -1))["half"]
    assert (row["state"], row["kind"]) == ("failed", "bad")
    assert row["why"] == "Gave up at step 50 of 50: loss is nan."


def test_a_broken_run_is_one_line(runs):
    (runs / "empty").mkdir()
    (runs / "empty" / "log.txt").touch()
    (runs / "link").symlink_to(runs / "whole")
    (runs / "notes").mkdir()  # no run at all
    (runs / "a file").touch()
    os.mkfifo(runs / "a pipe")
    damaged = shutil.copytree(runs / "whole", runs / "damaged")
    (damaged / "metrics.jsonl").unlink()
    os.mkfifo(damaged / "metrics.jsonl")
    (damaged / "config.toml").write_text("name = [")
    news = Board(runs).news("", -1)
    assert news["addresses"] == ["damaged", "empty", "half", "link", "whole"]
    found = rows(news)
    assert found["empty"]["why"] == "no run: it has neither config.toml nor metrics.jsonl"
    assert "a symbolic link" in found["link"]["why"]
    assert found["damaged"]["state"] == "not started"
    assert any("not a regular file" in words for words in found["damaged"]["unread"])
    assert found["whole"]["state"] == "finished"


def test_a_run_that_appears_or_goes(runs):
    followed = Board(runs)
    first = followed.news("", -1)
    shutil.copytree(runs / "whole", runs / "third")
    shutil.rmtree(runs / "half")
    second = followed.news(first["session"], first["version"])
    assert second["addresses"] == ["third", "whole"]
    assert "third" in rows(second)


def test_a_folder_that_the_first_run_will_make(runs, tmp_path):
    board = Board(tmp_path / "later")
    assert board.news("", -1)["addresses"] == []
    runs.rename(tmp_path / "later")
    assert board.news("", -1)["addresses"] == ["half", "whole"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "there is no such folder"), ("runs/whole", "is itself a run; watch the folder")],
)
def test_folders_that_cannot_be_watched(runs, tmp_path, name, words):
    with pytest.raises(ConfigError, match=words):
        check_runs_folder(tmp_path / name)


# -- the pages ----------------------------------------------------------------------------------


def test_the_pages(runs):
    with served(runs) as server:
        status, page = ask(server, "/")
        assert status == 200
        check_page(page.replace('data-live="/runs.json"', ""))
        assert "connect-src 'self'" in page
        with urllib.request.urlopen(server.url) as reply:
            assert "frame-ancestors 'none'" in reply.headers["Content-Security-Policy"]
        status, reply = ask(server, "/runs.json?after=-1")
        assert json.loads(reply)["addresses"] == ["half", "whole"]
        status, page = ask(server, "/run/half")
        assert "optimizer" in text_of(page)
        live = re.search('data-live="([^"]*)"', page)[1]
        version = re.search('data-version="([^"]*)"', page)[1]
        assert json.loads(ask(server, live)[1]) == {"version": version}
        status, page = ask(server, "/compare?runs=whole,half")
        assert "2 runs compared" in text_of(page)


def test_a_report_follows_its_run(runs, run_events):
    with served(runs) as server:
        _, page = ask(server, "/run/half")
        live = re.search('data-live="([^"]*)"', page)[1]
        before = ask(server, live)[1]
        new = [event for event in run_events(400) if event["step"] > 260][:3]
        write(runs / "half", new, "a")
        assert ask(server, live)[1] != before
        assert f"{new[-1]['step']}" in text_of(ask(server, "/run/half")[1])


@pytest.mark.parametrize("error", [RuntimeError("a fault"), BrokenPipeError("it left")])
def test_an_error_in_answering_is_printed_unless_the_browser_left(runs, capsys, error):
    with served(runs) as server:
        try:
            raise error
        except Exception:
            server.handle_error(None, ("127.0.0.1", 1))
    assert ("a fault" in capsys.readouterr().err) == isinstance(error, RuntimeError)


def test_frozen_pages_connect_to_nothing(runs):
    from pentameter.report.pages.page import render_page

    page = check_page(render_page(read_run(runs / "half")))
    assert "connect-src" not in page
    assert "data-live" not in page


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/run/../whole", "no run in"),
        ("/run/..%2F..%2Fetc", "no run in"),
        ("/run/%2Fetc%2Fpasswd", "no run in"),
        ("/run/", "no run in"),
        ("/compare?runs=whole,nobody", "nobody is no run in"),
        ("/compare?runs=whole", "takes two runs"),
        ("/compare", "takes two runs"),
        ("/runs.json?after=x", "is no version"),
        ("/etc/passwd", "there is no page"),
    ],
)
def test_what_is_not_there(runs, path, words):
    with served(runs) as server:
        status, body = ask(server, path)
    assert status == 404
    assert words in body


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8001", 200), ("127.0.0.1", 200), ("[::1]:8001", 200), ("evil.example", 403),
     ("127.0.0.1.evil.example:8001", 403), ("", 403)],
)  # fmt: skip
def test_a_domain_that_is_made_to_point_here_is_refused(runs, host, status):
    with served(runs) as server:
        assert ask(server, "/runs.json", Host=host)[0] == status


def test_a_folder_whose_name_is_not_utf8_has_its_pages(runs):
    name = os.fsdecode(b"run-\xff 100% ?#")
    (runs / "half").rename(runs / name)
    with served(runs) as server:
        news = json.loads(ask(server, "/runs.json")[1])
        address = next(a for a in news["addresses"] if a != "whole")
        assert address == "run-%FF%20100%25%20%3F%23"
        for path in (f"/run/{address}", f"/compare?runs={address},whole"):
            status, page = ask(server, path)
            assert status == 200, page
            live = html.unescape(re.search('data-live="([^"]*)"', page)[1])
            assert ask(server, live)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_written(runs, method):
    with served(runs) as server:
        assert ask(server, "/", method)[0] == 501


def test_a_port_in_use_is_told_with_one_that_is_free(runs):
    with served(runs) as server:
        port = server.server_address[1]
        with pytest.raises(ConfigError, match=rf"--port {port} is in use on .* --port \d+ is free"):
            WatchServer(runs, "127.0.0.1", port)
    with pytest.raises(ConfigError, match="--port 99999 must be from 0 to 65535"):
        WatchServer(runs, "127.0.0.1", 99999)


def test_ctrl_c_ends_the_command_with_0(runs):
    process = subprocess.Popen(
        [sys.executable, "-m", "pentameter", "watch", runs, "--port", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        said = process.stdout.readline()
        assert re.match(r"http://127\.0\.0\.1:\d+/  \(the runs in .*; Ctrl-C ends\)", said)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("chromium") is None, reason="needs a Chromium: apt install chromium"
)
def test_a_browser_shows_the_runs_and_what_is_appended(runs, run_events, tmp_path, monkeypatch):
    """The page is asked for once; the second answer of the table has steps that the first had
    not. A name that is not UTF-8 stops nothing, nor does a run that cannot be read."""
    (runs / "broken").symlink_to(runs / "half")
    (runs / "whole").rename(runs / os.fsdecode(b"whole\xff"))
    new = [event for event in run_events(400) if event["step"] > 260][:3]
    asked = []

    class Growing(Board):
        def news(self, session, after):
            asked.append(after)
            if len(asked) == 2:
                write(runs / "half", new, "a")
            return super().news(session, after)

    monkeypatch.setattr("pentameter.report.watch.watch_server.Board", Growing)
    with served(runs) as server:
        done = subprocess.run(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu",
             f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
             server.url],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
    assert asked[0] == -1
    assert min(asked[1:]) >= 0  # a page that was loaded anew would ask for everything again
    table = re.search("<tbody>.*</tbody>", done.stdout, flags=re.DOTALL)[0]
    assert re.findall('href="/run/([^"]*)"', table) == ["half", "whole%FF"]
    assert table.count("<polyline") == 2
    heads = len(re.findall("<th ", re.search("<thead>.*</thead>", done.stdout, re.DOTALL)[0]))
    cells = [len(re.findall("<t[dh][ >]", row)) for row in table.split("</tr>")[:-1]]
    assert heads > 9
    assert cells == [heads] * 3  # sorting reads a cell of each row
    assert f"step {new[-1]['step']}" in text_of(table)
