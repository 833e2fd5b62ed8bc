import json
import os
import time

import pytest
from pages import check_page, text_of

from pentameter.disk.lock import RunLock
from pentameter.record.reading import read_run
from pentameter.record.results import outcome
from pentameter.report.pages.page import render_page, write_report


def evaluation(step, loss):
    return {"event": "eval", "step": step, "split": "val", "loss": loss}


def said(make_run, *events):
    """What is said of a run of 400 planned steps that made 50 of them, and of `events`."""
    start = {"event": "start", "step": 0, "steps": 400}
    steps = [{"event": "train", "step": step, "loss": 2.0, "eta_seconds": 70.0} for step in (1, 50)]
    return outcome(read_run(make_run([start, *steps, *events])))


def end(reason, step=50):
    return {"event": "end", "step": step, "reason": reason, "seconds": 69.0}


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ((), "Completed 50 of 400 steps in 1 min 9 s."),
        ((2.0, 1.5), "; the best validation loss is 1.5000 at step 20."),
        ((2.0, 1.5, 1.4), "is 1.4000 at step 30, and still falling."),
        ((2.0, 1.5, 1.499), "is 1.4990 at step 30, and hardly falling any more."),
        ((2.0, 1.4, 1.6), "is 1.4000 at step 20; it has risen to 1.6000 since."),
        ((2.0, 1.4, 1.401), "is 1.4000 at step 20, and has not improved since."),
    ],
)
def test_where_the_loss_of_a_completed_run_went(make_run, losses, words):
    evaluations = [evaluation(10 * i, loss) for i, loss in enumerate(losses, 1)]
    assert said(make_run, *evaluations, end("completed")).sentence.endswith(words)


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        ("SIGTERM", "Stopped by SIGTERM after step 50 of 400. The same command continues."),
        ("error: step 7: loss is nan\non batch ab.", "Gave up at step 50 of 400: loss is "
         "nan on batch ab."),
        ("no better validation loss in 3 evaluations",
         "Stopped early after step 50 of 400: no better validation loss in 3 evaluations."),
        ("enough", "Ended after step 50 of 400: enough."),
    ],
)  # fmt: skip
def test_why_a_run_ended_before_its_last_step(make_run, reason, sentence):
    assert said(make_run, end(reason)).sentence == sentence


@pytest.mark.parametrize(
    "reason", ["no better idea", "SIGma is reached", "errors fell", "completed"]
)
def test_a_hooks_reason_is_taken_for_no_other(make_run, reason):
    said_of = said(make_run, {**end(reason), "kind": "hook"})
    assert said_of.sentence == f"Ended after step 50 of 400: {reason}."
    assert said_of.label == "stopped"


def test_a_killed_run_is_not_taken_for_a_running_one(make_run):
    folder = make_run([{"event": "train", "step": 50, "loss": 2.0, "eta_seconds": 70.0}])
    lock = folder / "run.lock"
    with RunLock(lock, beat_seconds=60):
        left = lock.read_bytes()
        os.utime(lock, (time.time() - 3600,) * 2)  # a full disk takes no beats; clocks differ
        running = outcome(read_run(folder))
    assert running.label == "running"
    assert running.sentence == "Running: step 50, about 1 min 10 s to go."
    gone = {**json.loads(left), "pid": 2**22 + 1}
    lock.write_text(json.dumps(gone))  # touched just now, by nobody that lives
    killed = outcome(read_run(folder))
    assert killed.label == "interrupted"
    assert killed.sentence.endswith("The same command starts it again.")


def test_from_where_a_killed_run_continues(make_run):
    folder = make_run(
        [
            {"event": "train", "step": 50, "loss": 2.0},
            {"event": "checkpoint", "step": 20, "path": "checkpoints/step-00000020"},
            {"event": "checkpoint", "step": 40, "path": "checkpoints/step-00000040"},
        ]
    )
    (folder / "checkpoints" / "step-00000040").mkdir(parents=True)
    assert outcome(read_run(folder)).sentence.endswith("The same command continues from step 40.")


def test_the_page_begins_with_the_sentence(make_run):
    page = render_page(read_run(make_run()))
    assert '<p class="outcome">Completed 400 of 400 steps in 1 h 2 min; the best' in page


def test_the_subtitle_names_the_text_of_a_run_on_a_path(make_run):
    page = render_page(read_run(make_run(config='[data]\ncorpus = "none"\npath = "a/novel.txt"')))
    assert '<p class="muted">GPT · novel.txt · ' in page


def test_the_last_step_need_not_have_a_line_of_its_own(make_run):
    assert said(make_run, end("SIGTERM", step=57)).sentence.startswith(
        "Stopped by SIGTERM after step 57 of 400."
    )


def test_an_untrained_model_has_no_best_loss(make_run):
    assert "best" not in said(make_run, evaluation(0, 4.6), end("SIGTERM")).sentence


def test_a_rollback_is_listed_and_drawn(make_run, run_events):
    events = run_events(400)
    words = "loss 9.1 is a spike"
    events.append({"event": "rollback", "step": 200, "to_step": 150, "reason": words})
    page = check_page(write_report(make_run(events)).read_text(encoding="utf-8"))
    assert f"200 rollback {words}" in " ".join(text_of(page).split())
    assert "rolled back" in page


def test_a_failed_copy_is_listed(make_run, run_events):
    words = "step 200 is not copied to s3://bucket/run: cannot write run.json"
    made, failed = (
        {"event": "copy", "step": step, "bytes": 9, "seconds": 1.0} for step in (100, 200)
    )
    events = [*run_events(400), {**made, "error": None}, {**failed, "error": words}]
    text = " ".join(text_of(render_page(read_run(make_run(events)))).split())
    assert f"200 copy failed {words}" in text
    assert text.count("copy failed") == 1
