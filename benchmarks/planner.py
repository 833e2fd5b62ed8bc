"""Predicted against published: step times and memory of other programs' tables.

    python benchmarks/planner.py                  # the errors, per source
    python benchmarks/planner.py --rows           # and every row
    python benchmarks/planner.py --search         # is each table's layout among our best?
    python benchmarks/planner.py --fit ampere     # fits a calibration on the calibration rows
    python benchmarks/planner.py --plot FILE.svg  # draws predicted over published

Reads `planner/published_rows.json` and `planner/moe_rows.json` (`mixtures.py`) of
PENTAMETER_DATA_DIR. Every row goes the way that `pentameter plan CONFIG --cluster C --layout L
--json` goes. Rows are split by a hash of what they say: of each source two in five fit the
constants, the rest test them. Our own run fits, too.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mixtures import ROWS as MIXTURE_ROWS
from mixtures import SCORED, groups_in_order, mixture_rows, their_memory, unscored
from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.disk.cache import data_folder
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.fit import Verdict, memory_verdict
from pentameter.estimating.bytes.plan_estimates import step_of
from pentameter.estimating.search.candidates import LayoutCandidate
from pentameter.estimating.search.search import Allowed, search
from pentameter.estimating.seconds.cluster import Cluster, parse_cluster
from pentameter.estimating.seconds.estimate import Estimate, make_estimate
from pentameter.estimating.seconds.step_time import step_time
from pentameter.planning.layouts.layout import Layout

ROWS = "planner/published_rows.json"
H100_2023 = "h100-2023"
"""An H100 with the libraries of 2023."""
GPT: dict[str, Any] = {
    "model.feed_forward.activation": "gelu_tanh",
    "model.bias": True,
    "model.attention.qkv_bias": True,
    "data.corpus": "stdlib",
    "train.precision": "bf16",
}


OWN = "pentameter h100 80gb"
"""The source of what we ran ourselves."""
WIDER = {"torchtitan h100 96gb 500w": 16e9}
"""Bytes that a source's devices have more than those they are planned on."""


@dataclass(frozen=True)
class Row:
    """A published measurement, and what it takes to predict it."""

    source: str
    label: str
    settings: Mapping[str, Any]
    layout: str
    cluster: str
    step_seconds: float
    memory_bytes: float | None = None

    @property
    def is_calibration(self) -> bool:
        """Whether constants are fitted on it, not tested, as they are on what we ran ourselves."""
        return (
            self.source == OWN
            or hashlib.sha256(f"{self.source} {self.label}".encode()).digest()[0] % 5 < 2
        )

    @property
    def config(self) -> Config:
        """The row as a configuration."""
        return load_config("quickstart", {"name": "row", **GPT, **self.settings})

    def estimate(self, cluster: Cluster | None = None) -> Estimate:
        """What the planner says of it."""
        return make_estimate(
            self.config, cluster or parse_cluster(self.cluster), layout=self.layout
        )


def _model(
    layers: int, width: int, heads: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "model.n_layers": layers,
        "model.d_model": width,
        "model.attention.n_heads": heads,
        "model.vocab_size": vocab,
        "model.context_length": context,
        **{f"model.{key}": value for key, value in more.items()},
    }


def _nodes(n_devices: int) -> str:
    return f"{min(8, n_devices)}x{max(1, -(-n_devices // 8))}"


def llm_foundry(table: Mapping[str, Any]) -> Iterator[Row]:
    """MosaicML's table: FSDP, without tensor or pipeline parallelism. FP8 rows are left out."""
    devices = {"h100_80gb": H100_2023, "a100_80gb": "a100-80gb", "a100_40gb": "a100-40gb"}
    zero = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}
    dims = table["dims_hidden_layers_heads"]
    for row in table["rows"]:
        if "fp8" in row["Precision"]:
            continue
        width, layers, heads = dims[row["Model"]]
        context, n = int(row["SeqLen (T)"]), int(row["# GPUs"])
        batch = int(row["GlobalBatchSize"])
        recompute = "full" if row["Activation Checkpointing"] == "True" else None
        yield Row(
            source=f"llm-foundry {row['GPU'].replace('_', ' ')}",
            label=f"{row['Model']} T {context} × {n}",
            settings={
                **_model(layers, width, heads, 50368, context, tied_head=True),
                "model.bias": False,
                "model.attention.qkv_bias": False,
                "train.batch_size": batch,
                "train.micro_batch_size": int(row["MicroBatchSize"]),
                "train.activation_checkpoint": recompute,
            },
            layout=f"data={n},zero={zero[row['Sharding Strategy']]}",
            cluster=f"{devices[row['GPU']]}:{_nodes(n)}",
            step_seconds=batch * context / float(row["Throughput (T/s)"]),
        )


