"""The process that `encoding.py` starts: texts come in by its pipe, ids go out."""

from __future__ import annotations

import pickle
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np

from pentameter.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from pentameter.errors import PentameterError


def serve(tokenizer: Tokenizer, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer each list of texts with (all their ids, their lengths), or with the error raised."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    while True:
        try:
            texts = pickle.load(requests)  # written by the process that started this one
        except EOFError:
            return
        answer: object
        try:
            ids = tokenizer.encode_batch(texts)
            answer = np.concatenate(ids).astype(dtype), [len(part) for part in ids]
        except PentameterError as error:
            answer = error
        pickle.dump(answer, answers, protocol=5)
        answers.flush()


def main(tokenizer: str) -> None:
    """Serve the process that started this one, until it closes the pipe; `tokenizer` is a file in
    a temporary folder of its own."""
    # Ctrl-C reaches the whole group of processes; the one that started this ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(load_tokenizer(tokenizer), sys.stdin.buffer, sys.stdout.buffer)
    with suppress(OSError):  # who started this process was killed, or it would have ended this one
        Path(tokenizer).unlink(missing_ok=True)
        Path(tokenizer).parent.rmdir()
