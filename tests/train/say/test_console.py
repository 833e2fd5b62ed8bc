"""What reaches the screen and the logs, in one process and in several."""

import math
import os
import re
import socket
import subprocess
import sys
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from pentameter.config.files.load import load_config
from pentameter.errors import TrainingFailedError
from pentameter.processes.group.world import World
from pentameter.record.events import ChoiceMetrics, EpochMetrics, EvalMetrics, StepMetrics
from pentameter.train.say.console import Console
from pentameter.train.say.run_lines import RunLines
from pentameter.train.state import TrainState

TINY = [
    "grammar", "--data.grammar.n-characters=3000", "--model.n-layers=1", "--model.d-model=16",
    "--model.context-length=16", "--train.batch-size=4", "--train.steps=4", "--log.interval=2",
    "--train.eval-interval=4", "--train.precision=fp32", "--train.compile=false",
    "--train.sample-interval=4", "--run-dir", "run",
]  # fmt: skip


class SecondMachine(World):
    """Of two machines of eight processes; the main process has warned of one thing."""

    def __init__(self, local_rank: int) -> None:
        super().__init__(rank=8 + local_rank, size=16, local_rank=local_rank, local_size=8)

    def broadcast(self, value, source=0):
        return ["known to all"]


def metrics(step: int, eta_seconds: float = 100.0) -> StepMetrics:
    return StepMetrics(
        step, step * 64, step * 64, 2.5, 1e-3, 0.5, 0.1, 640.0, None, 5_000_000, eta_seconds
    )


@pytest.fixture
def trainer():
    config = load_config("quickstart", {"log.interval": 10, "train.eval_interval": 200})
    return SimpleNamespace(
        config=config,
        run_dir=Path("runs/quickstart"),
        plan=SimpleNamespace(steps=2000),
        compute=SimpleNamespace(device_name="a device", compiled=False),
        state=TrainState(step=300),
        evaluations={},
        world=World(),
    )


@contextmanager
def console_of(run, world=None):
    """The console of a run, and the hook that prints the run on it."""
    run.world = world or World()
    with Console(run.world) as run.console:
        yield run.console, RunLines()


def test_control_characters_of_a_sample_reach_no_terminal(tmp_path):
    with Console(quiet=True) as console:
        console.open_log(tmp_path / "log.txt")
        console.say("red \x1b[31m, bell \x07, tab \t, line\nnext")
    assert (tmp_path / "log.txt").read_text() == "red �[31m, bell �, tab \t, line\nnext\n"


def test_each_line_of_a_text_that_wraps_stands_beside_its_bar(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdout", terminal := NarrowTerminal())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    words = "a line of some words that a terminal of eighty cells wraps twice " * 3
    with Console() as console:
        console.open_log(tmp_path / "log.txt")
        console.say_text(f"short\n\n{words}\n{'w' * 200}")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", terminal.getvalue())
    said = [line for line in shown.splitlines() if line.strip()]
    assert len(said) == 2 + 3 + 3
    assert all(line.startswith("  │ ") and len(line) <= 80 for line in said)
    log = (tmp_path / "log.txt").read_text()
    assert log == f"  │ short\n  │ \n  │ {words}\n  │ {'w' * 200}\n"


def test_preparing_without_a_terminal_says_a_line_now_and_then(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pentameter.data.progress.LINE_SECONDS", 0.0)
    with Console() as console:
        console.progress("reading", 1_000_000, 4_000_000)
        console.open_log(tmp_path / "log.txt")
    assert capsys.readouterr().out == "reading the text: 25% · 1 of 4 MB\n"
    assert (tmp_path / "log.txt").read_text() == "reading the text: 25% · 1 of 4 MB\n"


def test_preparing_on_a_terminal_is_the_live_line(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("pentameter.train.say.console.REFRESH_SECONDS", 0.0)
    with Console() as console:
        console.progress("verifying", 1_000_000, 4_000_000)
    assert "verifying the tokens · 1 MB of 4 MB · 25%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step", "eta_seconds", "said"),
    [
        (10, 3.2, "step   10/2000 ·   0% ·    3 s left │ loss 2.5000"),
        (110, 59.7, "step  110/2000 ·   5% ·  1 min left │ loss"),
        (1990, 45 * 60, "step 1990/2000 ·  99% · 45 min left │ loss"),
        (1990, 4000, "step 1990/2000 ·  99% ·  1.1 h left │ loss"),
    ],
)
def test_a_step_line_says_how_far_the_run_is(trainer, capsys, step, eta_seconds, said):
    with console_of(trainer) as (_, lines):
        lines.on_step(trainer, metrics(1))
        lines.on_step(trainer, metrics(step, eta_seconds))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step    1/2000 ·   0% │ loss")  # it may have compiled
    assert second.startswith(said)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.1, "640 tok/s │ lr"), (0.5, "640 tok/s │ lr"), (1.734, "640 tok/s · 1.73 s/step │"),
     (9.996, "· 10.0 s/step │"), (12.34, "· 12.3 s/step │"), (1234.4, "· 1,234 s/step │")],
)  # fmt: skip
def test_a_long_step_says_how_long(trainer, capsys, seconds, said):
    with console_of(trainer) as (_, lines):
        lines.on_step(trainer, replace(metrics(10), step_seconds=seconds))
    assert said in capsys.readouterr().out


