"""Hugging Face model folders, read into a StoredModel or written from one for `transformers`.

This package does not import `transformers`: config.json, safetensors and the tokenizer's files are
public formats.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pentameter.checkpoint.folders.model_folder import StoredModel
from pentameter.checkpoint.format.lazy_tensors import LazyTensor, check_weights
from pentameter.checkpoint.format.manifest import is_plain_name
from pentameter.checkpoint.format.safetensors_format import plan_file
from pentameter.checkpoint.format.tensor_reader import StoredTensors
from pentameter.checkpoint.hugging_face.config_json import (
    choose_family,
    from_their_config,
    read_n_extra_layers,
    simplest,
    to_their_config,
)
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.hugging_face.family import Family, StoredForm
from pentameter.checkpoint.hugging_face.tensor_map import TensorMap
from pentameter.checkpoint.hugging_face.tokenizer_files import (
    generation_config,
    read_tokenizer,
    their_token_ids,
    tokenizer_files,
)
from pentameter.checkpoint.hugging_face.weights.embedding_and_head import (
    check_vocabulary,
    grown_to,
    has_tied_head,
)
from pentameter.checkpoint.hugging_face.weights.fp8_weights import block_size, dequantized
from pentameter.config.messages import problems
from pentameter.config.schema import Config, ModelConfig
from pentameter.config.tables import packaged_table
from pentameter.data.corpora.registry import UNKNOWN_CORPUS
from pentameter.data.tokenizers.base import GENERATION, Tokenizer
from pentameter.data.tokenizers.setting import is_gpt2
from pentameter.disk.atomic import read_json, refuse_existing, write_hashed
from pentameter.disk.lock import building
from pentameter.errors import ConfigError, CorruptError, few
from pentameter.planning.gpt import parameter_table

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"

HUB_CACHE = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)")
"""Name of a model's folder in the Hugging Face hub cache, above `snapshots/REVISION`."""

SHARD_BYTES = 5_000_000_000
"""Maximum size in bytes of a weights file; more weights are split into several files with an
index."""


def read_hf(
    path: Path, *, tokenizer: Tokenizer | None = None, warnings: list[str] | None = None
) -> StoredModel:
    """Open the model in a Hugging Face folder: config.json, safetensors, tokenizer files.

    fp16, bf16 and 4-bit weights become fp32, exactly, and FP8 ones are multiplied by their scales;
    they are read region by region, at access. `tokenizer` replaces the folder's own. `warnings`
    gets a line for each added token that text never becomes, for layers that are passed over, for a
    head that is not as config.json says, and for an embedding that is grown. Raises ConfigError for
    unsupported content (another architecture, a pickle, a setting that pentameter cannot express),
    CorruptError for damaged or incomplete files.
    """
    path = Path(path)
    warnings = [] if warnings is None else warnings
    files, content = _weight_files(path), read_json(path / CONFIG)
    section = from_their_config(content, path / CONFIG)
    family, block = families()[content["model_type"]], block_size(content, path / CONFIG)
    n_extra = read_n_extra_layers(content, family, path / CONFIG)
    if tokenizer is None:
        tokenizer = read_tokenizer(path, warnings, content)
    if tokenizer is None:
        raise ConfigError(
            f"{path} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); "
            f"`pentameter import {path} --out DIR --tokenizer gpt2` adds GPT-2's own, and then "
            "DIR can be used"
        )
    config, base = config_to_tune(path / CONFIG, section, tokenizer), hub_name(path)
    model, where = config.model, files[0] if len(files) == 1 else path
    layers = range(model.n_layers, model.n_layers + n_extra)
    tensors = dequantized(_their_tensors(files, family, layers, where, warnings), block, where)
    is_tied = has_tied_head(tensors, family, content, model.tied_head, where, warnings)
    model = model.model_copy(update={"tied_head": is_tied})
    weights = weights_of(tensors, family, model, where)
    weights = grown_to(tokenizer.vocab_size, model, weights, where, warnings)
    vocab_size = max(model.vocab_size or 0, tokenizer.vocab_size)
    config = config.updated({"model.tied_head": is_tied, "model.vocab_size": vocab_size})
    return StoredModel(path, config, tokenizer, weights, files, checkpoint=None, base_model=base)


def config_to_tune(where: Path, section: Mapping[str, Any], tokenizer: Tokenizer) -> Config:
    """Return the configuration for fine-tuning a model that another program stored:
    `fine_tuning.toml` with `section` as `[model]` and the tokenizer's setting. `where`, the file
    that describes the model, is for messages. Raises ConfigError if a value is invalid or the
    tokenizer has more tokens than the model."""
    setting = tokenizer.kind if tokenizer.kind != "bpe" else f"bpe:{tokenizer.vocab_size}"
    tree: dict[str, Any] = {
        **packaged_table("checkpoint/hugging_face/fine_tuning.toml"),
        "name": "fine-tuned",
        "model": section,
        "data": {"corpus": UNKNOWN_CORPUS, "tokenizer": "gpt2" if is_gpt2(tokenizer) else setting},
    }
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        sentences, _ = problems(error, tree)
        raise ConfigError(f"{where}: {'; '.join(sentences)}") from error
    check_vocabulary(config.model.vocab_size, tokenizer, where)
    return config.model_copy(update={"model": simplest(config.model)})


