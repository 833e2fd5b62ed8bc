"""Which tests `make test` leaves to `make test-more`: `python tests/kit/tiers.py REPORT.xml`.

REPORT.xml is what `--junitxml` of a whole run on a quiet machine has written. Tests are taken into
the quick tier from the cheapest on, all parameters of one together, until the seconds are spent;
the cheapest of each file is always there. The others are written to tests/more.txt.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--seconds", type=float, default=560.0, help="of the quick tier's workers")
    options = parser.parse_args()
    seconds = seconds_of_tests(options.report)
    quick = chosen(seconds, options.seconds)
    more = sorted(seconds.keys() - quick)
    (ROOT / "tests" / "more.txt").write_text("".join(f"{name}\n" for name in more))
    for name, tests in (("quick", quick), ("more", more)):
        print(f"{name}: {len(tests)} tests, {sum(seconds[each] for each in tests):.0f} s")


def seconds_of_tests(report: Path) -> dict[str, float]:
    """Return path::name → seconds, of all parameters together."""
    seconds: dict[str, float] = defaultdict(float)
    for case in ElementTree.parse(report).iter("testcase"):
        path, name = case.get("classname", ""), case.get("name", "").partition("[")[0]
        seconds[f"{path.replace('.', '/')}.py::{name}"] += float(case.get("time", 0))
    return dict(seconds)


def chosen(seconds: dict[str, float], budget: float) -> set[str]:
    """Return the tests of the quick tier, which take about `budget` seconds."""
    of_file: dict[str, list[str]] = defaultdict(list)
    for name in sorted(seconds, key=lambda each: seconds[each]):
        of_file[name.partition("::")[0]].append(name)
    quick = {names[0] for names in of_file.values()}
    spent = sum(seconds[each] for each in quick)
    for name in sorted(seconds.keys() - quick, key=lambda each: seconds[each]):
        spent += seconds[name]
        if spent > budget:
            break
        quick.add(name)
    return quick


if __name__ == "__main__":
    main()
