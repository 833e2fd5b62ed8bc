"""An Estimate: memory and step time for a Plan on a cluster, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pentameter.config.schema import Config
from pentameter.errors import ConfigError, either
from pentameter.estimating.bytes.communication import (
    WORLD,
    StepCommunication,
    communication_of_stages,
)
from pentameter.estimating.bytes.fit import MEMORY_MARGIN, Verdict, memory_verdict
from pentameter.estimating.bytes.memory import Memory
from pentameter.estimating.bytes.plan_estimates import plan_memory, plan_record, step_of
from pentameter.estimating.seconds.cluster import (
    LINEAR_ONLY,
    UNKNOWN_SPREAD,
    Cluster,
    Spread,
    parse_cluster,
    trained_precision,
)
from pentameter.estimating.seconds.compute_time import fuses_dropout
from pentameter.estimating.seconds.links import Links
from pentameter.estimating.seconds.step_time import StepTime, step_time
from pentameter.planning.auto_precision import auto_precision
from pentameter.planning.layouts.layout import Layout, parse_parallel
from pentameter.planning.mfu import model_flops
from pentameter.planning.plan import Plan, make_plan

SMALL_PRODUCT_ROWS = 1024
"""Tokens per micro-batch and rank below which matmuls leave much of a GPU idle."""
LARGE_BUBBLE = 0.25


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of running a Plan (a resolved configuration: sharding, batch, steps) on a
    cluster. Every figure is computed; nothing is run or measured."""

    plan: Plan
    cluster: Cluster
    precision: str
    """The matmul precision: the configuration's `train.precision`; the devices' best for `auto`; or
    a number format in LINEAR_ONLY, for linear layers' matmuls."""
    imbalance: float = 1.0
    """An assumption: the most rows that a rank's experts get in a layer ÷ the mean over the ranks
    that exchange rows. 1 if all get equally many."""

    @cached_property
    def memory(self) -> Memory:
        """Bytes by component on the rank that needs the most."""
        return plan_memory(
            self.plan,
            self.precision,
            drops_by_blocks=self.drops_by_blocks,
            imbalance=self.imbalance,
        )

    @property
    def drops_by_blocks(self) -> bool:
        """Whether GPU kernels are planned to apply attention dropout without writing out the
        attention weights."""
        plan = self.plan
        precision = trained_precision(self.precision)
        return fuses_dropout(plan.config.model, plan.layout, precision, self.cluster.device)

    @cached_property
    def time(self) -> StepTime:
        """The seconds for one step, in total and by component."""
        step = step_of(self.plan, self.precision, imbalance=self.imbalance)
        return step_time(step, self.cluster, self.communication)

    @cached_property
    def communication(self) -> list[StepCommunication]:
        """Calls and bytes in one step, for each `pipeline` coordinate, by the first rank there."""
        return communication_of_stages(step_of(self.plan, self.precision))

    @property
    def device_bytes(self) -> int:
        """Bytes that the fullest rank holds on its device."""
        return self.memory.device_bytes

    @property
    def spare_bytes(self) -> float:
        """Unused bytes on the fullest rank's device; negative if the plan does not fit."""
        return self.cluster.usable_bytes - self.device_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the fullest rank's bytes fit its device: "fits" with a margin for what is not
        planned, "tight" without the margin, or "does not fit"."""
        return memory_verdict(self.device_bytes, self.cluster.usable_bytes)

    @property
    def fits(self) -> bool:
        """Whether the verdict is "fits"."""
        return self.verdict == "fits"

    @property
    def tested_spread(self) -> Spread | None:
        """(Least, most) measured ÷ planned seconds, which four in five of the runs that tested the
        device's calibration were between. None if none did, or if micro-batches are smaller than in
        any of them."""
        is_small = self.cluster.device.units > 1 and self.n_micro_batch_tokens < SMALL_PRODUCT_ROWS
        return None if is_small else self.cluster.device.spread_of(self.precision)

    @property
    def n_micro_batch_tokens(self) -> int:
        """Tokens in one micro-batch on a rank."""
        plan = self.plan
        return plan.micro_batch_size * plan.config.model.context_length // plan.layout.context

    @property
    def seconds_range(self) -> tuple[float, float]:
        """(Least, most) seconds per step to expect: the estimate times `tested_spread`, or times
        UNKNOWN_SPREAD if that is None."""
        tested = self.tested_spread
        least, most = UNKNOWN_SPREAD if tested is None else tested
        return least * self.time.seconds, most * self.time.seconds

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """Training tokens per second to expect, at the least and at the most."""
        fastest, slowest = self.seconds_range
        return self.plan.tokens_per_step / slowest, self.plan.tokens_per_step / fastest

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second, over all ranks."""
        return self.plan.tokens_per_step / self.time.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the model's FLOP/s ÷ the peak FLOP/s of the devices that the
        layout uses."""
        matmul_precision = self.plan.config.train.matmul_precision
        peak = self.cluster.peak_flops(self.precision, matmul_precision)
        flops_per_token = self.plan.flops_per_token
        assert flops_per_token is not None  # an Estimate is of the built-in model
        flops = model_flops(flops_per_token, self.tokens_per_second)
        return flops / (self.plan.layout.world_size * peak)

    @property
    def run_seconds(self) -> float | None:
        """Training seconds for the whole run, without evaluation and checkpoints; None if the run
        is counted in epochs whose length is unknown."""
        return self.plan.steps * self.time.seconds if self.plan.has_known_length else None

    @property
    def device_hours(self) -> float | None:
        """`run_seconds` in hours × all devices in the cluster, idle ones included; None if
        `run_seconds` is None."""
        seconds = self.run_seconds
        return None if seconds is None else seconds / 3600 * self.cluster.n_devices

    def warnings(self) -> Iterator[str]:
        """Yield a sentence with a remedy for each problem: memory exceeded, idle devices, slow
        links, small micro-batches, a large bubble, figures without a measurement."""
        plan, layout = self.plan, self.plan.layout
        yield from _of_memory(self)
        if layout.world_size < self.cluster.n_devices:
            idle = self.cluster.n_devices - layout.world_size
            yield (
                f"the layout uses {layout.world_size:,} of {self.cluster.n_devices:,} devices, and "
                f"{idle:,} stay idle; leave data out of the layout to use them all"
            )
        yield from _between_nodes(layout, self.cluster)
        rows = self.n_micro_batch_tokens
        if self.cluster.device.units > 1 and rows < SMALL_PRODUCT_ROWS:
            yield (
                f"a micro-batch has {rows:,} tokens, too few to fill a device; raise "
                f"train.micro_batch_size={plan.micro_batch_size}"
            )
        if self.time.bubble_fraction > LARGE_BUBBLE:
            yield (
                f"the pipeline's bubble is {self.time.bubble_fraction:.0%} of its work: more "
                f"micro-batches than {plan.n_micro_batches}, parallel.schedule='interleaved' or, "
                "where nothing is computed again, 'zero-bubble', or a smaller parallel.pipeline "
                "shrink it"
            )
        if self.drops_by_blocks:
            whole = plan_memory(plan, self.precision, imbalance=self.imbalance)
            written = whole.total_bytes - self.memory.total_bytes
            yield (
                f"model.attention.dropout={plan.config.model.attention.dropout} is planned to be "
                "dropped in kernels, which no measured run has timed; a run checks them at its "
                f"start, and warns where it writes weights out: {written / 1e9:,.1f} GB more"
            )
        if plan.config.train.offload:
            yield "train.offload: what travels between host and device is not in the time"
        yield from _of_calibration(self)

    def to_json(self) -> dict[str, Any]:
        """Return the object that `plan --json` prints: the Plan's record, with the estimated
        memory, time, links, cluster and warnings."""
        time, plan, found = self.time, self.plan, plan_record(self.plan)
        return {
            **found,
            "memory": {
                **asdict(self.memory),
                "usable_bytes": round(self.cluster.usable_bytes),
                "spare_bytes": round(self.spare_bytes),
            },
            "time": {
                "step_seconds": time.seconds,
                "step_seconds_range": list(self.seconds_range),
                "tokens_per_second": self.tokens_per_second,
                "tokens_per_second_range": list(self.tokens_per_second_range),
                "mfu": self.mfu,
                "bubble_fraction": time.bubble_fraction,
                "compute_seconds": time.compute,
                "bubble_seconds": time.bubble,
                "exposed_seconds": time.exposed,
                "hidden_seconds": time.hidden,
                "optimizer_seconds": time.optimizer,
                "run_seconds": self.run_seconds,
                "device_hours": self.device_hours,
            },
            "links": self.links(),
            "precision": self.precision,
            "imbalance": self.imbalance if plan.config.model.experts.count else None,
            "cluster": {**self.cluster.to_json(), "text": str(self.cluster)},
            "fits": self.fits,
            "verdict": self.verdict,
            "warnings": list(self.warnings()),
        }

    def links(self) -> dict[str, str]:
        """Return each communicating mesh dimension's slowest link: "inside a node" or "between
        nodes"."""
        links = Links(self.plan.layout, self.cluster)
        names = dict.fromkeys(dimension for sent in self.communication for dimension, _ in sent)
        return {name: links.link(name) for name in names if name != WORLD}


