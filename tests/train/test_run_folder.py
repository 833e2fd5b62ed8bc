"""What a run folder must be for all processes of a run."""

import signal

import pytest

from pentameter.errors import ConfigError, InterruptedRunError
from pentameter.processes.world import World
from pentameter.train import run_folder
from pentameter.train.continuing import Request
from pentameter.train.run_folder import RunFolder, open_run_folder
from pentameter.train.signals import StopSignals, _StopNow


class Elsewhere(World):
    """The second process of two, on a machine of its own; the first has opened `folder`."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(rank=1, size=2)
        object.__setattr__(self, "folder", folder)

    def on_main(self, action):
        return self.folder, False

    def all_gather(self, value):
        return [None, value]


def test_a_folder_that_another_machine_does_not_see_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "VISIBLE_SECONDS", 0.3)
    (tmp_path / "config.toml").touch()  # which makes it a run
    world = Elsewhere(RunFolder(tmp_path, "this-run", None, None))
    request = Request(None, tmp_path, "auto", None, world)
    for content in (None, '{"run_id": "another"}', '{"run_id": "this'):
        if content is not None:
            (tmp_path / "plan.json").write_text(content)
        with pytest.raises(ConfigError, match=r"--run-dir .*rank 1 on .*all machines share"):
            open_run_folder(request, None, None)
    (tmp_path / "plan.json").write_text('{"run_id": "this-run"}')
    assert open_run_folder(request, None, None) is world.folder


def test_a_stop_that_arrives_from_another_process_has_its_signals_name():
    """As where all load a checkpoint together."""
    with pytest.raises(InterruptedRunError, match="stopped by SIGTERM before"), StopSignals():
        raise _StopNow(signal.SIGTERM.name)
