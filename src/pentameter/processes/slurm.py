"""What `srun` tells its tasks, in the notation of SLURM: node[01-03,7] and 2(x3),1."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from pentameter.errors import ConfigError

_FIRST_PORT, _N_PORTS = 10_000, 20_000  # below the ports that Linux gives to outgoing connections
_HOSTS = r"(?:[^,\[\]\s]|\[[^\[\]]*\])+"  # one item of a list of nodes, ranges and all


def expand_nodes(text: str) -> list[str]:
    """The hosts that a list like `node[001-003,7],gpu3` names, in its order.

    Raises ConfigError for what is no such list.
    """
    hosts: list[str] = []
    if not re.fullmatch(rf"{_HOSTS}(,{_HOSTS})*", text):
        raise _unreadable("SLURM_STEP_NODELIST", text, "node[01-03,7],gpu3")
    for item in re.findall(_HOSTS, text):
        parts = re.split(r"\[([^\[\]]*)\]", item)  # text, ranges, text, ranges, …, text
        choices = [
            [part] if index % 2 == 0 else _expand_ranges(part, text)
            for index, part in enumerate(parts)
        ]
        hosts += ["".join(pieces) for pieces in itertools.product(*choices)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """Tasks of each node, of a list like `2(x3),1`: [2, 2, 2, 1]. Raises ConfigError."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise _unreadable("SLURM_STEP_TASKS_PER_NODE", text, "2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def rendezvous_port(environ: Mapping[str, str]) -> int:
    """A port that all tasks of the step, and no other step of the machine, take."""
    digits = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text) if text.isdecimal() else 0 for text in digits)
    return _FIRST_PORT + (31 * job + step) % _N_PORTS


def _expand_ranges(ranges: str, whole: str) -> list[str]:
    """`001-003,7` as its numbers, with the zeros they are written with."""
    numbers: list[str] = []
    for item in ranges.split(","):
        first, dash, last = item.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last)):
            raise _unreadable("SLURM_STEP_NODELIST", whole, "node[01-03,7],gpu3")
        numbers += [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)]
    return numbers


def _unreadable(name: str, value: str, example: str) -> ConfigError:
    return ConfigError(
        f"{name}={value!r} cannot be read; srun writes it like {example}. Unset the SLURM_ "
        "variables to run as one process, or use torchrun"
    )
