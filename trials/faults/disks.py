"""Trials of the battery: damage on disk, disks that refuse, and power losses."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

from pentameter.checkpoint.folders.opening import list_checkpoints, open_checkpoint
from pentameter.errors import CorruptError
from trials.faults.damage import DAMAGES, FILES
from trials.faults.oracle import tiny_config
from trials.faults.planted import FailInSave, FileSizeLimit, LateWrites
from trials.faults.trial import Trial, assert_checkpoints_whole, join, kill, said, wait_for_step

EXIT_CORRUPT, EXIT_STORAGE = 65, 74


def _stopped_between_checkpoints(trial: Trial, whole) -> list[Path]:
    """Kill a run that has two checkpoints or more; their folders, newest first."""
    processes = trial.start(whole.config)
    wait_for_step(trial.run, trial.draw.randint(17, 34), processes)
    kill(processes)
    return [each.path for each in list_checkpoints(trial.run / "checkpoints")]


def a_damaged_file(trial: Trial) -> str:
    """One file of the newest checkpoint is damaged: the run goes on from the one before; in all of
    them: it ends with 65, and names the file."""
    whole = trial.undisturbed(**{"checkpoint.keep_last": 3})
    damage = DAMAGES[trial.number % len(DAMAGES)]
    name = FILES[trial.number // len(DAMAGES) % len(FILES)]
    folders = _stopped_between_checkpoints(trial, whole)
    if damage.__name__ == "swap_with_older" and name in ("config.toml", "manifest.json"):
        name = "state.json"  # the same in all; or a manifest of another step, which `K2` has
    damage(folders[0] / name)
    if trial.number % 5 == 4:  # also all the others
        for folder in folders[1:]:
            (folder / name).unlink()
        codes = join(trial.start(whole.config))
        assert codes == [EXIT_CORRUPT], codes
        assert name in said(trial.run), said(trial.run)
        return f"{damage.__name__} {name} in all {len(folders)}: 65"
    trial.finish(whole)
    assert "passed over a checkpoint" in (trial.run / "log.txt").read_text()
    return f"{damage.__name__} {name} of {folders[0].name}"


FLIPS = 50
"""Bits that a trial of `flipped_bits` flips, one at a time."""


def flipped_bits(trial: Trial) -> str:
    """Any bit of any file of a checkpoint: it is refused."""
    whole = trial.undisturbed()
    path = trial.folder / "step-00000040"
    shutil.copytree(whole.run / "checkpoints" / path.name, path)
    names = sorted(os.listdir(path))
    for _ in range(FLIPS):
        file = path / trial.draw.choice(names)
        content = file.read_bytes()
        bit = trial.draw.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except CorruptError:
            file.write_bytes(content)
        else:
            raise AssertionError(f"bit {bit} of {file.name} is flipped, and nobody sees it")
    open_checkpoint(path)
    return f"{FLIPS} bits"


# -- disks that refuse ----------------------------------------------------------------------------

REFUSALS = (
    (errno.ENOSPC, False),
    (errno.ENOSPC, True),
    (errno.EIO, True),
    (errno.EIO, False),
    (errno.EDQUOT, False),
    (errno.EROFS, False),
)


def a_disk_that_refuses(trial: Trial) -> str:
    """Writing fails at some point of a save, once or from then on, or files may not grow: the run
    warns and goes on, or ends with 74; the checkpoints are whole, and the same command goes on."""
    beside = trial.number % 2 == 0
    on_error = ("stop", "warn")[trial.number // 2 % 2]
    whole = trial.undisturbed(**{"checkpoint.asynchronous": beside})
    config = tiny_config(
        trial.folder, **{"checkpoint.asynchronous": beside, "checkpoint.on_error": on_error}
    )
    fault: FileSizeLimit | FailInSave
    if trial.number % 7 == 6:
        fault = FileSizeLimit(trial.draw.choice([1_000, 10_000, 40_000]))
    else:
        number, once = REFUSALS[trial.number % len(REFUSALS)]
        save, n = trial.draw.randint(1, 7), trial.draw.randint(1, 30)
        fault = FailInSave(save, n, number, once)
    codes = join(trial.start(config, planted=[fault, LateWrites(2)]))
    assert codes[0] in (0, EXIT_STORAGE), (codes, said(trial.run))
    assert_checkpoints_whole(trial.run)
    if codes[0] == EXIT_STORAGE:
        assert "cannot" in said(trial.run)
        trial.finish(whole, config=config)
    return f"{fault}, on_error={on_error}: {codes[0]}"


def no_mount() -> str | None:
    """Why this machine cannot mount a small disk; None where it can."""
    done = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True, text=True)
    return done.stderr.strip() or None if done.returncode else None


@contextmanager
def small_disk(folder: Path, n_bytes: int):
    """A disk of its own size, mounted at `folder`."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", str(folder)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def a_full_disk(trial: Trial) -> str:
    """A disk that is full at some point of the run: the same, and once there is space again the
    same command goes on."""
    beside = trial.number % 2 == 0
    whole = trial.undisturbed(**{"checkpoint.asynchronous": beside})
    disk = trial.folder / "disk"
    n_bytes = sum(path.stat().st_size for path in whole.run.rglob("*") if path.is_file())
    inside = Trial(trial.number, trial.draw, disk, trial.shared, trial.mistakes)
    with small_disk(disk, 4 << 20):
        filler = disk / "filler"
        room = trial.draw.randint(0, 3 * n_bytes)
        filler.write_bytes(bytes(max(0, (4 << 20) - room - (1 << 16))))
        codes = join(inside.start(whole.config))
        assert codes[0] in (0, EXIT_STORAGE), (codes, said(inside.run))
        assert_checkpoints_whole(inside.run)
        filler.unlink()
        inside.finish(whole)
    return f"room for {room:,} bytes: {codes[0]}"
