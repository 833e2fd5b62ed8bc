"""Writing beside others: tokens per second of `sample`, of `serve`'s batcher, of `transformers` and
of llama.cpp, with the same exported weights.

A model with random weights is written as `export` writes it, in Hugging Face's form and as GGUF.
Each side draws every token at temperature 1 from the whole vocabulary and takes turns with the
others; the texts begin with one token. Sides whose package is absent are left out: `pip install
transformers llama-cpp-python`. What each step reads of the weights, by their bytes, stands beside
what this machine reads of a long array.

    python benchmarks/sample_peers.py [--models character qwen3] [--dtypes float32 bfloat16]
        [--streams 1 16] [--new-tokens 128] [--rounds 3] [--sides sample transformers ...] [--json]
"""

# ruff: noqa: E402

from __future__ import annotations

from pentameter.machine.load.beside_others import BesideOthers
from pentameter.machine.load.idle_threads import prepare_threads

prepare_threads()  # as the command line does, before torch is imported

import argparse
import gc
import importlib
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pentameter.checkpoint.exports import EXPORTS
from pentameter.checkpoint.folders.load_model import open_model
from pentameter.checkpoint.gguf.tensors import DTYPES
from pentameter.config.model.attention import AttentionConfig
from pentameter.config.model.feed_forward import FeedForwardConfig
from pentameter.config.schema import ModelConfig
from pentameter.generation import loop
from pentameter.generation.loop import Generation, sampled_tokens
from pentameter.model.gpt import GPT, build_model
from pentameter.model.matmul import PLAIN
from pentameter.serve.batching import Batcher
from pentameter.serve.continuation import Continuation, TextRequest
from pentameter.serve.passes import Slots
from serve import MODELS as SERVED
from serve import save_run, tokenizer_for

MODELS = {
    "character": SERVED["character"],
    "qwen3": ModelConfig(  # as wide as the published model of 0.6 billion, with 12 layers of 28
        vocab_size=32768,
        context_length=512,
        n_layers=12,
        d_model=1024,
        norm="rmsnorm",
        norm_eps=1e-6,
        positions="rotary",
        rope_theta=1e6,
        bias=False,
        tied_head=True,
        attention=AttentionConfig(n_heads=16, n_kv_heads=8, head_size=128, qk_norm="head"),
        feed_forward=FeedForwardConfig(width=3072, activation="swiglu"),
    ),
}
GGUF_DTYPES = {"float32": "F32", "bfloat16": "BF16", "published": "BF16"}
"""What the weights are: `published` as a Hugging Face folder in bf16 is read, which is computed in
fp32 by us, and in bf16 by the others."""
AIMS = {"transformers": 3.0, "llama.cpp": 1.0}

Write = Callable[[int, int], None]
"""Writes texts: their number, and the tokens of each."""


@dataclass(frozen=True)
class Exported:
    """A model as every side reads it."""

    config: ModelConfig
    dtype: str
    """A key of GGUF_DTYPES."""
    hugging_face: Path
    gguf: Path

    @property
    def vocab_size(self) -> int:
        assert self.config.vocab_size is not None
        return self.config.vocab_size

    def built(self) -> GPT:
        """Return our model with these weights."""
        model = build_model(self.config, 1)
        if self.dtype != "float32":
            model = model.bfloat16()
        return (model.float() if self.dtype == "published" else model).eval()


def exported(folder: Path, config: ModelConfig, dtype: str) -> Exported:
    run = folder / "run"
    if not run.is_dir():
        save_run(run, config)
    found = Exported(config, dtype, folder / "hf", folder / f"{dtype}.gguf")
    if not found.hugging_face.is_dir():
        EXPORTS["hf"].write(open_model(run), found.hugging_face, {}, "")
    assert GGUF_DTYPES[dtype] in DTYPES
    EXPORTS["gguf"].write(open_model(run), found.gguf, {}, GGUF_DTYPES[dtype])
    return found


def by_sample(exported: Exported, _most: int) -> Write:
    model, start = exported.built(), np.zeros(1, dtype=np.int64)

    def write(n_texts: int, n_tokens: int) -> None:
        settings = Generation(max_new_tokens=n_tokens, num_samples=n_texts)
        deque(sampled_tokens(model, start, exported.vocab_size, settings), maxlen=0)

    return write


def by_pytorch(exported: Exported, most: int) -> Write:
    """Our loop as it computes where the kernels are not: PyTorch's operations alone."""
    write = by_sample(exported, most)

    def write_plainly(n_texts: int, n_tokens: int) -> None:
        kernels, loop.few_rows = loop.few_rows, lambda *_: PLAIN
        try:
            write(n_texts, n_tokens)
        finally:
            loop.few_rows = kernels

    return write_plainly


def by_serve(exported: Exported, most: int) -> Write:
    tokenizer = tokenizer_for(exported.vocab_size)
    slots = Slots(exported.built(), exported.vocab_size, most)
    slots.find_shapes()
    batcher, start = Batcher(slots), np.zeros(1, dtype=np.int64)

    def write(n_texts: int, n_tokens: int) -> None:
        for sample in range(n_texts):
            asked = TextRequest(start, n_tokens, sample=sample)
            batcher.add(Continuation(asked, tokenizer))
        while not batcher.is_idle:
            batcher.step()

    return write


