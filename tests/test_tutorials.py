"""The commands of the documentation run, at small size, in the order in which a reader types them.

A block that begins with ```console, after a comment `<!-- runs: OPTIONS -->`, is run: each command
in it with OPTIONS appended, which make it small. Other blocks need devices, data or hours. A
Chinese page has its English page's commands, which run as they do there, and perhaps more.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(
    r"(?:<!-- runs:(?P<options>[^\n]*)-->\n)?```console\n(?P<text>.*?)```", re.DOTALL
)
QUICK = {"start.md"}
"""Pages whose commands run in the quick tier; those of the others take minutes."""
PUBLIC_DATA = {
    "tutorials/characters.md": ["shakespeare"],
    "tutorials/gpt2.md": ["shakespeare", "gpt2-bpe"],
    "tutorials/hybrid.md": ["gpt2-bpe"],
}
"""Page → folders of PENTAMETER_DATA_DIR that its commands read."""


def commands_of(text: str) -> list[str]:
    """The commands of a console block: lines after `$`, those that a `\\` continues joined."""
    joined = text.replace("\\\n", " ")
    return [" ".join(line[2:].split()) for line in joined.splitlines() if line.startswith("$ ")]


def blocks_of(page: Path) -> list[tuple[str, str | None]]:
    """Every command of a page, with the options to append; None where it is not run."""
    found = []
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        found += [(command, block["options"]) for command in commands_of(block["text"])]
    return found


def english_of(name: str) -> str:
    """The English page of a Chinese one; an English page's own name."""
    return name.removeprefix("zh/")


def to_run(name: str) -> list[tuple[str, str]]:
    """The commands of a page that are run, with their options: a Chinese page's are those of the
    same command in its English page, where it has none of its own."""
    english = dict(blocks_of(DOCS / english_of(name)))
    found = [
        (command, english.get(command) if options is None else options)
        for command, options in blocks_of(DOCS / name)
    ]
    return [(command, options) for command, options in found if options is not None]


def pages() -> list[str]:
    """Pages with commands that are run, but for Chinese ones that would only repeat another's."""
    names = [str(page.relative_to(DOCS)) for page in sorted(DOCS.rglob("*.md"))]
    return [
        name
        for name in names
        if to_run(name) and (name == english_of(name) or to_run(name) != to_run(english_of(name)))
    ]


def write_inputs(folder: Path) -> None:
    """The files that a reader of the pages would bring."""
    words = "the cat sat on the mat , and the dog saw that the cat sat there .\n"
    for name in ("novel.txt", "valid.txt", "test.txt"):
        (folder / name).write_text(words * 200)
    (folder / "小说.txt").write_text(
        "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。" * 400, encoding="gb18030"
    )
    answers = [
        {"prompt": f"What comes after {n}?", "completion": f" It is {n + 1}."} for n in range(200)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(each) + "\n" for each in answers))


def run(command: str, options: str, folder: Path) -> None:
    verb, *arguments = shlex.split(command)
    assert verb == "pentameter", command
    line = [sys.executable, "-m", "pentameter", *arguments, *shlex.split(options)]
    done = subprocess.run(
        line, cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, (
        f"{command} {options}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in pages()]
)
def test_the_commands_of_a_page_run_at_small_size(name, tmp_path):
    public = os.environ.get("PENTAMETER_DATA_DIR")
    for folder in PUBLIC_DATA.get(english_of(name), []):
        if public is None or not Path(public, folder).is_dir():
            pytest.skip(f"{folder} is not in PENTAMETER_DATA_DIR")
    write_inputs(tmp_path)
    for command, options in to_run(name):
        run(command, options, tmp_path)


def test_a_block_with_a_comment_is_run_and_its_lines_are_joined(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- runs: --a 1 -->\n```console\n$ pentameter train x \\\n    --b 2\n```\n"
        "```console\n$ pentameter train y\n```\n"
    )
    assert blocks_of(page) == [
        ("pentameter train x --b 2", " --a 1 "),
        ("pentameter train y", None),
    ]


def test_a_tutorial_for_each_reference_workload_and_for_fine_tuning_runs_in_the_tests():
    assert {
        "start.md",
        "tutorials/characters.md",
        "tutorials/fine-tuning.md",
        "tutorials/gpt2.md",
        "tutorials/hybrid.md",
        "tutorials/wikitext.md",
    } <= set(pages())


CHINESE = sorted(str(page.relative_to(DOCS)) for page in (DOCS / "zh").rglob("*.md"))


@pytest.mark.parametrize("name", CHINESE)
def test_a_chinese_page_has_the_commands_of_its_english_page_in_their_order(name):
    english = [command for command, _ in blocks_of(DOCS / english_of(name))]
    chinese = [command for command, _ in blocks_of(DOCS / name)]
    assert [command for command in chinese if command in english] == english
    runs = {command for command, _ in to_run(name)}
    assert set(chinese) - set(english) <= runs  # what only the Chinese page has is run


def test_chinese_pages_run_commands_that_their_english_pages_lack():
    assert {"zh/start.md", "zh/faq.md"} <= set(pages())
    assert to_run("zh/tutorials/wikitext.md") == to_run("tutorials/wikitext.md")
    assert "zh/tutorials/wikitext.md" not in pages()
