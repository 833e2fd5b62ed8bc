"""Warnings before a run's first step: settings that do not suit its text, length, batches or
machine."""

from __future__ import annotations

import math
from pathlib import Path

from pentameter.config.choices import look_up
from pentameter.config.schema import Config
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.prepare.splits import IS_BY_DOCUMENT
from pentameter.data.shards.dataset import Dataset, TokenSplit
from pentameter.data.tokenizers.char import CharTokenizer, advice_on
from pentameter.data.tokenizers.render_client import ends_of_answers
from pentameter.data.tokenizers.setting import is_made_from_text
from pentameter.disk.atomic import SPARE_BYTES, free_bytes
from pentameter.errors import ConfigError, StorageError
from pentameter.estimating.bytes.costs import Step
from pentameter.estimating.bytes.memory import state_bytes
from pentameter.formatting import size
from pentameter.planning.layouts.layout import Layout
from pentameter.planning.plan import Plan
from pentameter.processes.group.world import World
from pentameter.train.compute import Compute
from pentameter.train.user_components import CustomBatches

FEW_WINDOWS = 8
"""Least length of a reliable validation split, in contexts (model.context_length tokens)."""

MOSTLY_PADDING = 0.5
"""A run warns if less than this fraction of its batch rows' tokens is not padding."""

LEAST_OF_EVEN = 0.1
"""Least loss of random weights, as a fraction of the loss of even guesses. Modules that scale
nothing begin above it; a mean over a micro-batch, divided by its tokens once more, far below it."""

MANY_PASSES = 10
"""A run that makes this many passes over its text, without dropout or patience, warns about
overfitting."""


def evaluation_warnings(plan: Plan, batches: TrainingBatches | CustomBatches) -> list[str]:
    """Return warnings about evaluations and samples that cannot be made with the user's own batches
    or model. Raises ConfigError if `train.patience` would count such evaluations."""
    train = plan.config.train
    if not batches.are_tokens:
        if train.patience is not None:
            raise ConfigError(
                f"train.patience={train.patience} counts evaluations on the text of [data], and "
                "batches= gives something else than tokens; leave patience out"
            )
        return [
            "batches= gives something else than tokens, so nothing is evaluated or sampled on the "
            "text of [data]; a hook may call trainer.engine.evaluate"
        ]
    if train.sample_interval is not None and not plan.gives_logits:
        return [f"nothing is sampled: the module that {plan.built_by} builds needs targets to run"]
    return []


def mean_loss_warning(plan: Plan, loss: float) -> str | None:
    """Return a warning if `loss`, in nats per token, of a custom model's initial weights is so far
    below that of even guesses that the module seems to divide its loss by the targets itself; else
    None."""
    vocab_size = plan.config.model.vocab_size
    if plan.built_by is None or vocab_size is None:
        return None
    even = math.log(vocab_size)
    if loss >= LEAST_OF_EVEN * even:
        return None
    return (
        f"before training the loss is {loss:.3g} a token, where even guesses have {even:.3g}: the "
        f"module that {plan.built_by} builds is to return the sum of its tokens' losses "
        '(reduction="sum"), not their mean'
    )


def compute_warnings(plan: Plan, compute: Compute, world: World) -> list[str]:
    """Return warnings about a GPU that is left out, GPU kernels that cannot be used for attention
    dropout, and a machine that was busy while its matmul rate was measured (rank 0's measurement).
    Collective."""
    warnings = [] if compute.gpu_obstacle is None else [compute.gpu_obstacle]
    if (obstacle := compute.forms.obstacles.get("drops_by_blocks")) is not None:
        warnings.append(
            f"model.attention.dropout={plan.config.model.attention.dropout} writes attention's "
            "weights out, as its kernels cannot serve here: "
            f"{obstacle}. The result is the same, in more memory and time"
        )
    measured = compute.measured
    busy = world.broadcast(None if measured is None else measured.warning())  # each has measured
    return [*warnings, busy] if busy is not None else warnings


