"""How many threads a process computes with, so that those of a machine share its cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping


def usable_cores() -> frozenset[int]:
    """Logical cores this process may run on, which in a container or under SLURM is not all."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def chosen_threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """The number that the user chose with OMP_NUM_THREADS; None where nobody did.

    torchrun sets it to 1 where it is not set. That 1 cannot be told from a user's, and would
    leave most of a machine's cores idle, so under torchrun a 1 is nobody's choice.
    """
    text = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if not text.isdecimal() or int(text) == 0:
        return None
    return None if text == "1" and "TORCHELASTIC_RUN_ID" in environ else int(text)


def fair_share(mine: frozenset[int], of_the_machine: Iterable[frozenset[int]]) -> int:
    """Threads for a process that may use the cores `mine`, at least one.

    `of_the_machine` holds what each process of the machine may use, this one included. Processes
    that SLURM bound to cores of their own use all of those; the others divide what they share.
    """
    n_sharing = sum(1 for cores in of_the_machine if cores & mine)
    return max(1, len(mine) // max(1, n_sharing))
