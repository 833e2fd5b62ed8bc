"""TensorBoard, W&B and trackio are told what metrics.jsonl holds, and cannot end a run."""

import importlib.machinery
import json
import math
import shutil
import sys
import threading
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pentameter.checkpoint.format import save_phases
from pentameter.config.files.load import load_config
from pentameter.config.fingerprint import config_hash
from pentameter.errors import ConfigError, TrainingFailedError
from pentameter.parallel.engine import Engine, LossSum
from pentameter.train.loop import Trainer
from pentameter.train.say.trackers import require_trackers


def config(**overrides):
    return load_config(
        "grammar",
        {
            "name": "tracked",
            "data.grammar.n_characters": 3000,
            "model.context_length": 16, "model.n_layers": 1, "model.d_model": 16,
            "model.attention.n_heads": 2, "train.steps": 12, "train.batch_size": 4,
            "train.eval_interval": 4, "train.sample_interval": 6,
            "train.sample_tokens": 5, "train.precision": "fp32",
            "train.compile": False, "schedule.warmup_steps": 0, "log.interval": 2,
            "checkpoint.asynchronous": False,  # which checkpoint a crash leaves is then known
            **{key.replace("__", "."): value for key, value in overrides.items()},
        },
    )  # fmt: skip


def fit(run_dir, *hooks, **overrides):
    return Trainer(config(**overrides), run_dir=run_dir, hooks=hooks, quiet=True).fit()


def points_of_metrics(run_dir):
    """{tag: [(step, value)]} that metrics.jsonl holds, under the names that trackers use. They note
    the time themselves."""
    points = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        kind, step, _ = event.pop("event"), event.pop("step"), event.pop("time")
        if kind in ("start", "resume", "end"):
            continue
        group = event.pop("split", kind)
        if (layer := event.pop("layer", None)) is not None:
            group += f"/layer-{layer}"
        for key, value in event.items():
            if isinstance(value, int | float):
                points.setdefault(f"{group}/{key}", []).append((step, float(value)))
    return points


def read_events(run_dir):
    found = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"tensors": 0})
    return found.Reload()


def points_of_tensorboard(run_dir):
    events = read_events(run_dir)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def texts_of_tensorboard(run_dir, tag):
    return {
        event.step: event.tensor_proto.string_val[0].decode()
        for event in read_events(run_dir).Tensors(f"{tag}/text_summary")
    }


def same_points(found, expected):
    assert found.keys() == expected.keys()
    for tag, points in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        for (_, ours), (_, theirs) in zip(found[tag], points, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6), tag  # event files hold float32


def test_tensorboard_has_what_metrics_jsonl_has(tmp_path):
    fit(tmp_path, log__tensorboard=True, model__n_experts=2)
    expected = points_of_metrics(tmp_path)
    assert {"train/loss", "val/perplexity", "checkpoint/bytes"} <= expected.keys()
    assert {"experts/layer-0/max_over_mean", "experts/layer-0/idle"} <= expected.keys()
    same_points(points_of_tensorboard(tmp_path), expected)
    samples = texts_of_tensorboard(tmp_path, "sample")
    assert sorted(samples) == [0, 6, 12]
    written = (tmp_path / "samples" / "step-00000006.txt").read_text()
    assert samples[6] == "".join(f"    {line}\n" for line in written.split("\n"))
    assert "d_model = 16" in texts_of_tensorboard(tmp_path, "config")[0]


class Dies:
    """Ends the run after step 7 as a kill would: nothing is saved, nobody is told."""

    def on_step(self, trainer, step):
        if step.step == 7:
            raise KeyboardInterrupt


def test_after_a_crash_no_step_is_told_twice(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Dies(), log__tensorboard=True)
    fit(tmp_path, log__tensorboard=True)  # from the checkpoint of step 4; 5 to 7 once more
    expected = points_of_metrics(tmp_path)
    assert [step for step, _ in expected["train/loss"]] == [1, 2, 4, 6, 8, 10, 12]
    same_points(points_of_tensorboard(tmp_path), expected)
    assert sorted(texts_of_tensorboard(tmp_path, "sample")) == [0, 6, 12]


