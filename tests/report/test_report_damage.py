"""Run folders that are damaged or hostile: each ends in a whole page or in an error of
`pentameter.errors`, within seconds and a bounded amount of memory."""

import json
import os
import resource
import shutil
import signal
import socket
from functools import partial
from pathlib import Path

import pytest
from pages import check_page

from pentameter.cli import compare, report
from pentameter.errors import PentameterError
from pentameter.record import event_reader
from pentameter.record.reading import read_run
from pentameter.record.results import outcome, results
from pentameter.report.pages.page import render_page

END = {"event": "end", "step": 400, "reason": "completed", "seconds": 3723.0}
SECONDS = 60.0
"""Far more than any of them takes; a reader that waits for a pipe never ends."""
MEMORY_BYTES = 2**30
FILES = ("metrics.jsonl", "config.toml", "plan.json", "environment.json", "log.txt", "run.lock")
SAMPLE = "samples/step-00000100.txt"
SECRET = "what stands outside"


@pytest.fixture(autouse=True)
def _bounded():
    """A test that takes too long is interrupted; what takes too much memory gets a MemoryError."""
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)

    def too_long(*_):
        pytest.fail(f"not done after {SECONDS} s")

    handler = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)


@pytest.fixture
def run(make_run):
    """A small whole run; its loss is not drawn, which would take most of the time."""
    events = [{"event": "start", "step": 0, "run_id": "ab"}, END]
    folder = make_run(events, samples={100: "one"}, log_txt="a line\n", plan_json='{"steps": 400}')
    for name in ("environment.json", "run.lock"):
        (folder / name).write_text("{}")
    (folder / "checkpoints" / "step-00000100").mkdir(parents=True)
    return folder


def make_other(folder):
    """Another, whole run beside a run folder."""
    other = folder.parent / "other"
    other.mkdir(exist_ok=True)
    (other / "metrics.jsonl").write_text(json.dumps(END))
    return other


def read(folder):
    """The pages of `report`, and of `compare` with a whole run, as text; or the error that one of
    them ends in."""
    both = folder.parent / "both.html"
    texts = []
    for verb, arguments in (
        (report, [str(folder)]),
        (compare, [str(folder), str(make_other(folder)), "--out", str(both), "--json"]),
    ):
        try:
            assert verb.run(arguments) == 0
        except PentameterError as error:
            texts.append(str(error))
    for page in (folder / "report.html", both):
        if os.path.isfile(page):  # False, too, where its folder may not be read
            texts.append(check_page(page.read_text(encoding="utf-8")))
    return "\n".join(texts)


# -- what stands under the name of a file -------------------------------------------------------


