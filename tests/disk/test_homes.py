"""Where the cache lies, and what a `~` means, for users with and without a home."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pentameter.cli.options.arguments import parse
from pentameter.cli.train import TrainArguments
from pentameter.config.files.load import load_config
from pentameter.config.urls import given_path
from pentameter.disk import cache
from pentameter.disk.cache import cache_folder, telling_of_the_cache
from pentameter.errors import StorageError
from pentameter.train.loop import Trainer


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """Neither $HOME nor an entry for this user: `~` stays as it is."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(cache.os.path, "expanduser", lambda path: path)
    return tmp_path


def test_without_a_home_the_cache_is_in_the_temporary_folder_with_a_warning(homeless):
    with pytest.warns(UserWarning, match=r"no home folder, so the cache is .*XDG_CACHE_HOME"):
        folder = cache_folder()
    assert folder == homeless / f"pentameter-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_home_that_cannot_be_written_is_none(homeless, monkeypatch):
    monkeypatch.setattr(cache.os.path, "expanduser", lambda _: str(homeless / "home"))
    (homeless / "home").mkdir()
    assert cache_folder() == homeless / "home" / ".cache" / "pentameter"
    monkeypatch.setattr(cache.os, "access", lambda *_: False)
    with pytest.warns(UserWarning, match=r"home/.cache/pentameter cannot be written, so"):
        assert cache_folder() == homeless / f"pentameter-{os.getuid()}"
    # What is there is read, whether or not it can be written.
    (homeless / "home" / ".cache" / "pentameter").mkdir(parents=True)
    assert cache_folder() == homeless / "home" / ".cache" / "pentameter"


def test_a_temporary_folder_of_others_is_refused(homeless):
    (homeless / f"pentameter-{os.getuid()}").mkdir()
    (homeless / f"pentameter-{os.getuid()}").chmod(0o777)
    with pytest.raises(StorageError, match="not this user's alone; set XDG_CACHE_HOME"):
        cache_folder()


def test_a_cache_that_cannot_be_written_is_told_with_the_way_to_move_it(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(StorageError, match="read-only, or set XDG"), telling_of_the_cache():
        raise StorageError(f"cannot write {tmp_path}/pentameter/x: read-only")
    with pytest.raises(StorageError, match=r"^cannot write /elsewhere$"), telling_of_the_cache():
        raise StorageError("cannot write /elsewhere")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("home", [{}, {"HOME": "/"}])
def test_a_user_whom_the_system_does_not_know_gets_on(home):
    """A container's `--user 12345`."""
    code = (
        "import os; from pentameter.disk import cache; os.setuid(12345); "
        "cache.find_folder_for_matplotlib(); "
        "print(cache.cache_folder(), os.environ['MPLCONFIGDIR'])"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, check=False,
            env={"TMPDIR": folder} | home,
        )  # fmt: skip
    own = f"{folder}/pentameter-12345"
    assert done.stdout == f"{own} {own}/matplotlib\n", done.stderr
    assert "Traceback" not in done.stderr
    assert "set XDG_CACHE_HOME to a folder" in done.stderr


def test_a_home_in_any_path_that_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    home = tmp_path / "home"
    parsed = parse(TrainArguments, ["~/a.toml", "--run-dir", "~/x", "--resume=~/c"], verb="train")
    assert (parsed.source, parsed.run_dir, parsed.resume) == (
        f"{home}/a.toml", home / "x", f"{home}/c",
    )  # fmt: skip
    config = load_config("quickstart", {"data.path": "~/text", "data.tokenizer": "~/t.json"})
    assert (config.data.path, config.data.tokenizer) == (f"{home}/text", f"{home}/t.json")
    assert Trainer(config, run_dir="~/run").run_dir == home / "run"
    home.mkdir()
    (home / "own.toml").write_text('extends = "quickstart"\nname = "mine"\n')
    assert load_config("~/own.toml").name == "mine"


def test_a_folder_whose_name_is_a_tilde_is_still_found(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("~/x").mkdir(parents=True)
    assert given_path("~/x") == "~/x"
    assert given_path("s3://a/~b") == "s3://a/~b"