def _of_memory(estimate: Estimate) -> Iterator[str]:
    """Yield a sentence with a remedy if the memory is tight or exceeded; nothing otherwise."""
    spare, usable = estimate.spare_bytes / 1e9, estimate.cluster.usable_bytes / 1e9
    if estimate.verdict == "tight":
        yield (
            f"tight: {spare:,.1f} GB of {usable:,.1f} to spare is less than the "
            f"{MEMORY_MARGIN:.0%} of the planned bytes that a run may need beyond them: "
            "fragmentation, buffers of NCCL and the libraries, the plan's error; it may go out of "
            "memory; a smaller train.micro_batch_size, train.activation_checkpoint or more "
            "processes make room"
        )
    if estimate.verdict == "does not fit":
        yield (
            f"does not fit: the fullest process needs {-spare:,.1f} GB more than the "
            f"{usable:,.1f} GB of {estimate.cluster.device_key}; try --search, a smaller "
            "train.micro_batch_size, train.activation_checkpoint, or more of parallel.zero, tensor "
            "or pipeline"
        )


def _of_calibration(estimate: Estimate) -> Iterator[str]:
    """Yield a sentence for each figure without a measurement."""
    if estimate.precision in LINEAR_ONLY:
        yield (
            f"{estimate.precision}: memory and messages are those of "
            f"{LINEAR_ONLY[estimate.precision]}, and no run of pentameter calibrated its time"
        )
    if estimate.cluster.device.calibration.fitted_on.startswith("nothing"):
        yield (
            f"no measured run calibrated {estimate.cluster.device_key}: its time is reckoned with "
            "usual shares of its figures"
        )


