"""Several processes against one, on the same CPU: what each layout gains, costs and waits for.

    python benchmarks/scaling.py [--parts data,layouts,four,bubble] [--rounds 5] [--json FILE]

`data`: the character GPT as `train` runs it, one process with all cores against `--nproc 2`, whose
processes run free or each keep to a core. `layouts`: the same global batch, uncompiled, on every
kind of parallelism; `four`: the same on four processes, which share the cores, so that what counts
is what they wait and send. MB are those of the loopback interface in a step, headers included,
beside the Plan's. `bubble`: the idle time of pipeline schedules with few micro-batches, beside the
Plan's. All sides of a part take turns in one run; figures are medians over rounds, ratios medians
of the ratios within a round. `others` is how many cores something else used meanwhile: a turn
waits for a quiet machine, and is taken again where it was not left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.estimating.bytes.communication import step_communication
from pentameter.estimating.bytes.plan_estimates import plan_bubble, step_of
from pentameter.planning.plan import Plan, make_plan
from scaling_group import Group, Turn

WARM_UP_STEPS = 3  # the first compiles, and heaps grow
LOOK_SECONDS = 0.5  # at how busy the machine is
PARTS = ("data", "layouts", "four", "bubble")
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"data": 2},
    "tensor 2": {"tensor": 2},
    "tensor 2, sequence": {"tensor": 2, "sequence": True},
    "pipeline 2, 1f1b": {"pipeline": 2},
    "pipeline 2, interleaved": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
    "context 2, ring": {"context": 2},
    "context 2, all-to-all": {"context": 2, "context_mode": "all-to-all"},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "data 4": {"data": 4},
    "tensor 4": {"tensor": 4},
    "tensor 4, 2d": {"tensor": 4, "tensor_mode": "2d"},
    "context 4, ring": {"context": 4},
    "context 4, all-to-all": {"context": 4, "context_mode": "all-to-all"},
    "data 2, context 2": {"data": 2, "context": 2},
    "tensor 2, context 2": {"tensor": 2, "context": 2},
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {},
    "1f1b, compiled": {"schedule": "1f1b"},
    "interleaved": {"virtual_stages": 2},
    "zero-bubble": {},
    "zero-bubble, 2 stages each": {"schedule": "zero-bubble", "virtual_stages": 2},
    "zero-bubble-v": {"virtual_stages": 2},
}
# Large products and little else: what a pipeline sends is 1 % of the time it computes.
COMPUTE_BOUND = {"n_layers": 8, "d_model": 768, "context_length": 256, "attention": {"n_heads": 12}}
TINY = {"n_layers": 4, "d_model": 32, "context_length": 32, "attention": {"n_heads": 2}}


@dataclass(frozen=True)
class Side:
    """A plan, the processes that run it, and whether each of them keeps to a core."""

    name: str
    plan: Plan
    group: Group
    pinned: bool = False


@dataclass
class Record:
    """The turns of a side: one list of the processes' reports a round."""

    how: str
    turns: list[list[Turn]] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    wire_bytes: list[float] = field(default_factory=list)

    def seconds(self) -> list[float]:
        """Of a step, by round."""
        return [max(turn.seconds for turn in turns) for turns in self.turns]

    def middle(self, figure: Callable[[Turn], float]) -> float:
        """The median over rounds of the processes' mean of a figure."""
        return median(mean(map(figure, turns)) for turns in self.turns)


class QuietTurns:
    """Takes turns while nothing else uses more than `limit` cores, as far as patience reaches."""

    def __init__(self, limit: float, patience_seconds: float) -> None:
        self._limit = limit
        self._deadline = time.perf_counter() + patience_seconds

    def wait(self) -> None:
        """Return when the machine is idle."""
        while time.perf_counter() < self._deadline:
            before = busy_seconds()
            time.sleep(LOOK_SECONDS)
            if busy_seconds() - before <= self._limit * LOOK_SECONDS:
                return

    def take(self, side: Side, first: int, n_steps: int) -> tuple[list[Turn], float, float]:
        """The reports of a side's processes, the cores that others used meanwhile, and the bytes
        that a step sent over the loopback interface."""
        while True:
            self.wait()
            before, start, sent = busy_seconds(), time.perf_counter(), loopback_bytes()
            turns = side.group.ask("turn", side.name, first, n_steps, side.pinned)
            elapsed, after = time.perf_counter() - start, busy_seconds()
            wire_bytes = (loopback_bytes() - sent) / n_steps
            ours = n_steps * sum(turn.busy + turn.background for turn in turns)
            others = max(0.0, after - before - ours) / elapsed
            if others <= self._limit or time.perf_counter() > self._deadline:
                return turns, others, wire_bytes


