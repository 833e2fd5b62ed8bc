"""Published runs of mixtures of experts, each as a configuration, a layout and a cluster.

`planner.py` scores them. Reads `planner/moe_rows.json` of PENTAMETER_DATA_DIR.

What a row does not say is read so, for all rows alike:
- the micro-batch is one sequence, the batch of the folding paper's table 4 is 1,024 sequences (its
  copies name 256 or 1,024; 256 would leave 1,024 GPUs four micro-batches for eight stages);
- of stages a process as many as divide the layers, up to eight, where a program interleaves them;
- activations are recomputed as little as is not refused; "norm, act" and the like are `selective`,
  and so is the time of rows that recompute whole layers of experts, whose memory is reckoned apart;
- the residual stream is in 16 bits; AutoModel keeps weights and Adam's moments in bfloat16, too
  (its benchmarks build models in the folder's dtype, without a float32 copy);
- Megatron Core divides experts' matrices as attention's, unless the row is of folding; AutoModel,
  whose tables leave the expert degree out, exchanges rows within a node, as its DeepEP kernels do;
- "natural" routing is planned with an imbalance of NATURAL_IMBALANCE.
Step times follow from tokens per second, or from TFLOP/s by `causal_flops_per_token`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

from pentameter.config.files.load import load_config
from pentameter.config.schema import Config, ModelConfig
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.communication import Communication, StepCommunication
from pentameter.estimating.bytes.costs import ActivationBytes, Step
from pentameter.estimating.bytes.memory import Memory, step_memory
from pentameter.estimating.bytes.plan_estimates import step_of
from pentameter.estimating.seconds.cluster import Cluster, parse_cluster
from pentameter.estimating.seconds.estimate import Estimate, make_estimate
from pentameter.estimating.seconds.links import Links
from pentameter.planning.adapters import run_operations
from pentameter.planning.architecture import ActivationTensor
from pentameter.planning.plan import Plan

ROWS = "planner/moe_rows.json"
NATURAL_IMBALANCE = 1.5
"""The imbalance of rows with natural routing, which no table says."""
FOLDING_BATCH = 1024
"""Sequences per step in the folding paper's table 4, as its numbers of GPUs suggest."""
PUBLISHED_DEVICES = {
    "h100": ("h100-80gb", 8),
    **{name: (name, 8) for name in ("b200", "b300")},
    **{name: (name, 64) for name in ("gb200", "gb300")},
}
"""Maps a row's device to ours, and to how many of them NVLink joins, as far as a power of two goes;
others cannot be planned for."""
FP8 = ("fp8", "fp8-cs", "fp8-mx", "mxfp8")
"""Precisions of rows that multiply in 8 bits: they differ in what shares a scale."""
SCORED = "bf16, h100"
"""The kind of rows that the calibration of an H100 is tested on. Those of others are marked."""
MOST_STAGES = 8
"""Stages a process where the row does not say how many, at most."""