def _between_nodes(layout: Layout, cluster: Cluster) -> Iterator[str]:
    """Yield a sentence for each mesh dimension whose ranks wait for the network in every layer."""
    links = Links(layout, cluster)
    in_layers = (
        ("tensor", "row", "depth", "context") if layout.is_3d else ("tensor", "row", "context")
    )
    for dimension in in_layers:
        if layout.sizes[dimension] > 1 and links.link(dimension) == "between nodes":
            yield (
                f"{dimension}-parallel processes are in several nodes: every layer waits for "
                f"the network; keep parallel.{'context' if dimension == 'context' else 'tensor'} "
                f"within the {cluster.node_size} devices of a node"
            )
    if layout.shards_experts and links.link("expert") == "between nodes":
        yield (
            "the ranks that exchange rows for experts are in several nodes: every layer waits "
            "for the network; keep parallel.expert × parallel.expert_tensor within the "
            f"{cluster.node_size} devices of a node"
        )


def make_estimate(
    config: Config,
    cluster: Cluster,
    vocab_size: int | None = None,
    rows_per_epoch: int | None = None,
    *,
    layout: str | None = None,
    imbalance: float = 1.0,
    matmuls: str | None = None,
) -> Estimate:
    """Return the Estimate for a configuration on a cluster. Raises ConfigError if the layout needs
    more devices than there are, or if model, batch, layout and number formats do not fit each
    other.

    vocab_size: needed if the configuration sets none.
    rows_per_epoch: batch rows in the training split; needed if the configuration counts in epochs.
    layout: replaces the configured layout ("data=8,tensor=8,pipeline=16"); if `data` is omitted, it
        fills the cluster.
    imbalance: at least 1, the most rows that a rank's experts get ÷ the mean over ranks; only
        layouts with `expert` depend on it.
    matmuls: a number format in LINEAR_ONLY for linear layers' matmuls; None for the configured
        precision.
    """
    if layout is not None:
        config = config.model_copy(update={"parallel": parse_parallel(layout, config.parallel)})
    world_size = cluster.n_devices
    if (data := config.parallel.data) is not None:
        asked = data * config.parallel.tensor * config.parallel.pipeline * config.parallel.context
        if asked > world_size:
            raise ConfigError(
                f"the layout takes {asked:,} devices, and --cluster {cluster} has {world_size:,}; "
                "name a larger cluster, or lower a degree"
            )
        world_size = asked
    plan = make_plan(config, vocab_size, rows_per_epoch, world_size=world_size)
    return Estimate(plan, cluster, best_precision(config, cluster, matmuls), imbalance)