def megatron_2021(table: Mapping[str, Any]) -> Iterator[Row]:
    """Megatron-LM's weak scaling on A100s (Narayanan et al. 2021, table 1), all recomputed."""
    for row in table["rows"]:
        v = row["virtual_stages"]
        schedule = f",schedule=interleaved,virtual_stages={v}" if v > 1 else ""
        degrees = f"data={row['dp']},tensor={row['tp']},pipeline={row['pp']}"
        yield Row(
            source="Megatron-LM 2021 a100 80gb",
            label=row["model"],
            settings={
                **_model(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
                "train.batch_size": row["gbs"],
                "train.micro_batch_size": row["mbs"],
                "train.activation_checkpoint": "full",
            },
            layout=degrees + schedule,
            cluster=f"a100-80gb:{_nodes(row['gpus'])}",
            step_seconds=row["derived_iter_s"],
        )


def megatron_core(table: Mapping[str, Any]) -> Iterator[Row]:
    """Megatron Core 0.8 on H100s. Micro-batches of 1, and no stages more than processes, are
    assumed: they are not published."""
    for row in table["rows"]:
        degrees = f"data={row['dp']},tensor={row['tp']},pipeline={row['pp']},sequence=true,zero=1"
        yield Row(
            source="Megatron Core 0.8 h100",
            label=row["model"],
            settings={
                **_model(row["layers"], row["hidden"], row["heads"], row["vocab"], row["seq"]),
                "model.tied_head": False,
                "train.batch_size": row["gbs"],
                "train.micro_batch_size": 1,
            },
            layout=degrees,
            cluster=f"h100-80gb:{_nodes(row['gpus'])}",
            step_seconds=row["derived_iter_s"],
        )


def nanotron(table: Mapping[str, Any]) -> Iterator[Row]:
    """Nanotron's Llama-like models on H100s, with FlashAttention 2; step times follow from MFU,
    6·N + 12·L·D·T a token."""
    context, vocab = table["seq"], table["vocab"]
    for row in table["rows"]:
        layers, width, heads, d_ff, tied = table["dims_layers_hidden_heads_ffn_tied"][
            f"{row['params_b']:g}"
        ]
        n = row["nodes"] * 8
        batch = row["dp"] * row["gas"] * row["mbs"]
        sequence = ",sequence=true" if row["tp"] > 1 else ""
        if row["gas"] < row["pp"]:
            sequence += ",schedule=gpipe"  # the same passes, where they are fewer than stages
        degrees = f"data={row['dp']},tensor={row['tp']},pipeline={row['pp']},zero={row['zero']}"
        settings = {
            **_model(layers, width, heads, vocab, context, tied_head=tied, **llama(d_ff)),
            "model.bias": False,
            "model.attention.qkv_bias": False,
            "train.batch_size": batch,
            "train.micro_batch_size": row["mbs"],
        }
        flops = 6 * row["params_b"] * 1e9 + 12 * layers * width * context
        yield Row(
            source="nanotron 0.5 h100",
            label=f"{row['params_b']}B {degrees} × {row['mbs']}",
            settings=settings,
            layout=degrees + sequence,
            cluster=f"{H100_2023}:{_nodes(n)}",
            step_seconds=flops * batch * context / (row["mfu_pct"] / 100 * 989.4e12 * n),
            memory_bytes=row["mem_gb"] * 1e9,
        )


def torchtitan(table: Mapping[str, Any]) -> Iterator[Row]:
    """torchtitan's Llama 3 on H100s with 96 GB at 500 of 700 W, which reach no more than full ones
    did with the libraries of 2023; rows in FP8 are left out."""
    for row in table["rows"]:
        if "fp8" in row["opt"]:
            continue
        yield Row(
            source="torchtitan h100 96gb 500w",
            label=f"{row['model']} × {row['gpus']} {row['opt']}",
            settings={
                **llama3_8b(row["seq"]),
                "train.batch_size": row["gbs"],
                "train.micro_batch_size": row["mbs"],
                "train.activation_checkpoint": row["ac"],
                "train.compile": row["opt"] != "eager",
            },
            layout=f"data={row['gpus']},zero=3",
            cluster=f"{H100_2023}:{_nodes(row['gpus'])}",
            step_seconds=row["gbs"] * row["seq"] / (row["tps"] * row["gpus"]),
            memory_bytes=row["mem_gib"] * 2**30,
        )


def llama3_8b(context: int) -> dict[str, Any]:
    """The keys of Llama 3 8B."""
    model = _model(32, 4096, 32, 128256, context, tied_head=False, **llama(14336, 8))
    return {**model, "model.bias": False, "model.attention.qkv_bias": False}


def own_runs() -> Iterator[Row]:
    """What we measured ourselves on a GPU (benchmarks/measurements/gpu.md)."""
    yield Row(
        source=OWN,
        label="gpt2-124m",
        settings={
            **_model(12, 768, 12, 50304, 1024, tied_head=True),
            "train.batch_size": 512,
            "train.micro_batch_size": 16,
            "train.compile": True,
        },
        layout="data=1",
        cluster="h100-80gb:1x1",
        step_seconds=1.057,
    )


def llama(d_ff: int, n_kv_heads: int | None = None) -> dict[str, Any]:
    """The keys of a Llama-like model."""
    return {
        "norm": "rmsnorm",
        "positions": "rotary",
        "attention": {"n_kv_heads": n_kv_heads},
        "feed_forward": {"width": d_ff, "activation": "swiglu"},
    }


READERS = {
    "mpt_llm_foundry": llm_foundry,
    "megatron_sc21_table1_A100": megatron_2021,
    "megatron_core_r0.8_H100": megatron_core,
    "nanotron_v0.5_H100": nanotron,
    "torchtitan_2412_H100_96GB_500W": torchtitan,
}


def read_rows(name: str) -> Any:
    """The content of a file of published rows."""
    folder = data_folder()
    if folder is None or not (folder / name).is_file():
        raise ConfigError(f"{name} is not in PENTAMETER_DATA_DIR")
    return json.loads((folder / name).read_text(encoding="utf-8"))


def published_rows() -> list[Row]:
    """All rows that a configuration can say, and our own."""
    tables = read_rows(ROWS)
    published = (read(tables[name]) for name, read in READERS.items())
    return [*itertools.chain(*published), *own_runs()]


def percentile(values: list[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


FITTED = ("product", "attention", "memory", "link", "network", "interference")
CEILINGS = {"memory_share": 0.92, "link_share": 0.85, "network_share": 0.95}
"""What programs made to measure these reach: STREAM's, and NCCL's all-reduces of gigabytes."""
TRIALS = 5000
"""Moves of a fit."""


def fit(rows: list[Row], family: str) -> dict[str, float]:
    """The shares of a family's devices that make the mean error of these rows least: from those
    that are, some at a time are moved by chance, ever less far, and kept where that helps."""
    estimates = [(row, row.estimate()) for row in rows]
    estimates = [
        (row, each) for row, each in estimates if each.cluster.device.calibration_key == family
    ]
    first = estimates[0][1].cluster.device.calibration
    shares = {f"{name}_share": getattr(first, f"{name}_share") for name in FITTED}
    shares |= {name: min(most, shares[name]) for name, most in CEILINGS.items()}

    def error(shares: dict[str, float]) -> float:
        errors = []
        for row, old in estimates:
            calibration = old.cluster.device.calibration.model_copy(update=shares)
            device = old.cluster.device.model_copy(update={"calibration": calibration})
            cluster = old.cluster.model_copy(update={"device": device})
            step = step_of(old.plan, old.precision)
            seconds = step_time(step, cluster, old.communication).seconds
            errors.append(min(0.5, abs(math.log(seconds / row.step_seconds))))
        return statistics.fmean(errors)

    draw = random.Random(1)
    best = error(shares)
    for trial in range(TRIALS):
        spread = 0.02 + 0.35 * (1 - trial / TRIALS)
        names = draw.sample(list(shares), draw.choice((1, 2, 3, len(shares))))
        moved = {name: shares[name] * math.exp(draw.gauss(0, spread)) for name in names}
        tried = shares | {
            name: min(CEILINGS.get(name, 1.0), max(0.02, share)) for name, share in moved.items()
        }
        if (found := error(tried)) < best:
            best, shares = found, tried
            named = " ".join(f"{name}={share:.3f}" for name, share in shares.items())
            print(f"{family} {trial} {best:.4f} {named}", flush=True)
    return shares


@dataclass(frozen=True)
class Outcome:
    """A row with what was predicted of it."""

    row: Row
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        return self.estimate.time.seconds

    @property
    def error(self) -> float:
        """Predicted ÷ published, less 1."""
        return self.seconds / self.row.step_seconds - 1

    @property
    def verdict(self) -> Verdict:
        """Whether the row's run fits, by what its program keeps: its stream is in 16 bits."""
        needed = self.estimate.device_bytes
        if self.row.source != OWN:
            needed = their_memory(self.estimate).device_bytes
        usable = self.estimate.cluster.usable_bytes
        return memory_verdict(needed, usable + WIDER.get(self.row.source, 0.0))

    @property
    def memory_error(self) -> float | None:
        """The same of the fullest device's memory, where it is published."""
        if self.row.memory_bytes is None:
            return None
        return self.estimate.memory.total_bytes / self.row.memory_bytes - 1

    def __str__(self) -> str:
        time = self.estimate.time
        parts = {"compute": time.compute, "bubble": time.bubble, **time.exposed}
        shares = " ".join(f"{name} {part / time.seconds:.0%}" for name, part in parts.items())
        memory = "" if self.memory_error is None else f" memory {self.memory_error:+.0%}"
        return (
            f"{'fit ' if self.row.is_calibration else 'test'} {self.row.source:27} "
            f"{self.row.label:46} {self.row.step_seconds:8.3f} s {self.seconds:8.3f} "
            f"{self.error:+6.1%}{memory} {shares}"
        )


N_BEST = 10
"""Layouts that a search is asked for, to find the published one among them."""


def print_ranking(outcomes: list[Outcome]) -> None:
    """The place of each published layout in the search for its model, batch and devices, where its
    program divides models too. No table has two layouts of one model on as many devices, so the
    search's own list is what there is to be ranked in: of layouts that run as the published one, in
    micro-batches and stages a process, and of all that its program could have run."""
    counts = {"alike": 0, "all": 0}
    n = 0
    for outcome in outcomes:
        row, published = outcome.row, outcome.estimate.plan.layout
        if row.source.startswith("llm-foundry"):
            continue
        n += 1
        said = []
        for name, allowed in (("alike", _runs_alike), ("all", _could_be_run)):
            place, best = _place(outcome, partial(allowed, row, published))
            counts[name] += place is not None and place <= 3
            said.append(
                f"of {name} {place or f'> {N_BEST}':>4}, the best {best.time.seconds:.3g} s: "
                f"{best.plan.layout} × {best.plan.micro_batch_size}"
            )
        print(
            f"{row.source:27} {row.label:46} planned so {outcome.seconds:.3g} s; {'; '.join(said)}",
            flush=True,
        )
    print("; ".join(f"among the first three of {name}: {counts[name]} of {n}" for name in counts))


def _place(outcome: Outcome, allowed: Allowed) -> tuple[int | None, Estimate]:
    """The place of a published layout's degrees among layouts that are allowed, and the best."""
    published = outcome.estimate.plan.layout
    found = search(
        outcome.row.config,
        outcome.estimate.cluster,
        n_best=N_BEST,
        allowed=allowed,
    )
    degrees = [_degrees(each.plan.layout) for each in found.estimates]
    mine = _degrees(published)
    return degrees.index(mine) + 1 if mine in degrees else None, found.estimates[0]


STUDIED_MODEL = {
    **GPT, **_model(32, 20480, 128, 51200, 2048), "train.micro_batch_size": 1,
    "train.activation_checkpoint": "full",
}  # fmt: skip
"""A model of 162B parameters on 64 A100s, of which Narayanan et al. 2021 (section 5.4.1, figure 13)
compare five layouts at two batches: as many tensor-parallel processes as a node has are best."""
STUDIED_BATCHES, STUDIED_TENSOR = (32, 128), (32, 16, 8, 4, 2)


def print_study() -> None:
    """The planned order of the layouts that were compared with one another, at each batch size."""
    for batch in STUDIED_BATCHES:
        config = load_config("quickstart", {**STUDIED_MODEL, "train.batch_size": batch})
        seconds = {}
        for tensor in STUDIED_TENSOR:
            layout = f"tensor={tensor},pipeline={64 // tensor}"
            estimate = make_estimate(config, parse_cluster("a100-80gb:8x8"), layout=layout)
            seconds[layout] = estimate.time.seconds
        order = sorted(seconds, key=seconds.__getitem__)
        print(f"162B, batch {batch}:", *(f"{each} {seconds[each]:.3g} s," for each in order))


def _could_be_run(row: Row, published: Layout, candidate: LayoutCandidate) -> bool:
    """Whether a row's program had what a candidate needs."""
    layout, train = candidate.step.layout, candidate.step.config.train
    zero = 1 if "nanotron" in row.source else published.zero
    return (
        layout.schedule in ("1f1b", "interleaved")
        and layout.context == 1
        and layout.zero <= zero
        and (layout.sequence == published.sequence or 1 in (layout.tensor, published.tensor))
        and train.activation_checkpoint == row.config.train.activation_checkpoint
    )


def _runs_alike(row: Row, published: Layout, candidate: LayoutCandidate) -> bool:
    """Whether a candidate differs from a published layout in its degrees alone: it has its
    micro-batch, and its stages a process where these are published."""
    layout, micro_batch = candidate.step.layout, candidate.step.config.train.micro_batch_size
    stages_are_known = row.source.startswith("Megatron-LM") and layout.pipeline > 1
    return (
        _could_be_run(row, published, candidate)
        and micro_batch == row.config.train.micro_batch_size
        and (not stages_are_known or layout.virtual_stages == published.virtual_stages)
    )


def _degrees(layout: Layout) -> tuple[int, int, int]:
    return layout.data, layout.tensor, layout.pipeline


def print_table(outcomes: list[Outcome]) -> None:
    """Median, 90th percentile and worst error of each source, on both kinds of rows."""
    print("| source | rows | median | 90th percentile | worst | bias |\n" + "| --- " * 6 + "|")
    for is_calibration, kind in ((False, "test"), (True, "calibration")):
        chosen = [each for each in outcomes if each.row.is_calibration is is_calibration]
        sources = dict.fromkeys(each.row.source for each in chosen)
        for source in (*sources, None):
            errors = [each.error for each in chosen if source in (each.row.source, None)]
            print(_line(f"{source or 'all'}, {kind}", errors))
    for source in dict.fromkeys(each.row.source for each in outcomes):
        memory = [
            each.memory_error
            for each in outcomes
            if each.row.source == source and each.memory_error is not None
        ]
        if memory:
            print(_line(f"memory: {source}", memory))


def _line(name: str, errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return (
        f"| {name} | {len(errors)} | {statistics.median(sizes):.1%} | {percentile(sizes, 0.9):.1%} "
        f"| {max(sizes):.1%} | {statistics.median(errors):+.1%} |"
    )


def spreads(ratios: Iterable[tuple[Estimate, float]]) -> dict[tuple[str, str], tuple[float, float]]:
    """The 10th and 90th percentile of measured ÷ planned seconds, by calibration (or device, where
    it has a spread of its own, Blackwell's together) and precision, of (estimate, ratio) pairs."""
    found: dict[tuple[str, str], list[float]] = {}
    for estimate, ratio in ratios:
        device = estimate.cluster.device
        name = device.calibration_key if device.spread is None else "blackwell"
        found.setdefault((name, estimate.precision), []).append(ratio)
    return {key: (percentile(each, 0.1), percentile(each, 0.9)) for key, each in found.items()}


def all_spreads(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], tuple[float, float]]:
    """The spreads of all published rows, dense ones and mixtures."""
    dense = [(each.estimate, each.row.step_seconds / each.seconds) for each in outcomes]
    mixtures = [
        (row.estimate, row.step_seconds / row.seconds)
        for row in mixture_rows(read_rows(MIXTURE_ROWS)["rows"])
        if not row.is_out_of_memory
    ]
    return spreads([*dense, *mixtures])


def print_mixtures(facts: Sequence[Mapping[str, Any]], *, every: bool) -> None:
    """Median, 90th percentile and worst error of mixtures of experts, as `print_table`; whether
    layouts of one model on as many devices are in their published order; the verdict on runs out of
    memory; and what is not scored. `every`: print each row first."""
    rows = list(mixture_rows(facts))
    if every:
        print(*rows, sep="\n")
    timed = [row for row in rows if not row.is_out_of_memory]
    for kind in dict.fromkeys((SCORED, *sorted({row.kind for row in timed}))):
        print(f"\n| {kind} | rows | median | 90th percentile | worst | bias |")
        print("| --- " * 6 + "|")
        for is_calibration, use in ((False, "test"), (True, "calibration")):
            chosen = [
                row for row in timed if row.kind == kind and row.is_calibration is is_calibration
            ]
            for source in (*dict.fromkeys(row.source for row in chosen), None):
                errors = [row.error for row in chosen if source in (row.source, None)]
                if errors:
                    print(_line(f"{source or 'all'}, {use}", errors))
    timed = [row for row in timed if row.kind == SCORED]
    for key, group in groups_in_order(timed).items():
        names = [f"{row.name} {row.step_seconds:.3g} s ({row.seconds:.3g})" for row in group]
        pairs = list(itertools.combinations([row.seconds for row in group], 2))
        n_right = sum(faster < slower for faster, slower in pairs)
        print(f"{key}: {n_right} of {len(pairs)} pairs in order: {', '.join(names)}")
    for row in rows:
        if row.is_out_of_memory:
            print(f"out of memory, and by plan {row.estimate.verdict}: {row.label}")
    counts = Counter(row.estimate.verdict for row in timed)
    print(f"verdicts on the rows of {SCORED} that ran:", dict(counts))
    print("not scored:", "; ".join(f"{n} {why}" for why, n in unscored(facts).items()))


def draw(path: Path, outcomes: list[Outcome]) -> None:
    """Predicted over published step times, calibration rows hollow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    axes = figure.subplots()
    sources = dict.fromkeys(each.row.source for each in outcomes)
    for index, source in enumerate(sources):
        colour = f"C{index}"
        for is_calibration in (False, True):
            chosen = [
                each
                for each in outcomes
                if each.row.source == source and each.row.is_calibration is is_calibration
            ]
            axes.plot(
                [each.row.step_seconds for each in chosen],
                [each.seconds / each.row.step_seconds for each in chosen],
                "o", ms=5, color=colour, mfc="none" if is_calibration else colour,
                label=None if is_calibration else source,
            )  # fmt: skip
    axes.axhspan(0.9, 1.1, color="#138a5e", alpha=0.12, lw=0)
    axes.axhline(1, color="#66707f", lw=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_yticks([0.5, 0.75, 1, 1.25, 1.5], ["½", "¾", "1", "1¼", "1½"])
    axes.set_xlabel("published seconds a step")
    axes.set_ylabel("predicted ÷ published")
    axes.set_title("filled: test rows · hollow: calibration rows · band: ± 10 %", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Predict every row, and print how far off it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--search", action="store_true", help="rank the published layouts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted over published")
    parser.add_argument("--fit", metavar="FAMILY", help="fit a calibration: ampere or hopper")
    parsed = parser.parse_args()
    rows = published_rows()
    if parsed.fit:
        for name, share in fit([row for row in rows if row.is_calibration], parsed.fit).items():
            print(f"{name} = {share:.3f}")
        return
    outcomes = [Outcome(row, row.estimate()) for row in rows]
    if parsed.rows:
        print(*outcomes, sep="\n")
    if parsed.search:
        print_ranking(outcomes)
        print_study()
        return
    print_table(outcomes)
    print_mixtures(read_rows(MIXTURE_ROWS)["rows"], every=parsed.rows)
    counts = Counter(each.verdict for each in outcomes)
    print("verdicts on the dense rows, which all ran:", dict(counts))
    for (name, precision), (least, most) in all_spreads(outcomes).items():
        print(f"spread of {name} in {precision}: [{least:.2f}, {most:.2f}]")
    if parsed.plot:
        draw(parsed.plot, outcomes)


if __name__ == "__main__":
    main()
