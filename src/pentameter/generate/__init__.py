"""Sampling text from a model."""

from pentameter.callable_module import make_callable
from pentameter.generate.detokenize import TextPieces
from pentameter.generate.loop import encode_prompt, generate, stream, stream_tokens, window_tokens
from pentameter.generate.sampling import Sampling

__all__ = [
    "Sampling",
    "TextPieces",
    "encode_prompt",
    "generate",
    "stream",
    "stream_tokens",
    "window_tokens",
]

make_callable(__name__, generate)
