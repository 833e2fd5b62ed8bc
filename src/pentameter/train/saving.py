"""What a checkpoint of a run holds, gathered and handed to the store."""

from __future__ import annotations

from collections.abc import Mapping

from pentameter.checkpoint.state import model_state, optimizer_state
from pentameter.checkpoint.store import CheckpointStore, Saved
from pentameter.config.load import to_toml
from pentameter.config.schema import Config
from pentameter.data.dataset import Dataset
from pentameter.optim.build import AnyOptimizer
from pentameter.parallel.assemble import Stage
from pentameter.train.state import TrainState


def save_checkpoint(
    store: CheckpointStore,
    state: TrainState,
    stage: Stage,
    optimizer: AnyOptimizer,
    *,
    config: Config,
    dataset: Dataset,
    log_sizes: Mapping[str, int],
) -> Saved:
    """What was saved: weights, optimizer and state, with the files that make it self-contained.

    `log_sizes` are metrics_bytes and log_bytes, where the logs end now: a resumed run cuts them
    back to there. Collective: each process of the world passes its own Stage, and raises the same.
    Raises StorageError when writing fails; earlier checkpoints are untouched then.
    """
    # First, as it shards what FSDP left gathered: the parameters below are the optimizer's then.
    model = model_state(stage.models)
    named = dict(stage.named_parameters())
    copies = named.keys() - {name for name, _ in stage.owned_parameters()}
    return store.save(
        state.step,
        {
            "model": {name: tensor for name, tensor in model.items() if name not in copies},
            "optimizer": optimizer_state(optimizer, named.items(), copies),
        },
        {**state.to_json(), "data_hash": dataset.hash, **log_sizes},
        extra_files={
            "config.toml": to_toml(config).encode(),
            "tokenizer.json": dataset.tokenizer.to_bytes(),
        },
        layout=stage.plan.layout.degrees(),
        world=stage.world,
    )
