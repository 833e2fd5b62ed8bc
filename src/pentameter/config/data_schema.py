"""The schema's section `[data]`: sources of text, and the way their files hold it."""

from __future__ import annotations

import codecs
from encodings.aliases import aliases
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pentameter.config.choices import FILE_DEFAULTS, TEMPLATE_DATE, VALIDATION_FRACTION
from pentameter.config.naming import name_of
from pentameter.config.section import (
    ABSENT,
    ByteCount,
    Day,
    GivenPath,
    Name,
    Positive,
    PositiveFloat,
    Rate,
    Section,
    Seed,
    Switch,
)
from pentameter.config.urls import is_remote, last_part, shown_path, url_problem
from pentameter.errors import nearest


class GrammarConfig(Section):
    """The `grammar` corpus: text from a hidden Markov source with an exactly known entropy rate."""

    n_states: Annotated[int, Field(strict=True, ge=1, le=4096)] = 8
    """Hidden states (the source's order)."""
    alphabet: Annotated[str, Field(min_length=2, max_length=4096)] = "abcdefghijklmnop"
    """Characters the source writes; all distinct."""
    n_characters: Positive = 1_000_000
    """Length of the generated text."""
    seed: Seed = 0
    """Seed with which the source and the text are drawn."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
        if twice:
            raise ValueError(
                f"data.grammar.alphabet repeats {', '.join(map(repr, twice[:5]))}; "
                "each character may stand once"
            )
        return self


RESERVED_SPLITS = ("train", "val", "val-sample", "test")


class SourceConfig(Section):
    """One of several data sets that a run reads, `[[data.sources]]`."""

    corpus: str | None = None
    """A corpus by name."""
    path: GivenPath | None = None
    """Instead of `corpus`: a file, a pattern, a folder, a URL, or prepared shards."""
    weight: PositiveFloat = 1.0
    """Share of the batch rows that come from this data set, in proportion to the other sources'
    weights."""

    @property
    def shown(self) -> str:
        """The corpus, or the path without secrets, for messages."""
        return self.corpus or shown_path(self.path or "")


class EvaluationConfig(Section):
    """A text, or a file of questions, on which a run is evaluated besides the validation split,
    `[[data.evaluations]]`."""

    name: Name
    """Name of the evaluation, which its metrics have as their `split`."""
    path: GivenPath | None = None
    """Text: a file, a pattern, a folder, a URL, or prepared shards; all of it is evaluated."""
    multiple_choice: GivenPath | None = None
    """Instead of `path`: a JSONL file of questions, as `eval --multiple-choice` takes."""


class DataConfig(Section):
    """The text, its tokenizer, its splits, and the order in which it is read."""

    corpus: str | None = None
    """A corpus by name: stdlib, grammar, shakespeare, wikitext-2."""
    path: GivenPath | None = None
    """Instead of `corpus`: a file of text, JSONL or a JSON array (documents or conversations),
    Parquet, Arrow or tar, a pattern (`corpus/*.parquet`), a folder, such as a data set of Hugging
    Face, a URL (`https://`, `s3://`, `hf://`, …), or prepared shards. If this or `corpus` chooses
    another text than the preset or file that this configuration extends, `max_bytes`,
    `validation_path`, `test_path`, `text_field`, `form`, `bad_rows`, `encoding`, `chat_template`,
    `grammar` and `train.sample_prompt` are reset, and the run is named after the text."""
    sources: tuple[SourceConfig, ...] = ()
    """Instead of `corpus` and `path`: a mixture of several data sets. Each row of a batch comes
    from one of them, drawn by their weights. Each is read in `order`, and split, as if it were the
    only one."""
    evaluations: tuple[EvaluationConfig, ...] = ()
    """Texts and questions by name that each evaluation also passes over, besides the validation
    split."""
    validation_path: GivenPath | None = None
    """A separate text as validation split; all of `path` is then trained on."""
    test_path: GivenPath | None = None
    """A separate text for `eval --split test`."""
    text_field: Annotated[str, Field(min_length=1)] = FILE_DEFAULTS["text_field"]
    """The field of a record in JSONL or a JSON array, or the column of a table, that holds its
    text; `meta.text` is `text` within `meta`."""
    form: Annotated[str, Field(min_length=1)] = FILE_DEFAULTS["form"]
    """The form in which records hold conversations. `auto`: documents if the records have the text
    field, else the form that their keys fit; or a form by its name (`alpaca`, `sharegpt`, …), as
    docs/fine-tuning.md lists them, or `text`."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """The treatment of a record that cannot be used (no JSON, no answer, no text, …). `refuse`: it
    ends the run before its first step; `skip`: it is left out, and a warning counts those and names
    the first."""
    encoding: Annotated[str, Field(min_length=1)] = FILE_DEFAULTS["encoding"]
    """Encoding of the files at `path` (and `validation_path`, `test_path`): `utf-8`, `utf-16`,
    `gb18030`, `latin-1`, or any other text encoding that Python knows."""
    tokenizer: Annotated[GivenPath, Field(min_length=1)] = "char"
    """`char`, `word` (basic English words), `gpt2`, `bpe:VOCAB_SIZE` (trained on the text), or a
    tokenizer file."""
    chat_template: Annotated[GivenPath, Field(min_length=1)] | None = None
    """Renders the messages of conversations as text: a Jinja file, a folder with the
    tokenizer_config.json of a Hugging Face model, or `chatml`; the tokenizer's own when absent."""
    template_date: Day = TEMPLATE_DATE
    """The day, YYYY-MM-DD, that chat templates get in training if they ask for today's date
    (`strftime_now`). It is fixed, so that the same data give the same tokens on any day."""
    order: Literal["random", "shuffled", "sequential", "streamed", "columns", "documents"] = (
        "random"
    )
    """`random`: windows at random offsets; `shuffled`: every window once an epoch, permuted;
    `sequential`: windows in the order of the text; `streamed`: these, permuted within blocks of 4
    million tokens, so that training begins when the first block is tokenized, and the rest is
    tokenized meanwhile (held out is then the text's beginning, at most 8 MiB); `columns`: the
    text cut into batch_size columns, read side by side; `documents`: a document a row, permuted
    anew each epoch. Conversations are `documents`, packed where another order stands."""
    packing: Switch = False
    """With `documents`: rows filled with one document after another instead of one each, cut at
    context_length and padded; nothing is dropped then."""
    split_by: Literal["position", "document"] = "position"
    """`position`: the last part of the text is held out; `document`: each document goes to the
    split that the hash of its text decides."""
    validation_fraction: Rate = VALIDATION_FRACTION
    """Fraction of the text that is held out."""
    test_fraction: Rate = 0.0
    """Fraction for `eval --split test`; by position, the tail."""
    max_bytes: ByteCount | None = None
    """Read at most this many bytes of the text, counted in UTF-8."""
    grammar: GrammarConfig = GrammarConfig()
    """Settings of `corpus = "grammar"`."""

    @property
    def shown(self) -> str:
        """The corpus, or the path without secrets, for messages; for several sources their
        number."""
        return self.corpus or shown_path(self.path or "") or f"a blend of {len(self.sources)}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        paths = [self.path, self.validation_path, self.test_path]
        paths += [source.path for source in self.sources]
        paths += [evaluation.path for evaluation in self.evaluations]
        for each in paths:
            if (secret := url_problem(each)) is not None:
                raise ValueError(secret)
        if self.corpus is not None and self.path is not None:
            raise ValueError(
                f"data.corpus={self.corpus!r} and data.path={self.path!r} exclude each other; "
                "keep one"
            )
        self._check_sources()
        if self.corpus is None and self.path is None and not self.sources:
            raise ValueError(
                "set data.corpus (stdlib, grammar, shakespeare, wikitext-2) or data.path (a file "
                "or a folder)"
            )
        for key in ("validation_path", "test_path"):
            if getattr(self, key) is not None and self.path is None:
                raise ValueError(
                    f"data.{key}={getattr(self, key)!r} stands beside data.path, which is not set"
                )
        if problem := encoding_problem(self.encoding):
            raise ValueError(f"data.encoding={self.encoding!r} {problem}")
        for key, usual in FILE_DEFAULTS.items():
            if self.corpus is not None and getattr(self, key) != usual:
                raise ValueError(
                    f"data.{key}={getattr(self, key)!r} is of the files at data.path, and "
                    f"data.corpus={self.corpus!r} has its own; leave one of them out"
                )
        if self.bad_rows == "skip" and self.order == "streamed":
            raise ValueError(
                "data.bad_rows='skip' counts the rows that it leaves out before the first step, "
                "and data.order='streamed' begins before they are read; choose another order"
            )
        if self.packing and self.order != "documents":
            raise ValueError(
                f"data.packing=true fills rows with documents, but data.order={self.order!r}; set "
                "data.order='documents', or leave packing out"
            )
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} and data.test_fraction="
                f"{self.test_fraction} leave nothing to train on; their sum must stay below 1"
            )
        return self

    @property
    def prepared_name(self) -> str:
        """A valid name (`config/naming.py`) for the files and folders that are made from the data
        at `path`: its file's, its folder's, or its URL's last part."""
        path = str(self.path)
        if is_remote(path):
            return name_of(PurePosixPath(last_part(path)).stem)
        whole = Path(path).absolute()
        if whole.name.startswith("*"):  # a pattern: corpus/*.parquet
            whole = whole.parent
        return name_of(whole.stem)

    def _check_sources(self) -> None:
        """Raise ValueError for `sources` or `evaluations` that cannot be: two splits of one name;
        an entry that sets both or neither of two keys of which it needs one; and, beside `sources`,
        a key that suits a single text."""
        names = [each.name for each in self.evaluations]
        for name in names:
            if name in RESERVED_SPLITS or names.count(name) > 1:
                raise ValueError(
                    f"data.evaluations has the name {name!r}, which another split has; choose one "
                    f"of its own (not {', '.join(RESERVED_SPLITS)})"
                )
        for number, each in enumerate(self.evaluations):
            if (each.path is None) == (each.multiple_choice is None):
                raise ValueError(
                    f"data.evaluations[{number}] needs one of path (now {each.path or ABSENT}) and "
                    f"multiple_choice (now {each.multiple_choice or ABSENT})"
                )
        if not self.sources:
            return
        if self.corpus is not None or self.path is not None:
            key, value = ("corpus", self.corpus) if self.path is None else ("path", self.path)
            raise ValueError(
                f"data.sources and data.{key}={value!r} exclude each other; make that one a source"
            )
        for number, source in enumerate(self.sources):
            if (source.corpus is None) == (source.path is None):
                raise ValueError(
                    f"data.sources[{number}] needs one of corpus (now {source.corpus or ABSENT}) "
                    f"and path (now {source.path or ABSENT})"
                )
        if self.max_bytes is not None:
            raise ValueError(
                f"data.max_bytes={self.max_bytes} cuts one text, and data.sources are several; "
                "prepare the one that is too long with `prepare --max-bytes`"
            )
        if self.order == "columns":
            raise ValueError(
                "data.order='columns' cuts one text into a column for each row, and data.sources "
                "are several; choose another order"
            )


