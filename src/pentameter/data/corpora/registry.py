"""Corpora by name. A new one is a function here that returns its `Text`, and an entry in
CORPORA."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.files import FileContents
from pentameter.data.corpora.grammar import grammar_source, grammar_text
from pentameter.data.corpora.inputs import files_below
from pentameter.data.corpora.text import (
    Text,
    first_bytes,
    text_from_files,
    text_from_paths,
    text_of_chunks,
)
from pentameter.disk.cache import PublicFile, public_file
from pentameter.errors import ConfigError, nearest

TINY_SHAKESPEARE = PublicFile(
    path="shakespeare/input.txt",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    n_bytes=1_115_394,
)

# The splits as raw text, as the language-model example of pytorch/examples has them.
_WIKITEXT_URL = (
    "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
)
WIKITEXT_2 = MappingProxyType(
    {
        "train": PublicFile(
            path="wikitext-2/train.txt",
            url=f"{_WIKITEXT_URL}/train.txt",
            sha256=None,
            n_bytes=16_000_000,
            git_blob="2d84b35af79e411d73ea7cae83c73964c6ac83b4",
        ),
        "val": PublicFile(
            path="wikitext-2/valid.txt",
            url=f"{_WIKITEXT_URL}/valid.txt",
            sha256="f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            n_bytes=1_121_681,
        ),
        "test": PublicFile(
            path="wikitext-2/test.txt",
            url=f"{_WIKITEXT_URL}/test.txt",
            sha256="d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
            n_bytes=1_256_449,
        ),
    }
)

UNKNOWN_CORPUS = "unknown"
"""The corpus of a model whose configuration does not record its training data."""

# Third-party code; test suites (some of whose files are deliberately broken); tables of data.
NOT_STDLIB = frozenset(
    (
        *("__pycache__", "site-packages", "dist-packages"),
        *("test", "tests", "idlelib", "turtledemo"),
        *("encodings", "pydoc_data"),
    )
)


def stdlib(data: DataConfig) -> Text:
    """The source code of Python's standard library on this machine, module by module."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "os.py").is_file():
        raise ConfigError(
            f"corpus 'stdlib': {folder} holds no Python source (a zipped or stripped "
            "installation?); use data.path with any text file"
        )

    def belongs(file: Path) -> bool:
        generated = file.relative_to(folder).parts[0].startswith(("config-", "_sysconfigdata"))
        return file.suffix == ".py" and not generated

    files = [file for file in files_below(folder, skip=NOT_STDLIB) if belongs(file)]
    return text_from_files(files, "stdlib")


def grammar(data: DataConfig) -> Text:
    """A hidden Markov source with an exactly known entropy rate; see `grammar.py`."""
    settings = data.grammar
    grammar_source(settings)  # raises now if the settings are impossible
    n_bytes = settings.n_characters * len(settings.alphabet.encode()) // len(settings.alphabet)
    identity = f"grammar, version 1, {settings.model_dump_json()}"
    return text_of_chunks("grammar", lambda: grammar_text(settings), n_bytes, identity)


def shakespeare(data: DataConfig) -> Text:
    """Tiny Shakespeare: 1,115,394 characters of plays, 65 distinct."""
    return text_from_files([public_file(TINY_SHAKESPEARE)], "shakespeare")


def wikitext_2(data: DataConfig) -> Text:
    """WikiText-2: about 2 million words from articles, in the three splits it was published in."""
    train, val, test = (
        text_from_files([public_file(file)], f"wikitext-2-{split}")
        for split, file in WIKITEXT_2.items()
    )
    return replace(train, name="wikitext-2", held_out={"val": val, "test": test})


CORPORA: Mapping[str, Callable[[DataConfig], Text]] = MappingProxyType(
    {
        function.__name__.replace("_", "-"): function
        for function in (stdlib, grammar, shakespeare, wikitext_2)
    }
)


def corpus_text(data: DataConfig) -> Text:
    """Return the text that `data` names (corpus or path), cut to `max_bytes`, with held-out texts.

    Raises ConfigError for an unknown corpus or a path that does not exist.
    """
    if data.path is not None:
        text = text_from_data_paths(data, [data.path])
    elif data.corpus is not None and data.corpus in CORPORA:
        text = CORPORA[data.corpus](data)
    else:
        if data.corpus == UNKNOWN_CORPUS:
            raise ConfigError("nobody recorded the text of this model; set --data.path FILE")
        near = nearest(str(data.corpus), CORPORA)
        hint = f"; did you mean {near!r}?" if near else ""
        raise ConfigError(
            f"data.corpus={data.corpus!r} is not a corpus{hint}; known: {', '.join(CORPORA)}. "
            "For a file or folder set data.path"
        )
    return text if data.max_bytes is None else first_bytes(text, data.max_bytes)


def text_from_data_paths(data: DataConfig, paths: Sequence[str | Path]) -> Text:
    """Return the text at paths, with the texts that `data` holds out beside them, or else those
    that the files' names do."""
    contents = FileContents(data.encoding, data.text_field)
    text = text_from_paths(paths, contents=contents)
    given = {"val": data.validation_path, "test": data.test_path}
    held_out = {
        split: text_from_paths([path], f"{text.name}-{split}", contents)
        for split, path in given.items()
        if path is not None
    }
    text = replace(text, held_out=held_out or text.held_out)
    if text.held_out and text.identity is not None:
        parts = {"train": text, **text.held_out}
        known = {split: part.identity for split, part in parts.items()}
        text = replace(text, identity=None if None in known.values() else json.dumps(known))
    return text
