"""The training loop. Between two steps it evaluates, samples, looks whether the run ends, and
saves, each if it is due. A step reads its batch, runs forward and backward, and updates the weights
(`update.py`: unscale, norm, clip, optimizer step).

The loop does not know the number of devices: it drives an Engine, which runs the sharded model.
Batches, dropout and learning rate are functions of the step's number, so a resumed loop needs
nothing but the weights, the optimizer's state and `TrainState`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

from pentameter.checkpoint.folders.verification import Verification
from pentameter.config.files.load import Overrides, load_config
from pentameter.config.schema import Config
from pentameter.config.urls import given_path, shown_url, was_url
from pentameter.errors import (
    ConfigError,
    InterruptedRunError,
    StorageError,
    TrainingFailedError,
    remark,
)
from pentameter.evaluate.split import perplexity
from pentameter.machine.load.beside_others import BesideOthers
from pentameter.machine.load.other_programs import OtherPrograms
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.sources.custom_model import Build, model_source
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.processes.group.join import lone_world, loss_behind
from pentameter.processes.group.world import World
from pentameter.record.events import EndKind, EpochMetrics, ExpertMetrics, RunEnd, StepMetrics
from pentameter.train.boundary import Boundary
from pentameter.train.checked_graphs import refuse_wrong_graphs
from pentameter.train.faults.device_memory import is_out_of_memory, out_of_memory
from pentameter.train.faults.guard import Guard
from pentameter.train.faults.pace import RankPace
from pentameter.train.faults.skipping import skip
from pentameter.train.hooks import Hooks, check_hook
from pentameter.train.keep.own_configuration import configuration_to_train
from pentameter.train.keep.resuming import RunRequest
from pentameter.train.keep.saving import RunCheckpoints, uncooled_step
from pentameter.train.run import TrainingRun, is_logged, records_loads
from pentameter.train.say.console import Console
from pentameter.train.say.recorder import Recorder
from pentameter.train.say.run_lines import RunLines
from pentameter.train.say.throughput import PlannedPace, Throughput
from pentameter.train.signals import StopSignals
from pentameter.train.start import start_run
from pentameter.train.state import EpochSums
from pentameter.train.timed.time_kept import TimeKept
from pentameter.train.timed.timed_run import TimedRun, check_timed
from pentameter.train.update import Update, may_read_late, read, update_weights
from pentameter.train.user_components import BatchFunction, OptimizerFunction, UserComponents

AWAITING_TOKENS = "awaiting tokens"
"""Name of the activity that a process reports while the tokens of its batch are not tokenized
yet."""


class Trainer:
    """Trains a configuration in its run folder, from the last checkpoint there on if there is one.
    `fit` runs it.

    config: a configuration, the name of a preset, a TOML file, or a text to train on, as `train`
        takes it.
    overrides: values on top of it, as `load_config` takes them.
    time: how long the run may take, such as "30m": settings that are left open are then chosen by a
        short trial on this machine, as by `train --time`. Or the TimedRun that has chosen `config`.
    run_dir: the run folder; runs/NAME by default, with the configuration's name.
    resume: auto, never, must, extend, or the path to a checkpoint to branch off from (see
        `RunRequest`).
    init_from: path to a model (run, checkpoint or Hugging Face folder) whose weights a new run
        begins with.
    hooks: objects with methods such as `on_step` (see `train/hooks.py`).
    model: a function from the resolved configuration to any module, or an `OwnModel`.
    optimizer: a function from parameter groups to an optimizer.
    batches: a function from a step and batch rows to inputs and targets.
    schedule: the learning rate as a function of the step, 0-based.
    quiet: print nothing, but still write log.txt.
    world: the ranks that train together; by default this process alone (an error under a launcher).
    force: try a run that is predicted to exceed the memory.

    Model, optimizer, batches and schedule are built from the configuration where they are not
    given. Each rank has its own Trainer and runs the same loop; rank 0 prints and writes the run
    folder. Raises TypeError for other arguments, and for an object that is not a hook.
    """

    def __init__(
        self,
        config: Config | str | Path,
        *,
        overrides: Overrides = (),
        time: str | TimedRun | None = None,
        run_dir: Path | str | None = None,
        resume: str = "auto",
        init_from: Path | str | None = None,
        hooks: Sequence[object] = (),
        model: Build | ModelSource | None = None,
        optimizer: OptimizerFunction | None = None,
        batches: BatchFunction | None = None,
        schedule: Callable[[int], float] | None = None,
        quiet: bool = False,
        world: World | None = None,
        force: bool = False,
        **unknown: object,
    ) -> None:
        if unknown:
            raise TypeError(
                f"Trainer takes no argument {', '.join(map(repr, unknown))}; beside the "
                f"configuration it takes {', '.join(Trainer.__init__.__kwdefaults__ or ())}"
            )
        for hook in hooks:
            check_hook(hook)
        supplied = UserComponents(model_source(model), optimizer, batches, schedule)
        if init_from is not None and model is not None:
            raise ConfigError(
                f"init_from={str(init_from)!r} is a model for the built-in one's weights; a module "
                "of your own begins with those that it is built with"
            )
        started = perf_counter()
        weights = None if init_from is None else Path(given_path(str(init_from)))
        self.config = load_config(*configuration_to_train(config, overrides, weights))
        self.run_dir = run_folder_path(run_dir, self.config)
        self.world = world or lone_world()
        self.run: TrainingRun
        """The run, once `fit` has set it up."""
        if isinstance(time, str):
            check_timed(resume, self.world.size)
            folder = self.run_dir
            time = TimedRun(
                config, overrides, time, run_dir=folder, init_from=weights, started=started
            )
            self.config = time.choose(resume, say=(lambda line: None) if quiet else remark)
        self._timed = time
        self._request = RunRequest(
            self.config,
            self.run_dir,
            given_path(resume),
            weights,
            self.world,
            supplied,
            force,
            Verification(self.world),
            goes_on=time is not None and time.goes_on_from is not None,
        )
        self._hooks, self._quiet = tuple(hooks), quiet

    def fit(self) -> RunEnd:
        """Train until all steps are made, `train.patience` is used up or a hook stops the run, and
        return how it ended. A run with a `time` that it would miss is changed once, to another
        number of steps, and goes on. Collective.

        Raises InterruptedRunError if a signal stopped the run (everything is saved by then, except
        steps whose updates were skipped), TrainingFailedError if the loss stays non-finite, a
        tensor to be saved is not finite or a step goes out of memory, and ConfigError, CorruptError
        or StorageError for an invalid configuration, data set or folder.
        """
        if self._timed is None:
            return self._fit(self._hooks)
        kept = TimeKept(self._timed.budget, begins_at=self._timed.goes_on_from or 0)
        end = self._fit((*self._hooks, kept))
        moved = self._timed.moved(kept, self.run)
        if moved is None:
            return end
        self.config, verified = moved, Verification(self.world)
        self._request = replace(self._request, config=moved, resume="must", verification=verified)
        return self._fit((*self._hooks, TimeKept(self._timed.budget, is_moved=True)))

    def _fit(self, hooks: Sequence[object]) -> RunEnd:
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(StopSignals())
            console = stack.enter_context(Console(self.world, quiet=self._quiet))
            others = OtherPrograms()
            run, checkpoints = start_run(self._request, console, stack)
            self.run = run
            if (warning := others.warning(run.world.all_gather)) is not None:
                console.say(f"warning: {warning}")
            throughput = Throughput(run.plan, run.compute)
            stack.callback(throughput.close)
            n_threads = run.compute.n_threads if run.compute.device.type == "cpu" else 1
            beside = stack.enter_context(BesideOthers(n_threads, run.world.all_gather))
            built_in = (Recorder(), RunLines(beside.take_word), PlannedPace(throughput))
            called = Hooks((*built_in, *hooks))
            checkpoints.on_saved = partial(called.call, "on_checkpoint", run)
            late = reads_late(run, hooks)
            loop = _Loop(run, checkpoints, called, signals, throughput, self._rate(), late)
            try:
                called.call("on_start", run)
                run.world.activity.note("training", run.state.step + 1, nothing_to_lose=True)
                wrong = refuse_wrong_graphs(run.engine, run.batches, run.state.step)
                if wrong is not None:
                    console.say(f"warning: {wrong}")
                end = loop.run_to_end()
            except Exception as error:
                # Tell the other ranks at once that this one misses another: hooks may take long.
                lost: Exception | None = loss_behind(error, run.world)
                checkpoints.close()
                if lost is None and is_out_of_memory(error):
                    needed = out_of_memory(run.plan, run.compute, f"after step {run.state.step}")
                    lost = TrainingFailedError(f"{needed}; {checkpoints}")
                called.tell_error(run, lost or error)
                run.copies.finish_after_error(lambda: signals.received is not None, console.say)
                loop.boundary.tell_of_copies()
                if lost is None:
                    raise
                raise lost from error
            not_copied = loop.boundary.finish_copies()
            run.folder.check_not_replaced()  # whose events since then were not written
            if end.kind == EndKind.SIGNAL:
                raise _interruption(end, checkpoints, not_copied)
            if not_copied is not None:
                raise StorageError(f"{not_copied}; it is complete, and in {run.folder.path}")
            return end

    def _rate(self) -> Callable[[int], float]:
        """Return a function from the step, 0-based, to its learning rate: the user's, else the
        configured."""
        config = self.run.config
        return self._request.supplied.schedule or partial(
            learning_rate, optimizer=config.optimizer, schedule=config.schedule
        )


def _interruption(
    end: RunEnd, checkpoints: RunCheckpoints, not_copied: str | None
) -> InterruptedRunError:
    """Return the error for a run that a signal has ended: it says where the same command goes on,
    and what is `not_copied`, if anything."""
    what = f"stopped by {end.reason} after step {end.step}"
    also = "" if not_copied is None else f"; {not_copied}"
    if checkpoints.last_step == end.step:
        return InterruptedRunError(f"{what}, which is saved; the same command continues{also}")
    if checkpoints.run.state.consecutive_skips:
        what += ", whose update was skipped"
    else:
        what = f"stopped by {end.reason} before its first step"
    return InterruptedRunError(f"{what}; {checkpoints}{also}")


def run_folder_path(run_dir: Path | str | None, config: Config) -> Path:
    """Return the path of the run folder: `run_dir`, or runs/NAME with the configuration's name if
    `run_dir` is None. Raises ConfigError if `run_dir` is a URL or holds a NUL character."""
    if run_dir is None:
        return Path("runs") / config.name
    path = Path(given_path(str(run_dir)))
    if was_url(path):
        raise ConfigError(
            f"run_dir={shown_url(str(path).replace(':/', '://', 1))} is a URL, and a run folder "
            "has a lock and logs that grow, which an object store has not; keep it on a disk and "
            "set checkpoint.copy_to to the URL: on a new machine the run goes on from there"
        )
    if "\0" in str(path):
        raise ConfigError(f"run_dir={str(path)!r} holds a NUL, which no path can")
    return path


def reads_late(run: TrainingRun, hooks: Sequence[object]) -> bool:
    """Return True if the host may launch the next step before it knows this one's loss and gradient
    norm: the device decides about the update by itself (`may_read_late`), and no user hook has
    `on_step` or `on_skip`. The same on every rank. Collective."""
    are_told = any(hasattr(hook, name) for hook in hooks for name in ("on_step", "on_skip"))
    may = may_read_late(run.engine, run.optimizer) and not are_told
    return not run.world.all_reduce_max(not may)


@dataclass(frozen=True)
class _Step:
    """A step that the loop has made: its number, counted from 1, its learning rate, and what came
    of it (`Update`). A frozen record."""

    number: int
    rate: float
    update: Update


@dataclass(eq=False)
class _Loop:
    """The training loop of one run. `rate` maps a step, 0-based, to its learning rate.

    late: True to launch several steps on the device before the host reads their losses and norms
        (`_must_read` says when it does). The device must then be able to leave out bad updates by
        itself (`reads_late`). Nothing else, such as a log line, an evaluation or a save, is done
        between these steps.
    """

    run: TrainingRun
    checkpoints: RunCheckpoints
    hooks: Hooks
    signals: StopSignals
    throughput: Throughput
    rate: Callable[[int], float]
    late: bool

    def __post_init__(self) -> None:
        run = self.run
        self._unread: list[_Step] = []
        self._guard = self._new_guard()
        self.boundary = Boundary(run, self.checkpoints, self.hooks, self.signals)
        self._pace = RankPace(run.plan, run.world)
        for tokens in run.dataset.training_tokens:
            tokens.waiting = lambda: run.world.activity.note(AWAITING_TOKENS, run.state.step + 1)

    def _new_guard(self) -> Guard | None:
        """Return an object that decides on the device whether each update is left out, with the
        history of losses in the run's state; or None if the host can decide that by itself. It is
        needed if `guard.spike_factor` is set (spikes are judged by the history), and if the run may
        roll back and the host launches steps before it knows the losses of earlier ones
        (`late`)."""
        run, settings = self.run, self.run.config.guard
        rolls_back = settings.rollback_interval is not None
        if settings.spike_factor is None and not (self.late and rolls_back):
            return None
        device = run.engine.device if run.engine.host_waits else torch.device("cpu")
        return Guard(settings, run.state, device, halts=self.late)

    def run_to_end(self) -> RunEnd:
        """Train until the run ends, and return how it ended."""
        boundary = self.boundary
        while True:
            boundary.check_ours_if_due()
            self.checkpoints.check_if_due()
            boundary.evaluate_if_due()
            boundary.sample_if_due()
            end = self._end_if_due()
            boundary.save_if_due(end)
            if end is not None:
                if end.kind != EndKind.SIGNAL:
                    boundary.test()
                self.hooks.call("on_end", self.run, end)
                return end
            self._train_step()
            while not self._must_read():
                self._train_step()
            self._read_steps()

    def _end_if_due(self) -> RunEnd | None:
        """Return the end of the run if it ends at this step, else None. After a logged step, also
        compare how long each rank computed since the last one, and call `on_ranks` hooks."""
        run, step_seconds = self.run, self.throughput.step_seconds
        own = self.throughput.take_own_time() if is_logged(run.state.step, run.config) else None
        numbers = () if own is None else self._pace.numbers(own)
        end = self.boundary.end_if_due(step_seconds, numbers)
        if own is not None:
            maxima = self.signals.maxima
            self.hooks.call("on_ranks", run, self._pace.metrics(run.state.step, maxima, own))
        return end

    def _train_step(self) -> None:
        run, state, throughput = self.run, self.run.state, self.throughput
        run.world.activity.note(
            "training", state.step + 1, nothing_to_lose=self.signals.nothing_to_lose
        )
        with throughput:
            with throughput.reading_batch():
                batch = run.batches.batch(state.step, run.engine.rows)
            if run.world.activity.latest.doing == AWAITING_TOKENS:
                run.world.activity.note("training", state.step + 1)
            scale = state.loss_scale.scale if run.compute.precision == "fp16" else 1.0
            loss = run.engine.forward_backward(batch, state.step, loss_scale=scale)
            rate, clip_norm = self.rate(state.step), run.config.optimizer.clip_norm
            self.checkpoints.checks.before_update()
            run.supplied.seed_update(run.config.seed, state.step)
            update = update_weights(
                run.engine,
                run.optimizer,
                loss,
                rate,
                scale,
                clip_norm,
                at_once=not self.late,
                with_loads=records_loads(state.step + 1, run.config),
                guard=self._guard,
            )
            self.checkpoints.checks.after_update()
        state.step += 1
        self._unread.append(_Step(state.step, rate, update))

    def _must_read(self) -> bool:
        """Return True if the losses and norms still on the device are needed on the host now: the
        latest step is logged, ends an epoch or precedes an action such as a save, or ranks should
        compare stop signals. The same on every rank."""
        run, step = self.run, self.run.state.step
        must_ask = len(self._unread) >= self.signals.steps_unasked
        if not self.late or must_ask or is_logged(step, run.config):
            return True
        train, checkpoint = run.config.train, run.config.checkpoint
        actions = (train.eval_interval, train.sample_interval)
        checks = (train.check_copies, train.check_every)
        saves = (checkpoint.interval, run.config.guard.rollback_interval)
        intervals = [each for each in (*actions, *checks, *saves) if isinstance(each, int)]
        ends_epoch = run.plan.epoch(step) != run.plan.epoch(step - 1)
        if ends_epoch or step == uncooled_step(run.config):
            return True
        return any(step % each == 0 for each in intervals)

    def _read_steps(self) -> None:
        """Copy the unread steps' losses and norms to the host; then, for each step, update
        `TrainState` and call `on_step` or `on_skip` hooks."""
        run, state, throughput = self.run, self.run.state, self.throughput
        settings = run.config.guard
        steps, self._unread = self._unread, []
        with throughput:
            updates = read([step.update for step in steps])
        throughput.end_steps(len(steps))
        self.signals.nothing_to_lose = False
        peak_bytes = run.compute.peak_memory_bytes()  # once: a GPU idles until the next step
        for step, update in zip(steps, updates, strict=True):
            state.step = step.number
            state.tokens += int(update.loss.n_targets)
            state.train_seconds += throughput.step_seconds
            if run.compute.precision == "fp16":
                state.loss_scale.update(finite=update.is_finite)
            if update.made:
                state.consecutive_skips = 0
                self.checkpoints.prove()
                state.epoch.add(update.loss, throughput.step_seconds)
                if settings.spike_factor is not None:
                    state.guard.add(update.loss.mean, float(update.grad_norm), settings.window)
                self.hooks.call("on_step", run, self._step_metrics(step.rate, update, peak_bytes))
                for metrics in _expert_metrics(run, update):
                    self.hooks.call("on_experts", run, metrics)
            has_rolled_back = not update.made and skip(run, self.checkpoints, self.hooks, update)
            self._end_epoch_if_due()
            if has_rolled_back:
                self._guard = self._new_guard()
                break  # the device left out the steps that were launched after this one

    def _end_epoch_if_due(self) -> None:
        """If the latest step completed an epoch, call `on_epoch` hooks and begin new sums."""
        run, state = self.run, self.run.state
        step, sums, epoch = state.step, state.epoch, run.plan.epoch(state.step)
        if epoch == run.plan.epoch(step - 1):
            return
        if sums.n_targets:
            loss = sums.loss / sums.n_targets
            metrics = EpochMetrics(
                step, epoch, loss, perplexity(loss), sums.n_targets, sums.n_steps, sums.seconds
            )
            self.hooks.call("on_epoch", run, metrics)
        state.epoch = EpochSums()

    def _step_metrics(self, rate: float, update: Update, peak_bytes: int) -> StepMetrics:
        run, state, throughput = self.run, self.run.state, self.throughput
        return StepMetrics(
            step=state.step,
            tokens=state.step * run.plan.tokens_per_step,
            loss_tokens=state.tokens,
            loss=update.loss.mean,
            learning_rate=rate,
            grad_norm=float(update.grad_norm),
            step_seconds=throughput.step_seconds,
            tokens_per_second=throughput.tokens_per_second,
            mfu=throughput.mfu,
            peak_memory_bytes=peak_bytes,
            eta_seconds=throughput.eta_seconds(run.plan.steps - state.step),
        )


def _expert_metrics(run: TrainingRun, update: Update) -> list[ExpertMetrics]:
    """Return the metrics of each layer that has experts, from the counts of tokens in `update`,
    which must be on the host. Layers whose router counted nothing are left out; the list is empty
    if nothing was counted at all."""
    if not isinstance(update.loads, list):
        return []
    rows = zip(run.engine.expert_loads.layers, update.loads, strict=True)
    step, model = run.state.step, run.config.model
    return [
        ExpertMetrics.of_totals(step, layer, totals, model.experts.n_chosen)
        for layer, totals in rows
        if any(totals[: model.experts.count])
    ]
