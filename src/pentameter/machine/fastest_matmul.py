"""The fastest matmul ever measured on this machine. MFU is relative to that rate if the device has
no published peak.

A measurement of some tenths of a second tells the machine's speed at that moment, which may be a
hundredth of its best while other programs run. So the best is kept in the cache folder, by device,
threads, processes that measure at once, dtype and torch release.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pentameter.disk.atomic import make_folder
from pentameter.disk.cache import cache_folder
from pentameter.disk.record import read_record, write_record
from pentameter.errors import StorageError
from pentameter.formatting import flops
from pentameter.machine.load.other_programs import BUSY_CORES, Collect, OtherPrograms
from pentameter.machine.peaks import measure_matmul

FASTEST_FLOPS = 1e17
"""Rate in FLOP/s that no device reaches; a cache entry that claims more is damaged."""


@dataclass(frozen=True)
class Ceiling:
    """A measured matmul rate in FLOP/s, and how many cores other programs kept busy during
    the measurement."""

    flops: float
    busy_cores: float = 0.0

    def warning(self) -> str | None:
        """Return a sentence for people if other programs kept the machine busy during the
        measurement, so that MFU will read too high; else None."""
        if self.busy_cores < BUSY_CORES:
            return None
        return (
            f"MFU is a share of {flops(self.flops)}, measured while other programs kept "
            f"{self.busy_cores:.1f} cores busy: it reads too high until a run starts on this "
            "machine while it is quiet"
        )


def ceiling(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    n_processes: int = 1,
    collect: Collect = lambda value: [value],
    measure: Callable[[torch.device, torch.dtype], float] = measure_matmul,
) -> Ceiling:
    """Measure a matmul in `dtype` now, and return the best rate measured on this machine so far
    under the same conditions, this measurement included. It is kept in the cache folder.
    Collective.

    Args:
        name: the device's product name, one of the conditions.
        device: the device to measure.
        dtype: the matmul's dtype.
        n_processes: processes in this run on this machine; they measure at once.
        collect: all-gather over the run's ranks (`World.all_gather`); by default there is one rank.
        measure: (device, dtype) → FLOP/s.

    Raises ConfigError if the device cannot multiply this dtype.
    """
    others = OtherPrograms()
    found = Ceiling(measure(device, dtype))
    if device.type == "cpu":
        found = Ceiling(found.flops, others.cores(collect))
    key = (
        f"{name} · {torch.backends.cpu.get_cpu_capability()} · {torch.get_num_threads()} threads · "
        f"{n_processes} processes · {str(dtype).removeprefix('torch.')} · torch {torch.__version__}"
    )
    path = cache_folder() / "ceilings.json"
    best = _read(path).get(key)
    if best is not None and best.flops >= found.flops:
        return best
    with suppress(StorageError):  # a cache that cannot be written
        make_folder(path.parent)
        kept = {**_read(path), key: found}
        write_record(path, {each: asdict(value) for each, value in kept.items()})
    return found


def _read(path: Path) -> dict[str, Ceiling]:
    """Return the cached ceilings by condition; damaged ones, or a damaged file, are left out."""
    found = {}
    for key, entry in (read_record(path, dict[str, Any]) or {}).items():
        with suppress(AttributeError, TypeError, ValueError, OverflowError):
            kept = Ceiling(**{name: float(value) for name, value in entry.items()})
            if 0 < kept.flops < FASTEST_FLOPS and math.isfinite(kept.busy_cores):
                found[key] = kept
    return found
