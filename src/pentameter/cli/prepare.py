"""`pentameter prepare`: text into token shards."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.config.choices import FILE_DEFAULTS, TEMPLATE_DATE, VALIDATION_FRACTION
from pentameter.errors import ConfigError, terminal_message

if TYPE_CHECKING:
    from pentameter.config.data_schema import DataConfig
    from pentameter.data.shards.dataset import Dataset


@dataclass(frozen=True)
class GrammarOptions:
    """Options for the `grammar` corpus, a generated text."""

    n_states: int = 8
    """Hidden states."""
    alphabet: str = "abcdefghijklmnop"
    """Characters the source writes; all distinct."""
    n_characters: int = 1_000_000
    """Length of the generated text."""
    seed: int = 0
    """Draws the source and the text."""


@dataclass(frozen=True)
class PrepareArguments:
    """Turn text into token shards.

    Writes NAME-00000.bin, …, NAME-documents.bin, NAME.json and tokenizer.json into a new folder,
    which `data.path` of a configuration takes. The folder appears whole or not at all; after a kill
    the same command begins again.
    """

    source: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CORPUS-or-FILES")
    ]
    """A corpus (stdlib, grammar, shakespeare, wikitext-2), or files, folders, patterns and URLs:
    text, each file a document; .jsonl, .json arrays, or tables (.parquet, .arrow), with a
    document's `text` or a conversation in each record or row; .gz, .zst and .tar of text and
    .jsonl. Or tokens of nanoGPT, llm.c, modded-nanogpt (.bin) or Megatron (.bin and .idx), taken as
    they are."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to make."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="char|word|gpt2|bpe:N|FILE")] = "char"
    """`char`: one token per character; `word`: per word of lower-cased English; `gpt2`: GPT-2's
    own; `bpe:8192`: byte-level BPE of that size, trained on the text; or a tokenizer file of an
    earlier `prepare`. Tokens of other programs need the one that wrote them."""
    chat_template: Annotated[str | None, tyro.conf.arg(metavar="FILE|DIR|chatml")] = None
    """What makes the messages of conversations text: a Jinja file, a folder with the
    tokenizer_config.json of a Hugging Face model, or `chatml`; the tokenizer's own when absent."""
    template_date: Annotated[str, tyro.conf.arg(metavar="DAY")] = TEMPLATE_DATE
    """The day, YYYY-MM-DD, that chat templates are told where they ask for today's."""
    encoding: str = FILE_DEFAULTS["encoding"]
    """How the files encode text: `utf-8`, `utf-16`, `gb18030`, `latin-1`, or another that Python
    knows. The shards do not depend on it."""
    text_field: str = FILE_DEFAULTS["text_field"]
    """The field of a record, or the column of a table, that holds its text; `meta.text` is `text`
    within `meta`."""
    form: str = FILE_DEFAULTS["form"]
    """The form in which records hold conversations: by their keys, or one by its name (`alpaca`,
    `sharegpt`, …; `text` for documents)."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """The treatment of a record that cannot be used; `skip` leaves it out, and a warning counts
    them."""
    split_by: Literal["position", "document"] = "position"
    """`position`: the last part of the text is held out; `document`: each document goes to the
    split that the hash of its text decides."""
    validation_fraction: float = VALIDATION_FRACTION
    """Share of the text held out for validation."""
    test_fraction: float = 0.0
    """Share of the text held out for `eval --split test`; by position, the tail."""
    validation_path: Path | None = None
    """Held-out text of its own; the rest is then trained on whole."""
    test_path: Path | None = None
    """Text of its own for `eval --split test`."""
    max_bytes: int | None = None
    """Read at most this many bytes."""
    grammar: GrammarOptions = field(default_factory=GrammarOptions)


def run(arguments: list[str]) -> int:
    """Write token shards as `arguments` (the command line after the verb) ask, print their sizes,
    and return the exit code 0."""
    options = parse(PrepareArguments, arguments, verb="prepare")
    from pentameter.data.prepare.from_tokens import token_files
    from pentameter.data.shards.format import find_header
    from pentameter.data.shards.opening import open_shards
    from pentameter.data.tokenizers.char import CharTokenizer, advice_on

    started = time.perf_counter()
    warnings: list[str] = []
    if files := token_files([Path(source) for source in options.source]):
        _import(options, files)
    else:
        _prepare(options, warnings)
    seconds = time.perf_counter() - started
    header = find_header(options.out)
    assert header is not None
    dataset = open_shards(header)
    if dataset.tokenizer.kind == CharTokenizer.kind:
        advice = advice_on(dataset.vocab_size, dataset.split("train").n_tokens)
        warnings += [] if advice is None else [advice]
    for warning in warnings:
        print(f"warning: {terminal_message(warning)}", file=sys.stderr)
    _report(dataset, options.out, seconds)
    return 0


def _import(options: PrepareArguments, sources: Sequence[Path]) -> None:
    from pentameter.data.prepare.from_tokens import files_by_split, import_tokens, open_token_file
    from pentameter.data.progress import progress_on_stderr
    from pentameter.data.tokenizers.setting import chosen_tokenizer

    of_text = "is of files of text, not of tokens"
    by_text = f"{options.split_by} goes by each document's text, which files of tokens do not have"
    refused = {
        "chat_template": (None, "is for conversations, not for tokens"),
        "max_bytes": (None, "cannot shorten files of tokens"),
        **{key: (usual, of_text) for key, usual in FILE_DEFAULTS.items()},
        "split_by": ("position", by_text),
    }
    for name, (usual, reason) in refused.items():
        if getattr(options, name) != usual:
            raise ConfigError(f"--{name.replace('_', '-')} {reason}; leave it out")
    _data_section(options, None)  # for its rules
    paths = files_by_split(sources)
    for split, path in (("val", options.validation_path), ("test", options.test_path)):
        if path is not None:
            paths[split] = [path]
    files = {split: [open_token_file(path) for path in here] for split, here in paths.items()}
    tokenizer = chosen_tokenizer(options.tokenizer)
    if isinstance(tokenizer, str):
        raise ConfigError(
            f"--tokenizer {tokenizer} cannot be made from tokens ({options.source[0]}); name the "
            "one that wrote them: gpt2, or a tokenizer file"
        )
    for split, here in files.items():
        for file in here:
            print(f"{file.path}: {file.format}, {file.n_tokens:,} tokens, {split}")
    with progress_on_stderr() as progress:
        import_tokens(
            files,
            options.out,
            tokenizer,
            validation_fraction=options.validation_fraction,
            test_fraction=options.test_fraction,
            progress=progress,
        )


def _prepare(options: PrepareArguments, warnings: list[str]) -> None:
    """Tokenize the text or conversations that the options name, and write the shards; add to
    `warnings`."""
    from pentameter.data.corpora.registry import CORPORA
    from pentameter.data.open_dataset import preparation_of
    from pentameter.data.progress import progress_on_stderr
    from pentameter.disk.atomic import refuse_existing

    if not options.source:
        raise ConfigError(f"name a corpus ({', '.join(CORPORA)}) or text files and folders")
    corpus = options.source[0] if len(options.source) == 1 else None
    if corpus is not None and corpus not in CORPORA and _names_files(corpus):
        corpus = None
    data = _data_section(options, corpus)
    with progress_on_stderr() as progress:
        preparation = preparation_of(
            data,
            options.tokenizer,
            paths=options.source if corpus is None else (),
            progress=progress,
        )
        refuse_existing(options.out)  # before all is read
        warnings += preparation.corpus.warnings
        preparation.write_shards(options.out, warnings=warnings, count_tokens=progress.count_tokens)
        warnings += preparation.remarks
    if preparation.holds:
        files = preparation.corpus.files
        named = files[0].name if len(files) == 1 else f"{len(files):,} files"
        print(f"{named} · {preparation.holds}")


def _names_files(source: str) -> bool:
    """Return False if `source` can only be a corpus: `nots` is an unknown corpus, `notes.txt` a
    missing file."""
    path = Path(source)
    is_word = path.name == source and not path.suffix and not has_magic(source)
    return not is_word or path.exists()


def _data_section(options: PrepareArguments, corpus: str | None) -> DataConfig:
    """Return the options as a [data] section with the key `corpus`, or if that is None, with the
    first source as `path`. Raises ConfigError if they break the section's rules."""
    from pydantic import ValidationError

    from pentameter.config.messages import problems
    from pentameter.config.schema import Config

    section = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in asdict(options).items()
        if key not in ("source", "out")
    }
    section |= {"corpus": corpus, "path": options.source[0] if corpus is None else None}
    tree = {"data": section, "train": {"batch_size": 1}}  # a whole configuration, for its rules
    try:
        return Config.model_validate(tree).data
    except ValidationError as error:
        raise ConfigError("; ".join(problems(error, tree)[0])) from error


def _report(dataset: Dataset, folder: Path, seconds: float) -> None:
    splits = [dataset.split(name) for name in ("train", "val", "test")]
    n_tokens = sum(split.n_tokens for split in splits)
    n_bytes = sum(split.n_bytes for split in splits)
    n_documents = sum(len(split.document_starts) for split in splits)
    sizes = ", ".join(f"{split.name} {split.n_tokens:,}" for split in splits if split.n_tokens)
    print(
        f"{folder}: {n_tokens:,} tokens ({sizes}) in {n_documents:,} "
        f"document{'s' if n_documents != 1 else ''}, vocabulary {dataset.vocab_size:,}, "
        f"{n_bytes / n_tokens:.2f} bytes per token, {seconds:.1f} s, "
        f"{n_tokens / seconds:,.0f} tokens/s"
    )
