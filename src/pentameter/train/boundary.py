"""The actions between two optimizer steps, if they are due: evaluate, sample, end, save.

Whether they are due follows from the step and the saved state alone, so a resumed run does exactly
those that are still to do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from pentameter.disk.lock import BEAT_SECONDS
from pentameter.errors import CorruptError, StorageError
from pentameter.generation.loop import Generation, sample_text
from pentameter.record.events import EndKind, RunEnd
from pentameter.train.evaluations import (
    SAMPLE,
    VALIDATION,
    evaluate_all,
    evaluate_at_end,
    measured_on,
)
from pentameter.train.hooks import Hooks, SampledText
from pentameter.train.keep.saving import RunCheckpoints, failure_ends_run
from pentameter.train.run import TrainingRun
from pentameter.train.say.start_warnings import mean_loss_warning
from pentameter.train.signals import PROMPT_SECONDS, StopSignals


@dataclass
class Boundary:
    """The training loop's work between two steps, each if it is due: check the run folder,
    evaluate, sample, end, save, test. Call the methods in this order; all are collective.
    `checkpoints` saves the run, `hooks` are called with the results, and `signals` says whether a
    stop signal came to any rank."""

    run: TrainingRun
    checkpoints: RunCheckpoints
    hooks: Hooks
    signals: StopSignals
    _new_best: bool = field(default=False, init=False)
    """True if the evaluation at this boundary found a new best model."""
    _has_lost_a_sample: bool = field(default=False, init=False)
    _last_saved: int | None = field(default=None, init=False)
    """Step of the newest checkpoint at the previous boundary."""
    _looked_at: float = field(default=0.0, init=False)
    """Time at which the run folder's lock was last checked, in monotonic seconds."""

    def check_ours_if_due(self) -> None:
        """Check from time to time, on rank 0, that no other process has taken over the run folder;
        it is due as often as the lock's time stamp is renewed. Raises RunFolderInUseError if one
        has."""
        now = time.monotonic()
        if self.run.world.is_main and now >= self._looked_at + BEAT_SECONDS:
            self._looked_at = now
            self.run.folder.check_not_replaced()

    def evaluate_if_due(self) -> None:
        """Every `train.eval_interval` steps and after the last one, evaluate every split, update
        the best loss and call `on_eval` hooks.

        If a stop signal comes meanwhile, the metrics are discarded, and the resumed run evaluates
        again. Raises TrainingFailedError if a loss is not finite.
        """
        run, state, interval = self.run, self.run.state, self.run.config.train.eval_interval
        assert not isinstance(interval, str)  # resolved by the plan
        if not state.is_due(interval, state.last_eval_step, run.plan.steps):
            return
        run.world.activity.note("evaluating", state.step)
        found = evaluate_all(run, self._is_stopping)
        if not found:  # there is nothing to evaluate on, or a signal came
            return
        for name, metrics in found.items():
            if not math.isfinite(metrics.loss):
                what = "validation" if name in (VALIDATION, SAMPLE) else name
                self.checkpoints.give_up(f"the {what} loss is {metrics.loss} at step {state.step}")
        if self.checkpoints.last_step == state.step:
            self.checkpoints.prove()
        state.last_eval_step = state.step
        validation = SAMPLE if SAMPLE in found else VALIDATION
        if (kind := measured_on(run)) is not None:
            folder = run.folder
            trained = state.step > 0 or (folder.initial_weights or folder.checkpoint) is not None
            loss = found[validation].loss
            if not trained and (said := mean_loss_warning(run.plan, loss)) is not None:
                run.console.say(f"warning: {said}")
            self._new_best = state.record_eval(loss, trained=trained, of=kind)
        for name, metrics in found.items():
            best = name == validation and self._new_best
            self.hooks.call("on_eval", run, replace(metrics, best=best))

    def sample_if_due(self) -> None:
        """Every `train.sample_interval` steps and after the last one, sample a text; rank 0 prints
        it, writes it into the run folder and calls `on_sample` hooks. Non-finite logits or a failed
        write only warn. Nothing is sampled after a stop signal, or from a model that gives no
        logits."""
        run, state, train = self.run, self.run.state, self.run.config.train
        assert train.sample_interval != "auto"  # resolved by the plan
        due = state.is_due(train.sample_interval, state.last_sample_step, run.plan.steps)
        if self.signals.agreed or not due or not run.plan.gives_logits:
            return
        state.last_sample_step = state.step
        run.world.activity.note("sampling", state.step)
        try:
            text = _sampled(run)
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
        run.console.say_text(text.strip("\n"))
        self.hooks.call("on_sample", run, SampledText(state.step, text))

    def end_if_due(self, step_seconds: float, beside: Sequence[int]) -> RunEnd | None:
        """Return the end of the run if it ends at this step, else None. It ends after a stop signal
        on any rank, the last step, `train.patience` evaluations in a row without a new best, or a
        hook's call to `run.stop`.

        step_seconds: the latest step's time, 0 if unknown. The ranks compare signals again after
            the steps that take about PROMPT_SECONDS.
        beside: further numbers whose maxima over ranks are wanted (`StopSignals.maxima`); the same
            message carries them.
        """
        run, state, patience = self.run, self.run.state, self.run.config.train.patience
        end = partial(RunEnd, step=state.step, seconds=state.train_seconds)
        took = step_seconds or PROMPT_SECONDS  # a first step may compile
        hooks_reason = self.signals.agree(
            run.world, run.stop_reason, step_seconds=took, beside=beside
        )
        if self.signals.agreed is not None:
            return end(kind=EndKind.SIGNAL, reason=self.signals.agreed)
        if state.step >= run.plan.steps:
            return end(kind=EndKind.COMPLETED, reason="completed")
        if patience is not None and state.evals_without_best >= patience:
            reason = f"no better validation loss in {patience} evaluations"
            return end(kind=EndKind.PATIENCE, reason=reason)
        if hooks_reason is not None:
            return end(kind=EndKind.HOOK, reason=hooks_reason)
        return None

    def save_if_due(self, end: RunEnd | None) -> None:
        """Save a checkpoint if `checkpoint.interval` steps have passed, if the evaluation at this
        step was the best (`checkpoint.keep_best`), or if the run ends here (`end` is not None).
        Print the checkpoint store's warnings."""
        interrupted = end is not None and end.kind == EndKind.SIGNAL
        new_best, self._new_best = self._new_best, False
        self.checkpoints.save_if_due(
            complete=end is not None and not interrupted, interrupted=interrupted, new_best=new_best
        )
        self.checkpoints.say_warnings()
        self.tell_of_copies()
        if end is None and self.checkpoints.last_step != self._last_saved:
            self._refuse_failed_copy()
        self._last_saved = self.checkpoints.last_step

    def finish_copies(self) -> str | None:
        """Wait for copies of checkpoints that are still on their way to `checkpoint.copy_to`.
        Return a clause that says what could not be copied; None if everything was."""
        signals = self.signals
        not_copied = self.run.copies.finish(
            self.run.world, lambda: bool(signals.agreed or signals.received), self.run.console.say
        )
        self.tell_of_copies()
        self.checkpoints.old.prune()  # those that had to stay until they were copied
        return not_copied

    def tell_of_copies(self) -> None:
        """Call the `on_copy` hooks for each checkpoint that was copied to `checkpoint.copy_to`, or
        could not be, since the last call. Print a line if the store there fails."""
        if (word := self.run.copies.take_word()) is not None:
            self.run.console.say(word)
        for metrics in self.run.copies.take_done():
            self.hooks.call("on_copy", self.run, metrics)

    def _refuse_failed_copy(self) -> None:
        """Raise StorageError on every rank if the latest copy has failed and `checkpoint.on_error`
        says that this ends the run. A pending save is committed before it is raised."""
        run = self.run
        if run.config.checkpoint.copy_to is None or not failure_ends_run(run.config):
            return
        failure = run.world.broadcast(run.copies.failure)
        if failure is not None:
            self.checkpoints.commit_pending()
            raise StorageError(f"{failure}; {self.checkpoints}")

    def test(self) -> None:
        """Evaluate the test split, and the validation split if a sample of it was evaluated, with
        the weights of the best checkpoint (the last weights if there is none), and call `on_eval`
        hooks. Do nothing if there is neither, evaluation is off, or a stop signal comes."""
        for metrics in evaluate_at_end(self.run, self._is_stopping):
            self.hooks.call("on_eval", self.run, metrics)

    def _is_stopping(self) -> bool:
        return self.signals.agree(self.run.world) is not None


def _sampled(run: TrainingRun) -> str | None:
    """Return a sample after the latest step on rank 0, None on other ranks. Its random draws are a
    function of seed and step. A question is answered twice, greedily and below that by a random
    draw, since a single draw may be unlucky. Collective. Raises CorruptError if logits are not
    finite."""
    train = run.config.train

    def ask(temperature: float) -> str | None:
        settings = Generation(temperature, max_new_tokens=train.sample_tokens, seed=run.config.seed)
        tokenizer = run.dataset.tokenizer
        return sample_text(run.engine, tokenizer, run.prompt, settings, run.state.step)

    temperature = train.sample_temperature
    if not run.dataset.has_conversations or not temperature:
        return ask(temperature)
    likeliest, drawn = ask(0.0), ask(temperature)
    if likeliest is None or drawn is None:
        return None
    answer = drawn.removeprefix(run.prompt.text)
    return f"{likeliest}\n\n(drawn at temperature {temperature:g}:)\n{answer}"