def test_a_run_begun_again_hides_what_was_told_before(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Dies(), log__tensorboard=True, train__eval_interval=100)
    fit(tmp_path, log__tensorboard=True, train__eval_interval=100)
    same_points(points_of_tensorboard(tmp_path), points_of_metrics(tmp_path))


def test_a_tracker_that_is_added_later_has_the_configuration_too(tmp_path):
    fit(tmp_path, train__steps=6, schedule__name="constant")
    fit(tmp_path, log__tensorboard=True, schedule__name="constant")
    assert points_of_tensorboard(tmp_path)["train/loss"][0][0] == 8
    assert "d_model = 16" in texts_of_tensorboard(tmp_path, "config")[0]


class Measures:
    """A hook with a metric of its own."""

    def on_step(self, trainer, step):
        if step.step == 3:
            trainer.record("weight_norm", step=3, value=1.5)


def test_what_a_hook_records_is_told_too(tmp_path):
    fit(tmp_path, Measures(), log__tensorboard=True)
    assert points_of_tensorboard(tmp_path)["weight_norm/value"] == [(3, 1.5)]


def test_why_a_step_was_skipped(tmp_path, monkeypatch):
    real = Engine.forward_backward

    def spoiled(self, batch, step, **arguments):
        loss = real(self, batch, step, **arguments)
        return LossSum(math.nan, loss.n_targets) if step == 4 else loss

    monkeypatch.setattr(Engine, "forward_backward", spoiled)
    fit(tmp_path, log__tensorboard=True)
    assert "loss is nan" in texts_of_tensorboard(tmp_path, "skip/reason")[5]


class FakeRun:
    """A run of a fake `wandb` or `trackio`, which fails at its `fails_at`-th call."""

    def __init__(self, first_step=0, fails_at=None):
        self.starting_step, self.rows, self.ended = first_step, [], []
        self._calls_left = fails_at

    def log(self, values, step):
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left <= 0:
                raise ConnectionError("the network is down\nfor reasons")
        self.rows.append((step, values))

    def finish(self, **how):
        self.ended.append(how)


@pytest.fixture(params=["wandb", "trackio"])
def service(request, monkeypatch):
    """A module that stands for the package, with the calls that it got."""
    module = types.ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None, origin="a test")
    module.calls, module.run = [], FakeRun()
    module.Html = lambda text: ("html", text)
    module.Settings = dict

    def init(**arguments):
        module.calls.append(arguments)
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def points_of_service(run):
    points = {}
    for step, values in run.rows:
        for tag, value in values.items():
            if isinstance(value, float):
                points.setdefault(tag, []).append((step, value))
    return points


def test_a_project_has_what_metrics_jsonl_has(tmp_path, service):
    trainer = Trainer(config(**{f"log__{service.__name__}": "mine"}), run_dir=tmp_path, quiet=True)
    trainer.fit()
    same_points(points_of_service(service.run), points_of_metrics(tmp_path))
    assert [step for step, _ in service.run.rows] == sorted(step for step, _ in service.run.rows)
    samples = [values["sample"] for _, values in service.run.rows if "sample" in values]
    assert len(samples) == 3
    assert samples[0][0] == "html"
    (call,) = service.calls
    assert call["project"] == "mine"
    assert call["resume"] == "allow"
    run_id = json.loads((tmp_path / "plan.json").read_text())["run_id"]
    assert call.get("id", run_id) == run_id
    assert run_id[:8] in call.get("id", call["name"])
    assert call["config"]["model"]["d_model"] == 16
    json.dumps(call["config"])
    assert len(service.run.ended) == 1


