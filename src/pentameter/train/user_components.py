"""User components: a model, optimizer and batches that the user gives in place of the configured
ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from pentameter.checkpoint.folders.opening import STATE_NAME, Checkpoint
from pentameter.checkpoint.state.custom_optimizer import note_as_made
from pentameter.config.schema import Config
from pentameter.data.batches.step import Batch, Int64, refuse_unknown_ids
from pentameter.errors import ConfigError
from pentameter.keyed import WORD, bits, make_key
from pentameter.optim.build import AnyOptimizer, build_optimizer, parameter_groups
from pentameter.optim.sharded_muon import ShardedMuon
from pentameter.parallel.sources.gpt_source import GPTSource
from pentameter.parallel.sources.model_source import ModelSource
from pentameter.planning.architecture import IGNORED_TARGET
from pentameter.planning.batch_sizes import global_batch_size
from pentameter.planning.plan import Plan
from pentameter.tree import Tree, map_leaves, named_leaves

BatchFunction = Callable[[int, Int64], Sequence[Any]]
"""`batches(step, rows)`: inputs and targets for a step's batch rows. `rows` holds their int64
numbers in the global batch. For the built-in model both are token ids (len(rows), context_length),
and a target of -1 does not count. For a custom model they are arrays or tensors (len(rows), …),
alone or in dicts, lists and tuples. Pure: the same arguments give the same batch, in any process
and at any time."""
OptimizerFunction = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""`optimizer(groups)`: returns an optimizer for parameter groups, dicts with `params` and
`weight_decay`. The learning rate is set before every step."""


@dataclass(frozen=True)
class UserComponents:
    """The user's own model (`source`), optimizer, batches, and learning rate as a function of the
    0-based step. For each that is not given (None, or GPTSource for the model), the configured one
    is used."""

    source: ModelSource = field(default_factory=GPTSource)
    optimizer: OptimizerFunction | None = None
    batches: BatchFunction | None = None
    schedule: Callable[[int], float] | None = None

    def build_optimizer(
        self, named: Sequence[tuple[str, torch.nn.Parameter]], plan: Plan
    ) -> AnyOptimizer:
        """Build the optimizer for the trainable parameters `named`, (name, parameter) each: the
        user's, else the configured.

        Raises TypeError if the user's function returns no optimizer, or one for other parameters.
        """
        settings, table = plan.config.optimizer, plan.table
        if self.optimizer is None:
            return build_optimizer(named, table, settings, ShardedMuon)
        groups = parameter_groups(named, table, settings)
        made = self.optimizer(groups)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(
                "optimizer= is to be a function of parameter groups that returns a torch.optim."
                f"Optimizer; it returned {type(made).__name__}"
            )
        held = {id(each) for group in made.param_groups for each in group["params"]}
        if held != {id(each) for group in groups for each in group["params"]}:
            raise TypeError(
                "optimizer= was given the parameters that learn, and returned an optimizer of "
                f"{len(held)} others; it is to hold those of its groups"
            )
        note_as_made(made, dict(named))
        return made

    def seed_update(self, seed: int, step: int) -> None:
        """Seed PyTorch's generator before the update of a step, 0-based, since a user's optimizer
        may round at random. So its draws are the same in every process, and after a resume."""
        if self.optimizer is not None:
            word = bits(make_key("update", seed, step), np.zeros(1, dtype=np.int32))[0]
            torch.manual_seed(int(word) & WORD)

    def record(self, plan: Plan) -> dict[str, str | None]:
        """Return the names of the user's functions, None for those not given, which a checkpoint
        records for `check_same`."""
        names = {
            key: None if function is None else _name(function)
            for key in ("optimizer", "batches", "schedule")
            for function in [getattr(self, key)]
        }
        return {"built_by": plan.built_by, **names}

    def check_same(
        self, checkpoint: Checkpoint, plan: Plan, *, with_schedule: bool = False
    ) -> None:
        """Raise ConfigError if only one of the checkpoint and this run uses the user's own model,
        or optimizer, or batches; with `with_schedule` also learning rates. Names of functions are
        not compared: a function may move, and two may have the same name. Schedules are not
        compared for checkpoints of earlier versions, which do not record them."""
        is_asked = with_schedule and "schedule" in checkpoint.state
        for key, here in self.record(plan).items():
            if key == "schedule" and not is_asked:
                continue
            there, argument = checkpoint.state.get(key), "model" if key == "built_by" else key
            if (there is None) != (here is None):
                was = "the configuration's" if there is None else there
                now = "the configuration's" if here is None else here
                raise ConfigError(
                    f"{checkpoint.path / STATE_NAME}: the run's {argument} was {was}, and is "
                    f"now to be {now}; give Trainer the same {argument}=, or another run_dir"
                )


