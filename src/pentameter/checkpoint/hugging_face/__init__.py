"""GPT-2 folders of Hugging Face, both ways: what `transformers` writes is read, and it opens ours.

Nothing here imports `transformers`: config.json, safetensors and the tokenizer's files are public
formats.
"""

from pentameter.checkpoint.hugging_face.export import Exported, export_hf
from pentameter.checkpoint.hugging_face.reading import read_hf

__all__ = ["Exported", "export_hf", "read_hf"]
