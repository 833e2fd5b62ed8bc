"""The training loop: next batch, forward-backward, clip, step, log, maybe evaluate, maybe save.

The loop does not know how many devices there are: it drives an Engine. It keeps no state except
`TrainState`: batches, dropout and learning rate are functions of the step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pentameter.config.schema import Config
from pentameter.errors import ConfigError, CorruptError, InterruptedRunError, StorageError
from pentameter.evaluate.split import perplexity
from pentameter.generation.loop import sample_text
from pentameter.machine.cores import OtherPrograms
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.sources.custom_model import Build, model_source
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.processes.join import lone_world, loss_behind
from pentameter.processes.world import World
from pentameter.train.console import Console
from pentameter.train.evaluations import VALIDATION, evaluate_all, evaluate_test
from pentameter.train.hooks import (
    EpochMetrics,
    Hooks,
    RunEnd,
    SampledText,
    SkippedStep,
    StepMetrics,
    TrainingRun,
    check_hook,
    is_logged,
)
from pentameter.train.log_files import EndKind
from pentameter.train.recorder import Recorder
from pentameter.train.resuming import RunRequest
from pentameter.train.run_lines import RunLines
from pentameter.train.saving import RunCheckpoints
from pentameter.train.signals import PROMPT_SECONDS, StopSignals
from pentameter.train.start import start_run
from pentameter.train.state import EpochSums
from pentameter.train.throughput import PlannedPace, Throughput
from pentameter.train.update import Update, may_read_late, read, update_weights
from pentameter.train.user_components import BatchFunction, OptimizerFunction, UserComponents

MAX_CONSECUTIVE_SKIPS = 3


class Trainer:
    """Train a configuration in its run folder, and resume from the last checkpoint there.

    `fit` returns how the run ended. Arguments next to the configuration: `run_dir` (runs/NAME by
    default), `resume` (auto, never, must, extend, or a path to a checkpoint), `init_from` (a model
    whose weights a new run begins with) and `hooks` (see `train/hooks.py`). User components replace
    the configured ones (see `train/user_components.py`): `model`, a function from the resolved
    configuration to any module, or an `OwnModel`; `optimizer`, a function from parameter groups;
    `batches`, a function from a step and batch rows. `schedule` is the learning rate as a function
    of the step (0-based). `quiet` prints nothing but still writes log.txt. `world` names the ranks
    that train together. Each rank has its own Trainer; all run the same loop and agree on every
    decision in it, and rank 0 prints and writes the run folder. Raises TypeError for other
    arguments, and for an object that is not a hook.
    """

    def __init__(
        self,
        config: Config,
        *,
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
        supplied = UserComponents(model_source(model), optimizer, batches)
        if init_from is not None and model is not None:
            raise ConfigError(
                f"init_from={str(init_from)!r} is a model for the built-in one's weights; a module "
                "of your own begins with those that it is built with"
            )
        self.config = config
        self.run_dir = Path(run_dir) if run_dir is not None else Path("runs") / config.name
        if "\0" in str(self.run_dir):
            raise ConfigError(f"run_dir={str(self.run_dir)!r} holds a NUL, which no path can")
        self.world = world or lone_world()
        self.run: TrainingRun
        """The run, once `fit` has set it up."""
        weights = None if init_from is None else Path(init_from)
        self._request = RunRequest(
            config, self.run_dir, resume, weights, self.world, supplied, force
        )
        self._hooks, self._schedule, self._quiet = tuple(hooks), schedule, quiet

    def fit(self) -> RunEnd:
        """Train to the end: all steps, patience, or a hook's stop.

        Raises InterruptedRunError if a signal stopped the run (everything is saved by then, except
        steps whose updates were skipped), TrainingFailedError if the loss stays non-finite or a
        tensor to be saved is not finite, and the errors in `pentameter.errors` for an invalid
        configuration, data set or folder.
        """
        with contextlib.ExitStack() as stack:
            signals = stack.enter_context(StopSignals())
            console = stack.enter_context(Console(self.world, quiet=self._quiet))
            others = OtherPrograms()
            run, checkpoints = start_run(self._request, console, stack)
            self.run = run
            if (warning := others.warning(run.world.all_gather)) is not None:
                console.say(f"warning: {warning}")
            throughput = Throughput(run.plan, run.compute)
            built_in = (Recorder(), RunLines(), PlannedPace(throughput))
            hooks = Hooks((*built_in, *self._hooks))
            checkpoints.on_saved = partial(hooks.call, "on_checkpoint", run)
            late = reads_late(run, self._hooks)
            loop = _Loop(run, checkpoints, hooks, signals, throughput, self._rate(), late)
            try:
                hooks.call("on_start", run)
                end = loop.run_to_end()
            except Exception as error:
                # Tell the other ranks at once that this one misses another: hooks may take long.
                lost = loss_behind(error, run.world)
                checkpoints.close()
                hooks.tell_error(run, lost or error)
                if lost is None:
                    raise
                raise lost from error
            if end.kind != EndKind.SIGNAL:
                return end
            what = f"stopped by {end.reason} after step {end.step}"
            if checkpoints.last_step == end.step:
                raise InterruptedRunError(f"{what}, which is saved; the same command continues")
            raise InterruptedRunError(f"{what}, whose update was skipped; {checkpoints}")

    def _rate(self) -> Callable[[int], float]:
        """Return the learning rate as a function of the step, 0-based."""
        config = self.run.config
        return self._schedule or partial(
            learning_rate, optimizer=config.optimizer, schedule=config.schedule
        )


def reads_late(run: TrainingRun, hooks: Sequence[object]) -> bool:
    """Return True if nobody needs a step's numbers before the next step is launched: not the next
    step, and none of a user's `hooks`, which are called while the weights are those of their step.
    The same on every rank, whose hooks may differ. Collective.
    """
    are_told = any(hasattr(hook, name) for hook in hooks for name in ("on_step", "on_skip"))
    may = may_read_late(run.engine, run.optimizer) and not are_told
    return not run.world.all_reduce_max(not may)


@dataclass(frozen=True)
class _Step:
    """A step that was made: the number of steps completed with it, its learning rate and update."""

    number: int
    rate: float
    update: Update


class _Loop:
    """The loop of a run. `rate` is the learning rate as a function of the step, 0-based.

    If it reads `late`, a step's numbers stay on the device until `_must_read`, and nothing is done
    between two steps before that: all that a run does there depends on them.
    """

    def __init__(
        self,
        run: TrainingRun,
        checkpoints: RunCheckpoints,
        hooks: Hooks,
        signals: StopSignals,
        throughput: Throughput,
        rate: Callable[[int], float],
        late: bool,
    ) -> None:
        self._run, self._checkpoints, self._hooks = run, checkpoints, hooks
        self._signals, self._throughput, self._rate = signals, throughput, rate
        self._late = late
        self._unread: list[_Step] = []
        self._read_by = 0
        """The step at which ranks ask each other for signals again."""
        self._new_best = False
        self._has_lost_a_sample = False

    def run_to_end(self) -> RunEnd:
        """Train until the run ends, and return how it ended."""
        run = self._run
        while True:
            self._checkpoints.check_copies_if_due()
            self._evaluate_if_due()
            self._sample_if_due()
            end = self._end_if_due()
            self._save_if_due(end)
            if end is not None:
                if end.kind != EndKind.SIGNAL:
                    self._test()
                self._hooks.call("on_end", run, end)
                return end
            self._train_step()
            while not self._must_read():
                self._train_step()
            self._read_steps()

    def _train_step(self) -> None:
        run, state, throughput = self._run, self._run.state, self._throughput
        run.world.progress.note(
            "training", state.step + 1, nothing_to_lose=self._signals.nothing_to_lose
        )
        with throughput:
            with throughput.reading_batch():
                batch = run.batches.batch(state.step, run.engine.rows)
            scale = state.loss_scale.scale if run.compute.precision == "fp16" else 1.0
            loss = run.engine.forward_backward(batch, state.step, loss_scale=scale)
            rate, clip_norm = self._rate(state.step), run.config.optimizer.clip_norm
            optimizer, at_once = run.optimizer, not self._late
            update = update_weights(
                run.engine, optimizer, loss, rate, scale, clip_norm, at_once=at_once
            )
        state.step += 1
        self._unread.append(_Step(state.step, rate, update))

    def _must_read(self) -> bool:
        """Return True if the numbers of the steps since the last read are needed now: the latest is
        logged, ends an epoch, or comes before an action that is due; or ranks should ask for
        signals. The same on every rank."""
        run, step = self._run, self._run.state.step
        if not self._late or step >= self._read_by or is_logged(step, run.config):
            return True
        train, checkpoint = run.config.train, run.config.checkpoint
        actions = (train.check_copies, train.eval_interval, train.sample_interval)
        intervals = [each for each in (*actions, checkpoint.interval) if isinstance(each, int)]
        ends_epoch = run.plan.epoch(step) != run.plan.epoch(step - 1)
        return ends_epoch or any(step % each == 0 for each in intervals)

    def _read_steps(self) -> None:
        """Read the numbers of the steps since the last read, then count and report each."""
        run, state, throughput = self._run, self._run.state, self._throughput
        steps, self._unread = self._unread, []
        with throughput:
            updates = read([step.update for step in steps])
        throughput.end_steps(len(steps))
        self._signals.nothing_to_lose = False
        for step, update in zip(steps, updates, strict=True):
            state.step = step.number
            state.tokens += int(update.loss.n_targets)
            state.train_seconds += throughput.step_seconds
            if run.compute.precision == "fp16":
                state.loss_scale.update(finite=update.made)
            if update.made:
                state.consecutive_skips = 0
                self._checkpoints.prove()
                state.epoch.add(update.loss, throughput.step_seconds)
                self._hooks.call("on_step", run, self._step_metrics(step.rate, update))
            else:
                self._skip(update)
            self._end_epoch_if_due()

    def _end_epoch_if_due(self) -> None:
        """Report the epoch that the latest step completed, if it did."""
        run, state = self._run, self._run.state
        step, sums, epoch = state.step, state.epoch, run.plan.epoch(state.step)
        if epoch == run.plan.epoch(step - 1):
            return
        if sums.n_targets:
            loss = sums.loss / sums.n_targets
            metrics = EpochMetrics(
                epoch, step, loss, perplexity(loss), sums.n_targets, sums.n_steps, sums.seconds
            )
            self._hooks.call("on_epoch", run, metrics)
        state.epoch = EpochSums()

    def _step_metrics(self, rate: float, update: Update) -> StepMetrics:
        run, state, throughput = self._run, self._run.state, self._throughput
        return StepMetrics(
            step=state.step,
            tokens=state.tokens,
            loss=update.loss.mean,
            learning_rate=rate,
            grad_norm=float(update.grad_norm),
            step_seconds=throughput.step_seconds,
            tokens_per_second=throughput.tokens_per_second(int(update.loss.n_targets)),
            mfu=throughput.mfu,
            peak_memory_bytes=run.compute.peak_memory_bytes(),
            eta_seconds=throughput.eta_seconds(run.plan.steps - state.step),
        )

    def _skip(self, update: Update) -> None:
        """Count and report an update that was not made; give up after MAX_CONSECUTIVE_SKIPS in a
        row.

        Under fp16, the loss scale is found by overflow, so those skips count only once the scale
        can fall no further.
        """
        run, state = self._run, self._run.state
        what, value = "loss", update.loss.mean
        if math.isfinite(value):
            what, value = "gradient norm", float(update.grad_norm)
        batch = run.batches.batch(state.step - 1)  # of all ranks
        reason = f"{what} is {value} on batch {batch.hash()[:16]}"
        if not batch.n_targets:
            reason += ", of which no token is to be learnt"
        if run.compute.precision == "fp16" and state.loss_scale.scale > 1:
            reason += f"; loss scale falls to {state.loss_scale.scale:g}"
        else:
            state.consecutive_skips += 1
        self._hooks.call("on_skip", run, SkippedStep(state.step, reason))
        if state.consecutive_skips > MAX_CONSECUTIVE_SKIPS:
            self._checkpoints.give_up(
                f"step {state.step}: {reason}, after {MAX_CONSECUTIVE_SKIPS} skipped updates in a "
                "row"
            )

    # -- between two steps ----------------------------------------------------------------------

    def _end_if_due(self) -> RunEnd | None:
        """Return the end of the run if it ends at this step, else None."""
        run, state, patience = self._run, self._run.state, self._run.config.train.patience
        end = partial(RunEnd, step=state.step, seconds=state.train_seconds)
        took = self._throughput.step_seconds or PROMPT_SECONDS  # a first step may compile
        hooks_reason = self._signals.agree(run.world, run.stop_reason, step_seconds=took)
        self._read_by = state.step + self._signals.steps_unasked
        if self._signals.agreed is not None:
            return end(kind=EndKind.SIGNAL, reason=self._signals.agreed)
        if state.step >= run.plan.steps:
            return end(kind=EndKind.COMPLETED, reason="completed")
        if patience is not None and state.evals_without_best >= patience:
            reason = f"no better validation loss in {patience} evaluations"
            return end(kind=EndKind.PATIENCE, reason=reason)
        if hooks_reason is not None:
            return end(kind=EndKind.HOOK, reason=hooks_reason)
        return None

    def _evaluate_if_due(self) -> None:
        run, state, interval = self._run, self._run.state, self._run.config.train.eval_interval
        assert not isinstance(interval, str)  # resolved by the plan
        if not state.is_due(interval, state.last_eval_step, run.plan.steps):
            return
        run.world.progress.note("evaluating", state.step)
        found = evaluate_all(run, self._is_stopping)
        if not found:  # there is nothing to evaluate on, or a signal came
            return
        for name, metrics in found.items():
            if not math.isfinite(metrics.loss):
                what = "validation" if name == VALIDATION else name
                self._checkpoints.give_up(f"the {what} loss is {metrics.loss} at step {state.step}")
        if self._checkpoints.last_step == state.step:
            self._checkpoints.prove()
        state.last_eval_step = state.step
        if VALIDATION in found:
            folder = run.folder
            trained = state.step > 0 or (folder.initial_weights or folder.checkpoint) is not None
            self._new_best = state.record_eval(found[VALIDATION].loss, trained=trained)
        for name, metrics in found.items():
            best = name == VALIDATION and self._new_best
            self._hooks.call("on_eval", run, replace(metrics, best=best))

    def _test(self) -> None:
        """Evaluate the test split once, at the end of a run that has one."""
        metrics = evaluate_test(self._run, self._is_stopping)
        if metrics is not None:
            self._hooks.call("on_eval", self._run, metrics)

    def _is_stopping(self) -> bool:
        return self._signals.agree(self._run.world) is not None

    def _sample_if_due(self) -> None:
        run, state, train = self._run, self._run.state, self._run.config.train
        assert train.sample_interval != "auto"  # resolved by the plan
        due = state.is_due(train.sample_interval, state.last_sample_step, run.plan.steps)
        if self._signals.agreed or not due or not run.plan.gives_logits:
            return
        state.last_sample_step = state.step
        run.world.progress.note("sampling", state.step)
        try:
            text = sample_text(
                run.engine,
                run.dataset.tokenizer,
                run.prompt,
                max_new_tokens=train.sample_tokens,
                seed=run.config.seed,
            )
        except CorruptError:  # raised on every rank that samples: they have the same logits
            run.console.say(
                f"warning: no sample at step {state.step}: the model's logits are not finite. "
                "Training goes on"
            )
            return
        if text is None:  # rank 0 has it
            return
        try:
            run.folder.write_sample(state.step, text)
        except StorageError as error:  # training does not depend on it: one warning is enough
            if not self._has_lost_a_sample:
                run.console.say(f"warning: {error}. Training goes on")
            self._has_lost_a_sample = True
        run.console.say(f"sample at step {state.step}:")
        for line in text.strip("\n").splitlines():
            run.console.say(f"  │ {line}")
        self._hooks.call("on_sample", run, SampledText(state.step, text))

    def _save_if_due(self, end: RunEnd | None) -> None:
        interrupted = end is not None and end.kind == EndKind.SIGNAL
        new_best, self._new_best = self._new_best, False
        self._checkpoints.save_if_due(
            complete=end is not None and not interrupted,
            interrupted=interrupted,
            new_best=new_best,
        )
        self._checkpoints.say_warnings()