def plan(
    config: Config,
    cluster: Cluster | str | int | None = None,
    vocab_size: int | None = None,
    rows_per_epoch: int | None = None,
    *,
    layout: str | None = None,
    world_size: int | None = None,
    local_size: int | None = None,
) -> Plan | Estimate:
    """Implement `pm.plan`: return the Estimate for a configuration on a cluster, or without one its
    Plan. Raises ConfigError for an invalid layout or cluster.

    cluster: a Cluster, or text such as "h100-80gb:8x2"; None for a Plan. An int in its position is
        the `vocab_size`, followed by `rows_per_epoch`.
    vocab_size: needed if the configuration sets none.
    rows_per_epoch: batch rows in the training split; needed if the configuration counts in epochs.
    layout: replaces `[parallel]`, such as "data=8,tensor=2".
    world_size, local_size: for a Plan, all ranks (None: as many as the layout implies), and those
        per node (None: not known).
    """
    if isinstance(cluster, int):
        cluster, vocab_size, rows_per_epoch = None, cluster, rows_per_epoch or vocab_size
    if cluster is None:
        if layout is not None:
            config = config.model_copy(update={"parallel": parse_parallel(layout, config.parallel)})
        return make_plan(
            config, vocab_size, rows_per_epoch, world_size=world_size, local_size=local_size
        )
    resolved = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    return make_estimate(config, resolved, vocab_size, rows_per_epoch, layout=layout)


def best_precision(config: Config, cluster: Cluster, matmuls: str | None = None) -> str:
    """Return the precision of a run on these devices: `matmuls` if it is set, else the configured
    `train.precision`. For `auto` it is the one that a run would choose: bf16, else fp16, if its
    peak FLOP/s exceed fp32's; else fp32. If the fp32 peak is unknown, it is the format with the
    highest peak. Raises ConfigError for an unknown format, or one that does not go with
    `train.precision`."""
    if matmuls is not None:
        if matmuls not in LINEAR_ONLY:
            raise ConfigError(f"--matmuls {matmuls}: choose {either(LINEAR_ONLY)}")
        if config.train.precision not in ("auto", LINEAR_ONLY[matmuls]):
            others = LINEAR_ONLY[matmuls]
            raise ConfigError(
                f"--matmuls {matmuls} goes with train.precision={others!r}, in which all else is "
                f"planned, not {config.train.precision!r}"
            )
        return matmuls
    if (asked := config.train.matmuls) in cluster.device.tflops:
        assert asked is not None
        return asked
    if config.train.precision != "auto":
        return config.train.precision
    known: dict[str, float] = dict(cluster.device.tflops)
    chosen = auto_precision([name for name in known if known[name] > known.get("fp32", 0)])
    return chosen if chosen in known else max(known, key=lambda name: known[name])
