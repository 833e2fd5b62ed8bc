"""The fastest matrix product ever measured on this machine: where no peak is published, MFU is a
share of it.

A measurement of some tenths of a second says how fast the machine was just then, which beside
other programs may be a hundredth of what it can do. So the best one is kept in the cache, for each
device, number of threads, number of processes that measure at once, type of number and release of
torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pentameter.disk.atomic import make_folder, read_regular, write_atomic
from pentameter.disk.cache import cache_folder
from pentameter.errors import CorruptError, StorageError
from pentameter.machine.cores import BUSY_CORES, Collect, OtherPrograms
from pentameter.machine.peaks import measure_product
from pentameter.wording import flops

LARGEST_FILE_BYTES = 2**20
FASTEST_FLOPS = 1e17
"""FLOP/s that no device reaches; a file that claims more is damaged."""


@dataclass(frozen=True)
class Ceiling:
    """FLOP/s of a matrix product, and how many cores other programs kept busy while it was
    measured."""

    flops: float
    busy_cores: float = 0.0

    def warning(self) -> str | None:
        """A line for a person where the product was measured on a busy machine, else None."""
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
    measure: Callable[[torch.device, torch.dtype], float] = measure_product,
) -> Ceiling:
    """The best matrix product of `dtype` that was ever measured here, by this call or before it.

    name: the device's. n_processes: of the run on this machine; they measure at once. Collective:
    `collect` is that of the run's World. Raises ConfigError where the device cannot multiply this
    type.
    """
    others = OtherPrograms()
    found = Ceiling(measure(device, dtype))
    if device.type == "cpu":
        found = Ceiling(found.flops, others.cores(collect))
    key = " · ".join(
        (
            name,
            torch.backends.cpu.get_cpu_capability(),
            f"{torch.get_num_threads()} threads",
            f"{n_processes} processes",
            str(dtype).removeprefix("torch."),
            f"torch {torch.__version__}",
        )
    )
    path = cache_folder() / "ceilings.json"
    best = _read(path).get(key)
    if best is not None and best.flops >= found.flops:
        return best
    with suppress(StorageError):  # a cache that cannot be written
        make_folder(path.parent)
        kept = {**_read(path), key: found}
        content = {each: asdict(value) for each, value in kept.items()}
        write_atomic(path, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")
    return found


def _read(path: Path) -> dict[str, Ceiling]:
    """The ceilings that the cache holds; without those that are damaged."""
    content: Any = None
    with suppress(CorruptError, StorageError, ValueError, RecursionError):
        content = json.loads(read_regular(path, max_bytes=LARGEST_FILE_BYTES))
    found = {}
    for key, entry in content.items() if isinstance(content, dict) else ():
        with suppress(AttributeError, TypeError, ValueError, OverflowError):
            kept = Ceiling(**{name: float(value) for name, value in entry.items()})
            if 0 < kept.flops < FASTEST_FLOPS and math.isfinite(kept.busy_cores):
                found[key] = kept
    return found