def busy_seconds() -> float:
    """Processor time that the whole machine has used; 0 where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def loopback_bytes() -> int:
    """Bytes sent over the loopback interface so far; 0 where the system does not say."""
    try:
        return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text(encoding="ascii"))
    except OSError:
        return 0


def planned_wire_bytes(plan: Plan, precision: str) -> float:
    """Bytes of the Plan's collectives that all processes send in a step in the precision that it
    runs in, each as a ring would."""
    total, layout = 0.0, plan.layout
    # Gradients are summed over all who hold a parameter alike, those that divide time among them.
    sizes = layout.sizes | {name: layout.parameter_sizes[name] for name in ("data", "shard")}
    step = step_of(plan, precision)
    for rank in range(layout.world_size):
        sent = step_communication(step, rank)
        for (dimension, kind), traffic in sent.items():
            n = sizes.get(dimension, layout.world_size)
            passes = {"all_reduce": 2.0, "receive": 0.0}.get(kind, 1.0)
            total += traffic.n_bytes * passes * (1.0 if kind == "send" else (n - 1) / n)
    return total


def measure(
    sides: Sequence[Side], rounds: int, n_steps: int, quiet: QuietTurns
) -> dict[str, Record]:
    """Turns of all sides, in one order and then in the other, so that drift hits all alike."""
    records = {}
    for side in sides:
        records[side.name] = Record(side.group.ask("build", side.name, side.plan)[0])
        side.group.ask("turn", side.name, 0, WARM_UP_STEPS, side.pinned)
    number = WARM_UP_STEPS
    for turn in range(rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            turns, others, wire_bytes = quiet.take(side, number, n_steps)
            records[side.name].turns.append(turns)
            records[side.name].others.append(others)
            records[side.name].wire_bytes.append(wire_bytes)
        number += n_steps
    for side in sides:
        side.group.ask("drop", side.name)
    return records


def character_gpt(asked: argparse.Namespace, overrides: Mapping[str, Any]) -> Config:
    """The preset's sizes and recipe, on random tokens."""
    values = {"model.vocab_size": 65, "train.device": "cpu", **overrides}
    if asked.tiny:
        values |= {f"model.{name}": value for name, value in TINY.items()}
        values |= {"train.batch_size": 16, "train.compile": False}
    elif asked.batch_size is not None:
        values["train.batch_size"] = asked.batch_size
    return load_config("shakespeare-char", values)


def parallel(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"parallel.{name}": value for name, value in values.items()}


def data_part(asked: argparse.Namespace, one: Group, two: Group) -> dict[str, Any]:
    """One process with all cores against two that divide the batch."""
    whole = make_plan(character_gpt(asked, {}))
    halves = make_plan(character_gpt(asked, parallel({"data": 2})), world_size=2)
    records = measure(
        [
            Side("1 process", whole, one),
            Side("data 2", halves, two),
            Side("data 2, pinned", halves, two, pinned=True),
        ],
        2 * asked.rounds,  # of one step, a second each
        1,
        asked.quiet,
    )
    gradient_bytes = 4 * whole.n_parameters_padded
    result = rows(records, "1 process", whole.tokens_per_step)
    result["pinned over free"] = median(
        free / pinned
        for free, pinned in zip(
            records["data 2"].seconds(), records["data 2, pinned"].seconds(), strict=True
        )
    )
    result["gradient bytes"] = gradient_bytes
    result["all-reduce alone, seconds"] = two.ask("all_reduce", gradient_bytes)[0]
    result["flops per step"] = whole.tokens_per_step * whole.least_flops_per_token
    return result


