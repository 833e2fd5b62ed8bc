"""`pentameter import`: weights of Hugging Face, or of another training program, into a MODEL."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from pentameter.cli.options.arguments import parse
from pentameter.errors import ConfigError, remark

if TYPE_CHECKING:
    pass

MADE_FROM_TEXT = ("char", "word", "bpe")
"""Tokenizers built from a text, with which no imported model can have been trained."""


@dataclass(frozen=True)
class ImportArguments:
    """Turn a Hugging Face folder, a model on the Hugging Face Hub, or a checkpoint of nanoGPT,
    nanochat, litgpt or llm.c, into a checkpoint folder, which appears whole or not at all.

    `sample`, `eval`, `export` and `train --init-from` take it. Its config.toml is complete but
    for the text: pentameter train DIR/config.toml --init-from DIR --data.path FILE.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder with config.json, model.safetensors (or its parts and index) and the tokenizer; or
    OWNER/NAME[@REVISION] on the Hub, of which these files are fetched into its cache; or nanoGPT's
    ckpt.pt, nanochat's model_NNNNNN.pt, litgpt's lit_model.pth, llm.c's .bin, or its folder."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The folder to make."""
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="gpt2|FILE")] = None
    """Instead of the folder's own: GPT-2's, or a tokenizer file of `prepare`."""


def run(arguments: list[str]) -> int:
    """Import the model that `arguments` (the command line after the verb) name into a new
    checkpoint folder, print how to fine-tune it, and return the exit code 0."""
    asked = parse(ImportArguments, arguments, verb="import")
    from pentameter.checkpoint.folders.model_folder import save_model
    from pentameter.checkpoint.hugging_face.hub import fetch, hub_address
    from pentameter.checkpoint.programs.table import read_source
    from pentameter.config.naming import name_of
    from pentameter.data.tokenizers.render_client import check_template
    from pentameter.data.tokenizers.setting import build_tokenizer
    from pentameter.disk.atomic import refuse_existing
    from pentameter.train.keep.own_configuration import with_micro_batch

    if asked.out.exists() and asked.source.exists() and asked.out.samefile(asked.source):
        raise ConfigError(f"--out {asked.out} is the folder to import; choose another")
    refuse_existing(asked.out)
    if asked.tokenizer is not None and asked.tokenizer.partition(":")[0] in MADE_FROM_TEXT:
        raise ConfigError(
            f"--tokenizer {asked.tokenizer}: weights go with the tokenizer that they were trained "
            "with; give gpt2 or a file"
        )
    warnings: list[str] = []
    address = hub_address(asked.source, scheme=False)
    source = asked.source if address is None else fetch(address, warnings)
    tokenizer = None
    if asked.tokenizer is not None:
        tokenizer = build_tokenizer(asked.tokenizer, lambda: iter(()))  # nothing is built of text
    stored = read_source(source, tokenizer, warnings)
    if stored.tokenizer.chat is not None:
        check_template(stored.tokenizer.chat)
    config = stored.config
    if config.data.tokenizer != "gpt2":  # the text is cut by the tokenizer that lies in the folder
        config = config.updated({"data.tokenizer": str((asked.out / "tokenizer.json").resolve())})
    config = with_micro_batch(config)
    save_model(stored, asked.out, config)
    remark(*warnings)
    model = stored.config.model
    out, name = shlex.quote(str(asked.out)), name_of(asked.out.name, "-tuned")
    experts = ""
    if model.experts.count is not None:
        experts = f"{model.experts.count} experts, {model.experts.n_chosen} for each token, "
    print(
        f"{asked.out}: {model.n_layers} layers, d_model {model.d_model}, "
        f"{model.attention.n_heads} heads, {experts}context {model.context_length}, "
        f"vocabulary {model.vocab_size}, tokenizer {stored.config.data.tokenizer}\n"
        f"fine-tune it: pentameter train {out}/config.toml --init-from {out} --name {name} "
        "--data.path FILE"
    )
    return 0