def hub_name(folder: Path) -> str:
    """Return the name by which `from_pretrained` opens a model folder: `owner/name` if it lies in
    the Hugging Face hub cache, else its absolute path."""
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots":
        found = HUB_CACHE.fullmatch(resolved.parent.parent.name)
        if found is not None:
            return f"{found['owner']}/{found['name']}"
    return str(resolved)


def has_weights(path: Path) -> bool:
    """Return True if a folder has weights as safetensors, whole or in parts."""
    return (path / WEIGHTS).is_file() or (path / INDEX).is_file()


def _weight_files(path: Path) -> tuple[Path, ...]:
    """List the folder's safetensors files: model.safetensors, else the files that its index names.

    Raises ConfigError if there are none (explaining how to convert a pickle), CorruptError if the
    index is malformed or a named file is missing.
    """
    if (path / WEIGHTS).is_file():
        return (path / WEIGHTS,)
    if not (path / INDEX).is_file():
        if next(path.glob("pytorch_model*.bin"), None) is not None:
            raise ConfigError(_pickle(path))
        raise ConfigError(
            f"{path} has a {CONFIG} but no weights; {WEIGHTS} is expected, or {INDEX} and its files"
        )
    file_of = read_json(path / INDEX).get("weight_map")
    if not (isinstance(file_of, dict) and file_of and all(map(is_plain_name, file_of.values()))):
        raise CorruptError(f"{path / INDEX} is malformed: its weight_map is not names → files")
    files = tuple(path / name for name in sorted(set(file_of.values())))
    for file in files:
        if not file.is_file():
            raise CorruptError(f"{file} is missing; {path / INDEX} names it")
    return files


def _pickle(path: Path) -> str:
    """Compose the error message for weights in pytorch_model.bin, with one command that converts
    them, in which the pickle cannot run code."""
    code = (
        "import glob, torch, safetensors.torch as s; w = {}; "
        f"d = {json.dumps(str(path.resolve()))}; "
        '[w.update(torch.load(f, map_location="cpu", weights_only=True)) '
        'for f in sorted(glob.glob(glob.escape(d) + "/pytorch_model*.bin"))]; '
        "s.save_file({k: t.clone().contiguous() for k, t in w.items()}, "
        'd + "/model.safetensors", {"format": "pt"})'
    )
    return (
        f"{path} has its weights as a pickle (pytorch_model.bin), which can run code when it is "
        f"opened and is not read here; convert it once: python -c {shlex.quote(code)}"
    )


def _their_tensors(
    files: tuple[Path, ...], family: Family, passed_over: range, where: Path, warnings: list[str]
) -> dict[str, LazyTensor]:
    """Return the tensors in the files by the family's full name, as lazy tensors. The layers
    numbered `passed_over` are left out; `warnings` gets a line if there are any. `where`, the file
    or folder, is for messages. Raises CorruptError for a tensor that occurs twice."""
    body = family.body
    extra = tuple(f"{family.layers}{number}." for number in passed_over)
    tensors: dict[str, LazyTensor] = {}
    stored, n_passed_over = StoredTensors(files), 0
    for name in stored:
        full = name if name == family.head or name.startswith(body) else body + name
        within = full.removeprefix(body)
        if re.fullmatch(family.passed_over, within):
            continue
        if within.startswith(extra):
            n_passed_over += 1
            continue
        if full in tensors:
            raise CorruptError(f"{where} holds {name!r} a second time")
        tensors[full] = stored.lazy(name)
    if n_passed_over:
        warnings.append(
            f"{where}: {n_passed_over} tensors of layer {', '.join(map(str, passed_over))}, for "
            "multi-token prediction, are passed over: the model here predicts the next token alone"
        )
    return tensors


def weights_of(
    tensors: Mapping[str, LazyTensor], family: Family, model: ModelConfig, where: Path
) -> dict[str, LazyTensor]:
    """Return the weights, pentameter's name → tensor (fp32, or fp64 if any of the family's
    `tensors` is), converted at access. `where`, their file or folder, is for messages.

    Raises CorruptError if a name or shape is not one that the family's `model` has.
    """
    import torch

    tensor_map, packing = _map_of(family, model, tensors.keys()), family.packing
    form = StoredForm(tensor_map.their_shapes, frozenset())
    if packing is not None:
        form = packing.form_of(tensor_map.their_shapes, tensors)
    expected = form.shapes
    if missing := expected.keys() - tensors.keys():
        raise CorruptError(f"{where} lacks {few(missing)}")
    if unexpected := tensors.keys() - expected.keys():
        raise CorruptError(
            f"{where} holds what a {family.label} language model of its sizes does not have: "
            f"{few(unexpected)}"
        )
    for name, shape in expected.items():
        found, is_bytes = tensors[name], name in form.in_bytes
        is_right = found.dtype == torch.uint8 if is_bytes else found.dtype.is_floating_point
        if found.shape != shape or not is_right:
            raise CorruptError(
                f"{where}: {name} is {tuple(found.shape)} of {found.dtype}, its sizes ask for "
                f"{shape} of {'bytes' if is_bytes else 'floating-point numbers'}"
            )
    # fp32 holds every tensor exactly, unless one is fp64.
    has_double = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    if packing is not None:
        tensors = packing.unpack(tensors, tensor_map.their_shapes)
    return tensor_map.to_ours(tensors, torch.float64 if has_double else torch.float32)


