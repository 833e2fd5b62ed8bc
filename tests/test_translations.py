"""No Chinese page is behind its English one; which is, is told by page and section."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from translations import (
    COMMAND,
    accept,
    behind,
    chinese_pages,
    english_page,
    recorded,
    sections,
    what_changed,
)

ROOT = Path(__file__).parents[1]
ENGLISH = (
    "# Title\n\nFor who.\n\n## One\n\nA text\nof words.\n\n```\n# no heading\n```\n\n## Two\n\nB.\n"
)
PAGES = {str(page.relative_to(ROOT)): page for page in chinese_pages(ROOT)}


@pytest.mark.parametrize("name", PAGES)
def test_a_chinese_page_has_what_its_english_page_says(name):
    english = english_page(PAGES[name], ROOT)
    found = behind(PAGES[name].read_text(encoding="utf-8"), english.read_text(encoding="utf-8"))
    told = [f'section "{heading}" {what}' for heading, what in found.items()]
    assert not told, (
        f"{name} is behind {english.relative_to(ROOT)}: {'; '.join(told)}.\n`{COMMAND}` shows what "
        f"changed; after the translation `{COMMAND} --accept {name}` records it."
    )


@pytest.mark.parametrize("name", PAGES)
def test_a_chinese_page_has_the_sections_of_its_english_page(name):
    chinese = sections(PAGES[name].read_text(encoding="utf-8"))
    english = sections(english_page(PAGES[name], ROOT).read_text(encoding="utf-8"))
    assert len(chinese) == len(english), f"{list(chinese)} and {list(english)}"


def test_links_between_chinese_pages_lead_to_pages_that_there_are():
    for name, page in PAGES.items():
        for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name}: {target}"


def test_sections_begin_at_headings_outside_of_fences():
    found = sections(ENGLISH)
    assert list(found) == ["Title", "One", "Two"]
    assert "# no heading" in found["One"]


@pytest.fixture
def pages(tmp_path):
    """A Chinese page and its English one, as they were accepted and committed."""
    english, chinese = tmp_path / "docs" / "page.md", tmp_path / "docs" / "zh" / "page.md"
    chinese.parent.mkdir(parents=True)
    english.write_text(ENGLISH)
    chinese.write_text("# 标题\n\n## 一\n\n## 二\n")
    accept(chinese, english)
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "All"]):
        who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True)
    return chinese, english


def test_a_section_that_changed_came_or_went_is_named(pages):
    chinese, english = (page.read_text() for page in pages)
    assert behind(chinese, english) == {}
    assert behind(chinese, english.replace("words", "letters")) == {"One": "has changed"}
    assert behind(chinese, english.replace("## Two", "## Three")) == {
        "Three": "is new", "Two": "is gone",
    }  # fmt: skip
    assert behind("# 标题\n", english).keys() == {"Title", "One", "Two"}


def test_other_line_ends_and_how_tests_run_a_block_are_no_change(pages):
    chinese, english = (page.read_text() for page in pages)
    flowed = english.replace("text\nof", "text of")
    assert behind(chinese, flowed.replace("A text", "<!-- runs: --a 1 -->\nA text")) == {}


def test_what_changed_is_shown_and_accepted(pages):
    chinese, english = pages
    english.write_text(ENGLISH.replace("words", "letters"))
    shown = what_changed(english, "One", recorded(chinese.read_text())["One"])
    assert "\n-of words.\n+of letters.\n" in shown
    assert what_changed(english, "One", "00000000") == ""
    before = chinese.read_text()
    accept(chinese, english)
    assert behind(chinese.read_text(), english.read_text()) == {}
    assert chinese.read_text().partition("<!--")[0] == before.partition("<!--")[0]
    assert english_page(chinese, chinese.parents[2]) == english
