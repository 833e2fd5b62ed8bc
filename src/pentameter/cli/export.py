"""`pentameter export`: a model as files for other programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pentameter.cli.arguments import parse, print_warnings


@dataclass(frozen=True)
class ExportArguments:
    """Write a model into a new folder, which appears whole or not at all."""

    model: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder (its best checkpoint, else its last), a checkpoint folder, or a Hugging Face
    folder."""
    to: Literal["hf", "safetensors", "peft"]
    """`hf`: a folder that `transformers` opens, with the same logits. `safetensors`: this
    library's names, with config.toml and tokenizer.json; any model, and itself a MODEL. What
    adapters add is in the weights of both. `peft`: the adapters alone, as
    adapter_model.safetensors and adapter_config.json. `hf` and `peft` have a model card."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to make."""


def run(arguments: list[str]) -> int:
    """Export and return 0."""
    asked = parse(ExportArguments, arguments, verb="export")
    from pentameter.checkpoint.hugging_face.folder import export_hf
    from pentameter.checkpoint.hugging_face.peft import export_peft
    from pentameter.checkpoint.load_model import open_model
    from pentameter.checkpoint.model_folder import save_model
    from pentameter.disk.atomic import refuse_existing

    refuse_existing(asked.out)  # before gigabytes are verified
    warnings: list[str] = []
    stored = open_model(asked.model, warnings=warnings)
    match asked.to:
        case "hf":
            warnings += export_hf(stored, asked.out).notes
        case "safetensors":
            save_model(stored, asked.out)
        case "peft":
            warnings += export_peft(stored, asked.out).notes
    print_warnings(warnings)
    n_bytes = sum(file.stat().st_size for file in asked.out.iterdir())
    print(f"{asked.out}: step {stored.step}, {n_bytes:,} bytes")
    return 0
