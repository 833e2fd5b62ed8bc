"""A text's shards in one call, for tests."""

from contextlib import ExitStack
from unittest import mock

from pentameter.data.prepare import from_text
from pentameter.data.prepare.contents import prepare_contents
from pentameter.data.prepare.splits import Splitting
from pentameter.data.shards import writer
from pentameter.data.tokenizers.setting import chosen_tokenizer
from pentameter.disk.atomic import refuse_existing


def prepare(
    text,
    folder,
    *,
    tokenizer="char",
    splitting=None,
    shard_tokens=None,
    n_processes=None,
    **options,
):
    """Prepare `text` with shards of `shard_tokens`, encoded by `n_processes`."""
    if not options.get("keep_existing"):
        refuse_existing(folder)
    wanted = chosen_tokenizer(tokenizer)
    told = {key: options[key] for key in ("progress",) if key in options}
    contents = from_text.read_contents(text, splitting or Splitting(), **told)
    with ExitStack() as stack:
        if shard_tokens is not None:
            stack.enter_context(mock.patch.object(writer, "SHARD_TOKENS", shard_tokens))
        if n_processes is not None:
            counted = mock.Mock(return_value=n_processes)
            stack.enter_context(mock.patch.object(from_text, "processes_for", counted))
        prepare_contents(contents, folder, wanted, **options)
