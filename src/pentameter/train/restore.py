"""Giving a run its weights, optimizer and state: those it left off with, or another model's."""

from __future__ import annotations

from pentameter.checkpoint.state import load_model_state, load_optimizer_state
from pentameter.optim.build import AnyOptimizer
from pentameter.parallel.stage import Stage
from pentameter.train.run_folder import RunFolder
from pentameter.train.state import TrainState, saved_state


def restore(folder: RunFolder, stage: Stage, optimizer: AnyOptimizer) -> TrainState:
    """The state to go on from, whose tensors the stage and the optimizer have afterwards.

    Each process reads what is its own, whatever layout the checkpoint was written on. Collective.
    """
    if folder.initial_weights is not None:
        folder.initial_weights.load_into(stage.models)
    checkpoint = folder.checkpoint
    if checkpoint is None:
        return TrainState()
    state, _ = saved_state(checkpoint)
    load_model_state(stage.models, checkpoint.tensors("model"), stage.world)
    load_optimizer_state(
        optimizer, stage.named_parameters(), checkpoint.tensors("optimizer"), stage.world
    )
    if state.last_eval_step == state.step:  # which proved it, when its state was written already
        state.proved_step = state.step
    if state.step == stage.plan.config.schedule.start_step:  # extended here: patience starts anew
        state.evals_without_best = 0
    return state
