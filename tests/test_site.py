"""The site's configuration: it is strict, has every page, and loads nothing from other hosts.

Links and anchors are checked by `make site` itself, which has an environment of its own.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIGURATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation_once():
    listed = re.findall(r": (\S+\.md)$", CONFIGURATION, flags=re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))


def test_every_page_names_its_reader_first():
    for page in (ROOT / "docs").glob("**/*.md"):
        folders = page.relative_to(ROOT / "docs").parts
        if folders[0] in ("project", "zh"):  # pages of other folders; in Chinese
            continue
        lines = page.read_text(encoding="utf-8").splitlines()[1:]
        first = next(line for line in lines if line and not line.startswith("<!--"))
        assert first.startswith("For "), f"{page.name} begins: {first}"


def test_no_page_is_long_but_those_that_are_generated():
    for page in (ROOT / "docs").glob("**/*.md"):
        text = page.read_text(encoding="utf-8")
        assert "<!-- Written by `make docs`" in text or len(text.split()) <= 3000, page.name


def test_warnings_are_errors_and_nothing_comes_from_another_host():
    assert "\nstrict: true\n" in CONFIGURATION
    assert "\n  font: false\n" in CONFIGURATION
    assert "://" not in CONFIGURATION


def test_every_picture_is_shown_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    unused = [p.name for p in (ROOT / "docs" / "images").iterdir() if p.name not in text]
    assert not unused


def test_start_names_every_preset():
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    table = page.split("## Presets")[1].split("\n## ")[0]
    presets = (ROOT / "src" / "pentameter" / "config" / "presets").glob("*.toml")
    assert not [path.stem for path in presets if f"`{path.stem}`" not in table]