def gone(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def link(target, path):
    gone(path)
    path.symlink_to(target)


def loop(path):
    link("there", path)
    path.with_name("there").symlink_to(path.name)


def link_outside(path):
    outside = path.parent.parent / "outside"
    if path.is_dir():
        outside.mkdir()
        (outside / "step-00000100.txt").write_text(SECRET)
    else:
        outside.write_text(SECRET if path.suffix == ".txt" else f'{{"name": "{SECRET}"}}')
    link(outside, path)


def pipe(path):
    gone(path)
    os.mkfifo(path)


def listener(path):
    gone(path)
    with socket.socket(socket.AF_UNIX) as opened:
        before = os.getcwd()
        os.chdir(path.parent)  # the address of a socket is short
        try:
            opened.bind(path.name)
        finally:
            os.chdir(before)


def folder_instead(path):
    gone(path)
    path.mkdir()


def file_instead(path):
    gone(path)
    path.write_text("a file")


def terabyte(path):
    if path.is_file():
        os.truncate(path, 2**40)


KINDS = {
    "a link to /dev/zero": partial(link, "/dev/zero"),
    "a link to /dev/tty": partial(link, "/dev/tty"),
    "a link to /proc/self/mem": partial(link, "/proc/self/mem"),
    "a dangling link": partial(link, "nowhere"),
    "a loop of links": loop,
    "a link out of the folder": link_outside,
    "a pipe": pipe,
    "a socket": listener,
    "a terabyte of nothing": terabyte,
    "a folder": folder_instead,
    "a file": file_instead,
    "nothing": gone,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [*FILES, SAMPLE, "samples", "checkpoints", "report.html"])
def test_whatever_stands_under_a_name(run, name, kind):
    KINDS[kind](run / name)
    assert SECRET not in read(run)


CONTENTS = {
    "100,000 [": b"[" * 100_000,
    "900 lists": b"[" * 900 + b"]" * 900,
    "a key of 900 lists": b'{"a":' + b"[" * 900 + b"]" * 900 + b"}",
    "TOML of 900 lists": b"a = " + b"[" * 900 + b"]" * 900,
    "TOML of 100,000 lists": b"a = " + b"[" * 100_000,
    "100,000 objects": b'{"a":' * 100_000,
    "not UTF-8": b"\xff\xfe\x00a = 1\n\xc3",
    "NUL bytes": b"\0" * 10_000,
    "null": b"null",
    "a list": b"[1, 2]",
    "1e400": b"1e400",
    "NaN": b"NaN",
    "TOML of infinities": b"name = inf\na = nan\n[model]\nd_model = inf\nn_layers = -inf\n",
    "TOML of dates": b"name = 2020-01-01\nseed = 2020-01-01T00:00:00Z\n[model]\nd_model = 1:00:00",
    "a TOML number of 4,000 digits": b"seed = " + b"9" * 4000 + b"\n[train]\nsteps = 1e400",
    "10,000 digits": b"1" * 10_000,
    "half an object": b'{"a": ',
    "half of a surrogate pair": b'{"event": "end", "reason": "\\ud800", "name": "\\ud800"}',
    "lists in the place of sections": b'{"model": [1], "steps": [1], "earlier_starts": {"a": {}}}',
}  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("name", FILES[:5])
def test_whatever_a_file_holds(run, name, content):
    (run / name).write_bytes(CONTENTS[content])
    read(run)


HOSTILE = (
    10**400, -(10**400), 2**63, -1, True, None, "1e400", "NaN", "x" * 10_000, "\0\x1b[31m", [], {},
    [[1]], {"a": 10**400}, float("inf"), float("nan"), 1e308, -1e308, 5e-324, 0, -0.0,
)  # fmt: skip
FIELDS = (
    "event", "step", "split", "path", "bytes", "reason", "seconds", "name", "steps", "parameters",
    "tokens_per_step", "ceiling_flops", "entropy_rate", "device", "layout", "precision", "run_id",
)  # fmt: skip
CURVES = ("tokens", "loss", "learning_rate", "grad_norm", "mfu", "tokens_per_second")


def write_events(folder, events):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.mark.parametrize("field", FIELDS)
def test_whatever_a_field_of_an_event_holds(run, run_events, field):
    events = [*run_events(100), END]
    events = [event for event in events if event["event"] not in ("train", "eval")]
    plan = {"steps": 1, "rows_per_epoch": 5, "model": {"parameters": 3, "flops_convention": "6N"}}
    for value in HOSTILE:
        write_events(run, [{**event, field: value} for event in events])
        (run / "plan.json").write_text(json.dumps({**plan, field: value, "model": value}))
        check_page(render_page(read_run(run)))


@pytest.mark.parametrize("fields", [("step",), CURVES], ids=["step", "values"])
def test_whatever_a_curve_holds(run, run_events, fields):
    events = run_events(600)
    lines = [event for event in events if event["event"] in ("train", "eval")]
    for index, field in enumerate(fields):
        for value, event in zip(HOSTILE, lines[index:], strict=False):
            if field in event:
                event[field] = value
    write_events(run, events)
    assert "</html>" in read(run)


def test_events_without_a_field_in_any_order_and_twice(run, run_events):
    whole = run_events(100)
    for field in ("event", "step", "loss", "split", "tokens", "path"):
        events = [{key: event[key] for key in event if key != field} for event in whole]
        write_events(run, [*reversed(events), *events, END])
        record = read_run(run)
        results(record), outcome(record)
    assert "</html>" in render_page(record)


def test_what_is_left_out_is_told(run, capsys):
    pipe(run / "log.txt")
    link("/dev/zero", run / "plan.json")
    (run / "config.toml").write_text("name = [")
    assert report.run([str(run)]) == 0
    page, told = (run / "report.html").read_text(encoding="utf-8"), capsys.readouterr().err
    for words in (
        f"{run}/log.txt is not a regular file",
        f"{run}/plan.json is a symbolic link, which could lead anywhere",
        "config.toml: end of document: not valid TOML",
    ):
        assert words in told
        assert f"Left out: {words}" in page
    compare.run([str(run), str(make_other(run)), "--out", str(run.parent / "both.html")])
    assert f"{run}/log.txt is not a regular file" in capsys.readouterr().err
    assert "Left out: " in (run.parent / "both.html").read_text(encoding="utf-8")


def test_a_line_without_end(run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "end", "reason": "' + "x" * 3_000_000)
    assert read_run(run).unreadable_lines > 0


def test_what_is_no_metrics_at_all(run, monkeypatch):
    monkeypatch.setattr(event_reader, "MOST_UNREADABLE", 5)
    (run / "metrics.jsonl").write_text("[1]\n\n" * 5)
    assert read_run(run).unread == ()
    (run / "metrics.jsonl").write_text("[1]\n" * 6)
    assert "has over 5 unreadable lines" in read_run(run).unread[0]


@pytest.mark.slow
def test_a_million_lines(run, run_events):
    train = next(event for event in run_events(100) if event["event"] == "train")
    line = json.dumps(train).replace('"step": 10,', '"step": %d,') + "\n"
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(line % step for step in range(1_000_000))
    record = read_run(run)
    assert len(record.train["loss"]) == 1_000_000
    assert "</html>" in render_page(record)


@pytest.mark.parametrize("verb", ["report", "compare"])
@pytest.mark.parametrize("name", ["/", "empty", "a file", "pipe", "gone", "\0", "x" * 300, ""])
def test_nothing_is_written_where_no_run_is(run, tmp_path, monkeypatch, name, verb):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("a file").touch()
    pipe(Path("pipe"))
    arguments = [name] if verb == "report" else [str(run), name]
    before = sorted(tmp_path.rglob("*")), sorted(Path("/").iterdir())
    with pytest.raises(PentameterError):
        {"report": report, "compare": compare}[verb].run(arguments)
    assert (sorted(tmp_path.rglob("*")), sorted(Path("/").iterdir())) == before


@pytest.mark.parametrize("name", ["", "metrics.jsonl", "config.toml", "samples", SAMPLE])
def test_what_may_not_be_read(no_other_reads, run, name):
    mode = (run / name).stat().st_mode
    (run / name).chmod(0)
    try:
        read(run)
    finally:
        (run / name).chmod(mode)