def test_perplexity_stands_in_the_line_of_a_preset_whose_source_says_it(trainer, capsys):
    assert not trainer.config.log.perplexity
    trainer.config = load_config("wikitext2-small")
    with console_of(trainer) as (_, lines):
        lines.on_step(trainer, metrics(10))
    assert "│ loss 2.5000 │ perplexity 12.18 │ 640 tok/s" in capsys.readouterr().out


class NarrowTerminal(StringIO):
    """A terminal of 80 cells; rich asks for the width where the console is made."""

    def isatty(self):
        return True


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_line_never_wraps(trainer, monkeypatch, tmp_path, width):
    monkeypatch.setattr("sys.stdout", terminal := NarrowTerminal())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    step = replace(metrics(1110, 7000), tokens_per_second=56_327.0, mfu=0.14, step_seconds=1.73)
    trainer.console, lines = Console(), RunLines()  # never entered, so that it has no live line
    trainer.console.open_log(tmp_path / "log.txt")
    lines.on_step(trainer, metrics(9))
    lines.on_step(trainer, step)
    lines.on_eval(trainer, evaluated("val", 2.5, best=True))
    trainer.console.say_columns(["小说" * 4, "她" * 8, "三" * 2])
    said = terminal.getvalue().splitlines()
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len(said) == len(log) == 3  # step 9 is not one of those that are logged
    assert all(cell_len(line) <= width for line in said)
    assert all(whole.startswith(line) for whole, line in zip(log, said, strict=True))
    assert "← best" in said[1]
    columns = ["step 1110/2000 ·  55% ·  1.9 h left", "loss 2.5000", "56,327 tok/s · 1.73 s/step"]
    if width >= 80:
        assert said[0].startswith(" │ ".join(columns))
    assert said[2] == "小说小说小说小说 │ " + "她" * 8 + (" │ 三三" if width > 40 else "")
    assert "5 MB" in log[0]


def test_the_live_line_has_the_curve_of_the_loss(trainer):
    shown = []
    console = SimpleNamespace(
        say_columns=lambda *_, **__: None, status=lambda _, below="": shown.append(below)
    )
    trainer.console = console
    lines = RunLines()
    for step in range(1, 201):
        lines.on_step(trainer, replace(metrics(step), loss=4 - step / 100))
    assert shown[:2] == ["", "loss 3.9900 █▁ 3.9800"]
    assert all(len(below) <= 70 for below in shown)
    bars = shown[-1].split()[2]
    assert bars == "".join(sorted(bars, reverse=True))
    assert len(bars) == 25  # eight steps each
    assert shown[-1].startswith("loss 3.9550 █")


