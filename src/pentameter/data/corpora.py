"""The corpora by name. A new one is a function here that returns its `Text`, and a line below."""

from __future__ import annotations

import difflib
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from pentameter.config.schema import DataConfig
from pentameter.data.grammar import grammar_source, grammar_text
from pentameter.data.storage import PublicFile, public_file
from pentameter.data.text import (
    Text,
    files_below,
    first_bytes,
    text_from_files,
    text_from_paths,
)
from pentameter.errors import ConfigError

TINY_SHAKESPEARE = PublicFile(
    place="shakespeare/input.txt",
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    n_bytes=1_115_394,
)

# Third-party code; test suites (some of whose files are deliberately broken); tables of data.
NOT_STDLIB = frozenset(
    (
        *("__pycache__", "site-packages", "dist-packages"),
        *("test", "tests", "idlelib", "turtledemo"),
        *("encodings", "pydoc_data"),
    )
)


def stdlib(data: DataConfig) -> Text:
    """The Python standard library's own source on this machine, module by module."""
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
    """A hidden Markov source of exactly known entropy rate; see `pentameter.data.grammar`."""
    settings = data.grammar
    grammar_source(settings)  # raises now if the settings are impossible
    n_bytes = settings.n_characters * len(settings.alphabet.encode()) // len(settings.alphabet)
    identity = f"grammar, version 1, {settings.model_dump_json()}"
    return Text("grammar", lambda: grammar_text(settings), n_bytes, identity)


def shakespeare(data: DataConfig) -> Text:
    """Tiny Shakespeare: 1,115,394 characters of plays, 65 distinct."""
    return text_from_files([public_file(TINY_SHAKESPEARE)], "shakespeare")


CORPORA: Mapping[str, Callable[[DataConfig], Text]] = MappingProxyType(
    {function.__name__: function for function in (stdlib, grammar, shakespeare)}
)


def corpus_text(data: DataConfig) -> Text:
    """The text that `data` names (corpus or path), cut to `max_bytes`.

    Raises ConfigError for an unknown corpus or a path that does not exist.
    """
    if data.path is not None:
        text = text_from_paths([Path(data.path)])
    elif data.corpus is not None and data.corpus in CORPORA:
        text = CORPORA[data.corpus](data)
    else:
        near = difflib.get_close_matches(str(data.corpus), CORPORA, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"data.corpus={data.corpus!r} is not a corpus{hint}; known: {', '.join(CORPORA)}. "
            "For a file or folder set data.path"
        )
    return text if data.max_bytes is None else first_bytes(text, data.max_bytes)
