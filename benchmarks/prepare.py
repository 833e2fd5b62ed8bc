"""How fast `prepare` turns files into shards, beside the `tokenizers` library's own batch speed.

    python benchmarks/prepare.py [--tokenizer gpt2|bpe:8192|char] [--megabytes 30] [--pairs 3]

The text is the standard library's source, file by file, repeated under other names. `prepare` is
the whole command: start of the interpreter, two readings, encoding, hashes, files synced to disk.
The library's speed is `encode_batch` on the same documents, in memory, on its own threads; the two
take turns, and the ratio is the median of the pairs'. Memory is that of all processes together,
sampled ten times a second. A `bpe:N` tokenizer is trained before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

LIBRARY_BYTES = 1 << 23  # its results take some hundred bytes per token, so a few MB at a time


def write_text(folder: Path, megabytes: float) -> list[str]:
    """The documents, each a file below `folder`."""
    source = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(source.glob("*.py")) + sorted(source.glob("[a-z]*/*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue  # a few files say another encoding
    documents: list[str] = []
    n_bytes = 0
    while n_bytes < megabytes * 1e6:
        text = f"# {len(documents)}\n{texts[len(documents) % len(texts)]}"
        path = folder / f"{len(documents) // 1000:03d}" / f"{len(documents):06d}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        documents.append(text)
        n_bytes += len(text.encode())
    return documents


def resident_bytes(pid: int) -> int:
    """Memory of a process and of those it started; 0 where it has ended."""
    try:
        status = Path(f"/proc/{pid}/smaps_rollup").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0
    own = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("Pss:"))
    return own * 1024 + sum(resident_bytes(int(child)) for child in children)


def time_prepare(source: Path, tokenizer: str, out: Path) -> tuple[float, int]:
    """Seconds of the command, and the most memory it was seen to take."""
    command = [sys.executable, "-m", "pentameter", "prepare", str(source)]
    command += ["--tokenizer", tokenizer, "--split-by", "document", "--out", str(out)]
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, resident_bytes(process.pid))
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(process.returncode)
    return time.perf_counter() - start, peak


def time_library(library: Any, documents: list[str]) -> float:
    """Seconds of `encode_batch` over the documents."""
    start = time.perf_counter()
    batch: list[str] = []
    n_bytes = 0
    for document in documents:
        batch.append(document)
        n_bytes += len(document)
        if n_bytes >= LIBRARY_BYTES:
            library.encode_batch(batch)
            batch, n_bytes = [], 0
    library.encode_batch(batch)
    return time.perf_counter() - start


def library_tokenizer(path: Path) -> Any:
    """The library's tokenizer with the vocabulary of a tokenizer file."""
    import tokenizers

    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = {token: number for number, token in enumerate(content["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in content["merges"]]
    library: Any = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", default="gpt2")
    parser.add_argument("--megabytes", type=float, default=30)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text").mkdir()
        documents = write_text(folder / "text", options.megabytes)
        n_bytes = sum(len(document.encode()) for document in documents)
        print(f"{len(documents):,} files, {n_bytes / 1e6:.1f} MB, {os.cpu_count()} cores")
        tokenizer, library = options.tokenizer, None
        if tokenizer != "char":
            from pentameter.data.tokenizers.setting import build_tokenizer

            made = build_tokenizer(tokenizer, lambda: iter(documents[:500]))
            made.save(folder / "made.json")
            tokenizer, library = str(folder / "made.json"), library_tokenizer(folder / "made.json")
        ratios = []
        for pair in range(options.pairs):
            out = folder / f"out-{pair}"
            seconds, peak = time_prepare(folder / "text", tokenizer, out)
            header = json.loads((out / "text.json").read_text())
            n_tokens = header["n_tokens"]
            line = f"prepare {n_bytes / seconds / 1e6:.2f} MB/s, {n_tokens / seconds:,.0f} "
            line += f"tokens/s, {peak / 1e6:.0f} MB"
            if library is not None:
                own = time_library(library, documents)
                ratios.append(own / seconds)
                line += f"; encode_batch {n_bytes / own / 1e6:.2f} MB/s; ratio {ratios[-1]:.2f}"
            print(line, flush=True)
        if ratios:
            print(f"median ratio {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
