"""`pentameter prepare`: text into token shards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from pentameter.data import Dataset, Progress
    from pentameter.data.text import Text

HELP = "Turn text into token shards."


@dataclass(frozen=True)
class GrammarOptions:
    """The `grammar` corpus."""

    n_states: int = 8
    """Hidden states."""
    alphabet: str = "abcdefghijklmnop"
    """Characters the source writes; all distinct."""
    n_characters: int = 1_000_000
    """Length of the generated text."""
    seed: int = 0
    """Draws the source and the text."""


@dataclass(frozen=True)
class Options:
    """Turn text into token shards.

    Writes NAME-00000.bin, …, NAME.json and tokenizer.json into a new folder, which `data.path`
    of a configuration takes. The folder appears whole or not at all.
    """

    source: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS-or-FILES")
    ]
    """A corpus (stdlib, grammar, shakespeare), or text files and folders (UTF-8)."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to make."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="char|FILE")] = "char"
    """`char`: one token per character; or a tokenizer file of an earlier `prepare`."""
    validation_fraction: float = 0.1
    """Share of the text held out for validation."""
    test_fraction: float = 0.0
    """Share of the text held out for `eval --split test`: the tail."""
    max_bytes: int | None = None
    """Read at most this many bytes."""
    grammar: GrammarOptions = field(default_factory=GrammarOptions)


def run(arguments: list[str]) -> int:
    """Exit code 0 once the shards are written; the errors of `pentameter.errors` otherwise."""
    options = tyro.cli(Options, args=arguments, prog="pentameter prepare", description=None)
    return _prepare(options)


def _prepare(options: Options) -> int:
    from pentameter.data import prepare
    from pentameter.data.dataset import Dataset
    from pentameter.data.shards import open_shards

    text = _text(options)
    started = time.perf_counter()
    with _progress_bar() as progress:
        prepare(
            text,
            options.out,
            tokenizer=options.tokenizer,
            validation_fraction=options.validation_fraction,
            test_fraction=options.test_fraction,
            progress=progress,
        )
    seconds = time.perf_counter() - started
    _report(Dataset(open_shards(options.out / f"{text.name}.json")), options.out, seconds)
    return 0


def _text(options: Options) -> Text:
    """The text that the options name, after the rules of the `data` section."""
    from dataclasses import asdict

    from pydantic import ValidationError

    from pentameter.config.problems import problems
    from pentameter.config.schema import Config
    from pentameter.data import CORPORA, corpus_text
    from pentameter.data.text import first_bytes, text_from_paths
    from pentameter.errors import ConfigError

    if not options.source:
        raise ConfigError(f"name a corpus ({', '.join(CORPORA)}) or text files and folders")
    corpus = options.source[0] if len(options.source) == 1 else None
    if corpus is not None and not Path(corpus).exists() and Path(corpus).name == corpus:
        if corpus not in CORPORA and Path(corpus).suffix:
            corpus = None  # `notes.txt` is a missing file rather than an unknown corpus
    elif corpus not in CORPORA:
        corpus = None
    section = {
        "corpus": corpus,
        "path": options.source[0] if corpus is None else None,
        "validation_fraction": options.validation_fraction,
        "test_fraction": options.test_fraction,
        "max_bytes": options.max_bytes,
        "grammar": asdict(options.grammar),
    }
    tree = {"data": section, "train": {"batch_size": 1}}  # a whole configuration, for its rules
    try:
        data = Config.model_validate(tree).data
    except ValidationError as error:
        raise ConfigError("; ".join(problems(error, tree))) from error
    if len(options.source) == 1:
        return corpus_text(data)
    text = text_from_paths([Path(path) for path in options.source])
    return text if options.max_bytes is None else first_bytes(text, options.max_bytes)


def _report(dataset: Dataset, folder: Path, seconds: float) -> None:
    splits = [dataset.split(name) for name in ("train", "val", "test")]
    n_tokens = sum(split.n_tokens for split in splits)
    n_bytes = sum(split.n_bytes for split in splits)
    sizes = ", ".join(f"{split.name} {split.n_tokens:,}" for split in splits if split.n_tokens)
    print(
        f"{folder}: {n_tokens:,} tokens ({sizes}), vocabulary {dataset.vocab_size:,}, "
        f"{n_bytes / n_tokens:.2f} bytes per token, {seconds:.1f} s, "
        f"{n_tokens / seconds:,.0f} tokens/s"
    )


@contextmanager
def _progress_bar() -> Iterator[Progress]:
    """A callback that draws one bar per pass on standard error, if that is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:>8}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {}

        def update(stage: str, done_bytes: int, total_bytes: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total_bytes)
            bar.update(tasks[stage], completed=done_bytes, total=max(total_bytes, done_bytes))

        yield update
