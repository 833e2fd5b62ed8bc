"""Checkpoints of a run by the names of their folders."""

from pentameter.disk.atomic import temporary_name
from pentameter.record import checkpoints
from pentameter.record.checkpoints import (
    list_checkpoints,
    newest_checkpoint,
    step_folder_name,
    step_of,
)


def test_a_step_is_read_from_the_name_that_it_gives():
    for step in (0, 5, 10**8 - 1, 10**8, 10**12):
        name = step_folder_name(step)
        assert step_of(name) == step_of(f"{name}{checkpoints.REPLACED}") == step
        assert step_of(temporary_name(name)) is None
    for name in ("step-5", "step-0000000x", "step-00000005.txt", "steps", ""):
        assert step_of(name) is None


def test_the_newest_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path) == ""
    for name in ("step-00000005", "step-00000010", "step-00000015.tmp-1"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert newest_checkpoint(tmp_path) == "step-00000010"
    (tmp_path / "checkpoints" / "step-100000000").mkdir()  # nine digits, later than eight
    (tmp_path / "checkpoints" / "step-100000001.replaced").mkdir()
    (tmp_path / "checkpoints" / "step-100000002").write_text("no folder")
    assert newest_checkpoint(tmp_path) == "step-100000000"
    steps = [(each.step, each.replaced) for each in list_checkpoints(tmp_path / "checkpoints")]
    assert steps == [(100000001, True), (100000000, False), (10, False), (5, False)]


def test_a_folder_that_cannot_be_listed_has_none(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    assert newest_checkpoint(tmp_path) == ""
