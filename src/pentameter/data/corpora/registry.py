"""Corpora by name, `data.corpus`. To add one, write a function here that returns its `Text`, and
list it in CORPORA."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.conversations import Conversations
from pentameter.data.corpora.files import LocalFile
from pentameter.data.corpora.grammar import GrammarFile, grammar_source
from pentameter.data.corpora.inputs import corpus_at, files_below
from pentameter.data.corpora.text import Text
from pentameter.disk.cache import known_files, public_file
from pentameter.errors import ConfigError, nearest

UNKNOWN_CORPUS = "unknown"
"""The `data.corpus` of a model whose training data nobody recorded."""

# Third-party code; test suites (some of whose files are deliberately broken); tables of data.
NOT_STDLIB = (
    *("__pycache__", "site-packages", "dist-packages"),
    *("test", "tests", "idlelib", "turtledemo"),
    *("encodings", "pydoc_data"),
)


def stdlib(data: DataConfig) -> Text:
    """Return the source code of Python's standard library on this machine, one document per module,
    tests left out; `data` is unused. Raises ConfigError if it is not there as source."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "os.py").is_file():
        raise ConfigError(
            f"corpus 'stdlib': {folder} holds no Python source (a zipped or stripped "
            "installation?); use data.path with any text file"
        )

    def belongs(file: Path) -> bool:
        generated = file.relative_to(folder).parts[0].startswith(("config-", "_sysconfigdata"))
        return file.suffix == ".py" and not generated

    files = (file for file in files_below(folder, skip=NOT_STDLIB) if belongs(file))
    return Text("stdlib", tuple(map(LocalFile, files)))


def grammar(data: DataConfig) -> Text:
    """Return the `grammar` corpus: text generated, as it is read, by the hidden Markov source that
    `data.grammar` describes, with an exactly known entropy rate. Raises ConfigError for impossible
    settings."""
    grammar_source(data.grammar)  # raises now if the settings are impossible
    return Text("grammar", (GrammarFile(data.grammar),))


def shakespeare(data: DataConfig) -> Text:
    """Return Tiny Shakespeare: 1,115,394 characters of plays, 65 distinct; downloaded now unless
    cached. `data` is unused."""
    return Text("shakespeare", (LocalFile(public_file(known_files()["shakespeare"])),))


def wikitext_2(data: DataConfig) -> Text:
    """Return WikiText-2: about 2 million words from articles, in its three published splits;
    downloaded now unless cached. `data` is unused."""
    train, val, test = (
        Text(name, (LocalFile(public_file(known_files()[name])),))
        for name in ("wikitext-2-train", "wikitext-2-val", "wikitext-2-test")
    )
    return replace(train, name="wikitext-2", held_out={"val": val, "test": test})


CORPORA: Mapping[str, Callable[[DataConfig], Text]] = {
    function.__name__.replace("_", "-"): function
    for function in (stdlib, grammar, shakespeare, wikitext_2)
}


def corpus_of(data: DataConfig, paths: Sequence[str | Path] = ()) -> Text | Conversations:
    """Open the corpus that `data` names, by `corpus` or `path`, with the corpora held out beside
    it. Files are listed, not read, but for a first record; a public corpus is downloaded unless
    cached.

    `paths`, if there are any, replaces `data.path` and `data.corpus`. Raises ConfigError for an
    unknown corpus or a path that does not exist, StorageError for unreadable files, CorruptError
    for damaged ones.
    """
    if paths or data.path is not None:
        return corpus_at(paths or [str(data.path)], data)
    if data.corpus is not None and data.corpus in CORPORA:
        return replace(CORPORA[data.corpus](data), max_bytes=data.max_bytes)
    if data.corpus == UNKNOWN_CORPUS:
        raise ConfigError("nobody recorded the text of this model; set --data.path FILE")
    near = nearest(str(data.corpus), CORPORA)
    hint = f"; did you mean {near!r}?" if near else ""
    raise ConfigError(
        f"data.corpus={data.corpus!r} is not a corpus{hint}; known: {', '.join(CORPORA)}. "
        "For a file or folder set data.path"
    )
