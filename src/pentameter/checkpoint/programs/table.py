"""The programs whose checkpoints are read, and how a path is recognized as one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.folders.opening import is_hugging_face
from pentameter.checkpoint.hugging_face.folder import has_weights, read_hf
from pentameter.checkpoint.programs import litgpt, llm_c, nanochat, nanogpt
from pentameter.checkpoint.programs.program_model import ProgramModel
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError


@dataclass(frozen=True)
class Program:
    """A program, the pattern of its files, and its reader."""

    label: str
    pattern: str
    """Glob pattern of a checkpoint's file."""
    is_its: Callable[[Path], bool]
    """Whether a file with such a name is its."""
    read: Callable[[Path, Tokenizer | None], ProgramModel]


PROGRAMS = (
    Program("litgpt", litgpt.NAME, lambda path: True, litgpt.read),
    Program(
        "nanochat",
        "model_*.pt",
        lambda path: nanochat.NAME.fullmatch(path.name) is not None,
        nanochat.read,
    ),
    Program("llm.c", "*.bin", llm_c.is_llm_c, llm_c.read),
    Program("nanoGPT", nanogpt.NAME, lambda path: True, nanogpt.read),
)
FORMS = "nanoGPT's ckpt.pt, nanochat's model_NNNNNN.pt, litgpt's lit_model.pth, llm.c's .bin"


def read_source(source: Path, tokenizer: Tokenizer | None, warnings: list[str]) -> StoredModel:
    """Read the model that a path denotes: a Hugging Face folder, or the checkpoint of a program.
    `tokenizer` replaces its own; `warnings` is as for `read_hf`. Raises ConfigError for any other
    path, and what the readers raise."""
    is_theirs = is_hugging_face(source)
    found = None if is_theirs and has_weights(source) else find_program(source)
    if found is not None:
        program, file = found
        return program.read(file, tokenizer).stored()
    if not is_theirs:
        raise ConfigError(
            f"{source} is not a Hugging Face folder: it has no config.json; nor is it {FORMS}"
        )
    return read_hf(source, tokenizer=tokenizer, warnings=warnings)


def find_program(path: Path) -> tuple[Program, Path] | None:
    """Find the checkpoint of another program that `path`, a file or its folder, denotes; in a
    folder of several steps the last. Return the program and the file; None if there is none. Raises
    ConfigError for a folder with checkpoints of several programs."""
    if path.is_file():
        named = [each for each in PROGRAMS if path.match(each.pattern) and each.is_its(path)]
        if not named and path.suffix == ".pt":  # nanoGPT's under any name, such as `best.pt`
            named = [PROGRAMS[-1]]
        return (named[0], path) if named else None
    found: dict[Program, Path] = {}
    for program in PROGRAMS:
        for file in sorted(path.glob(program.pattern)):
            if program.is_its(file):
                found[program] = file
    if len(found) > 1:
        names = ", ".join(f"{file.name} ({each.label})" for each, file in found.items())
        raise ConfigError(f"{path} has checkpoints of several programs: {names}; name a file")
    return next(iter(found.items()), None)
