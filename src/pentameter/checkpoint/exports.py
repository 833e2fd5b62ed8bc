"""The formats that a model can be written in, as one table: `export --to` chooses from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pentameter.checkpoint.folders.model_folder import StoredModel, save_model
from pentameter.checkpoint.gguf.file import SUFFIX, export_gguf, file_name
from pentameter.checkpoint.gguf.tensors import DTYPES
from pentameter.checkpoint.hugging_face.folder import export_hf
from pentameter.checkpoint.hugging_face.peft import export_peft
from pentameter.checkpoint.hugging_face.tokenizer_files import has_their_chat

Library = Literal["transformers", "peft", "gguf"]
"""The library that opens a format, as hubs know it."""


@dataclass(frozen=True)
class ExportFormat:
    """A format that a model can be written in."""

    write: Callable[[StoredModel, Path, Mapping[str, bytes], str], tuple[str, ...]]
    """Function that writes a model to a new folder or file, with files (name → content) beside it
    if it is a folder, in one of `dtypes`; it returns notes for the user, a line each."""
    library: Library | None = None
    """The library that a model card names; None for a format without a card."""
    dtypes: tuple[str, ...] = ()
    """The dtypes to choose from, the usual one first; () if weights keep theirs."""
    suffix: str | None = None
    """The ending of a name that asks for one file instead of a folder; None if there is only a
    folder."""

    file_name: Callable[[str, str], str] | None = None
    """Function from a run's name and a dtype to the name of the one file in the folder that holds
    the model; None if a folder has it in files of fixed names."""

    def is_file(self, out: Path) -> bool:
        """Return True if `out` names a file, and not a folder, to write to."""
        return self.suffix is not None and out.suffix == self.suffix


def _save(stored: StoredModel, out: Path, _beside: object, _dtype: object) -> tuple[str, ...]:
    save_model(stored, out)
    return ()


def chat_notes(stored: StoredModel, library: Library | None) -> tuple[str, ...]:
    """Return notes for the user, a line each, on what `library` is not told of the chat of a model
    that is exported for it: its template, or the text that ends its answers."""
    tokenizer = stored.tokenizer
    if tokenizer.chat is None or library not in ("transformers", "gguf"):
        return ()
    if library == "transformers" and not has_their_chat(tokenizer):
        return (
            f"the chat template is left out: the tokenizer ({tokenizer.kind}) has no token of it; "
            "chat with the model by `pentameter serve`",
        )
    if not (texts := stored.ends_of_answers.texts):
        return ()
    return (
        f"no token ends an answer, but the text {texts[0]!r}, which an export cannot name: have "
        'vLLM and llama.cpp end there by "stop" of a request, Ollama by PARAMETER stop, '
        "transformers by stop_strings",
    )


EXPORTS: Mapping[str, ExportFormat] = {
    "hf": ExportFormat(
        lambda stored, out, beside, _: export_hf(stored, out, beside).notes, "transformers"
    ),
    "gguf": ExportFormat(
        lambda stored, out, beside, dtype: export_gguf(stored, out, beside, dtype=dtype).notes,
        "gguf",
        DTYPES,
        SUFFIX,
        file_name,
    ),
    "safetensors": ExportFormat(_save),
    "peft": ExportFormat(
        lambda stored, out, beside, _: export_peft(stored, out, beside).notes, "peft"
    ),
}
"""`--to` → the format."""
