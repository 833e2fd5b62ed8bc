"""Data: corpora, tokenizers, token shards, and the batch of each step. Imports no torch."""

from pentameter.data.batches import (
    Batch,
    TrainingBatches,
    training_batches,
)
from pentameter.data.contents import Splitting
from pentameter.data.corpora import CORPORA, corpus_text
from pentameter.data.dataset import Dataset, TokenSplit, open_dataset
from pentameter.data.evaluation import evaluation_batches
from pentameter.data.grammar import grammar_entropy_rate
from pentameter.data.prepare import prepare
from pentameter.data.progress import Progress
from pentameter.data.tokenizer import (
    CharTokenizer,
    Tokenizer,
    UnseenCharacterError,
    load_tokenizer,
)

__all__ = [
    "CORPORA",
    "Batch",
    "CharTokenizer",
    "Dataset",
    "Progress",
    "Splitting",
    "TokenSplit",
    "Tokenizer",
    "TrainingBatches",
    "UnseenCharacterError",
    "corpus_text",
    "evaluation_batches",
    "grammar_entropy_rate",
    "load_tokenizer",
    "open_dataset",
    "prepare",
    "training_batches",
]