def test_a_word_of_the_machine_stands_after_the_step_at_which_it_came(trainer, capsys):
    words = iter([None, "idle threads sleep meanwhile", None])
    with Console() as trainer.console:
        lines = RunLines(lambda: next(words))
        for step in (9, 10, 11):
            lines.on_step(trainer, metrics(step))
    said = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in said] == ["step", "idle"]
    assert said[1] == "idle threads sleep meanwhile"


class Terminal:
    """A live line; what it shows."""

    def __init__(self):
        self.shown = []

    def update(self, text, refresh):
        self.shown.append(str(text))

    def stop(self):
        pass


@pytest.mark.parametrize("compiled", [True, False])
def test_the_live_line_says_what_is_waited_for(trainer, compiled):
    trainer.compute.compiled = compiled
    trainer.evaluations = {"val": None}
    trainer.state = TrainState()
    word = " compiles" if compiled else ""
    with console_of(trainer) as (console, lines):
        console._live = live = Terminal()
        console.progress("reading", 13, 100)
        console.show("")  # as the data is there
        lines.on_start(trainer)
        lines.on_eval(trainer, evaluated("val", 2.0))
        assert live.shown[0].endswith("· 13%")
        assert live.shown[1:] == ["", f"the first evaluation{word}", f"step 1{word}"]
        trainer.state = TrainState(step=300, last_eval_step=300)  # resumed
        lines.on_start(trainer)
        assert live.shown[-1] == f"step 301{word}"


def test_epochs_shorter_than_the_log_interval_are_not_said(trainer, capsys):
    with console_of(trainer) as (_, lines):
        for n_steps in (9, 10):
            lines.on_epoch(trainer, EpochMetrics(n_steps, 1, 2.5, 12.2, 640, n_steps, 1.0))
    assert capsys.readouterr().out.count("epoch ") == 1


def evaluated(split: str, loss: float, *, best: bool = False) -> EvalMetrics:
    return EvalMetrics(100, split, loss, math.exp(loss), loss / math.log(2), 1000, 0.5, best)


def test_the_loss_of_the_training_split_stands_beside_validations(trainer, capsys):
    trainer.evaluations = {"val": None, "train": None, "more": None}
    with console_of(trainer) as (_, lines):
        for metrics_of_one in (
            evaluated("val", 2.5012, best=True), evaluated("train", 2.4966), evaluated("more", 3.0)
        ):  # fmt: skip
            lines.on_eval(trainer, metrics_of_one)
    assert capsys.readouterr().out.splitlines() == [
        "eval    100 │ val loss 2.5012 ← best │ train loss 2.4966 │ perplexity 12.2 │ "
        "3.6085 bits/byte │ 1.0 s",
        "eval    100 │ more loss 3.0000 │ perplexity 20.09 │ 4.3281 bits/byte │ 0.5 s",
    ]


def test_questions_have_a_line_of_accuracies(trainer, capsys):
    metrics = ChoiceMetrics(
        **asdict(evaluated("arc", 2.0)),
        examples=200,
        accuracy=0.2859,
        accuracy_per_token=0.2955,
        accuracy_per_byte=0.3,
    )
    with console_of(trainer) as (_, lines):
        lines.on_eval(trainer, metrics)
    assert capsys.readouterr().out.splitlines() == [
        "eval    100 │ arc accuracy 0.2859 │ per token 0.2955 │ per byte 0.3000 │ loss 2.0000 │ "
        "0.5 s"
    ]


@pytest.mark.parametrize("split", ["val", "train"])
def test_one_of_the_two_alone_has_a_line(trainer, capsys, split):
    trainer.evaluations = {split: None}
    with console_of(trainer) as (_, lines):
        lines.on_eval(trainer, evaluated(split, 2.0))
    (line,) = capsys.readouterr().out.splitlines()
    assert (
        line == f"eval    100 │ {split} loss 2.0000 │ perplexity 7.389 │ 2.8854 bits/byte │ 0.5 s"
    )


