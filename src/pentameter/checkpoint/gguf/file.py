"""A model as a GGUF file, with its tokenizer and chat template, for llama.cpp and what is built on
it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.gguf.architectures import (
    Architecture,
    choose_architecture,
)
from pentameter.checkpoint.gguf.rotary import rotary_entries, rotary_notes
from pentameter.checkpoint.gguf.tensors import FileTensor, file_tensors
from pentameter.checkpoint.gguf.vocabulary import Vocabulary, refuse, vocabulary
from pentameter.checkpoint.hugging_face.folder import Exported, their_weights
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.data.tokenizers.base import Ends, Tokenizer
from pentameter.disk.atomic import (
    refuse_existing,
    storage_errors,
    sync,
    temporary_name,
    write_hashed,
)
from pentameter.disk.lock import building
from pentameter.errors import missing_package

SUFFIX = ".gguf"
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
"""Dtype of the matrices → the file's type, by llama.cpp's numbers."""
_MOST_ENDS = 3


def export_gguf(
    stored: StoredModel, out: Path, beside: Mapping[str, bytes] | None = None, *, dtype: str = "F32"
) -> Exported:
    """Write a model as a GGUF file: `out` if that ends in .gguf, else NAME-DTYPE.gguf in a new
    folder `out`, with the files `beside` (name → content), such as a model card.

    dtype: one of DTYPES, for matrices; vectors, position embeddings and routers are fp32.

    One tensor is in memory at a time. The file, or the folder, appears whole or not at all. The
    result's `notes` tell what llama.cpp does otherwise.

    Raises ConfigError if the package `gguf` is not installed, for a model or a tokenizer that
    llama.cpp cannot express, for weights that `F16` cannot hold, and if `out` exists; StorageError
    if writing fails.
    """
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise missing_package("--to gguf", "gguf", "gguf") from error
    out = Path(out)
    refuse_existing(out)
    model, tokenizer = stored.config.model, stored.tokenizer
    chosen = choose_architecture(model)
    known = vocabulary(tokenizer).padded(model.vocab_size or tokenizer.vocab_size)
    entries, notes = _tokenizer_entries(known, tokenizer, stored.ends_of_answers)
    entries = {**_model_entries(chosen, stored, dtype), **entries}
    weights = their_weights(stored, chosen.as_family())
    tensors = list(file_tensors(weights, chosen, model, dtype, gguf))
    if out.suffix == SUFFIX:
        with storage_errors(out, "write"):
            out.parent.mkdir(parents=True, exist_ok=True)
            part = out.with_name(temporary_name(out.name))
            try:
                _write(part, chosen, entries, tensors, gguf)
                sync(part)
                refuse_existing(out)
                os.rename(part, out)
                sync(out.parent)
            finally:
                part.unlink(missing_ok=True)
    else:
        with building(out) as folder:
            path = folder / file_name(stored.config.name, dtype)
            _write(path, chosen, entries, tensors, gguf)
            sync(path)
            for file, data in (beside or {}).items():
                write_hashed(folder / file, [data])
    notes += rotary_notes(model)
    if dtype == "Q8_0" and (n_others := sum(tensor.dtype == "F16" for tensor in tensors)):
        notes += (
            f"{n_others} tensors are F16, as their rows are no multiple of Q8_0's blocks of 32",
        )
    return Exported(out, notes)


def file_name(run: str, dtype: str) -> str:
    """Return the name of the file in a folder: the run's name and the matrices' dtype."""
    return f"{run}-{dtype}{SUFFIX}"


def _write(
    path: Path,
    chosen: Architecture,
    entries: Mapping[str, Any],
    tensors: list[FileTensor],
    gguf: Any,
) -> None:
    """Write a GGUF file of `chosen`: its `entries` (key → value) and `tensors`, by the package
    `gguf`."""
    with closing(gguf.GGUFWriter(path, chosen.architecture)) as writer:
        for key, value in entries.items():
            kind = gguf.GGUFValueType.get_type(value)
            if type(value) is int:
                kind = gguf.GGUFValueType.UINT32
            writer.add_key_value(key, value, kind)
        for tensor in tensors:
            kind = gguf.GGMLQuantizationType[tensor.dtype]
            n_bytes = tensor.n_bytes(gguf)
            writer.add_tensor_info(tensor.name, tensor.shape, None, n_bytes, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(tensor.data(gguf))


def _model_entries(chosen: Architecture, stored: StoredModel, dtype: str) -> dict[str, Any]:
    """Return the entries (key → value) that describe the model, with matrices in `dtype`."""
    model = stored.config.model
    found: dict[str, Any] = {
        "general.type": "model",
        "general.name": stored.config.name,
        "general.file_type": _FILE_TYPES[dtype],
        "general.quantization_version": 2,
    }
    of_model = _architecture_entries(model.resolved, chosen) | rotary_entries(model)
    return found | {f"{chosen.architecture}.{key}": value for key, value in of_model.items()}


def _architecture_entries(model: ModelConfig, chosen: Architecture) -> dict[str, Any]:
    """Return a resolved model's sizes and switches as entries, without the architecture's name."""
    values = {**architecture(model), "vocab_size": model.vocab_size}
    values["query_channels"] = model.query_channels
    values["window_rope_theta"] = model.window_rope_theta or model.rope_theta
    values["experts.shared_width"] = model.experts.n_shared * (model.experts.width or 0) or None
    found = {
        key: values[ours]
        for ours, keys in chosen.keys.items()
        for key in keys
        if values[ours] is not None
    }
    found |= chosen.entries
    norm = "layer_norm_epsilon" if model.norm == "layernorm" else "layer_norm_rms_epsilon"
    return {**found, f"attention.{norm}": float(model.norm_eps)}


def _tokenizer_entries(
    known: Vocabulary, tokenizer: Tokenizer, ends_of_answers: Ends
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the tokenizer's entries, and lines for the user: what llama.cpp does otherwise.
    `known` is the tokenizer in llama.cpp's form."""
    entries: dict[str, Any] = {
        "model": known.model,
        "pre": known.pre,
        "tokens": known.tokens,
        "token_type": [int(each) for each in known.types],
        "merges": known.merges,
        "scores": known.scores,
        "add_space_prefix": known.adds_space,
        "add_bos_token": bool(tokenizer.prefix),
        "add_eos_token": False,
    }
    notes, end = known.notes, tokenizer.end_of_text
    ends = sorted(ends_of_answers.tokens - {end}) if tokenizer.chat is not None else []
    if end is None and not ends and known.model != "gemma4":
        refuse("its tokenizer has no end of text, and llama.cpp would take some token for one")
    if end is None and ends:
        end = ends.pop(0)
    if end is not None:
        first = tokenizer.prefix[0] if tokenizer.prefix else end
        ids = {"eos": end, "bos": first, **dict(zip(("eot", "eom"), ends, strict=False))}
        entries |= {f"{use}_token_id": number for use, number in ids.items()}
    if len(tokenizer.prefix) > 1:
        notes += ("llama.cpp begins a text with one token, where the tokenizer puts several",)
    if len(ends) >= _MOST_ENDS:
        notes += (f"an answer may end with {len(ends) + 1} tokens, of which the file names three",)
    if tokenizer.chat is not None:
        entries["chat_template"] = tokenizer.chat.source
    found = {key: value for key, value in entries.items() if value is not None}
    keys = {"chat_template": "tokenizer.chat_template"}
    return {keys.get(key, f"tokenizer.ggml.{key}"): value for key, value in found.items()}, notes
