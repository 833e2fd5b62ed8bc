"""What a run folder must be for all processes of a run."""

import os
import shutil
import signal
from dataclasses import replace

import pytest
from tiny_runs import fit

from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.folders.verification import Verification
from pentameter.errors import ConfigError, CorruptError, InterruptedRunError, PentameterError
from pentameter.processes.group.world import World
from pentameter.record.log_files import LogFile
from pentameter.train.keep import run_folder
from pentameter.train.keep.resuming import RunRequest
from pentameter.train.keep.run_folder import RunFolder, open_run_folder
from pentameter.train.signals import StopSignals, _StopNow


class Elsewhere(World):
    """The second process of two, on a machine of its own; the first has opened `folder`."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(rank=1, size=2)
        object.__setattr__(self, "folder", folder)

    def patiently_on_main(self, action, doing, step):
        return (self.folder, None), None

    def all_gather(self, value):
        return [None, value]


def test_a_folder_that_another_machine_does_not_see_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "VISIBLE_SECONDS", 0.3)
    (tmp_path / "config.toml").touch()  # which makes it a run
    store = CheckpointStore(tmp_path / "checkpoints", run_id="this-run", config_hash="")
    world = Elsewhere(RunFolder(tmp_path, "this-run", store, None))
    verification = Verification(world)
    request = RunRequest(None, tmp_path, "auto", None, world, verification=verification)
    for content in (None, '{"run_id": "another"}', '{"run_id": "this'):
        if content is not None:
            (tmp_path / "plan.json").write_text(content)
        with pytest.raises(ConfigError, match=r"--run-dir .*rank 1 on .*all machines share"):
            open_run_folder(request, None, None)
    (tmp_path / "plan.json").write_text('{"run_id": "this-run"}')
    opened = open_run_folder(request, None, None)
    assert replace(opened, opened=None, store=store) == world.folder
    assert opened.store.verification is verification
    opened.check_there()


def test_a_stop_that_arrives_from_another_process_has_its_signals_name():
    """As where all load a checkpoint together."""
    with pytest.raises(InterruptedRunError, match="stopped by SIGTERM before"), StopSignals():
        raise _StopNow(signal.SIGTERM.name)


# -- what stands in a run folder and leads out of it --------------------------------------------

TINY = {"train": {"steps": 2, "eval_interval": None}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that has ended; tests take copies."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    fit(folder, sections=TINY)
    return folder


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["log.txt", "metrics.jsonl", "checkpoints", "samples", "logs"])
def test_nothing_is_written_through_a_link_out_of_the_run_folder(run, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "target").write_text("a file of the user's\n" * 100)
    target = outside / "target" if "." in name else outside
    shutil.rmtree(run / name, ignore_errors=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(target)
    before = content(tmp_path)
    with pytest.raises(ConfigError) as refused:
        fit(run, sections=TINY)
    for words in (
        f"{run / name} is a symbolic link to {target}",
        "--run-dir /disk",
        "mount --bind",
    ):
        assert words in str(refused.value)
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ["config.toml", "plan.json", "environment.json"])
def test_a_link_in_the_place_of_a_file_that_is_written_whole_is_replaced(run, tmp_path, name):
    shutil.move(run / name, tmp_path / "outside")
    (run / name).symlink_to(tmp_path / "outside")
    before = (tmp_path / "outside").read_bytes()
    shutil.rmtree(run / "checkpoints")  # it begins again
    if name == "plan.json":
        with pytest.raises(CorruptError, match=r"plan\.json is missing or damaged"):
            fit(run, sections=TINY)
    else:
        fit(run, sections={"train": {**TINY["train"], "steps": 3}})
        assert (run / name).is_file()
        assert not (run / name).is_symlink()
    assert (tmp_path / "outside").read_bytes() == before


def test_a_run_folder_may_be_a_link_itself(run, tmp_path):
    (tmp_path / "link").symlink_to(run)
    _, end = fit(tmp_path / "link", sections=TINY)
    assert end.step == 2
    assert (run / "log.txt").read_text().count("resume  from step 2") == 1


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [pipe, device, folder])
@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json", "config.toml", "log.txt"])
def test_a_resume_waits_for_no_pipe_and_reads_no_device(run, name, damage):
    damage(run / name)
    with pytest.raises(PentameterError, match=name):
        fit(run, sections=TINY)


@pytest.mark.parametrize("line", ["[1]", "[" * 100_000, '{"event": "checkpoint", "step": 1e400}'])
def test_a_resume_reads_over_damaged_events(run, line):
    path = run / "metrics.jsonl"
    path.write_text(f"{line}\n{path.read_text()}")
    _, end = fit(run, sections=TINY)
    assert end.step == 2


def test_a_log_that_becomes_a_link_or_a_pipe_is_not_written(tmp_path):
    warnings = []
    log = LogFile(tmp_path / "log.txt", warnings.append)
    log.append("one")
    (tmp_path / "log.txt").unlink()
    (tmp_path / "outside").write_text("as it was")
    (tmp_path / "log.txt").symlink_to("outside")
    log.append("two")
    assert "a symbolic link stands there" in warnings[0]
    (tmp_path / "log.txt").unlink()
    os.mkfifo(tmp_path / "log.txt")
    log.append("three")
    (tmp_path / "log.txt").unlink()
    log.append("four")
    log.close()
    assert (tmp_path / "log.txt").read_text() == "two\nthree\nfour\n"
    assert (tmp_path / "outside").read_text() == "as it was"
    assert len(warnings) == 1
