"""Trials of runs that are copied to an object store: requests that fail, processes that are killed
before a request, machines that are gone with their disk.

All trials end alike: on a machine that has nothing, the same command gives the undisturbed run, bit
for bit, and no object is left that belongs to no copy.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.folders.remote_copies import RemoteCopies, fetch_checkpoint
from pentameter.checkpoint.folders.store import CheckpointStore
from pentameter.checkpoint.format.manifest import MANIFEST_NAME
from pentameter.disk import remote_folder
from pentameter.disk.remote_folder import RemoteFolder
from pentameter.train.keep import copying
from trials.faults.object_store import Request, Store, running_store, use_client
from trials.faults.oracle import _train, assert_same_run, events, tiny_config
from trials.faults.trial import PATIENCE_SECONDS, Trial

URL = "s3://bucket/runs/tiny"
INTERVAL = 20
"""Steps between the checkpoints of these runs, of 40 steps."""
MOST_REQUESTS = 180
"""Requests of such a run with four copies, the best among them, and a few more."""
LEAST_PAUSES, MOST_PAUSES = (0.0,) * 4, (0.0,) * 10
"""Pauses between the attempts of these runs: as many as of any other, and no time."""
FAULTS = ("500", "503", "drop", "truncate", "flip", "500 after", "503 after", "stale")

_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class StoreTrial(Trial):
    """A trial with a client of its own choice."""

    client: str = "plain"
    """`plain`, or `s3fs`."""


@dataclass
class _Runs:
    """The runs of a trial, which are copied to its store."""

    trial: Trial
    store: Store
    config: Path
    whole: Path
    """The undisturbed run."""
    process: Any = None
    committed: set[int] = field(default_factory=set)
    """Steps whose manifests the store has."""

    def start(self, name: str) -> Any:
        """A started process that trains in a run folder of that name."""
        client = getattr(self.trial, "client", "plain")
        arguments = (client, self.store.options(), self.config, self.trial.folder / name)
        self.process = _context.Process(target=_train_with_store, args=arguments)
        self.process.start()
        return self.process

    def run(self, name: str) -> int | None:
        """The exit code of such a run."""
        process = self.start(name)
        process.join(PATIENCE_SECONDS)
        code = process.exitcode
        process.kill()
        process.join()
        return code

    def assert_whole_copy(self) -> None:
        """If a copy was ever committed, the newest one can be fetched, and is no older."""
        use_client("plain", self.store.options())
        copies = RemoteCopies(RemoteFolder(URL), [])
        copies.read()
        assert bool(copies.copies) == bool(self.committed)
        if copies.copies:
            newest = copies.copies[max(copies.copies)]
            assert newest.step >= max(self.committed)
            folder = self.trial.folder / f"fetched-{len(self.store.requests)}"
            checkpoints = CheckpointStore(folder, run_id=newest.run_id, config_hash="")
            fetch_checkpoint(copies.folder, newest, checkpoints, lambda n_bytes: None)
            open_checkpoint(folder / f"step-{newest.step:08d}")

    def finish_elsewhere(self, name: str = "new machine") -> int:
        """Run the command on a machine that has nothing: it gives the undisturbed run, and every
        object belongs to a copy. Returns the step from which it went on."""
        code = self.run(name)
        run = self.trial.folder / name
        assert code == 0, f"exit {code}: {_said(run)}"
        assert_same_run(run, self.whole)
        use_client("plain", self.store.options())
        copies = RemoteCopies(RemoteFolder(URL), [])
        copies.read()
        assert max(copies.copies) == 40
        named = {"run.json", *(f"step-{step:08d}/{MANIFEST_NAME}" for step in copies.copies)}
        named |= {each for copy in copies.copies.values() for each in copy.names}
        left = {key.removeprefix("runs/tiny/") for key in self.store.objects} - named
        assert not left, f"left behind: {sorted(left)}"
        return max([0, *(event["step"] for event in events(run, "resume"))])


def _said(run: Path) -> str:
    with suppress(OSError):
        return next(iter(run.glob("error*.txt"))).read_text()
    return ""


def _quick() -> None:
    remote_folder.START_PAUSES, copying.PAUSES = LEAST_PAUSES, MOST_PAUSES


def _train_with_store(client: str, options: dict[str, Any], config: Path, run: Path) -> None:
    use_client(client, options)
    _quick()
    _train(config, run, (), None, {})


def _trained(trial: Trial, act: Callable[[_Runs], str]) -> str:
    """What `act` says of the runs of a trial; first the undisturbed run is made, once for all."""
    settings = {"checkpoint.interval": INTERVAL, "checkpoint.keep_last": 1}
    whole = trial.undisturbed(**settings)
    copied = {"checkpoint.copy_to": URL, "checkpoint.on_error": "warn"}
    config = tiny_config(trial.folder, **settings, **copied)
    _quick()
    with running_store() as store:
        return act(_Runs(trial, store, config, whole.run))


def _watched(
    runs: _Runs, fault: Callable[[Request], str | None]
) -> Callable[[Request], str | None]:
    """`fault`, with a note of each manifest that the store has by then."""

    def ask(request: Request) -> str | None:
        for key in runs.store.objects:
            if key.count("/") == 3 and key.endswith(MANIFEST_NAME):
                runs.committed.add(int(key.split("/")[2][5:]))
        return fault(request)

    return ask


def killed_at_a_request(trial: Trial) -> str:
    """SIGKILL before the store has done the n-th request, or once it has and no answer came; the
    machine is gone, or starts again."""
    number, after = 1 + trial.number // 2 % MOST_REQUESTS, trial.number % 2 == 1

    def act(runs: _Runs) -> str:
        process = runs.start("gone")
        seen = []

        def kill(request: Request) -> str | None:
            if request.number != number:
                return None
            seen.append(f"{request.what} {request.key.rpartition('/')[2]}".strip())
            os.kill(process.pid, signal.SIGKILL)
            return "500 after" if after else "drop"

        runs.store.fault = _watched(runs, kill)
        process.join(PATIENCE_SECONDS)
        code = process.exitcode
        process.kill()
        process.join()
        assert code in (-signal.SIGKILL, 0), code  # 0: there are fewer requests
        runs.store.fault = _watched(runs, lambda request: None)
        runs.assert_whole_copy()
        name = "gone" if trial.number % 5 == 4 else "new machine"
        resumed = runs.finish_elsewhere(name)
        what = seen[0] if seen else "none so late"
        return f"request {number} ({what}), {'done' if after else 'not done'}, from step {resumed}"

    return _trained(trial, act)


def failing_requests(trial: Trial) -> str:
    """A fifth of all requests fail, each in one of eight ways; then the same on a new machine."""
    rate = 0.2

    def act(runs: _Runs) -> str:
        draws = trial.draw
        n_failed = 0

        def fail(request: Request) -> str | None:
            nonlocal n_failed
            if draws.random() > rate:
                return None
            n_failed += 1
            return draws.choice(FAULTS)

        runs.store.fault = _watched(runs, fail)
        code = runs.run("gone")
        assert code in (0, 74), f"exit {code}: {_said(trial.folder / 'gone')}"
        runs.store.fault = _watched(runs, lambda request: None)
        runs.assert_whole_copy()
        runs.store.fault = _watched(runs, fail)
        for start in range(20):
            name = f"new machine {start}"
            code = runs.run(name)
            assert code in (0, 74), f"exit {code}: {_said(trial.folder / name)}"
            if code == 0:
                break
        assert_same_run(trial.folder / name, runs.whole)
        runs.store.fault = lambda request: None
        runs.finish_elsewhere("newest machine")
        return f"{n_failed} of {len(runs.store.requests)} requests failed, {start + 1} starts"

    return _trained(trial, act)


def killed_while_requests_fail(trial: Trial) -> str:
    """The same, and SIGKILL at three random requests, each time on a machine that has nothing."""

    def act(runs: _Runs) -> str:
        draws = trial.draw
        steps = []
        for life in range(3):
            last = len(runs.store.requests) + draws.randint(1, MOST_REQUESTS)
            process = runs.start(f"machine {life}")

            def fail(request: Request, last: int = last, process: Any = process) -> str | None:
                if request.number >= last:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                    return draws.choice(["drop", "500 after"])
                return draws.choice(FAULTS) if draws.random() < 0.1 else None

            runs.store.fault = _watched(runs, fail)
            process.join(PATIENCE_SECONDS)
            assert process.exitcode in (-signal.SIGKILL, 0, 74), process.exitcode
            # What the last request has committed is noted, too.
            runs.store.fault = _watched(runs, lambda request: None)
            runs.assert_whole_copy()
            steps.append(max(runs.committed, default=0))
        return f"copies after each life: {steps}, from step {runs.finish_elsewhere()}"

    return _trained(trial, act)


def out_of_order(trial: Trial) -> str:
    """The store answers nothing from a request on, for good: the run goes on, says so at its end
    (exit 74), and the same command copies it once the store is back."""
    first = trial.draw.randint(6, MOST_REQUESTS // 2)

    def act(runs: _Runs) -> str:
        runs.store.fault = _watched(runs, lambda r: "503" if r.number >= first else None)
        code = runs.run("run")
        run = trial.folder / "run"
        assert code == 74, f"exit {code}: {_said(run)}"
        assert "is not copied to s3://bucket/runs/tiny" in _said(run)
        assert_same_run(run, runs.whole)
        runs.store.fault = lambda request: None
        assert runs.run("run") == 0, _said(run)
        return f"from request {first}, then from step {runs.finish_elsewhere()}"

    return _trained(trial, act)