def by_transformers(exported: Exported, _most: int) -> Write:
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        exported.hugging_face,
        dtype=torch.float32 if exported.dtype == "float32" else torch.bfloat16,
    ).eval()
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0
    )

    def write(n_texts: int, n_tokens: int) -> None:
        tokens = torch.zeros((n_texts, 1), dtype=torch.int64)
        mask = torch.ones_like(tokens)
        found = model.generate(tokens, attention_mask=mask, max_new_tokens=n_tokens)
        assert found.shape == (n_texts, 1 + n_tokens)

    return write


def by_llama_cpp(exported: Exported, most: int) -> Write:
    """llama.cpp through its C interface: one batch with a token of each text, and its sampler."""
    api: Any = importlib.import_module("llama_cpp")
    silent = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(silent, None)
    path = str(exported.gguf).encode()
    model = api.llama_model_load_from_file(path, api.llama_model_default_params())
    settings = api.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max = exported.config.context_length * most, most
    settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
    context = api.llama_init_from_model(model, settings)
    assert context
    sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    api.llama_sampler_chain_add(sampler, api.llama_sampler_init_dist(1))
    batch = api.llama_batch_init(most, 0, 1)

    def write(n_texts: int, n_tokens: int, _kept: object = silent) -> None:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        tokens = [0] * n_texts
        batch.n_tokens = n_texts
        for position in range(n_tokens):
            for text, token in enumerate(tokens):
                batch.token[text], batch.pos[text] = token, position
                batch.n_seq_id[text], batch.seq_id[text][0], batch.logits[text] = 1, text, 1
            assert api.llama_decode(context, batch) == 0
            tokens = [api.llama_sampler_sample(sampler, context, text) for text in range(n_texts)]

    return write


SIDES: Mapping[str, Callable[[Exported, int], Write]] = {
    "sample": by_sample,
    "pytorch": by_pytorch,
    "serve": by_serve,
    "transformers": by_transformers,
    "llama.cpp": by_llama_cpp,
}


def read_bytes_per_second() -> float:
    """Return the rate at which all threads read an array of 512 MiB, the best of three."""
    array, seconds = torch.ones(2**27), []
    for _ in range(4):
        start = time.perf_counter()
        array.sum()
        seconds.append(time.perf_counter() - start)
    return array.nbytes / min(seconds)


def measure(sides: Mapping[str, Write], n_texts: int, n_tokens: int, rounds: int) -> dict[str, Any]:
    """Return each side's median tokens per second, and the median of ours over it, round by
    round."""
    for write in sides.values():
        write(n_texts, 4)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, write in sides.items():
            start = time.perf_counter()
            write(n_texts, n_tokens)
            rates[name].append(n_texts * n_tokens / (time.perf_counter() - start))
    ours = rates[next(iter(sides))]
    return {
        name: {
            "tokens_per_second": statistics.median(found),
            "ratio": statistics.median(a / b for a, b in zip(ours, found, strict=True)),
        }
        for name, found in rates.items()
    }


def opened(names: list[str], exported: Exported, most: int) -> dict[str, Write]:
    sides = {}
    for name in names:
        try:
            sides[name] = SIDES[name](exported, most)
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", choices=MODELS, nargs="+", default=[*MODELS])
    parser.add_argument("--dtypes", choices=GGUF_DTYPES, nargs="+", default=[*GGUF_DTYPES])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=[*SIDES])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()

    reads = read_bytes_per_second()
    if not asked.json:
        print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", end="")
        print(f", reads {reads / 1e9:.1f} GB/s; {asked.new_tokens} new tokens, temperature 1")
    rows = []
    for name in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            for dtype in asked.dtypes:
                files = exported(Path(folder), MODELS[name], dtype)
                sides = opened(asked.sides, files, max(asked.streams))
                n_bytes = sum(each.nbytes for each in files.built().parameters())
                for n_texts in asked.streams:
                    found = measure(sides, n_texts, asked.new_tokens, asked.rounds)
                    for side, row in found.items():
                        row["read_share"] = row["tokens_per_second"] / n_texts * n_bytes / reads
                        rows.append({"model": name, "dtype": dtype, "streams": n_texts} | row)
                        rows[-1]["side"] = side
                        if not asked.json:
                            print(
                                f"{name:>10} {dtype:>9} {n_texts:>3} {side:>13} "
                                f"{row['tokens_per_second']:>8.1f} tokens/s, {asked.sides[0]} is "
                                f"{row['ratio']:>5.2f} × it (aim {AIMS.get(side, 1):.0f}), weights "
                                f"at {row['read_share']:.0%} of what is read",
                                flush=True,
                            )
                del sides
                gc.collect()
    if asked.json:
        print(
            json.dumps({"torch": torch.__version__, "read_bytes_per_second": reads, "rows": rows})
        )


if __name__ == "__main__":
    with BesideOthers():  # as the command line
        main()
