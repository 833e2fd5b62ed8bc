"""Corpora and their shards in one call, for tests."""

from contextlib import ExitStack, suppress
from unittest import mock

from pentameter.config.data_schema import DataConfig
from pentameter.data.corpora.registry import corpus_of
from pentameter.data.corpora.text import Text
from pentameter.data.prepare import encoders
from pentameter.data.prepare.from_text import TextPreparation
from pentameter.data.prepare.splits import Splitting
from pentameter.data.progress import no_progress
from pentameter.data.shards import writer
from pentameter.data.tokenizers.setting import chosen_tokenizer
from pentameter.disk.atomic import FolderExistsError, refuse_existing


class MemoryFile:
    """An `InputFile` whose documents `start()` begins anew."""

    name = "memory"
    key = None

    def __init__(self, start, n_bytes):
        self.start, self.n_bytes = start, n_bytes

    def documents(self, contents):
        return self.start()


def text_of_documents(start, *, name="text", n_bytes=1, **settings):
    """A text; `start` begins a pass over its documents, each an iterator of chunks."""
    return Text(name, (MemoryFile(start, n_bytes),), **settings)


def corpus_at(path, **settings):
    return corpus_of(DataConfig(path=str(path), **settings))


def prepare(
    text,
    folder,
    *,
    tokenizer="char",
    splitting=None,
    shard_tokens=None,
    n_processes=None,
    progress=no_progress,
    keep_existing=False,
):
    """Prepare `text` with shards of `shard_tokens`, encoded by `n_processes`; `keep_existing` keeps
    a folder that has appeared meanwhile, as the cache does."""
    if not keep_existing:
        refuse_existing(folder)
    wanted = chosen_tokenizer(tokenizer)
    preparation = TextPreparation(text, wanted, splitting or Splitting(), progress)
    with ExitStack() as stack:
        if keep_existing:
            stack.enter_context(suppress(FolderExistsError))
        if shard_tokens is not None:
            stack.enter_context(mock.patch.object(writer, "SHARD_TOKENS", shard_tokens))
        if n_processes is not None:
            counted = mock.Mock(return_value=n_processes)
            stack.enter_context(mock.patch.object(encoders, "processes_for", counted))
        preparation.write_shards(folder, warnings=[])
