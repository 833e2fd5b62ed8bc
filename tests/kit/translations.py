"""Which Chinese page is behind its English one: `python tests/kit/translations.py`.

Lists each English section that has changed since it was translated, and what changed in it. A
Chinese page ends with a comment that names its English page's sections as they were translated,
each by a hash; `--accept PAGE …` writes it anew, after the translation.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMENT = re.compile(r"\n<!-- Translated from \S+:\n(?P<rows>.*?)-->\n", re.DOTALL)
COMMAND = "python tests/kit/translations.py"


def chinese_pages(root: Path) -> list[Path]:
    """Return the Chinese pages of a checkout."""
    return [root / "README.zh.md", *sorted((root / "docs" / "zh").rglob("*.md"))]


def english_page(chinese: Path, root: Path) -> Path:
    """Return the English page of a Chinese one: README.md, or the same path without `zh`."""
    if chinese == root / "README.zh.md":
        return root / "README.md"
    return root / "docs" / chinese.relative_to(root / "docs" / "zh")


def sections(text: str) -> dict[str, str]:
    """Return heading → text of a page's sections; what precedes the first `##` is under its title.

    A `#` inside of a fenced block is none.
    """
    found: dict[str, str] = {}
    heading, fenced = "", False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if re.match(r"##? ", line) and not fenced:
            heading = line.lstrip("#").strip()
            if heading in found:
                raise ValueError(f"two sections are called {heading!r}")
            found[heading] = ""
        elif heading:
            found[heading] += line + "\n"
    return found


def digest(section: str) -> str:
    """Return a hash of what a section says: not of its line ends, nor of how tests run it."""
    said = re.sub(r"<!-- runs:.*?-->", "", section)
    return hashlib.sha256(" ".join(said.split()).encode()).hexdigest()[:8]


def recorded(chinese: str) -> dict[str, str]:
    """Return heading → hash of the English sections as a Chinese page has translated them."""
    comment = COMMENT.search(chinese)
    rows = comment["rows"].splitlines() if comment else []
    return {heading: value for value, _, heading in (row.partition(" ") for row in rows)}


def behind(chinese: str, english: str) -> dict[str, str]:
    """Return heading → what has become of each English section that the Chinese page lacks."""
    known, there = recorded(chinese), sections(english)
    now = {heading: digest(section) for heading, section in there.items()}
    changed = {heading: "has changed" for heading in now if now[heading] != known.get(heading)}
    new = {heading: "is new" for heading in now if heading not in known}
    gone = {heading: "is gone" for heading in known if heading not in now}
    return changed | new | gone


def accept(chinese: Path, english: Path) -> None:
    """Record in a Chinese page that all of its English one is translated."""
    there = sections(english.read_text(encoding="utf-8"))
    rows = "".join(f"{digest(section)} {heading}\n" for heading, section in there.items())
    text = COMMENT.sub("", chinese.read_text(encoding="utf-8")).rstrip("\n")
    name = english.name if english.parent.name != "tutorials" else f"tutorials/{english.name}"
    chinese.write_text(f"{text}\n\n<!-- Translated from {name}:\n{rows}-->\n", encoding="utf-8")


def what_changed(english: Path, heading: str, value: str | None) -> str:
    """Return a section's difference to the commit in which it had this hash; "" if none had."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=english.parent, capture_output=True, text=True, check=False
        )
        return done.stdout

    now = sections(english.read_text(encoding="utf-8")).get(heading, "")
    for commit in git("log", "--format=%H", "--", english.name).split():
        before = sections(git("show", f"{commit}:./{english.name}")).get(heading)
        if before is not None and digest(before) == value:
            lines = difflib.unified_diff(
                before.splitlines(), now.splitlines(), commit[:8], "now", lineterm="", n=1
            )
            return "\n".join(lines)
    return ""


def main() -> None:
    """List what is behind, or accept pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--accept", nargs="+", type=Path, default=[], metavar="PAGE")
    for page in parser.parse_args().accept:
        accept(page.resolve(), english_page(page.resolve(), ROOT))
    any_behind = False
    for chinese in chinese_pages(ROOT):
        english, text = english_page(chinese, ROOT), chinese.read_text(encoding="utf-8")
        for heading, what in behind(text, english.read_text(encoding="utf-8")).items():
            any_behind = True
            print(f'{chinese.relative_to(ROOT)}: section "{heading}" of {english.name} {what}')
            print(what_changed(english, heading, recorded(text).get(heading)))
    if any_behind:
        sys.exit(f"Translate what changed, then: {COMMAND} --accept PAGE …")


if __name__ == "__main__":
    main()
