"""The plain lines of a long preparation."""

from pentameter.data.progress import ENCODING, MERGING, TRAINING, ProgressBars, ProgressLines


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_line_at_most_every_ten_seconds_has_all_that_is_known():
    clock, said = Clock(), []
    lines = ProgressLines(said.append, clock)
    for second in range(31):
        clock.now = 1000.0 + second
        lines("reading", second * 2_000_000, 300_000_000)
    assert said == [
        "reading the text: 7% · 20 of 300 MB · 2.0 MB/s · 0:02:20 left",
        "reading the text: 13% · 40 of 300 MB · 2.0 MB/s · 0:02:10 left",
        "reading the text: 20% · 60 of 300 MB · 2.0 MB/s · 0:02:00 left",
    ]


def test_each_pass_has_its_own_rate_and_encoding_its_tokens():
    clock, said = Clock(), []
    lines = ProgressLines(said.append, clock)
    lines("reading", 1, 2_000_000)
    clock.now += 11
    lines("training", 500_000, 2_000_000)  # its first sign: no rate yet
    clock.now += 5
    lines("encoding", 1_000_000, 2_000_000)
    lines.count_tokens(1234567)
    clock.now += 5
    lines("encoding", 1_500_000, 2_000_000)
    assert said == [
        "training the tokenizer: 25% · 0 of 2 MB",
        "encoding the text: 75% · 2 of 2 MB · 0.1 MB/s · 1,234,567 tokens · 0:00:05 left",
    ]


def test_waiting_is_said_at_once_and_once():
    clock, said = Clock(), []
    lines = ProgressLines(said.append, clock)
    for _ in range(3):
        lines("awaiting", 0, 0)
        clock.now += 20
    assert said == ["another process prepares the same data; waiting for it"]


def test_a_total_that_was_too_small_or_nothing_breaks_no_line():
    clock, said = Clock(), []
    lines = ProgressLines(said.append, clock)
    for done, total in ((0, 0), (3_000_000, 2_000_000)):
        clock.now += 10
        lines("reading", done, total)
    assert said == [
        "reading the text: 0% · 0 of 0 MB",
        "reading the text: 100% · 3 of 2 MB · 0.3 MB/s · 0:00:00 left",
    ]


def test_bars_of_a_pass_without_an_end_and_of_what_follows_it():
    from rich.progress import Progress

    bars = Progress(disable=True)
    progress = ProgressBars(bars)
    progress(TRAINING, 5, 10)
    progress(MERGING, 0, 10)
    training, merging = bars.tasks
    assert (training.completed, training.total) == (5, 10)
    assert merging.total is None  # so it moves, and tells no share
    progress(ENCODING, 3, 10)
    progress(ENCODING, 10, 10)
    assert merging.finished
    assert [task.description for task in bars.tasks] == [TRAINING, MERGING, ENCODING]
    assert bars.tasks[-1].finished


def test_a_pass_without_an_end_has_one_line():
    said = []
    progress = ProgressLines(said.append)
    progress(MERGING, 0, 10)
    progress(MERGING, 0, 10)
    assert said == ["merging pairs into the tokenizer's tokens"]
