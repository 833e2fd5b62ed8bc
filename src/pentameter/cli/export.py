"""`pentameter export`: a model as files for other programs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import ConfigError, PentameterError, printable, remark

if TYPE_CHECKING:
    from pentameter.checkpoint.folders.model_folder import StoredModel


@dataclass(frozen=True)
class ExportArguments:
    """Write a model into a new folder or file, which appears whole or not at all, and push it to
    the Hugging Face Hub if asked."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder (its best checkpoint, else its last), a checkpoint folder, a Hugging Face
    folder, or hf://OWNER/NAME."""
    to: Literal["hf", "gguf", "safetensors", "peft"]
    """`hf`: a folder that `transformers` opens, with the same logits. `gguf`: a file for llama.cpp,
    Ollama and others, with tokenizer and chat template. `safetensors`: this library's names, with
    config.toml and tokenizer.json; any model, and itself a MODEL. What adapters add is in the
    weights of all three. `peft`: the adapters alone, as adapter_model.safetensors and
    adapter_config.json. All but `safetensors` have a model card."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to make; with --to gguf also a file: NAME.gguf, without a card."""
    dtype: Literal["F32", "F16", "BF16", "Q8_0"] | None = None
    """With --to gguf: the numbers of matrices, F32 if absent. Q8_0 has a byte for each."""
    license: Annotated[str | None, tyro.conf.arg(metavar="ID")] = None
    """The model's license for its card, as the Hub knows it: apache-2.0, mit, cc-by-4.0, other, …
    Without one, the card says that none is granted."""
    base_model: Annotated[str | None, tyro.conf.arg(metavar="OWNER/NAME")] = None
    """The model on the Hub that this one began with, if not recorded by that name."""
    push: Annotated[str | None, tyro.conf.arg(metavar="OWNER/NAME")] = None
    """Also upload the folder to this model repository of the Hugging Face Hub, as one commit; it
    is made if absent. Log in before, with `hf auth login` or HF_TOKEN."""
    private: tyro.conf.FlagCreatePairsOff[bool] = False
    """With --push: only its owner sees the repository."""


def run(arguments: list[str]) -> int:
    """Export the model that `arguments` (the command line after the verb) name, push it if asked,
    print the folder's size, and return the exit code 0."""
    asked = parse(ExportArguments, arguments, verb="export")
    _check(asked)
    from pentameter.checkpoint.folders.load_model import open_model
    from pentameter.checkpoint.hugging_face.hub import check_login
    from pentameter.disk.atomic import refuse_existing

    refuse_existing(asked.out)  # before gigabytes are verified
    if asked.push is not None:
        check_login(asked.push)
    warnings: list[str] = []
    stored = open_model(asked.model, warnings=warnings)
    if asked.base_model is not None:
        stored = replace(stored, base_model=asked.base_model)
    _check_base(asked, stored)
    warnings += _write(asked, stored)
    is_folder = asked.out.is_dir()
    if is_folder and asked.to != "safetensors" and asked.license is None:
        warnings.append(
            "the model card grants no license, so nobody else may use the model: add --license ID "
            f"(apache-2.0, mit, cc-by-4.0, …), or `license: ID` at the head of "
            f"{asked.out / 'README.md'}"
        )
    remark(*warnings)
    files = asked.out.iterdir() if is_folder else [asked.out]
    n_bytes = sum(file.stat().st_size for file in files)
    print(f"{asked.out}: step {stored.step}, {n_bytes:,} bytes")
    if asked.push is not None:
        print(_push(asked.out, asked.push, private=asked.private))
    return 0


def _check(asked: ExportArguments) -> None:
    """Raise ConfigError if options exclude each other, lack another that they need, or are
    malformed."""
    from pentameter.checkpoint.exports import EXPORTS

    found = EXPORTS[asked.to]
    of_card = {
        "--push": asked.push,
        "--license": asked.license,
        "--base-model": asked.base_model,
    }
    given = [name for name, value in of_card.items() if value is not None]
    if given and found.library is None:
        having = [f"--to {name}" for name, each in EXPORTS.items() if each.library is not None]
        raise ConfigError(
            f"{given[0]} goes with {', '.join(having[:-1])} and {having[-1]}, which have a model "
            "card"
        )
    if given and found.is_file(asked.out):
        raise ConfigError(
            f"{given[0]} goes with a folder, which has a model card, and --out {asked.out} is a "
            f"file; leave its {found.suffix} out, and the folder holds the file"
        )
    if asked.dtype is not None and asked.dtype not in found.dtypes:
        raise ConfigError(
            f"--dtype {asked.dtype} goes with --to gguf; --to {asked.to} keeps the weights' dtype"
        )
    if asked.private and asked.push is None:
        raise ConfigError("--private goes with --push OWNER/NAME")
    if asked.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", asked.license):
        raise ConfigError(
            f"--license {printable(asked.license)} is no identifier such as apache-2.0, mit, "
            "cc-by-4.0 or other"
        )
    if asked.base_model is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", asked.base_model):
        raise ConfigError(f"--base-model {printable(asked.base_model)} is not OWNER/NAME")


def _check_base(asked: ExportArguments, stored: StoredModel) -> None:
    """Raise ConfigError if adapters are to be pushed and their base model has no name on the Hub:
    their files would name a folder on this machine."""
    named = stored.base_model is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", stored.base_model)
    if asked.push is not None and asked.to == "peft" and not named:
        raise ConfigError(
            f"--push {asked.push}: adapters need their base model, and {asked.model} names none "
            "that is on the Hub; add --base-model OWNER/NAME, or push the whole model (--to hf)"
        )


def _write(asked: ExportArguments, stored: StoredModel) -> tuple[str, ...]:
    """Write the model in the requested format; return notes to print, a line each."""
    from pentameter.checkpoint.exports import EXPORTS, chat_notes
    from pentameter.report.pages.model_card import card_files

    found = EXPORTS[asked.to]
    dtype: str = asked.dtype or (found.dtypes[0] if found.dtypes else "")
    beside: dict[str, bytes] = {}
    if found.library is not None and not found.is_file(asked.out):
        name = found.file_name and found.file_name(stored.config.name, dtype)
        beside = card_files(
            stored, found.library, license_id=asked.license, repository=asked.push, file=name
        )
    notes = found.write(stored, asked.out, beside, dtype)
    return (*notes, *chat_notes(stored, found.library))


def _push(folder: Path, repository: str, *, private: bool) -> str:
    """Upload the folder to the Hub and return the commit's URL. An error's message adds that the
    folder is complete."""
    from pentameter.checkpoint.hugging_face.hub import push

    try:
        return push(folder, repository, private=private)
    except PentameterError as error:
        raise type(error)(
            f"{error} ({folder} is complete; `hf upload {repository} {folder}` pushes it)"
        ) from error