USUAL_ENCODINGS = "utf-8, utf-16, gb18030, big5, shift_jis, euc-kr, cp1252, latin-1"
NOT_OF_FILES = frozenset(("idna", "punycode", "unicode-escape", "raw-unicode-escape"))
"""Encodings for names and source code: text files have none of them."""


def encoding_problem(name: str) -> str | None:
    """Return the reason that `name` is no encoding for text files, with a similar one; None if it
    is one. Python's other codecs (`base64`, `zlib`, `rot13`) do not turn bytes into text."""
    if _is_text_encoding(name):
        return None
    try:
        codecs.lookup(name)
        reason = "is no encoding of text files"
    except (LookupError, ValueError):  # a name with a NUL is a ValueError
        known = filter(_is_text_encoding, sorted({*aliases, *aliases.values()}))
        near = nearest(name.lower().replace("-", "_")[:40], known)
        hint = f"; did you mean {near.replace('_', '-')}?" if near else ""
        reason = f"is not known{hint}"
    return f"{reason} (usual ones: {USUAL_ENCODINGS})"


def _is_text_encoding(name: str) -> bool:
    try:
        "a".encode(name)  # which knows of each codec whether it is for text
        return codecs.lookup(name).name not in NOT_OF_FILES
    except (LookupError, ValueError):
        return False
