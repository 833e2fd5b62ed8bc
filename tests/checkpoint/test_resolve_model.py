from __future__ import annotations

import pytest

from pentameter.checkpoint.folders.opening import find_model
from pentameter.checkpoint.format.save_phases import Contents
from pentameter.errors import ConfigError, CorruptError


@pytest.fixture
def run(store):
    return store.folder.parent


def test_a_run_means_its_best_checkpoint(store, save, run):
    for step in (1, 2, 3):
        save(store, step, best=min(step, 2))
    assert find_model(run).path == (store.folder / "step-00000002").resolve()
    assert find_model(run).state["step"] == 2


def test_a_run_without_a_best_means_its_last(store, save, run):
    for step in (1, 2):
        save(store, step)
    assert find_model(run).path.name == "step-00000002"


def test_a_best_that_is_gone_or_damaged_gives_way_to_the_last(store, save, run):
    for step in (1, 2, 3):
        save(store, step, best=1)
    store.prune(2)
    assert find_model(run).path.name == "step-00000003"
    save(store, 4, best=2)
    (store.folder / "step-00000002" / "model.safetensors").write_bytes(b"")
    warnings: list[str] = []
    assert find_model(run, warnings).path.name == "step-00000004"
    (line,) = warnings
    assert line.startswith("passed over a checkpoint:")
    assert "step-00000002" in line
    (store.folder / "step-00000004" / "state.json").unlink()
    warnings.clear()
    assert find_model(run, warnings).path.name == "step-00000003"
    assert any("step-00000004" in warning for warning in warnings)


def test_a_damaged_best_that_is_the_last_is_told_once(store, save, run):
    for step in (1, 2):
        save(store, step, best=2)
    (store.folder / "step-00000002" / "model.safetensors").write_bytes(b"")
    warnings: list[str] = []
    assert find_model(run, warnings).path.name == "step-00000001"
    assert len(warnings) == 1


def test_the_best_before_stands_in_for_a_best_that_was_never_saved(store, run):
    """On a disk that was full at step 2; step 3 is worse than step 1."""
    for step, saved_best in ((1, None), (3, 1)):
        state = {"step": step, "best": {"step": min(step, 2), "loss": 1.0}}
        state["saved_best_step"] = saved_best
        store.save(Contents(step, {"model": {}}, state, {}))
    assert find_model(run).path.name == "step-00000001"


def test_a_checkpoint_folder_means_itself(store, save):
    save(store, 1, best=7)
    path = save(store, 2, best=1).path
    assert find_model(path).path == path.resolve()
    (path / "config.toml").unlink()
    with pytest.raises(CorruptError, match=r"config\.toml is missing"):
        find_model(path)


def test_anything_else_says_what_was_found(tmp_path, store, save, run):
    for path, message in [
        (tmp_path / "absent", "does not exist"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "empty", "found there: nothing"),
        (tmp_path / "other", r"found there: notes\.txt"),
        (tmp_path / "new", "without a checkpoint yet"),
    ]:
        if path.name not in ("absent", "file"):
            path.mkdir()
        (tmp_path / "file").write_text("")
        if path.name == "other":
            (path / "notes.txt").write_text("")
        if path.name == "new":
            (path / "checkpoints").mkdir()
        with pytest.raises(ConfigError, match=message) as caught:
            find_model(path)
        assert str(path) in str(caught.value)


def test_a_hugging_face_folder_has_no_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_model(tmp_path) is None


def test_a_run_whose_checkpoints_are_all_damaged_is_corrupt(store, save, run):
    (save(store, 1).path / "state.json").unlink()
    with pytest.raises(CorruptError, match=r"every checkpoint .*state\.json is missing"):
        find_model(run)
