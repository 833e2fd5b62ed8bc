"""The corpus at a path: the files that it names (a file, a folder, a pattern or a URL), whether
they hold text or conversations, and those held out as splits.

A folder with tables (Parquet, Arrow) is a data set in Hugging Face's layout: downloaded, or saved
by `datasets`. Only its tables are read, and their names, or those of their folders, tell their
split.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pentameter.config.data_schema import DataConfig
from pentameter.config.urls import is_remote
from pentameter.data.corpora.conversations import Conversations
from pentameter.data.corpora.file_kinds import table_warning
from pentameter.data.corpora.files import UTF8, FileContents, InputFile, LocalFile, is_json
from pentameter.data.corpora.records.forms import check_form
from pentameter.data.corpora.records.recognizing import (
    hold_conversations,
    hold_json_records,
    hold_records,
)
from pentameter.data.corpora.remote import remote_files
from pentameter.data.corpora.tables import is_table, split_in, split_of
from pentameter.data.corpora.text import Text
from pentameter.disk.atomic import storage_error, storage_errors
from pentameter.errors import ConfigError, CorruptError, near_files

Kind = TypeVar("Kind", Text, Conversations)

_NOT_DATA = re.compile(r"(cache|tmp|indices)[-_.\w]*\.arrow$")
"""Names of cache files that `datasets` leaves in a data set's folder."""
_STATE_FILE = "state.json"
_ABOUT = frozenset(
    ("README.md", "LICENSE", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
) | {_STATE_FILE}
"""Names of files that describe a data set; leaving them out needs no warning."""


@dataclass(frozen=True)
class Inputs:
    """The files that a user's paths stand for, in order: those to read, and files held out for
    validation or test, by split."""

    files: tuple[InputFile, ...]
    held_out: Mapping[str, tuple[InputFile, ...]] = field(default_factory=dict)
    """Files by split, `val` and `test`, if a user named them, or tables have these words in their
    names."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user about files that are not read."""


def corpus_at(paths: Sequence[str | Path], data: DataConfig) -> Text | Conversations:
    """Open the files at `paths` (files, folders, patterns, URLs), read as `data` says: encoding,
    text field, form, bad rows, `max_bytes`. Files of records (JSONL, JSON arrays, tables) whose
    first record is a conversation become Conversations, everything else Text.

    Held-out splits are `data.validation_path` and `data.test_path`; if neither is set, the tables
    whose names tell a split. Raises ConfigError for a path that does not exist or holds no file,
    StorageError for one that cannot be read, CorruptError if text is held out beside conversations,
    and for records that have no text and no form, or two.
    """
    check_form(data.form)
    contents = FileContents(data.encoding, data.text_field, data.form, data.bad_rows)
    given = {"val": data.validation_path, "test": data.test_path}
    found = {
        split: inputs_at([path], contents, has_held_out=True)
        for split, path in given.items()
        if path is not None
    }
    beside = {split: each.files for split, each in found.items()}
    inputs = inputs_at(paths, contents, has_held_out=bool(beside))
    warnings = [line for each in found.values() for line in each.warnings]
    for split, each in found.items():
        if each.held_out:  # its files have splits of their own by their names
            other = next(iter(each.held_out.values()))[0]
            warnings.append(
                f"{given[split]} is a data set with several splits, and as {split} its training "
                f"split ({each.files[0]}, …) is read; name {other} to read that"
            )
    inputs = replace(
        inputs,
        held_out=beside or inputs.held_out,
        warnings=tuple(dict.fromkeys([*inputs.warnings, *warnings])),
    )
    files = _without_descriptions(inputs.files, paths, contents)
    inputs = replace(inputs, files=files)
    groups = [files, *beside.values()]
    arrays = [
        hold_json_records(each, contents)
        for each in groups
        if any(is_json(file.name) for file in each)
    ]
    contents = replace(contents, json_has_records=bool(arrays) and all(arrays))
    told: list[str] = []
    if not hold_conversations(inputs.files, contents, told):
        warning = None if contents.json_has_records else table_warning(inputs.files)
        told += [warning] if warning else []
        inputs = replace(inputs, warnings=(*inputs.warnings, *told))
        return _corpus(Text, inputs, contents, data)
    inputs = replace(inputs, warnings=(*inputs.warnings, *told))
    for split, files in beside.items():
        if not hold_records(files, contents):
            raise CorruptError(
                f"{given[split]} holds no conversations, as {inputs.files[0]} does: .jsonl files, "
                "JSON arrays or tables are expected"
            )
    return _corpus(Conversations, inputs, contents, data)


def _without_descriptions(
    files: tuple[InputFile, ...], paths: Sequence[str | Path], contents: FileContents
) -> tuple[InputFile, ...]:
    """Return a data set's `files` without those that describe it (README.md, …) and are not among
    the `paths` that a user named, if the others are JSON arrays or hold conversations; else all."""
    named = {str(path) for path in paths}
    others = tuple(each for each in files if each.name not in _ABOUT or str(each) in named)
    if len(others) in (0, len(files)):
        return files
    are_records = hold_json_records(others, contents) or (
        hold_records(others, contents) and hold_conversations(others, contents, [])
    )
    return others if are_records else files


def _corpus(kind: type[Kind], inputs: Inputs, contents: FileContents, data: DataConfig) -> Kind:
    """Return `inputs` as a corpus with the class `kind`, held-out files included; `data` gives its
    name and `max_bytes`."""
    name = data.prepared_name
    held_out = {
        split: kind(f"{name}-{split}", files, contents) for split, files in inputs.held_out.items()
    }
    return kind(name, inputs.files, contents, data.max_bytes, held_out, inputs.warnings)


def inputs_at(
    paths: Sequence[str | Path], contents: FileContents = UTF8, *, has_held_out: bool = False
) -> Inputs:
    """List the files at paths: files, folders, patterns (`*`, `?`, `[`) and URLs. `has_held_out`
    says that the user has named held-out files, so that no warning advises it.

    A folder stands for the files below it, sorted by path. Left out are hidden files and folders,
    `__pycache__`, symlinks to folders, symlinks to files that are listed anyway, and special files
    (pipes, sockets). In a folder with tables (Parquet, Arrow), all other files are left out; in one
    without, binary files; pictures, programs and the like alone if `contents` names another
    encoding than UTF-8.

    If all files are tables and some are named for training, those named for validation and test are
    held out. Raises ConfigError for a path that does not exist or holds no file, StorageError for
    one that cannot be read.
    """
    found: list[InputFile] = []
    named: list[tuple[InputFile, PurePosixPath]] = []
    n_alone = 0  # tables named by themselves
    warnings: list[str] = []
    for path in paths:
        files, root = _files_at(path)
        tables = [file for file in files if is_table(file.name)]
        if root and tables:
            known = _ABOUT | {str(each) for each in paths}  # these are read as they are named
            n_others = sum(
                not is_table(file.name) and known.isdisjoint((file.name, str(file)))
                for file in files
            )
            if n_others:
                warnings.append(
                    f"{path} holds tables, and its {n_others:,} other files are not read; name "
                    "them to read them"
                )
            files = tables = list(_without_remains(tables))
        elif root:
            files, left_out = _with_text(files, is_utf8=contents.is_utf8)
            if left_out:
                warnings.append(_left_out_warning(path, left_out))
        found += files
        named += [(file, PurePosixPath(str(file).removeprefix(root))) for file in tables]
        n_alone += 0 if root else len(tables)
    if len(named) < len(found):  # text has no split by its name
        return Inputs(tuple(found), {}, tuple(warnings))
    return _by_split(named, warnings, has_held_out=has_held_out, are_alone=n_alone == len(named))


def _with_text(
    files: Sequence[InputFile], *, is_utf8: bool
) -> tuple[list[InputFile], list[InputFile]]:
    """Return (files to read, files left out) of a folder's `files`: those with binary data are left
    out. If all have binary data, none is: reading the first then tells the user what it is."""
    kept: list[InputFile] = []
    left_out: list[InputFile] = []
    for file in files:
        is_binary = isinstance(file, LocalFile) and file.lacks_text(is_utf8=is_utf8)
        (left_out if is_binary else kept).append(file)
    return (kept, left_out) if kept else (left_out, [])


def _left_out_warning(folder: str | Path, files: Sequence[InputFile]) -> str:
    """Return a warning for the user: how many binary `files` in `folder` are not read, with their
    suffixes."""
    counts = Counter(PurePosixPath(file.name).suffix or file.name for file in files)
    kinds = ", ".join(f"{n:,} × {kind}" for kind, n in counts.most_common(4))
    rest = ", …" if len(counts) > 4 else ""
    return (
        f"{folder}: {len(files):,} binary {'file is' if len(files) == 1 else 'files are'} left "
        f"out ({kinds}{rest})"
    )


def files_below(folder: Path, skip: Collection[str] = ("__pycache__",)) -> list[Path]:
    """List the regular files below a folder, sorted by the parts of their path. Left out are hidden
    files and folders, folders named in `skip`, symlinks to folders, and symlinks to files that are
    listed anyway.

    Raises ConfigError if there is no file, StorageError if a folder cannot be listed.
    """
    found: list[Path] = []

    def refuse(error: OSError) -> None:
        raise storage_error(error.filename, "list", error) from error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        for name in files:
            path = Path(parent, name)
            # A symlink to nowhere is kept: reading it then fails with its name.
            regular = path.is_file() or (path.is_symlink() and not path.exists())
            if regular and not name.startswith("."):
                found.append(path)
    if not found:
        raise ConfigError(f"no text file below {folder}; hidden files do not count")
    if any(path.is_symlink() for path in found):  # resolving each path costs more than this
        listed = {path.resolve() for path in found if not path.is_symlink()}
        found = [path for path in found if not path.is_symlink() or path.resolve() not in listed]
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def _files_at(path: str | Path) -> tuple[list[InputFile], str]:
    """Return (files at a path, root). `root` is `path` as text if that is a folder, or a URL with a
    pattern or folder, else "". Raises ConfigError for a path that does not exist or holds no file,
    StorageError for one that cannot be read."""
    if is_remote(path):
        remote, root = remote_files(str(path))
        return list(remote), root
    path = Path(path)
    if path.is_dir():
        return [LocalFile(file) for file in files_below(path)], str(path)
    if path.is_file():
        return [LocalFile(path)], ""
    if path.exists():
        raise ConfigError(f"{path} is neither a regular file nor a folder; save the text to a file")
    if glob.has_magic(str(path)):
        matches = [Path(each) for each in sorted(glob.glob(str(path), recursive=True))]
        if files := [each for each in matches if each.is_file()]:
            return [LocalFile(file) for file in files], ""
        raise ConfigError(f"{path} matches no file (in {Path.cwd()})")
    raise ConfigError(
        f"{path} does not exist (in {Path.cwd()}){near_files(path)}; give a text file or a folder"
    )


def _without_remains(tables: Sequence[InputFile]) -> Iterator[InputFile]:
    """Yield a data set's tables without cache files that `datasets` left beside them. In a folder
    that `save_to_disk` wrote, only the Arrow files listed in its state.json are yielded. Raises
    CorruptError if a listed file is missing."""
    inside: dict[Path | None, set[str]] = {}
    for file in tables:  # those of a folder need not follow one another
        inside.setdefault(_folder_of(file), set()).add(file.name)
    listed: dict[Path | None, set[str]] = {}
    for folder, names in inside.items():
        state = None if folder is None else folder / _STATE_FILE
        if state is None or not state.is_file():
            listed[folder] = {name for name in names if not _NOT_DATA.match(name)}
            continue
        listed[folder] = {*_listed_files(state)}
        if missing := sorted(listed[folder] - names):
            raise CorruptError(f"{state} lists {missing[0]}, which is not there; save it again")
    yield from (file for file in tables if file.name in listed[_folder_of(file)])


def _folder_of(file: InputFile) -> Path | None:
    return file.path.parent if isinstance(file, LocalFile) else None


def _listed_files(state: Path) -> list[str]:
    """Return the names of the data files listed in a saved data set's state.json. Raises
    ConfigError if it selects rows by indices, CorruptError or StorageError if it is invalid or
    unreadable."""
    try:
        with storage_errors(state, "read"):
            content = json.loads(state.read_bytes())
        if content.get("_indices_data_files"):
            raise ConfigError(
                f"{state} chooses rows by a file of indices; save the data set again after "
                "flatten_indices()"
            )
        return [str(each["filename"]) for each in content["_data_files"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{state} is no state of a saved data set; save it again") from error


def _by_split(
    named: Sequence[tuple[InputFile, PurePosixPath]],
    warnings: list[str],
    *,
    has_held_out: bool,
    are_alone: bool,
) -> Inputs:
    """Return tables as Inputs, each assigned to the split that a word in its path names.

    If no table is for training, all are read as one text. Otherwise tables whose path names no
    split are left out, with a warning. Folders common to all tables say nothing about held-out
    splits (`/home/dev`).

    named: (table, its path relative to the folder that the user named). warnings: gets sentences
    for the user. has_held_out: the user has named held-out files. are_alone: the user has named
    each table by itself. Both suppress the warnings that advise so.
    """
    splits: dict[str | None, list[InputFile]] = {}
    folders = set()
    alike = (
        len({*parts}) == 1 for parts in zip(*(path.parent.parts for _, path in named), strict=False)
    )
    n_common = sum(1 for _ in itertools.takewhile(bool, alike))  # first parts of all paths
    for file, path in named:
        split = split_of(PurePosixPath(*path.parts[n_common:]))
        if split is None and split_of(PurePosixPath(*path.parts[:n_common])) == "train":
            split = "train"
        splits.setdefault(split, []).append(file)
        if split == "train":
            folders.add(path.parent if split_in(path.name) else path.parent.parent)
    if "train" not in splits:
        return Inputs(tuple(file for file, _ in named), {}, tuple(warnings))
    if len(folders) > 1 and not are_alone:
        names = ", ".join(sorted(str(each) for each in folders)[:5])
        warnings.append(
            f"there are {len(folders):,} data sets in these files ({names}), and all are read; "
            "name one for itself"
        )
    held_out: dict[str, tuple[InputFile, ...]] = {
        split: tuple(splits[split]) for split in ("val", "test") if split in splits
    }
    if "val" not in held_out and held_out:
        test = held_out.pop("test")
        advice = (
            f"{test[0]} is named for the test split, and no file for validation: it is left out, "
            "and validation is a part of the rest; name it with --data.validation-path to validate "
            "on it"
        )
        warnings += [] if has_held_out else [advice]
    if others := splits.get(None):
        warnings.append(
            f"{others[0]} (one of {len(others):,}) is named for no split, where others are named "
            "for training; it is left out"
        )
    return Inputs(tuple(splits["train"]), held_out, tuple(warnings))