class CustomBatches:
    """Batches from a user's `function`, each checked when it is made. Batch size and context length
    come from `config`; `vocab_size` is the tokenizer's. `source` builds the model, and says whether
    it takes batches that are not token ids; None for the built-in model."""

    rows_per_epoch: None = None
    """None: the length of an epoch is unknown, so a run counts in steps."""

    def __init__(
        self,
        function: BatchFunction,
        config: Config,
        vocab_size: int,
        source: ModelSource | None = None,
    ) -> None:
        self._function = function
        self._source = source or GPTSource()
        self._n_rows = global_batch_size(config)
        self._context_length = config.model.context_length
        self._vocab_size = config.model.vocab_size or vocab_size

    def batch(self, step: int, rows: Int64 | None = None) -> Batch:
        """Return a step's global batch (`rows` None), or its rows with the numbers `rows` (B,),
        each below the batch size. The step is 0-based.

        Raises ConfigError if the function does not return inputs and targets that fit.
        """
        rows = np.arange(self._n_rows, dtype=np.int64) if rows is None else rows
        made = self._function(step, rows)
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise ConfigError(
                f"batches({step}, rows) is to return (inputs, targets), and returned "
                f"{type(made).__name__}"
            )
        whose = f"batches({step}, rows) gave "
        if not self._source.takes_any_batch or self._are_token_ids(made, len(rows)):
            inputs = self._token_ids(made[0], f"{whose}inputs", 0, len(rows))
            targets = self._token_ids(made[1], f"{whose}targets", IGNORED_TARGET, len(rows))
        else:
            inputs, targets = (
                _arrays(each, f"{whose}{name}", len(rows))
                for each, name in zip(made, ("inputs", "targets"), strict=True)
            )
        count = self._source.n_targets(targets)
        if count is None and (
            not isinstance(targets, np.ndarray) or targets.dtype.kind not in "iu"
        ):
            raise ConfigError(
                f"{whose}targets that are not one array of integers, so it is not known how many "
                "count; give pm.OwnModel a `count_targets`"
            )
        return Batch(inputs, targets, rows, count)

    @cached_property  # a start asks several times, and the user's function may be slow
    def are_tokens(self) -> bool:
        """True if the batches are token ids, so that the model can also run on text; decided by the
        first row of step 0."""
        batch = self.batch(0, np.zeros(1, dtype=np.int64))
        return self._are_token_ids((batch.inputs, batch.targets), 1)

    def _are_token_ids(self, made: Sequence[Any], n_rows: int) -> bool:
        """Return True if inputs and targets are each one array of integers (n_rows,
        context_length)."""
        shape = (n_rows, self._context_length)
        return all(
            not isinstance(each, dict | list | tuple)
            and np.shape(each) == shape
            and np.asarray(each).dtype.kind in "iu"
            for each in made
        )

    def _token_ids(self, made: Any, whose: str, least: int, n_rows: int) -> Int64:
        ids = np.asarray(made)
        shape = (n_rows, self._context_length)
        if ids.dtype.kind not in "iu" or ids.shape != shape:
            raise ConfigError(
                f"{whose} of {ids.dtype} and shape {ids.shape}; they are to be whole numbers of "
                f"shape {shape}, the rows asked for × model.context_length"
            )
        refuse_unknown_ids(ids, least, self._vocab_size, whose)
        return ids.astype(np.int64)


def _arrays(made: Tree, name: str, n_rows: int) -> Tree:
    """Convert the arrays and tensors in a nested structure to NumPy arrays (n_rows, …), in the same
    structure. Raises ConfigError, with `name`, if a first dimension is not `n_rows`, or a leaf is
    not an array of numbers."""
    for path, leaf in named_leaves(made, name):
        shape = tuple(np.shape(leaf))
        if shape[:1] != (n_rows,):
            raise ConfigError(
                f"{path} of shape {shape}; its first dimension is to be the {n_rows} rows asked for"
            )

    def array(leaf: Any) -> Any:
        try:
            found = np.asarray(leaf)
        except (TypeError, RuntimeError) as error:  # bfloat16, or on a GPU
            raise ConfigError(f"{name} that is no array on the CPU: {error}") from error
        if found.dtype.kind not in "biuf":
            raise ConfigError(f"{name} of {found.dtype}; give numbers or booleans")
        return found

    return map_leaves(array, made)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