def test_the_first_process_of_another_machine_says_where_it_stands(trainer, capsys, tmp_path):
    with console_of(trainer, SecondMachine(0)) as (console, lines):
        console.open_log(tmp_path / "logs" / "rank-00008.txt")
        console.say("the data")
        console.warn(["known to all", "only here"])
        lines.on_start(trainer)
        for step in (9, 10, 11):
            lines.on_step(trainer, metrics(step))
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "rank 8: warning: only here",
        "rank 8: quickstart · runs/quickstart · rank 8 of 16; ranks 8-15 are on "
        f"{socket.gethostname()} · a device · from step 300",
        *[line for line in said if line.startswith("rank 8: step   10/2000 ·   0% · ")],
    ]
    assert len(said) == 3
    log = (tmp_path / "logs" / "rank-00008.txt").read_text().splitlines()
    assert log[:3] == ["the data", "warning: known to all", "warning: only here"]
    assert log[3:] == [line.removeprefix("rank 8: ") for line in said[1:]]


def test_another_process_of_it_prints_its_own_warnings_only(trainer, capsys, tmp_path):
    with suppress(ValueError), console_of(trainer, SecondMachine(3)) as (console, lines):
        console.say("before the log is open")
        console.open_log(tmp_path / "log.txt")
        console.warn(["known to all", "only here"])
        lines.on_start(trainer)
        lines.on_step(trainer, metrics(10))
        raise ValueError("planted")
    assert capsys.readouterr().out == "rank 11: warning: only here\n"
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("before the log is open\nwarning: known to all\nwarning: only here\n")
    assert "step   10/2000" in log
    assert "Traceback (most recent call last)" in log
    assert log.endswith("ValueError: planted\n")


def test_an_expected_error_is_one_line_of_another_processs_log(tmp_path):
    with suppress(TrainingFailedError), Console(SecondMachine(3)) as console:
        console.open_log(tmp_path / "log.txt")
        raise TrainingFailedError("step 3: loss is nan")
    assert (tmp_path / "log.txt").read_text() == "step 3: loss is nan\n"


def test_a_log_that_cannot_be_written_ends_no_run(tmp_path):
    (tmp_path / "file").write_text("")
    with Console(SecondMachine(3)) as console:
        console.open_log(tmp_path / "file" / "rank-00011.txt")
        console.say("nowhere")
        assert console.sync() == 0
    assert (tmp_path / "file").read_text() == ""


def started(arguments: list[str], cwd: Path, **environment: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pentameter", "train", *TINY, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
    )  # fmt: skip


def test_two_machines_say_where_they_stand_and_every_process_keeps_a_log(tmp_path):
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    shared = {
        "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "XDG_CACHE_HOME": tmp_path / "cache",
    }  # fmt: skip
    (tmp_path / "run" / "logs").mkdir(parents=True)
    stale = tmp_path / "run" / "logs" / "rank-00007.txt"
    stale.write_text("of a run that never came to a checkpoint\n")
    processes = [started([], tmp_path, RANK=rank, **shared) for rank in range(2)]
    said = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    main, other = (out for out, _ in said)
    assert "sample at step 4:" in main
    told = re.sub(r"(?m)^warning: .*", "", main)  # of a busy machine, which may be rank 1's
    assert "rank 1" not in told
    lines = [re.sub(r" ·.*", "", line) for line in other.splitlines()]
    assert lines == ["rank 1: grammar", *(f"rank 1: step {step}/4" for step in (1, 2, 4))]
    log = (tmp_path / "run" / "logs" / "rank-00001.txt").read_text()
    assert "model   " in log
    assert log.splitlines()[-1].startswith("ended at step 4: completed")
    assert not stale.exists()


@pytest.mark.parametrize(
    ("size", "who"), [(1, "another process"), (2, "another rank, or another run,")]
)
def test_who_prepares_the_data_is_one_of_the_ranks_perhaps(capsys, size, who):
    with Console(World(0, size)) as console:
        for _ in range(2):
            console.progress("awaiting", 0, 0)
    assert capsys.readouterr().out == f"{who} prepares the same data; waiting for it\n"
