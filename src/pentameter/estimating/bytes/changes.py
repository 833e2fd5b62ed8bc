"""Changes of a plan's settings, one or several, and those with which it fits a device."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from pentameter.config.schema import Config
from pentameter.errors import ConfigError, divisors
from pentameter.estimating.bytes.fit import Verdict, memory_verdict
from pentameter.estimating.bytes.plan_estimates import plan_memory
from pentameter.planning.plan import Plan, make_plan

Change = tuple[str, object]
"""A setting's dotted path ("train.micro_batch_size"), and its new value."""
CHECKPOINTS = (None, "selective", "full")


def settings_that_fit(
    plan: Plan, usable_bytes: float, precision: str | None, *, drops_by_blocks: bool = False
) -> list[tuple[str, Verdict]]:
    """Return changes of settings with which the bytes of the fullest rank fit into `usable_bytes`,
    then changes with which they are tight. Each is a pair (command-line options such as
    "--train.micro-batch-size 1", verdict). Single changes are tried, then full recomputation with
    micro-batches of one sequence, then both of these with ZeRO 3.

    plan: the Plan to be changed.
    precision: the matmul precision; None for `train.precision`, with fp32 for `auto`.
    drops_by_blocks: True if kernels apply attention dropout without storing the attention weights.
    """
    ways = [[change] for change in single_changes(plan)]
    smallest: list[Change] = [
        ("train.micro_batch_size", 1),
        ("train.activation_checkpoint", "full"),
    ]
    ways += [smallest, [*smallest, ("parallel.zero", 3)]]
    found: list[tuple[str, Verdict]] = []
    for changes in ways:
        other = changed(plan, changes)
        if other is None:
            continue
        memory = plan_memory(other, precision, drops_by_blocks=drops_by_blocks)
        verdict = memory_verdict(memory.total_bytes, usable_bytes)
        if verdict != "does not fit":
            found.append((as_options(changes), verdict))
    return sorted(found, key=lambda each: each[1] == "tight")


def fitting_micro_batches(
    plan: Plan, usable_bytes: float, precision: str | None, *, drops_by_blocks: bool
) -> int:
    """Return the largest micro-batch, in sequences, up to the Plan's own, with which the bytes of
    the fullest rank fit into `usable_bytes`. If none fits, return the largest with which they are
    tight; if there is none either, the Plan's own. The other arguments are as for
    `settings_that_fit`."""
    rows = plan.batch_size // plan.layout.n_batch_shards
    tight = None
    for size in reversed([size for size in divisors(rows) if size <= plan.micro_batch_size]):
        try:
            other = plan.with_micro_batches(size)
        except ConfigError:  # a pipeline that cannot run as many
            continue
        memory = plan_memory(other, precision, drops_by_blocks=drops_by_blocks)
        match memory_verdict(memory.total_bytes, usable_bytes):
            case "fits":
                return size
            case "tight":
                tight = tight or size
    return tight or plan.micro_batch_size


def single_changes(plan: Plan) -> list[Change]:
    """Return every change of one setting to another value that is worth trying: the micro-batch
    size, doubled or one of the next smaller sizes that divide a rank's sequences; activation
    checkpointing; ZeRO stage; sequence parallelism; pipeline schedule."""
    rows, micro = plan.batch_size // plan.layout.n_batch_shards, plan.micro_batch_size
    smaller = [size for size in reversed(divisors(rows)) if size < micro]
    sizes = [*([micro * 2] if rows % (micro * 2) == 0 else []), *smaller]
    ways: list[Change] = [("train.micro_batch_size", size) for size in sizes[:4]]
    ways += [("train.activation_checkpoint", how) for how in CHECKPOINTS]
    ways += [("parallel.zero", zero) for zero in (0, 1, 2, 3) if plan.layout.data > 1]
    ways += [("parallel.sequence", True)] if plan.layout.tensor > 1 else []
    if plan.layout.pipeline > 1:
        ways += [("parallel.schedule", name) for name in ("1f1b", "zero-bubble")]
    return [way for way in ways if attrgetter(way[0])(plan.config) != way[1]]


def changed(plan: Plan, changes: Sequence[Change]) -> Plan | None:
    """Return the Plan with these settings changed; None if that configuration is invalid."""
    try:
        config = Config.model_validate(plan.portable_config.updated(dict(changes)).model_dump())
        return make_plan(
            config, rows_per_epoch=plan.rows_per_epoch, world_size=plan.layout.world_size
        )
    except (ConfigError, ValueError):
        return None


def as_options(changes: Sequence[Change]) -> str:
    """Return changes as command-line options: "--train.micro-batch-size 1"."""
    return " ".join(
        f"--{key.replace('_', '-')} {'none' if value is None else str(value).lower()}"
        for key, value in changes
    )
