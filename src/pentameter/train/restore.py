"""Giving a run its weights, optimizer and state: those it left off with, or another model's."""

from __future__ import annotations

from pentameter.checkpoint.state import load_model_state, load_optimizer_state
from pentameter.optim.build import AnyOptimizer
from pentameter.parallel.engine import Engine
from pentameter.train.run_folder import RunFolder
from pentameter.train.state import TrainState, saved_state


def restore(folder: RunFolder, engine: Engine, optimizer: AnyOptimizer) -> TrainState:
    """The state to go on from, whose tensors the engine and the optimizer have afterwards.

    Each process reads what is its own, whatever layout the checkpoint was written on. Collective.
    """
    if folder.initial_weights is not None:
        folder.initial_weights.load_into(engine.models)
    checkpoint = folder.checkpoint
    if checkpoint is None:
        return TrainState()
    state, _ = saved_state(checkpoint)
    load_model_state(engine.models, checkpoint.tensors("model"), engine.world)
    load_optimizer_state(
        optimizer, engine.named_parameters(), checkpoint.tensors("optimizer"), engine.world
    )
    if state.last_eval_step == state.step:  # which proved it, when its state was written already
        state.proved_step = state.step
    if state.step == engine.plan.config.schedule.start_step:  # extended here: patience starts anew
        state.evals_without_best = 0
    return state
