"""The training loop: next batch, forward-backward, clip, step, log, maybe evaluate, maybe save.

Nothing here knows how many devices there are: the trainer drives an Engine. Nothing here is
remembered but `TrainState`: batches, dropout and learning rate are functions of the step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pentameter.config.schema import Config
from pentameter.errors import ConfigError, CorruptError, InterruptedRunError, StorageError
from pentameter.evaluate.split import perplexity
from pentameter.generation.loop import sample_text
from pentameter.machine.cores import OtherPrograms
from pentameter.optim.schedule import learning_rate
from pentameter.parallel.engine import LossSum
from pentameter.parallel.model_source import ModelSource
from pentameter.parallel.own_model import Build, model_source
from pentameter.processes.join import lone_world, loss_behind
from pentameter.processes.world import World
from pentameter.train.console import Console
from pentameter.train.continuing import Request
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
)
from pentameter.train.profile import PlannedPace, Stopwatch
from pentameter.train.signals import StopSignals
from pentameter.train.start import start_run
from pentameter.train.state import EpochSums, TrainState
from pentameter.train.supplied import BatchFunction, OptimizerFunction, Supplied
from pentameter.train.update import update_weights

MAX_CONSECUTIVE_SKIPS = 3


class Trainer(TrainingRun):
    """Trains what a configuration asks for, in its run folder, continuing where it stopped.

    `fit` returns how the run ended. Beside the configuration: `run_dir` (runs/NAME when absent),
    `resume` (auto, never, must, extend, or a checkpoint's path), `init_from` (a model whose weights
    a new run begins with), `hooks` (see `train/hooks.py`), and in the place of the configuration's
    own: `model`, a function of the resolved configuration that returns any module, or an
    `OwnModel`; `optimizer`, a function of parameter groups; `batches`, a function of step and rows
    (see `train/supplied.py`); `schedule`, the learning rate as a function of the step (0-based).
    `quiet`, which prints nothing but
    still writes log.txt, and `world`, the processes that train together, each with a Trainer of its
    own: they run the same loop and agree on every turn of it, and the main one speaks and writes
    the run folder. Raises TypeError for other arguments, and for what is no hook.
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
        supplied = Supplied(model_source(model), optimizer, batches)
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
        self.console = Console(self.world, quiet=quiet)
        self.state = TrainState()
        weights = None if init_from is None else Path(init_from)
        self._request = Request(config, self.run_dir, resume, weights, self.world, supplied, force)
        self._user_hooks = tuple(hooks)
        self._schedule = schedule
        self._signals = StopSignals()
        self._stop_word: str | None = None
        self._new_best = False
        self._has_lost_a_sample = False
        self._input_seconds = 0.0

    def fit(self) -> RunEnd:
        """Train to the end: all steps, patience, or a hook's stop.

        Raises InterruptedRunError when a signal stopped it (everything is saved by then, but for
        steps whose updates were skipped), TrainingFailedError when the loss stays non-finite or
        what is to be saved is not finite, and the errors of `pentameter.errors` for a
        configuration, data or a folder that cannot be.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals)
            stack.enter_context(self.console)
            others = OtherPrograms()
            self._start(stack)
            if (warning := others.warning(self.world.all_gather)) is not None:
                self.console.say(f"warning: {warning}")
            try:
                self._hooks.call("on_start", self)
                end = self._loop()
            except Exception as error:
                # The others are told at once that this process misses another: hooks may take long.
                lost = loss_behind(error, self.world)
                self._hooks.tell_error(self, lost or error)
                if lost is None:
                    raise
                raise lost from error
            if end.reason != self._signals.agreed:
                return end
            what = f"stopped by {end.reason} after step {end.step}"
            if self._checkpoints.last_step == end.step:
                raise InterruptedRunError(f"{what}, which is saved; the same command continues")
            raise InterruptedRunError(f"{what}, whose update was skipped; {self._checkpoints}")

    def stop(self, reason: str) -> None:
        """Ask the run to end after the current step, as if it were complete."""
        self._stop_word = reason

    def record(self, event: str, **values: float | str | None) -> None:
        """Record an event in metrics.jsonl and trackers, for a hook that measures something; its
        step is among `values`. Does nothing in other processes than the main one."""
        self._recorder.write(event, **values)

    def _start(self, stack: contextlib.ExitStack) -> None:
        """Set the run up, and keep what the loop works with."""
        self._checkpoints, self._recorder = start_run(self, self._request, stack)
        self.stopwatch = Stopwatch(self.plan, self.compute)
        self._rate = self._schedule or partial(
            learning_rate, optimizer=self.config.optimizer, schedule=self.config.schedule
        )
        pace = PlannedPace(lambda: self._input_seconds)
        self._hooks = Hooks((self._recorder, self.console, pace, *self._user_hooks))

    # -- the loop -------------------------------------------------------------------------------

    def _loop(self) -> RunEnd:
        while True:
            self._checkpoints.check_copies_if_due()
            self._evaluate_if_due()
            self._sample_if_due()
            reason = self._stop_reason()
            self._save_if_due(reason)
            if reason is not None:
                if self._signals.agreed is None:
                    self._test()
                end = RunEnd(self.state.step, reason, self.state.train_seconds)
                self._hooks.call("on_end", self, end)
                return end
            self._train_step()

    def _train_step(self) -> None:
        state, config = self.state, self.config
        self.world.progress.note(
            "training", state.step + 1, nothing_to_lose=self._signals.nothing_to_lose
        )
        with self.stopwatch:
            start = time.perf_counter()
            batch = self.batches.batch(state.step, self.engine.rows)
            self._input_seconds = time.perf_counter() - start
            scale = state.loss_scale.scale if self.compute.precision == "fp16" else 1.0
            loss = self.engine.forward_backward(batch, state.step, loss_scale=scale)
            rate = self._rate(state.step)
            norm = update_weights(
                self.engine, self.optimizer, loss, rate, scale, config.optimizer.clip_norm
            )
        self._signals.nothing_to_lose = False
        finite = math.isfinite(loss.mean) and math.isfinite(norm)
        state.step += 1
        state.tokens += loss.n_targets
        state.train_seconds += self.stopwatch.step_seconds
        if self.compute.precision == "fp16":
            state.loss_scale.update(finite=finite)
        if finite:
            state.consecutive_skips = 0
            self._checkpoints.prove()
            state.epoch.add(loss, self.stopwatch.step_seconds)
            self._hooks.call("on_step", self, self._step_metrics(loss, rate, norm))
        else:
            self._skip(loss.mean, norm)
        self._end_epoch_if_due()

    def _end_epoch_if_due(self) -> None:
        """Report the pass over the training split that the latest step completed, if it did."""
        step, sums = self.state.step, self.state.epoch
        epoch = self.plan.epoch(step)
        if epoch == self.plan.epoch(step - 1):
            return
        if sums.n_targets:
            loss = sums.loss / sums.n_targets
            metrics = EpochMetrics(
                epoch, step, loss, perplexity(loss), sums.n_targets, sums.n_steps, sums.seconds
            )
            self._hooks.call("on_epoch", self, metrics)
        self.state.epoch = EpochSums()

    def _step_metrics(self, loss: LossSum, rate: float, norm: float) -> StepMetrics:
        watch = self.stopwatch
        return StepMetrics(
            step=self.state.step,
            tokens=self.state.tokens,
            loss=loss.mean,
            learning_rate=rate,
            grad_norm=norm,
            step_seconds=watch.step_seconds,
            tokens_per_second=loss.n_targets / watch.step_seconds,
            mfu=watch.mfu,
            peak_memory_bytes=self.compute.peak_memory_bytes(),
            eta_seconds=watch.eta_seconds(self.plan.steps - self.state.step),
        )

    def _skip(self, loss: float, norm: float) -> None:
        """Count and report an update that was not made; give up after a few in a row.

        Under fp16 an overflow is how the loss scale finds its level, so those skips count only
        once the scale can fall no further.
        """
        state = self.state
        what = "loss" if not math.isfinite(loss) else "gradient norm"
        value = loss if what == "loss" else norm
        batch = self.batches.batch(state.step - 1)  # of all processes
        reason = f"{what} is {value} on batch {batch.hash()[:16]}"
        if not batch.n_targets:
            reason += ", of which no token is to be learnt"
        if self.compute.precision == "fp16" and state.loss_scale.scale > 1:
            reason += f"; loss scale falls to {state.loss_scale.scale:g}"
        else:
            state.consecutive_skips += 1
        self._hooks.call("on_skip", self, SkippedStep(state.step, reason))
        if state.consecutive_skips > MAX_CONSECUTIVE_SKIPS:
            self._checkpoints.give_up(
                f"step {state.step}: {reason}, after {MAX_CONSECUTIVE_SKIPS} skipped updates in a "
                "row"
            )

    # -- between two steps ----------------------------------------------------------------------

    def _stop_reason(self) -> str | None:
        patience = self.config.train.patience
        stop_word = self._signals.agree(self.world, self._stop_word)
        if self._signals.agreed is not None:
            return self._signals.agreed
        if self.state.step >= self.plan.steps:
            return "completed"
        if patience is not None and self.state.evals_without_best >= patience:
            return f"no better validation loss in {patience} evaluations"
        return stop_word

    def _evaluate_if_due(self) -> None:
        state, interval = self.state, self.config.train.eval_interval
        assert not isinstance(interval, str)  # the plan resolved it
        if not state.is_due(interval, state.last_eval_step, self.plan.steps):
            return
        self.world.progress.note("evaluating", state.step)
        found = evaluate_all(self, self._is_stopping)
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
            trained = state.step > 0 or self._request.init_from is not None
            self._new_best = state.record_eval(found[VALIDATION].loss, trained=trained)
        for name, metrics in found.items():
            best = name == VALIDATION and self._new_best
            self._hooks.call("on_eval", self, replace(metrics, best=best))

    def _test(self) -> None:
        """Evaluate the test split, once, at the end of a run that has one."""
        metrics = evaluate_test(self, self._is_stopping)
        if metrics is not None:
            self._hooks.call("on_eval", self, metrics)

    def _is_stopping(self) -> bool:
        return self._signals.agree(self.world) is not None

    def _sample_if_due(self) -> None:
        state, train = self.state, self.config.train
        assert train.sample_interval != "auto"  # the plan resolved it
        due = state.is_due(train.sample_interval, state.last_sample_step, self.plan.steps)
        if self._signals.agreed or not due or not self.plan.gives_logits:
            return
        state.last_sample_step = state.step
        self.world.progress.note("sampling", state.step)
        try:
            text = sample_text(
                self.engine,
                self.dataset.tokenizer,
                self.prompt,
                max_new_tokens=train.sample_tokens,
                seed=self.config.seed,
            )
        except CorruptError:  # in every process that samples: they have the same logits
            self.console.say(
                f"warning: no sample at step {state.step}: the model's logits are not finite. "
                "Training goes on"
            )
            return
        if text is None:  # the main process has it
            return
        try:
            self.folder.write_sample(state.step, text)
        except StorageError as error:  # no training depends on it: one warning is enough
            if not self._has_lost_a_sample:
                self.console.say(f"warning: {error}. Training goes on")
            self._has_lost_a_sample = True
        self.console.say(f"sample at step {state.step}:")
        for line in text.strip("\n").splitlines():
            self.console.say(f"  │ {line}")
        self._hooks.call("on_sample", self, SampledText(state.step, text))

    def _save_if_due(self, end_reason: str | None) -> None:
        interrupted = self._signals.agreed is not None
        new_best, self._new_best = self._new_best, False
        saved = self._checkpoints.save_if_due(
            complete=end_reason is not None and not interrupted,
            interrupted=interrupted,
            new_best=new_best,
        )
        self._checkpoints.say_warnings()
        if saved is not None:
            self._hooks.call("on_checkpoint", self, saved)
