"""`pentameter doctor`: this machine's capabilities, and the choices that training would make."""

from __future__ import annotations

import json
from dataclasses import dataclass

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import printable


@dataclass(frozen=True)
class DoctorArguments:
    """Show devices, versions, and usable and missing features."""

    measure: tyro.conf.FlagCreatePairsOff[bool] = False
    """Measure this machine's CPU for `plan` and `train --layout best`: a minute, half a minute
    more the first time, in which nothing else should run."""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print one JSON object."""


def run(arguments: list[str]) -> int:
    """Print this machine's capabilities and choices, whatever they are, or with --measure its
    speed; return the exit code 0. `arguments` are the command line after the verb."""
    asked = parse(DoctorArguments, arguments, verb="doctor")
    if asked.measure:
        return _measure(as_json=asked.json)
    from pentameter.report.text.doctor import examine, machine_rows

    facts = examine()
    if asked.json:
        print(json.dumps(facts))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for row in machine_rows(facts):
        table.add_row(*map(printable, row))
    Console(highlight=False, markup=False).print(table)
    return 0


def _measure(*, as_json: bool) -> int:
    """Measure this machine's speed, write it to the file that `plan` and `train --layout best`
    read, and print it; return the exit code 0."""
    from pentameter.calibrate.measured_machine import measure_machine
    from pentameter.estimating.seconds.cluster import read_devices

    path = measure_machine()
    (device,) = read_devices(path).values()
    if as_json:
        print(json.dumps({"path": str(path), **device.model_dump()}))
    else:
        print(path.read_text(encoding="utf-8"), end="")
        print(f"\nwritten to {path}; pentameter plan quickstart reads it")
    return 0