def _map_of(family: Family, model: ModelConfig, names: Set[str]) -> TensorMap:
    """Return the map between the family's tensors and pentameter's for a folder whose tensors have
    these `names`. If one of these occurs only in folders with stacked experts (all experts of a
    layer in one tensor), stacked ones are expected, else a tensor for each expert."""
    published = TensorMap.of(family, model)
    stacked = TensorMap.of(family, model, is_stacked=True) if family.may_stack else published
    is_stacked = not names.isdisjoint(stacked.their_shapes.keys() - published.their_shapes.keys())
    return stacked if is_stacked else published


@dataclass(frozen=True)
class Exported:
    """The folder that an export wrote, with notes for the user."""

    path: Path
    notes: tuple[str, ...]
    """One line for each thing the folder lacks, with the reason."""


def export_hf(
    stored: StoredModel, out: Path, beside: Mapping[str, bytes] | None = None
) -> Exported:
    """Write the folder `out`, which `transformers.AutoModelForCausalLM.from_pretrained` opens.

    It holds config.json, generation_config.json, the weights (split into several files with an
    index beyond SHARD_BYTES), the tokenizer's files, and the files `beside`, name → content, such
    as a model card. The logits equal the model's: tensors are renamed, transposed and reordered,
    rows that pad the vocabulary are dropped, and biases that the model lacks are zero. One tensor
    is in memory at a time. The folder appears whole or not at all.

    Raises ConfigError for a model that no family can express, and if `out` exists and is not an
    empty folder; CorruptError unless the weights are all of the model's and no others; StorageError
    if writing fails.
    """
    out = Path(out)
    refuse_existing(out)
    model, tokenizer = stored.config.model, stored.tokenizer
    name = choose_family(model)
    vocab_size = model.vocab_size or tokenizer.vocab_size
    weights = their_weights(stored, families()[name])
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    token_ids = their_token_ids(tokenizer)
    config = to_their_config(name, model, vocab_size=vocab_size, token_ids=token_ids, dtype=dtype)
    of_tokenizer = tokenizer_files(tokenizer, model.context_length)
    small = {
        CONFIG: _json(config),
        GENERATION: generation_config(
            tokenizer,
            stored.ends_of_answers,
            token_ids,
            model.context_length,
            stored.config.train.sample_temperature,
        ),
        **of_tokenizer,
        **(beside or {}),
    }
    shards = _shards(weights)
    if len(shards) > 1:
        n_bytes = sum(map(_n_bytes, weights.values()))
        file_of = {key: file for file, tensors in shards.items() for key in tensors}
        small[INDEX] = _json({"metadata": {"total_size": n_bytes}, "weight_map": file_of})
    with building(out) as folder:
        for file, tensors in shards.items():
            write_hashed(folder / file, plan_file(tensors).chunks())
        for file, data in small.items():
            (folder / file).parent.mkdir(exist_ok=True)
            write_hashed(folder / file, [data])
    left_out = (
        f"the tokenizer ({tokenizer.kind}) is left out: Hugging Face's tokenizer files cannot "
        "express it; encode and decode with pentameter"
    )
    return Exported(out, () if of_tokenizer else (left_out,))


def their_weights(stored: StoredModel, family: Family) -> dict[str, LazyTensor]:
    """Return a model's weights by the names of `family`, which must be able to express it, as lazy
    tensors. Raises CorruptError unless the weights are all of the model's and no others."""
    model = stored.config.model
    vocab_size = model.vocab_size or stored.tokenizer.vocab_size
    whole = model.model_copy(update={"vocab_size": vocab_size})
    table = parameter_table(whole)
    complete = {spec.name: (spec.shape, None) for spec in table}
    check_weights(stored.weights, complete, stored.path)
    written = {spec.name: stored.weights[spec.name] for spec in table if not spec.is_state}
    weights = TensorMap.of(family, whole).to_theirs(written)
    return weights if family.packing is None else family.packing.pack(weights)


def _shards(weights: dict[str, LazyTensor]) -> dict[str, dict[str, LazyTensor]]:
    """Assign tensors to files in order, file name → its tensors; each file has at most SHARD_BYTES,
    or a single tensor."""
    groups: list[dict[str, LazyTensor]] = [{}]
    held = 0  # bytes in the last group
    for name, tensor in weights.items():
        n_bytes = _n_bytes(tensor)
        if held and held + n_bytes > SHARD_BYTES:
            groups.append({})
            held = 0
        groups[-1][name] = tensor
        held += n_bytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {
        f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": group
        for number, group in enumerate(groups, start=1)
    }


def _n_bytes(tensor: LazyTensor) -> int:
    """Return a tensor's size in bytes."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
