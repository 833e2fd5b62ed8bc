import re
import time

import pytest
from pages import check_page, text_of

from pentameter import formatting
from pentameter.disk.lock import RunLock
from pentameter.errors import ConfigError, StorageError
from pentameter.record.reading import read_run
from pentameter.record.results import results
from pentameter.report.figures.markup import TEMPLATES
from pentameter.report.pages.page import write_report


def checked(folder):
    path = write_report(folder)
    assert path == folder / "report.html"
    return check_page(path.read_text(encoding="utf-8"))


def test_a_finished_run(make_run):
    page = checked(make_run(samples={400: "ROMEO: yes"}, plan_json='{"steps": 400}'))
    text = text_of(page)
    for part in ("small-gpt", "finished", "10.7M", "10,745,088", "1 h 2 min", "2.56k",
                 "40.0 %", "102k", "of 400", "Step 400", "ROMEO: yes", "0.9, 0.99",
                 "2.2 TFLOP/s"):  # fmt: skip
        assert part in text, part
    assert page.count("<svg") == 2 + 3  # MFU is an axis beside that of the tokens per second
    assert "Tokens per second, and MFU at the right" in text


def test_further_evaluations_are_told_of_the_best_step(make_run):
    def evaluated(step, split, loss, **more):
        return {"event": "eval", "step": step, "split": split, "loss": loss, **more}

    events = [
        evaluated(5, "val", 2.0),
        evaluated(5, "train", 1.75),
        evaluated(5, "arc", 3.0, accuracy=0.625),
        evaluated(5, "news", 2.5),
        evaluated(9, "val", 2.25),
        evaluated(9, "arc", 3.5, accuracy=0.5),
    ]
    folder = make_run(events)
    assert results(read_run(folder)).further == {"arc accuracy": 0.625, "news loss": 2.5}
    assert "arc accuracy 0.6250 at step 5" in " ".join(text_of(checked(folder)).split())


def test_everything_a_run_says_is_escaped(make_run, run_events):
    evil = '<script>alert("1")</script>&amp;<img src=x onerror=alert(1)>\x00\x1b[0m'
    events = run_events(100, device=evil, precision=evil)
    events += [
        {"event": "skip", "step": 3, "reason": evil + "\ud800"},
        {"event": "checkpoint", "step": 5, "path": "checkpoints/<script>alert(3)"},
        {"event": "end", "step": 5, "reason": f"error: {evil}", "seconds": None},
    ]
    quoted = "<script>alert(4)</script>"
    folder = make_run(
        events,
        samples={10: evil},
        config=f'name = "{quoted}"\n[model]\nnorm = "{quoted}"\n["{quoted}"]\n"{quoted}" = 1',
        log_txt=evil,
        environment_json='{"command": "<script>alert(2)</script>", "<b>": {"<i>": ["<u>"]}}',
    )
    page = checked(folder)
    assert page.count("<script") == 1
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(") >= 8
    assert "\x00" not in page
    assert "\x1b" not in page
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("completed", "finished"),
        ("no better validation loss in 3 evaluations", "stopped early"),
        ("SIGTERM", "stopped"),
        ("error: the loss is nan", "failed"),
    ],
)
def test_how_a_run_ended(make_run, run_events, reason, label):
    page = checked(make_run([*run_events(50), {"event": "end", "step": 50, "reason": reason}]))
    assert f">{label}</span>" in page


def test_a_run_in_progress_and_an_abandoned_one(make_run, run_events):
    folder = make_run(run_events(50))
    assert ">interrupted</span>" in checked(folder)
    with RunLock(folder / "run.lock"):
        assert ">running</span>" in checked(folder)


def test_no_step_yet(make_run, run_events):
    text = text_of(checked(make_run(run_events(0))))
    assert "No step has been logged yet" in text
    assert "not started" in text


def test_a_folder_without_a_run_stays_as_it_is(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no run: it has neither config\.toml nor metrics"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "metrics.jsonl").touch()
    assert "not started" in checked(tmp_path)


def test_the_floor_of_a_grammar(make_run, run_events):
    text = text_of(checked(make_run(run_events(400, entropy_rate=0.9))))
    assert "Above entropy rate" in text
    assert "entropy rate 0.9000" in text


def test_of_many_samples_some_are_shown(make_run):
    page = checked(make_run(samples={i: f"sample {i}" for i in range(30)}))
    assert page.count('<article class="card sample') == 8
    assert "Earlier samples: 7 of 29" in page
    last, earlier = page.index('<article class="card sample last">'), page.index("<details")
    assert last < page.index(">sample 29<") < earlier < page.index(">sample 0<")
    assert ">sample 0<" in page
    assert ">sample 29<" in page


def test_checkpoints_that_are_still_there(make_run):
    folder = make_run()
    (folder / "checkpoints" / "step-00000300").mkdir(parents=True)
    page = checked(folder)
    assert "4 written, 1 kept." in page
    assert "step-00000300" in page
    assert "step-00000400" not in page


def test_a_huge_run_is_quick_and_small(make_run, run_events):
    folder = make_run(run_events(100_000, interval=1))
    start = time.process_time()
    page = checked(folder)
    assert time.process_time() - start < 20  # about 2 s on an idle core
    assert len(page) < 600_000


def test_earlier_starts_are_not_listed(make_run):
    environment = '{"platform": "Linux-9", "earlier_starts": [{"platform": "Linux-8"}]}'
    page = checked(make_run(environment_json=environment))
    assert "Linux-9" in page
    assert "Linux-8" not in page


def test_a_folder_that_cannot_be_written(make_run, monkeypatch):
    folder = make_run()

    def refuse(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pentameter.disk.atomic.os.replace", refuse)
    with pytest.raises(StorageError, match=r"cannot write .*report\.html: No space left"):
        write_report(folder)
    assert not list(folder.glob("*report*"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999_950, "1.00M"), (10_788_929, "10.8M"), (1.5e9, "1.50B"),
     (0.1234, "0.123"), (float("nan"), "–"), (float("inf"), "–")],
)  # fmt: skip
def test_counts(value, text):
    assert formatting.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.41, "0.41 s"), (59.6, "1 min 0 s"), (61, "1 min 1 s"), (3599, "1 h 0 min"),
     (3723, "1 h 2 min"), (90_000, "1 d 1 h"), (86_400 * 33, "33 d"),
     (86_400 * 3281, "8 y 361 d"), (86_400 * 730, "2 y"), (1e12, "31,709 y 289 d"),
     (float("nan"), "–"), (-1, "–")],
)  # fmt: skip
def test_durations(seconds, text):
    assert formatting.duration(seconds) == text


def test_what_is_wider_than_a_phone_wraps_or_shows_that_it_scrolls():
    """A layout's name of 60 letters without a blank made a page 849 px wide at 390."""
    style = (TEMPLATES / "page.css").read_text()
    rules = dict(re.findall(r"^([^@/\s][^{]*?) \{(.*?)\}", style, re.MULTILINE | re.DOTALL))
    assert "overflow-wrap: anywhere" in rules["p"]
    assert "overflow-x: auto" in rules[".scroll"]
    assert rules[".scroll"].count("local,") == rules[".scroll"].count("scroll,") == 2
    for theme in re.findall(r":root \{(.*?)\}", style, re.DOTALL)[:2]:
        assert "--beyond: " in theme
