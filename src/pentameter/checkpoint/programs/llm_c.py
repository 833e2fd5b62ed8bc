"""llm.c's `.bin`: GPT-2 in fp32 or bf16, a header and the tensors one behind the other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pentameter.checkpoint.hugging_face.families.table import family_in
from pentameter.checkpoint.programs.nanogpt import ALWAYS, FAMILY, gpt2_tokenizer
from pentameter.checkpoint.programs.program_model import ProgramModel
from pentameter.data.tokenizers.base import Tokenizer
from pentameter.errors import ConfigError, CorruptError

if TYPE_CHECKING:
    import torch

MAGIC, HEADER_INTEGERS = 20240326, 256
DTYPES = {3: ("<f4", "float32"), 5: ("<i2", "bfloat16")}
"""Version of the format, which says how numbers are stored → the file's type, PyTorch's."""


def is_llm_c(path: Path) -> bool:
    """Return True if a file begins as llm.c's models do."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC.to_bytes(4, "little")


def read(path: Path, tokenizer: Tokenizer | None) -> ProgramModel:
    """Return the model in a `.bin`. Raises ConfigError for an unknown version, CorruptError for a
    file of another length than its header says."""
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTEGERS)
    if len(header) < HEADER_INTEGERS:
        raise CorruptError(f"{path} ends within its header")
    version, T, V, L, H, D, padded = header[1:8].tolist()
    if version not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise ConfigError(f"{path} has version {version} of llm.c's format; {known} are read")
    if min(T, V, L, H, D) < 1 or not V <= padded < V + (1 << 16) or max(T, V, L, H, D) > 1 << 24:
        raise CorruptError(f"{path}: its header has no sizes of a model: {header[1:8].tolist()}")
    shapes = _shapes(T, padded, L, D)
    stored, dtype = DTYPES[version]
    start, n = 4 * HEADER_INTEGERS, sum(math.prod(shape) for _, shape in shapes)
    n_bytes = start + n * np.dtype(stored).itemsize
    if path.stat().st_size != n_bytes:
        raise CorruptError(
            f"{path} has {path.stat().st_size:,} bytes; its header asks for {n_bytes:,}"
        )
    tensors = _tensors(path, shapes, stored, dtype)
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"][:V]
    section = ALWAYS | {
        "vocab_size": V,
        "context_length": T,
        "n_layers": L,
        "attention.n_heads": H,
        "d_model": D,
        "bias": True,
        "attention.qkv_bias": True,
        "feed_forward.activation": "gelu_tanh",
    }
    return ProgramModel(family_in(FAMILY), section, tensors, tokenizer or gpt2_tokenizer(), path)


def _shapes(T: int, V: int, L: int, D: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return (name in nanoGPT, shape) for each tensor in the order of the file: of tensors in
    layers, those of one name for all layers."""
    in_layers: dict[str, tuple[int, ...]] = {
        "ln_1.weight": (D,),
        "ln_1.bias": (D,),
        "attn.c_attn.weight": (3 * D, D),
        "attn.c_attn.bias": (3 * D,),
        "attn.c_proj.weight": (D, D),
        "attn.c_proj.bias": (D,),
        "ln_2.weight": (D,),
        "ln_2.bias": (D,),
        "mlp.c_fc.weight": (4 * D, D),
        "mlp.c_fc.bias": (4 * D,),
        "mlp.c_proj.weight": (D, 4 * D),
        "mlp.c_proj.bias": (D,),
    }
    return [
        ("transformer.wte.weight", (V, D)),
        ("transformer.wpe.weight", (T, D)),
        *((f"transformer.h.{i}.{name}", s) for name, s in in_layers.items() for i in range(L)),
        ("transformer.ln_f.weight", (D,)),
        ("transformer.ln_f.bias", (D,)),
    ]


def _tensors(
    path: Path, shapes: list[tuple[str, tuple[int, ...]]], stored: str, dtype: str
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file by name, mapped from it, one behind the other."""
    import torch

    numbers = np.memmap(path, dtype=stored, mode="c", offset=4 * HEADER_INTEGERS)
    whole = torch.from_numpy(numbers).view(getattr(torch, dtype))
    tensors: dict[str, torch.Tensor] = {}
    first = 0
    for name, shape in shapes:
        n = math.prod(shape)
        tensors[name] = whole[first : first + n].view(shape)
        first += n
    return tensors