def test_a_checkpoint_that_is_committed_later_is_told_in_order(tmp_path, service, monkeypatch):
    """The services leave out a row whose step goes back."""
    gate = threading.Event()
    real = save_phases.write_verified

    def write(path, chunks):
        assert threading.current_thread() is threading.main_thread() or gate.wait(30)
        return real(path, chunks)

    class Opens:
        def on_step(self, trainer, step):
            if step.step == 6:
                gate.set()

    monkeypatch.setattr(save_phases, "write_verified", write)
    fit(tmp_path, Opens(), checkpoint__asynchronous=True, **{f"log__{service.__name__}": "mine"})
    steps = [step for step, _ in service.run.rows]
    assert steps == sorted(steps)
    assert next(step for step, _ in points_of_service(service.run)["checkpoint/bytes"]) >= 6
    assert [step for step, _ in points_of_metrics(tmp_path)["checkpoint/bytes"]] == [4, 8, 12]


def test_a_resumed_project_run_is_told_only_what_is_new(tmp_path, service):
    key = {f"log__{service.__name__}": "mine"}
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, Dies(), **key)
    first = service.run
    service.run = FakeRun(first_step=first.rows[-1][0] + 1)
    fit(tmp_path, **key)
    steps = [step for run in (first, service.run) for step, values in run.rows]
    assert steps == sorted(steps)
    told = points_of_service(first)
    for tag, points in points_of_service(service.run).items():
        told.setdefault(tag, []).extend(points)
    expected = points_of_metrics(tmp_path)
    assert told["train/loss"] == expected["train/loss"]
    assert told["val/loss"] == expected["val/loss"]
    same = [call.get("id", call["name"]) for call in service.calls]
    assert same[0] == same[1]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_service_that_fails_costs_one_warning(tmp_path, service, monkeypatch, call):
    def refuse(*_arguments, **_more):
        raise ConnectionError("not logged in\nfor reasons")

    monkeypatch.setattr(service if call == "init" else service.run, call, refuse)
    end = fit(tmp_path, log__tensorboard=True, **{f"log__{service.__name__}": "mine"})
    assert end.reason == "completed"
    log = (tmp_path / "log.txt").read_text()
    name = service.__name__
    assert log.count(f"warning: log.{name}: not logged in; the run goes on without it") == 1
    assert "for reasons" not in log
    same_points(points_of_tensorboard(tmp_path), points_of_metrics(tmp_path))


def test_a_failed_run_is_marked_as_such(tmp_path, service, monkeypatch):
    monkeypatch.setattr(Engine, "forward_backward", lambda *_a, **_k: LossSum(math.nan, 64))
    with pytest.raises(TrainingFailedError):
        fit(tmp_path, **{f"log__{service.__name__}": "mine"})
    assert service.run.ended == [{"exit_code": 1} if service.__name__ == "wandb" else {}]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_named_before_anything_is_done(tmp_path, monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=rf"pip install 'pentameter\[{name}\]'"):
        fit(tmp_path / "run", **{f"log__{name}": True if name == "tensorboard" else "mine"})
    assert not (tmp_path / "run").exists()


def test_a_folder_named_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # offline runs leave one where they were started
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ConfigError, match="not installed"):
        require_trackers(config(log__wandb="mine").log)


def test_trackers_are_no_part_of_the_training():
    tracked = config(log__tensorboard=True, log__wandb="a", log__trackio="b")
    assert config_hash(tracked) == config_hash(config())


def test_tensorboard_without_its_folder_is_a_warning_and_no_traceback(tmp_path, capfd):
    class Remove:
        def on_step(self, run, step):
            if step.step == 5:
                shutil.rmtree(tmp_path / "run" / "tensorboard")

    assert fit(tmp_path / "run", Remove(), log__tensorboard=True).reason == "completed"
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("tensorboard is not there any more; the run goes on without it") == 1
    assert "Traceback" not in capfd.readouterr().err