def layouts_part(
    asked: argparse.Namespace, one: Group, group: Group, layouts: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The same global batch in micro-batches of the same size, on each layout."""
    n_rows = (4 if asked.tiny else 16) // group.n_processes  # of a micro-batch
    base = {"train.compile": False, "train.micro_batch_size": n_rows}
    if group.n_processes == 4:
        base["model.attention.n_heads"] = 4 if asked.tiny else 8  # which four can divide
    whole = make_plan(character_gpt(asked, base))
    sides = [Side("1 process", whole, one)]
    for name, values in layouts.items():
        config = character_gpt(asked, {**base, **parallel(values)})
        sides.append(Side(name, make_plan(config, world_size=group.n_processes), group))
    records = measure(sides, asked.rounds, 1, asked.quiet)
    result = rows(records, "1 process", whole.tokens_per_step)
    for side in sides[1:]:
        result["sides"][side.name]["planned bubble"] = plan_bubble(side.plan)
        precision = records[side.name].how.split(",")[0]
        wire_bytes = planned_wire_bytes(side.plan, precision)
        result["sides"][side.name]["planned wire bytes"] = wire_bytes
    stream_bytes = 4 * whole.micro_batch_size * whole.config.model.context_length
    stream_bytes *= whole.config.model.d_model
    result["stream bytes"] = stream_bytes
    result["all-reduce alone, seconds"] = group.ask("all_reduce", stream_bytes)[0]
    if group.n_processes == 2:
        result["send alone, seconds"] = group.ask("send", stream_bytes)[0]
    return result


def bubble_part(asked: argparse.Namespace, two: Group) -> dict[str, Any]:
    """Idle ÷ computing time of forward and backward passes, by schedule and micro-batches."""
    result: dict[str, Any] = {}
    for n_micro_batches in (2, 4):
        sides = [
            Side(name, schedule_plan(asked, name, values, n_micro_batches), two)
            for name, values in SCHEDULES.items()
        ]
        records = measure(sides, asked.rounds, 1, asked.quiet)
        result[str(n_micro_batches)] = {
            side.name: {
                "planned": plan_bubble(side.plan),
                "measured": median(map(idle_fraction, records[side.name].turns)),
                "seconds": records[side.name].middle(lambda turn: turn.passes),
                "busy": records[side.name].middle(lambda turn: turn.passes_busy),
                "background": records[side.name].middle(lambda turn: turn.passes_background),
                "others": median(records[side.name].others),
            }
            for side in sides
        }
    return result


def idle_fraction(turns: Sequence[Turn]) -> float:
    """The bubble fraction (`estimating/seconds/timeline.py`) of measured passes: the time in which
    no thread of a process runs ÷ the time it computes. Moving data is no idleness but work, of
    gloo's threads, which take the cores that compute; it has its own column."""
    busy = sum(turn.passes_busy for turn in turns)
    background = sum(turn.passes_background for turn in turns)
    return (sum(turn.passes for turn in turns) - busy - background) / busy


def schedule_plan(
    asked: argparse.Namespace, name: str, values: Mapping[str, Any], n_micro_batches: int
) -> Plan:
    n_rows = 2  # of a micro-batch: 512 tokens
    sizes = TINY if asked.tiny else COMPUTE_BOUND
    plain = {"vocab_size": 256, "dropout": 0.0, "attention": {"dropout": 0.0}}
    config = load_config(
        "shakespeare-char",
        {
            **{f"model.{key}": value for key, value in {**plain, **sizes}.items()},
            "train.device": "cpu",
            "train.precision": "fp32",
            "train.compile": name.endswith("compiled") and not asked.tiny,
            "train.batch_size": n_rows * n_micro_batches,
            "train.micro_batch_size": n_rows,
            **parallel({"pipeline": 2, "schedule": name, **values}),
        },
    )
    return make_plan(config, world_size=2)


def rows(records: Mapping[str, Record], base: str, tokens: int) -> dict[str, Any]:
    """The figures of sides that do the same work; ratios are to `base`, higher is faster."""
    first = records[base].seconds()
    return {
        "sides": {
            name: {
                "how": record.how,
                "seconds": median(record.seconds()),
                "tokens per second": tokens / median(record.seconds()),
                "ratio": median(a / b for a, b in zip(first, record.seconds(), strict=True)),
                "waiting": max(0.0, record.middle(lambda turn: turn.seconds - turn.busy)),
                "background": record.middle(lambda turn: turn.background),
                "others": median(record.others),
                "loss": record.turns[-1][0].loss,
                "wire bytes": median(record.wire_bytes),
                "rounds": record.seconds(),
            }
            for name, record in records.items()
        }
    }


def ceilings(one: Group, two: Group) -> dict[str, Any]:
    """FLOP/s of matrix products: one process with all cores, two at once with one each."""
    return {
        name: {"1 process": one.ask("product", dtype)[0], "2 processes": two.ask("product", dtype)}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }


def report(result: Mapping[str, Any]) -> None:
    """Print all figures."""
    machine = result["machine"]
    print(
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, Python "
        f"{machine['python']}, torch {machine['torch']}, {machine['date']}"
    )
    for name, speed in result["ceilings"].items():
        both = " + ".join(f"{value / 1e12:.2f}" for value in speed["2 processes"])
        print(
            f"{name} product ceiling: {speed['1 process'] / 1e12:.2f} TFLOP/s in one process, "
            f"{both} in two at once"
        )
    for part in ("data", "layouts", "four"):
        if part in result:
            report_sides(part, result[part])
    if "data" in result:
        data = result["data"]
        speed = data["flops per step"] / data["sides"]["1 process"]["seconds"]
        share = speed / result["ceilings"]["bf16"]["1 process"]
        print(
            f"  pinned over free {data['pinned over free']:.3f} ×; one process does "
            f"{100 * share:.0f} % of the bf16 ceiling; the all-reduce of "
            f"{data['gradient bytes'] / 1e6:.0f} MB alone "
            f"{1000 * data['all-reduce alone, seconds']:.0f} ms"
        )
    if "layouts" in result:
        part = result["layouts"]
        print(
            f"  a micro-batch's stream, {part['stream bytes'] / 1e6:.1f} MB: all-reduce alone "
            f"{1000 * part['all-reduce alone, seconds']:.1f} ms, sent alone "
            f"{1000 * part['send alone, seconds']:.1f} ms"
        )
    for n_micro_batches, schedules in result.get("bubble", {}).items():
        print(f"\nbubble, pipeline 2, {n_micro_batches} micro-batches")
        heads = ("planned", "measured", "of plan", "s/step", "gloo", "others")
        print(f"  {'':28}" + "".join(f" {head:>8}" for head in heads))
        for name, row in schedules.items():
            print(
                f"  {name:28} {row['planned']:8.3f} {row['measured']:8.3f} "
                f"{row['measured'] / row['planned']:8.2f} {row['seconds']:8.3f} "
                f"{row['background']:8.3f} {row['others']:8.2f}"
            )


def report_sides(part: str, result: Mapping[str, Any]) -> None:
    print(f"\n{part}")
    widths = {"s/step": 7, "tok/s": 8, "ratio": 6, "waiting": 8, "gloo": 6, "MB": 7, "plan": 7}
    heads = " ".join(f"{head:>{width}}" for head, width in widths.items())
    print(f"  {'':26} {heads} others")
    for name, side in result["sides"].items():
        print(
            f"  {name:26} {side['seconds']:7.3f} {side['tokens per second']:8,.0f} "
            f"{side['ratio']:6.3f} {side['waiting']:8.3f} {side['background']:6.3f} "
            f"{side['wire bytes'] / 1e6:7.1f} {side.get('planned wire bytes', 0.0) / 1e6:7.1f} "
            f"{side['others']:6.2f}  {side['how'][:60]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--others", type=float, default=0.1, help="cores that others may use")
    parser.add_argument("--patience", type=float, default=600, help="seconds for a quiet machine")
    parser.add_argument("--batch-size", type=int, help="sequences of a step, for a slow machine")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test; speeds mean nothing")
    parser.add_argument("--json", type=Path, help="write all figures there")
    asked = parser.parse_args()
    asked.quiet = QuietTurns(asked.others, asked.patience)
    parts = asked.parts.split(",")
    if not set(parts) <= set(PARTS):
        sys.exit(f"--parts {asked.parts}: choose among {', '.join(PARTS)}")
    result: dict[str, Any] = {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "date": time.strftime("%Y-%m-%d"),
        }
    }
    with Group(1) as one, Group(2) as two:
        asked.quiet.wait()
        result["ceilings"] = ceilings(one, two)
        if "data" in parts:
            result["data"] = data_part(asked, one, two)
        if "layouts" in parts:
            result["layouts"] = layouts_part(asked, one, two, LAYOUTS)
        if "four" in parts:
            with Group(4) as four:
                result["four"] = layouts_part(asked, one, four, OF_FOUR)
        if "bubble" in parts:
            result["bubble"] = bubble_part(asked, two)
    report(result)
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