def settings_warnings(
    plan: Plan,
    dataset: Dataset,
    batches: TrainingBatches | CustomBatches,
    init_from: Path | None,
    *,
    own_schedule: bool,
) -> list[str]:
    """Return warnings about settings that need more text, a longer run or initial weights.
    `init_from` is the path to the model that the weights come from; None for random weights. With
    `own_schedule` the learning rate is the user's, and [schedule] is not read. Raises ConfigError
    if `train.patience` is set and nothing is held out."""
    warnings, config = [], plan.config
    train, val = dataset.split("train"), dataset.split("val")
    if config.lora.rank is not None and init_from is None:
        warnings.append(
            f"lora.rank={config.lora.rank} trains adapters alone, here of random weights; add "
            "--init-from MODEL"
        )
    for key in ("upcycle_noise", "upcycle_drop"):
        if (value := getattr(config.train, key)) and init_from is None:
            warnings.append(
                f"train.{key}={value} is left out: experts begin with random weights; add "
                "--init-from MODEL, a dense one, to begin with copies"
            )
    if isinstance(batches, TrainingBatches) and batches.tokens_per_epoch < train.n_tokens:
        warnings.append(
            f"data.order='{config.data.order}' reads {batches.tokens_per_epoch:,} of "
            f"{train.n_tokens:,} tokens: documents are cut after model.context_length="
            f"{config.model.context_length}; data.packing=true reads them whole"
        )
    if dataset.tokenizer.kind == CharTokenizer.kind:
        advice = advice_on(dataset.vocab_size, train.n_tokens)
        warnings += [] if advice is None else [advice]
    warnings += _answer_warnings(config, dataset, init_from)
    if isinstance(batches, TrainingBatches) and batches.filled_fraction < MOSTLY_PADDING:
        warnings.append(
            f"rows of model.context_length={config.model.context_length} are filled to "
            f"{batches.filled_fraction:.0%}, the rest is padding, which costs as much; "
            "data.packing=true fills them with one document after another"
        )
    warnings += _validation_warnings(config, val, batches)
    warmup, length = config.schedule.warmup_steps, plan.steps - config.schedule.start_step
    if 2 * warmup > length and not own_schedule:
        warnings.append(
            f"schedule.warmup_steps={warmup} take most of the {length} steps that the schedule "
            "has: the learning rate hardly falls again. Set fewer, or train longer"
        )
    n_passes = plan.epoch(plan.steps)
    is_guarded = config.model.dropout > 0 or config.train.patience is not None
    if n_passes >= MANY_PASSES and not is_guarded:
        warnings.append(
            f"train.steps={plan.steps} read the text {n_passes} times: the model may learn it by "
            "heart, and its validation loss rise. Use more text, or fewer steps, "
            "model.dropout=0.2 or train.patience=3"
        )
    return warnings


def disk_warnings(plan: Plan, checkpoints: Path) -> list[str]:
    """Return a warning if the disk with the folder `checkpoints` is too small for the checkpoints
    that the run keeps, and one more, since a new one is written before an old one is removed.
    Training would end, or go unsaved, in the middle."""
    settings, steps = plan.config.checkpoint, plan.steps
    saved = state_bytes(Step(plan.config, Layout()), [plan.table]).snapshot_bytes
    n_saves = 1 + steps // (settings.interval or steps)
    kept = settings.keep_last + settings.keep_best + settings.keep_before_cooldown
    n_there = sum(1 for _ in checkpoints.glob("step-*"))
    n_more = min(kept + 1, n_saves) - n_there
    try:
        free = free_bytes(
            next(each for each in (checkpoints, *checkpoints.parents) if each.is_dir())
        )
    except StorageError:  # what cannot be asked is found out by the first save
        return []
    needed = n_more * saved + SPARE_BYTES
    if needed <= free:
        return []
    return [
        f"checkpoints of {size(saved)} each will not fit on this disk: the run keeps "
        f"{kept} (checkpoint.keep_last={settings.keep_last}"
        f"{' and the best' if settings.keep_best else ''}), one more while it saves, which needs "
        f"{size(needed)}, and {size(free)} are free. Free some space, or keep fewer"
    ]


def _answer_warnings(config: Config, dataset: Dataset, init_from: Path | None) -> list[str]:
    """Return a warning if, in one of the data sources with conversations, the first answer does not
    end with a token that marks its end, but with a text at best. Else an empty list."""
    train, tokenizer = dataset.split("train"), dataset.tokenizer
    ends = {*tokenizer.special_tokens.values(), tokenizer.end_of_text}
    first_answers = [
        part.tokens[slice(*part.assistant.bounds[0].tolist())]
        for part in train.parts or (train,)  # to a blend, all of a text beside them is an answer
        if part.assistant is not None and len(part.assistant.bounds)
    ]
    if all(ends.intersection(answer.tolist()) for answer in first_answers):
        return []
    marks = ends_of_answers(tokenizer).texts
    instead = "a chat will not know where one ends; give serve a stop text"
    if marks:
        instead = f"they end at the text {marks[0]!r}, which messages can forge and exports lack"
    if init_from is None and is_made_from_text(config.data.tokenizer):
        instead += "; data.tokenizer='bpe:1024' has the chat template's tokens"
    return [
        f"answers are learnt without a token that ends them, as the tokenizer ({tokenizer.kind}) "
        f"has none: {instead}"
    ]


def _validation_warnings(
    config: Config, val: TokenSplit, batches: TrainingBatches | CustomBatches
) -> list[str]:
    """Return a warning if a run with evaluations has little or no held-out text. Raises ConfigError
    if it has none and `train.patience` is set."""
    evaluates = config.train.eval_interval is not None and batches.are_tokens
    asked = config.data.validation_fraction > 0 or config.data.validation_path is not None
    if evaluates and asked and val.n_tokens < 2:
        advice = (
            "use data.split_by='position', more documents, or data.validation_path"
            if look_up(IS_BY_DOCUMENT, config.data.split_by, "data.split_by", "the trainer")
            else "use a longer text, or data.validation_path"
        )
        patience = config.train.patience
        if patience is not None:
            raise ConfigError(
                f"train.patience={patience} counts evaluations, and the validation split has "
                f"{val.n_tokens} tokens; {advice}, or leave patience out"
            )
        return [f"nothing is held out, so nothing will be evaluated; {advice}"]
    if evaluates and 2 <= val.n_tokens < FEW_WINDOWS * config.model.context_length:
        return [
            f"the validation loss will be a rough measure: only {val.n_tokens:,} tokens are held "
            "out. Use a longer text, or raise data.validation_fraction="
            f"{config.data.validation_fraction}"
        ]
    return []
