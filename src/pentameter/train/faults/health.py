"""The check of all ranks before the first step: products, memory and links. A wrong result refuses
the start; a rank that is much slower than the others is warned of."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

from pentameter.errors import TrainingFailedError
from pentameter.formatting import flops, size
from pentameter.machine.health import Health, measure_health
from pentameter.parallel.engine import Engine
from pentameter.parallel.links import measure_links

OUTLIER = 2.0
"""A rank is an outlier if it takes this many times the median of the others; a warning names it."""


def check_health(engine: Engine) -> list[str]:
    """Return a sentence for each measurement in which a rank is an outlier. Nothing is measured for
    a single process. Outliers are measured twice, since another program may have the core for a
    moment. Collective.

    Raises TrainingFailedError if a rank computes wrong products, or memory or a link changes bits.
    """
    world = engine.world
    if world.size == 1:
        return []
    hosts, every = _measured(engine)
    if found := list(_outliers(hosts, every)):
        _, again = _measured(engine)
        better = [_better(*pair) for pair in zip(every, again, strict=True)]
        found = list(_outliers(hosts, better))
    return found


def _measured(engine: Engine) -> tuple[list[str], list[Health]]:
    """Measure this rank's speed and correctness; return (machine name of each rank, measurements of
    each rank), both by rank. Collective. Raises TrainingFailedError for a wrong result."""
    health = measure_health(engine.device, engine.arithmetic.products)
    link_seconds, faults = measure_links(engine.mesh, engine.device)
    health = replace(health, link_seconds=link_seconds, faults=(*health.faults, *faults))
    hosts, every = zip(*engine.world.all_gather((socket.gethostname(), health)), strict=True)
    wrong = [
        f"rank {rank} on {hosts[rank]} {fault}"
        for rank, each in enumerate(every)
        for fault in each.faults
    ]
    if wrong:
        raise TrainingFailedError(
            f"{'; '.join(wrong)}. No step was made: what such a machine trains is wrong, leave it "
            "out"
        )
    return list(hosts), list(every)


def _better(first: Health, second: Health) -> Health:
    """Return a Health with the better value of each measurement in two Healths of the same rank."""
    return Health(
        max(first.product_flops, second.product_flops),
        max(first.copied_bytes_per_second, second.copied_bytes_per_second),
        {
            name: min(seconds, second.link_seconds[name])
            for name, seconds in first.link_seconds.items()
        },
    )


def _outliers(hosts: Sequence[str], every: Sequence[Health]) -> Iterator[str]:
    """Yield a sentence for each rank and measurement that is OUTLIER times worse than the others'
    median. `hosts` and `every` are the ranks' machines and measurements."""
    for verb, of, shown in (
        ("multiplies at", lambda each: 1 / each.product_flops, lambda s: flops(1 / s)),
        (
            "copies memory at",
            lambda each: 1 / each.copied_bytes_per_second,
            lambda s: f"{size(1 / s)}/s",
        ),
    ):
        yield from _slow(hosts, list(map(of, every)), verb, shown)
    for dimension in every[0].link_seconds:
        seconds = [each.link_seconds[dimension] for each in every]
        verb = f"exchanges 1 MiB along {dimension} in"
        yield from _slow(hosts, seconds, verb, lambda s: f"{1e3 * s:.3g} ms")


def _slow(
    hosts: Sequence[str], times: Sequence[float], verb: str, shown: Callable[[float], str]
) -> Iterator[str]:
    """Yield a sentence for each slow rank: its time is at least OUTLIER times the median of the
    other ranks' times. Lists have one entry per rank; `verb` follows the rank's name in the
    sentence, and `shown` formats a time."""
    for rank, time in enumerate(times):
        others = median([*times[:rank], *times[rank + 1 :]])
        if time >= OUTLIER * others:
            yield (
                f"rank {rank} on {hosts[rank]} {verb} {shown(time)}, the others at a median of "
                f"{shown(others)}: each step waits for it"
            )