def _keys(
    layers: int, width: int, heads: tuple[int, int, int], vocab: int, experts: tuple[int, int, int],
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A model's keys. heads: query heads, key and value heads, channels of each. experts: how many,
    how many per token, the inner width."""
    n_heads, n_kv_heads, head_size = heads
    n_experts, n_chosen, d_expert = experts
    keys = {
        "n_layers": layers, "d_model": width, "vocab_size": vocab, "norm": "rmsnorm",
        "positions": "rotary", "tied_head": False,
        "attention.n_heads": n_heads, "attention.n_kv_heads": n_kv_heads,
        "attention.head_size": head_size,
        "feed_forward.width": d_expert, "feed_forward.activation": "swiglu",
        "experts.count": n_experts, "experts.per_token": n_chosen, "experts.width": d_expert,
        **(more or {}),
    }  # fmt: skip
    return {f"model.{key}": value for key, value in keys.items()}


def _gpt_oss(layers: int, n_experts: int) -> dict[str, Any]:
    """gpt-oss without its attention sinks, one number per head."""
    return _keys(
        layers, 2880, (64, 8, 64), 201088, (n_experts, 4, 2880),
        {"bias": True, "attention.qkv_bias": True, "attention.sliding_window": 128,
         "attention.sliding_window_pattern": 2},
    )  # fmt: skip


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral-8x7b": ("mixtral-8x7b", {}),
    "olmoe-1b-7b": ("olmoe-1b-7b", {}),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", {}),
    "deepseek-v3-671b": ("deepseek-v3", {}),
    "mixtral-8x22b": ("mixtral-8x22b", {}),
    "qwen3-235b-a22b": ("qwen3-235b-a22b", {}),
    # The folding paper's: eight times as many experts, an eighth as wide; eight are chosen.
    "mixtral-8x22b-g8t8": ("quickstart", _keys(56, 6144, (48, 8, 128), 32768, (64, 8, 2048))),
    "llama3-8x70b": ("quickstart", _keys(80, 8192, (64, 8, 128), 128256, (8, 2, 28672))),
    "qwen2-57b-a14b": ("quickstart", _keys(
        28, 3584, (28, 4, 128), 151936, (64, 8, 2560),
        {"experts.n_shared": 8, "experts.shared_gate": True, "attention.qkv_bias": True})),
    "gpt-oss-20b": ("quickstart", _gpt_oss(24, 32)),
    "gpt-oss-120b": ("quickstart", _gpt_oss(36, 128)),
    "olmoe dense 1.3b twin": ("olmoe-1b-7b", {
        "model.experts.count": None, "model.experts.per_token": None, "model.experts.width": None,
        "model.router.balance": "none", "model.router.z_loss": 0.0,
        "model.feed_forward.width": 8192}),
}  # fmt: skip
"""Maps a row's model to a preset and the keys that differ. Missing are models of other layers than
attention and feed-forward ones (Nemotron's, DeepSeek-V4's)."""


class SixteenBitStream(Step):
    """A Step whose residual stream is in 16 bits, as in all of the published programs; ours is in
    32."""

    def bytes_of(self, tensor: ActivationTensor) -> int:
        """Bytes per element in an activation."""
        return 2 if tensor.dtype == "weights" else super().bytes_of(tensor)


def their_memory(
    estimate: Estimate, *, halves_state: bool = False, keeps_attention: bool = False
) -> Memory:
    """What an estimate's run takes in its program instead of ours. halves_state: weights and the
    optimizer's moments are in 16 bits, too. keeps_attention: layers of experts and norms are
    computed again, attention is not, which none of our ways to recompute does; beside the streams
    of a full recomputation it keeps what attention saves."""
    step = step_of(
        estimate.plan,
        estimate.precision,
        drops_by_blocks=estimate.drops_by_blocks,
        imbalance=estimate.imbalance,
    )
    if keeps_attention:
        train = step.config.train.model_copy(update={"activation_checkpoint": "full"})
        step = replace(step, config=step.config.model_copy(update={"train": train}))
    theirs = SixteenBitStream(**{each.name: getattr(step, each.name) for each in fields(step)})
    memory = step_memory(theirs)
    added = 0.0
    if keeps_attention:
        costs = ActivationBytes(theirs)
        run = run_operations(step.config.model, step.config.lora)
        attention = [op for op in run.alike_blocks[0][0] if op.kind == "attention"]
        # What its kernel saves, and the stream between it and the experts.
        results = costs.of(each for op in attention for each in costs.saves(op)) + costs.stream
        kept = memory.activations_bytes - costs.recomputing(run)  # the stream, of each block
        added = kept * results / costs.stream
    if halves_state:
        added -= (memory.weights_bytes + memory.optimizer_bytes) / 2
    return replace(memory, device_bytes=round(memory.device_bytes + added))


@dataclass(frozen=True)
class TheirRun(Estimate):
    """An Estimate of another program's run: experts' exchange sends a fraction of the bytes that
    ours sends over the slowest link of its group, and memory is that of its number formats."""

    sent: float = 1.0
    halves_state: bool = False
    keeps_attention: bool = False

    @cached_property
    def memory(self) -> Memory:
        """Bytes on the rank that needs the most: `device_bytes` is their program's."""
        return their_memory(
            self, halves_state=self.halves_state, keeps_attention=self.keeps_attention
        )

    @cached_property
    def communication(self) -> list[StepCommunication]:
        """Calls and bytes in one step, for each `pipeline` coordinate; equal ones are one object,
        as in Estimate."""
        scaled: dict[int, StepCommunication] = {}
        own: list[StepCommunication] = super().communication
        for traffic in own:
            exchange = traffic.get(("expert", "all_to_all"))
            less = dict(traffic)
            if exchange is not None:
                n_bytes = round(exchange.n_bytes * self.sent)
                less["expert", "all_to_all"] = Communication(exchange.calls, n_bytes)
            scaled.setdefault(id(traffic), less)
        return [scaled[id(traffic)] for traffic in own]


@dataclass(frozen=True)
class MixtureRow:
    """A published run of a mixture of experts, and what it takes to plan it."""

    facts: Mapping[str, Any]

    @property
    def source(self) -> str:
        """The publication, shortened."""
        return str(self.facts["source"]).split(",")[0].split(" (")[0]

    @property
    def label(self) -> str:
        """The row's name in its file."""
        return str(self.facts["id"])

    @property
    def is_calibration(self) -> bool:
        """Whether constants are fitted on the row, not tested: two rows in five."""
        return hashlib.sha256(self.label.encode()).digest()[0] % 5 < 2

    @property
    def is_order_of_magnitude(self) -> bool:
        """Whether the row says too little to be planned: its layout or its speed is missing."""
        return self.facts.get("gpus") is None or str(self.facts["use"]).startswith("mark")

    @property
    def obstacle(self) -> str | None:
        """Why the row is not scored; None if it is."""
        if self.facts["model"] not in MODELS:
            return "a model with other layers"
        if self.facts["device"] not in PUBLISHED_DEVICES:
            return f"no {self.facts['device']} to plan for"
        if self.facts["precision"] not in ("bf16", *FP8):
            return f"{self.facts['precision']} cannot be planned"
        return "no layout or no speed" if self.is_order_of_magnitude else None

    @property
    def matmuls(self) -> str | None:
        """The number format of linear layers' matmuls that is planned, if not bf16."""
        return "fp8" if self.facts["precision"] in FP8 else None

    @property
    def kind(self) -> str:
        """The number format and the family of devices, by which errors are printed."""
        family = "h100" if self.facts["device"] == "h100" else "blackwell"
        return f"{self.matmuls or 'bf16'}, {family}"

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the run ran out of memory, so that no plan for it may fit."""
        return bool(self.facts.get("out_of_memory"))

    def _degree(self, name: str) -> int:
        return int(self.facts.get(name) or 1)

    @property
    def is_fsdp(self) -> bool:
        """Whether weights are sharded between steps: all of a ZeRO 3."""
        fsdp = self.facts.get("fsdp") not in (None, 0, "/")
        return self._degree("pipeline") == 1 and (fsdp or "FSDP" in str(self.facts["program"]))

    @property
    def is_of_folding(self) -> bool:
        """Whether the row is from the paper about parallel folding, where capacities fix how many
        rows each expert gets, so that no host reads counts."""
        return "Folding" in self.source

    @property
    def _expert_degrees(self) -> tuple[int, int]:
        """(expert, expert_tensor) of the row's run."""
        expert, shards = self.facts.get("expert"), self.facts.get("expert_tensor")
        if expert is None:
            deep_ep = "DeepEP" in str(self.facts.get("kernels"))
            expert = min(8, int(self.facts["gpus"])) if deep_ep else 1
        folds = not self.is_of_folding or "folding" in str(self.facts.get("strategy"))
        if shards is None:
            shards = 1 if folds else self._degree("tensor")
        return int(expert), int(shards)

    @property
    def batch_size(self) -> int:
        """Sequences per step."""
        known = self.facts.get("global_batch")
        if known:
            return int(known)
        n_ranks = int(self.facts["gpus"]) // self._degree("tensor") // self._degree("pipeline")
        return FOLDING_BATCH if self.is_of_folding else 4 * n_ranks

    @property
    def cluster(self) -> Cluster:
        """The row's GPUs, in nodes of those that NVLink joins."""
        n = int(self.facts["gpus"])
        device, node_size = PUBLISHED_DEVICES[self.facts["device"]]
        cluster = parse_cluster(f"{device}:{min(node_size, n)}x{max(1, n // node_size)}")
        if not self.is_of_folding:
            return cluster
        calibration = cluster.device.calibration.model_copy(update={"counts_seconds": 0.0})
        changed = cluster.device.model_copy(update={"calibration": calibration})
        return cluster.model_copy(update={"device": changed})

    def layout(self, virtual_stages: int) -> str:
        """The row's layout as text, with so many stages a process."""
        t, c, p = map(self._degree, ("tensor", "context", "pipeline"))
        n, (expert, shards) = int(self.facts["gpus"]), self._expert_degrees
        data, replicate = n // (t * c * p), 1
        if self.is_fsdp and c > 1:  # before folding, ranks that split a sequence held copies
            data, replicate, c = data * c, c, 1
        parts = [f"data={data},tensor={t},context={c},pipeline={p}"]
        if expert * shards > 1:
            parts.append(f"expert={expert},expert_tensor={shards}")
        if data * c > 1:
            parts.append("zero=3" if self.is_fsdp else "zero=1")
        if replicate > 1:
            parts.append(f"replicate={replicate}")
        if t > 1:
            parts.append("sequence=true")
        micro_batches = self.batch_size // data // self._degree("micro_batch")
        if p > 1 and micro_batches < p:
            parts.append("schedule=gpipe")
        elif virtual_stages > 1:
            parts.append(f"schedule=interleaved,virtual_stages={virtual_stages}")
        return ",".join(parts)

    def config(self, recompute: str | None) -> Config:
        """The row as a configuration."""
        preset, keys = MODELS[self.facts["model"]]
        return load_config(
            preset,
            {
                **keys,
                "name": "row",
                "data.corpus": "stdlib",
                "data.path": None,
                "data.tokenizer": "char",
                "model.context_length": self.facts["sequence"],
                "train.precision": "bf16",
                "train.tokens_per_step": None,
                "train.batch_size": self.batch_size,
                "train.micro_batch_size": self._degree("micro_batch"),
                "train.activation_checkpoint": recompute,
            },
        )

    @cached_property
    def estimate(self) -> TheirRun:
        """What the planner says of it: with the least recomputation that fits, where the row does
        not name one."""
        config = self.config(None)
        ways: Sequence[str | None] = (None, "selective", "full")
        if self.facts.get("recompute"):
            ways = ("selective",)
        for recompute in ways:
            found = self._estimate(recompute, config.model)
            if found.verdict != "does not fit":
                break
        return found

    def _estimate(self, recompute: str | None, model: ModelConfig) -> TheirRun:
        p, v = self._degree("pipeline"), self.facts.get("virtual_pipeline")
        if v is None:
            divide = [v for v in range(1, MOST_STAGES + 1) if model.n_layers % (p * v) == 0]
            v = max(divide, default=1) if p > 1 else 1
        v = min(int(v), model.n_layers // p)
        natural = "natural" in str(self.facts.get("routing"))
        found = make_estimate(
            self.config(recompute),
            self.cluster,
            layout=self.layout(v),
            imbalance=NATURAL_IMBALANCE if natural else 1.0,
            matmuls=self.matmuls,
        )
        return TheirRun(
            found.plan,
            found.cluster,
            found.precision,
            found.imbalance,
            sent=self._sent(found.plan, found.cluster),
            halves_state="AutoModel" in str(self.facts["program"]),
            keeps_attention="moe" in str(self.facts.get("recompute")),
        )

    def _sent(self, plan: Plan, cluster: Cluster) -> float:
        """The fraction of our exchange's bytes that the row's program sends over the slowest link.
        Ours sends k rows of each token, to every shard of their experts. DeepEP sends a token once
        to each node, or within one to each rank, however many of its experts are there. Megatron's
        all-to-all sends a row once to the node, whose ranks all-gather it for their shards."""
        layout, model = plan.layout, plan.config.model
        if not layout.shards_experts:
            return 1.0
        size, within, nodes = Links(layout, cluster).group("expert")
        n_parts = nodes if nodes > 1 else size
        k, shards = model.experts.n_chosen, layout.expert_tensor
        if "DeepEP" in f"{self.facts.get('dispatcher')} {self.facts.get('kernels')}":
            n_reached = (n_parts - 1) * (1 - (1 - 1 / n_parts) ** k)
            if nodes > 1 and model.router.open_groups is not None:
                n_reached = min(n_reached, model.router.open_groups * (n_parts - 1) / n_parts)
            return n_reached / (k * shards * (n_parts - 1) / n_parts)
        return 1 / shards if nodes > 1 and within % shards == 0 else 1.0

    @property
    def step_seconds(self) -> float:
        """The published seconds per step."""
        if self.facts.get("step_seconds_published"):
            return float(self.facts["step_seconds_published"])
        n_tokens = self.batch_size * int(self.facts["sequence"]) / int(self.facts["gpus"])
        if self.facts.get("tokens_per_second_per_gpu"):
            return n_tokens / float(self.facts["tokens_per_second_per_gpu"])
        flops = self.estimate.plan.causal_flops_per_token
        assert flops is not None
        return n_tokens * flops / (float(self.facts["model_tflops_per_gpu"]) * 1e12)

    @property
    def seconds(self) -> float:
        """The predicted seconds per step."""
        return self.estimate.time.seconds

    @property
    def error(self) -> float:
        """Predicted ÷ published seconds, less 1."""
        return self.seconds / self.step_seconds - 1

    @property
    def name(self) -> str:
        """The row's layout in short, to tell it from others of its model: the paper's strategy, or
        the degrees; with what the row notes."""
        degrees = " ".join(
            f"{short}{self._degree(name)}"
            for short, name in (("TP", "tensor"), ("PP", "pipeline"), ("EP", "expert"))
        )
        note = self.facts.get("notes") if not self.is_of_folding else None
        return str(self.facts.get("strategy") or degrees) + (f" {note}" if note else "")

    def __str__(self) -> str:
        found, time = self.estimate, self.estimate.time
        parts = {"compute": time.compute, "bubble": time.bubble, **time.exposed}
        shares = " ".join(
            f"{name} {part / time.seconds:.0%}" for name, part in parts.items() if part
        )
        published = "out of memory" if self.is_out_of_memory else f"{self.step_seconds:8.3f} s"
        error = "" if self.is_out_of_memory else f" {self.error:+6.1%}"
        how = found.plan.config.train.activation_checkpoint or "-"
        fits: str = found.verdict
        fits += f", {-found.spare_bytes / 1e9:.0f} GB more" if fits == "does not fit" else ""
        return (
            f"{self.label:46} {published} {time.seconds:8.3f}{error} {fits} {found.plan.layout} "
            f"{how} {shares}"
        )


def mixture_rows(facts: Sequence[Mapping[str, Any]]) -> Iterator[MixtureRow]:
    """Yield the rows that can be planned."""
    for row in map(MixtureRow, facts):
        if row.obstacle is not None:
            continue
        try:
            row.estimate  # noqa: B018
        except ConfigError as error:
            print(f"{row.label}: refused: {error}")
            continue
        yield row


def groups_in_order(rows: Sequence[MixtureRow]) -> dict[str, list[MixtureRow]]:
    """Return the rows that share model, devices, batch and sequence, the fastest published one
    first, by what they share; only where there are several layouts."""
    found: dict[str, list[MixtureRow]] = {}
    for row in rows:
        facts = row.facts
        if facts.get("routing") in (None, "token dropping, capacity factor 1"):
            key = f"{facts['model']} × {facts['gpus']}, {row.batch_size} × {facts['sequence']}"
            found.setdefault(key, []).append(row)
    return {
        key: sorted(group, key=lambda row: row.step_seconds)
        for key, group in found.items()
        if len({row.name for row in group}) > 1
    }


def unscored(facts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many rows are not scored, by the reason."""
    found: dict[str, int] = {}
    for row in map(MixtureRow, facts):
        if row.obstacle is not None:
            found[row.obstacle] = found.get(row.obstacle, 0) + 1
    return found
