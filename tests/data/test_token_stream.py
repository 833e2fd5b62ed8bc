"""Streams: a text's tokens are the same whenever its parts are written, read and interrupted."""

import json
import shutil
import threading
import time
from unittest import mock

import numpy as np
import pytest
from preparing import corpus_at

from pentameter.config.data_schema import DataConfig, SourceConfig
from pentameter.data.batches import orders
from pentameter.data.batches.mixture import Mixture
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.corpora import files
from pentameter.data.open_dataset import open_dataset
from pentameter.data.prepare import background
from pentameter.data.prepare import token_stream_writer as preparing_stream
from pentameter.data.prepare.background import Ahead, Follower, failure_file
from pentameter.data.prepare.splits import Splitting
from pentameter.data.prepare.token_stream_writer import Parts, origin_of
from pentameter.data.shards import token_stream as stream_shards
from pentameter.data.shards.dataset import first_tokens
from pentameter.data.shards.token_stream import Source, is_token_stream, open_token_stream
from pentameter.data.tokenizers import chunking
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.chat import ChatTemplate
from pentameter.data.tokenizers.library import LibraryTokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError
from pentameter.machine.child import PythonChild

WORDS = [f"word{n}" for n in range(50)] + ["the", "a", "of"]
BPE = train_bpe([" ".join(WORDS)] * 9, 300)


def sentences(seed, n_words):
    chosen = np.random.default_rng(seed).choice(WORDS, n_words)
    return " ".join(chosen.tolist())


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Blocks of 512 tokens, and passages of about 2,000 characters, in this process."""
    monkeypatch.setattr(chunking, "CHUNK_CHARACTERS", 2000)
    monkeypatch.setattr(files, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(stream_shards, "BLOCK_TOKENS", 512)
    monkeypatch.setattr(preparing_stream, "FIRST_TOKENS", 513)
    monkeypatch.setattr(preparing_stream, "LARGEST_TOKENS", 2048)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """A folder with records in two files and one long text behind them."""
    folder = tmp_path / "text"
    folder.mkdir()
    for n in range(2):
        records = [{"text": sentences(100 * n + i, 30)} for i in range(30)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{n}.jsonl").write_text(lines)
    (folder / "long.txt").write_text(sentences(7, 20_000))
    return folder


def origin(folder, **settings):
    return origin_of(corpus_at(folder, **settings), BPE, Splitting(0.02, 0.01))


def written(origin, target, *, anew=False):
    """The stream's parts; with `anew`, a new process for each."""
    parts = Parts(origin, target)
    while parts.write_next():
        parts = Parts(origin, target) if anew else parts
    return open_token_stream(target, Source(target))


def content(dataset):
    return {
        name: (split.tokens[:].tolist(), split.document_starts.tolist(), split.n_bytes)
        for name, split in dataset.splits.items()
    }


def test_parts_join_to_the_text_wherever_they_end(folder, tmp_path):
    whole = written(origin(folder), tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("part-*"))) > 4
    text = [whole.split(name).tokens[:] for name in ("val", "test", "train")]
    decoded = whole.tokenizer.decode(np.concatenate(text)).replace("<|endoftext|>", "")
    assert decoded == "".join(corpus_at(folder).chunks())
    held_out = [whole.split(name).n_bytes for name in ("val", "test")]
    assert all(0.01 < n / len(decoded) < 0.25 for n in held_out)
    end = whole.tokenizer.end_of_text
    train = whole.split("train")
    ends = [int(start) - 1 for start in train.document_starts[1:]]
    assert {int(train.tokens[at]) for at in ends} == {end}
    assert content(written(origin(folder), tmp_path / "anew", anew=True)) == content(whole)


@pytest.mark.parametrize("kind", ["bpe", "library"])
@pytest.mark.parametrize("n_words", [200, 2_000, 20_000])
def test_a_text_is_held_out_as_asked_however_long_its_passages(tmp_path, kind, n_words):
    """One document, which a tokenizer of the library gets in pieces of four million characters."""
    text = sentences(7, n_words)
    (tmp_path / "long.txt").write_text(text)
    tokenizer = (
        BPE if kind == "bpe" else LibraryTokenizer(json.loads(BPE.to_tokenizer_json()), None)
    )
    of_text = origin_of(corpus_at(tmp_path / "long.txt"), tokenizer, Splitting(0.1, 0.05))
    dataset = written(of_text, tmp_path / "stream")
    shares = {name: split.n_bytes / len(text) for name, split in dataset.splits.items()}
    assert abs(shares["val"] - 0.1) < 0.02
    assert abs(shares["test"] - 0.05) < 0.02
    assert sum(shares.values()) == 1
    val, test, train = (
        tokenizer.decode(dataset.split(name).tokens[:]) for name in ("val", "test", "train")
    )
    assert (val + test + train).replace("<|endoftext|>", "") == text
    assert {each[:1] for each in (test, train)} == {" "}  # cut between words
    assert content(written(of_text, tmp_path / "anew", anew=True)) == content(dataset)


def test_short_documents_are_held_out_whole(folder, tmp_path):
    """As by earlier versions, so that their runs go on: a document is less than 1 % of the text."""
    val = written(origin(folder), tmp_path / "whole").split("val")
    first = [json.loads(line)["text"] for line in (folder / "0.jsonl").read_text().splitlines()]
    ends = [*val.document_starts[1:].tolist(), val.n_tokens]
    texts = [BPE.decode(val.tokens[a : b - 1]) for a, b in zip([0, *ends], ends, strict=False)]
    assert texts == first[: len(texts)]


def test_a_stream_keeps_the_chat_template_of_its_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text(sentences(7, 2_000))
    tokenizer = train_bpe([" ".join(WORDS)] * 9, 300)
    for source in ("{{ messages }}", "another", None):
        tokenizer.chat = None if source is None else ChatTemplate(source)
        tokenizer.save(tmp_path / "tokenizer.json")
        found = {}
        for order in ("streamed", "shuffled"):
            path, file = str(tmp_path / "text.txt"), str(tmp_path / "tokenizer.json")
            dataset = open_dataset(DataConfig(path=path, tokenizer=file, order=order))
            dataset.close()
            found[order] = dataset.tokenizer.chat
        assert found == dict.fromkeys(found, tokenizer.chat)


def test_a_killed_preparation_goes_on_where_it_was(folder, tmp_path):
    whole = content(written(origin(folder), tmp_path / "whole"))
    target = tmp_path / "killed"
    parts = Parts(origin(folder), target)
    for _ in range(3):
        parts.write_next()
    kill = mock.patch.object(preparing_stream.ShardWriter, "finish", side_effect=KeyboardInterrupt)
    with kill, pytest.raises(KeyboardInterrupt):
        parts.write_next()
    assert content(written(origin(folder), target)) == whole


def test_a_limit_and_texts_held_out_beside_it(folder, tmp_path):
    (tmp_path / "val.txt").write_text("held out")
    dataset = written(
        origin(folder, max_bytes=30_000, validation_path=str(tmp_path / "val.txt")),
        tmp_path / "out",
    )
    assert dataset.tokenizer.decode(dataset.split("val").tokens[:-1]) == "held out"
    assert dataset.split("train").n_bytes == 30_000
    start = "".join(corpus_at(folder).chunks())[:30_000]
    found = dataset.tokenizer.decode(dataset.split("train").tokens[:]).replace("<|endoftext|>", "")
    assert found == start


class Slowly:
    """Writes a stream's next part when somebody waits."""

    def __init__(self, parts):
        self.parts, self.n_waits = parts, 0

    def prepare(self, n_tokens):
        pass

    def wait(self, n_tokens):
        self.n_waits += 1
        self.parts.write_next()

    def close(self):
        pass


def batches_of(dataset, batch_size=4):
    return TrainingBatches(
        dataset.split("train"), "streamed", seed=1, batch_size=batch_size, context_length=16
    )


def test_a_step_reads_the_same_whatever_is_there(folder, tmp_path):
    whole = written(origin(folder), tmp_path / "whole")
    n_windows = (whole.split("train").n_tokens - 1) // 16
    batches = batches_of(whole)
    steps = [0, 3, 40, n_windows // 4, n_windows // 4 + 1, n_windows // 2]  # into further epochs
    expected = [batches.batch(step).hash() for step in steps]
    assert len(set(expected)) == len(steps)
    source = Slowly(Parts(origin(folder), tmp_path / "slow"))
    growing = batches_of(open_token_stream(tmp_path / "slow", source))
    assert source.n_waits == 1
    assert growing.batch(0).hash() == expected[0]
    assert source.n_waits == 1  # the first block is enough
    for step, each in zip(steps, expected, strict=True):
        rows = [growing.batch(step, np.array([row])).inputs for row in range(4)]
        assert np.array_equal(np.concatenate(rows), batches.batch(step).inputs)
        assert growing.batch(step).hash() == each
    source = Slowly(Parts(origin(folder), tmp_path / "late"))
    late = batches_of(open_token_stream(tmp_path / "late", source))
    assert [late.batch(step).hash() for step in reversed(steps)] == expected[::-1]
    assert growing.rows_per_epoch is batches.rows_per_epoch is None


def test_an_epoch_reads_each_window_once_and_near_its_place(folder, tmp_path):
    dataset = written(origin(folder), tmp_path / "whole")
    split = dataset.split("train")
    n_windows = (split.n_tokens - 1) // 16
    order = orders.Streamed(split, seed=3, batch_size=n_windows, context_length=16)
    first, second = (
        (order.starts(epoch, np.arange(n_windows)) // 16).tolist() for epoch in range(2)
    )
    assert sorted(first) == sorted(second) == list(range(n_windows))
    assert first != second
    assert all(window // 32 == row // 32 for row, window in enumerate(first))
    assert first[:32] != sorted(first[:32])


def test_another_text_is_another_stream_but_what_was_read_of_it(folder, tmp_path):
    before = origin(folder)
    one = written(before, tmp_path / "one")
    (folder / "long.txt").write_text(sentences(7, 20_000)[:-500] + "changed")
    assert origin(folder).hash != before.hash
    other = written(origin(folder), tmp_path / "other")
    assert other.hash != one.hash
    assert other.hash_of(2000) == one.hash_of(2000)
    assert other.hash_of(10**9) != one.hash_of(10**9)
    with pytest.raises(StorageError, match=r"long\.txt changed while the run read it"):
        written(before, tmp_path / "mixed")
    shutil.rmtree(tmp_path / "other" / "part-00001")
    shutil.copytree(tmp_path / "one" / "part-00001", tmp_path / "other" / "part-00001")
    with pytest.raises(CorruptError, match="is of another text than the parts before it"):
        open_token_stream(tmp_path / "other", Source(tmp_path / "other"))


def test_what_needs_the_whole_text_is_refused(folder, tmp_path):
    text = corpus_at(folder)
    with pytest.raises(ConfigError, match=r"tokenizer='char' must know all its characters"):
        origin_of(text, "char", Splitting())
    with pytest.raises(ConfigError, match=r"data\.split_by='document' knows the validation split"):
        origin_of(text, BPE, Splitting(by="document"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        written(origin(tmp_path / "empty.txt"), tmp_path / "out")
    dataset = written(origin(folder), tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"data\.order='random' needs the whole text"):
        TrainingBatches(dataset.split("train"), "random", seed=1, batch_size=1, context_length=16)


def test_the_beginning_alone_is_evaluated(folder, tmp_path):
    whole = written(origin(folder), tmp_path / "whole")
    target = tmp_path / "slow"
    growing = open_token_stream(target, Slowly(Parts(origin(folder), target)))
    for n_tokens in (100, 400, 10**9):
        few, same = (first_tokens(each.split("train"), n_tokens) for each in (growing, whole))
        assert few.tokens[:].tolist() == same.tokens[:].tolist()
        assert few.n_bytes == same.n_bytes


# -- in the background ------------------------------------------------------------------------


def opened(path, **settings):
    data = DataConfig(path=str(path), order="streamed", tokenizer="bpe:300", **settings)
    return open_dataset(data, verify=True)


def test_the_text_is_tokenized_in_the_background(folder):
    (folder / "long.txt").write_text(sentences(7, 100_000))
    dataset = opened(folder)
    try:
        batches = batches_of(dataset)
        assert batches.is_growing
        batches.prepare(10_000)
        train = dataset.split("train")
        n_tokens = train.tokens.up_to(10**9)
        assert n_tokens == train.n_tokens > train.beginning.n_tokens
    finally:
        dataset.close()
    assert is_token_stream(dataset.folders[0])
    again = opened(folder)  # finds all of it
    assert content(again)["train"][:2] == (
        train.tokens[:].tolist(), again.split("train").document_starts.tolist()
    )  # fmt: skip
    again.close()
    dataset.tokenizer.chat = ChatTemplate("{{ messages }}")
    with_tokenizer = open_dataset(
        DataConfig(path=str(folder), order="streamed", tokenizer="bpe:300"),
        tokenizer=dataset.tokenizer,
    )
    assert with_tokenizer.folders == dataset.folders  # its text's own
    assert with_tokenizer.tokenizer.chat == dataset.tokenizer.chat


def test_a_damaged_file_is_met_when_its_turn_comes(folder):
    lines = (folder / "1.jsonl").read_text().splitlines(keepends=True)
    (folder / "0.jsonl").write_text("".join(lines) * 200)  # more than is read ahead
    (folder / "1.jsonl").write_text("".join([*lines[:20], '{"text": \n', *lines[20:]]))
    data = DataConfig(path=str(folder), order="streamed", tokenizer="bpe:300")
    dataset = open_dataset(data, tokenizer=BPE)
    try:
        batches = batches_of(dataset)
        assert batches.batch(0).n_targets
        with pytest.raises(CorruptError, match=r"1\.jsonl, line 21 is not JSON"):
            batches.batch(100_000)
        assert batches.batch(1).n_targets  # what is there can still be read
    finally:
        dataset.close()


def test_those_who_wait_for_another_process_hear_of_its_error(folder, tmp_path):
    (folder / "0.jsonl").write_text("no JSON")
    target = tmp_path / "out"
    target.mkdir()
    follower = Follower(target)
    ahead = Ahead(origin(folder), target)
    try:
        with pytest.raises(CorruptError, match=r"0\.jsonl, line 1 is not JSON"):
            open_token_stream(target, ahead)
    finally:
        ahead.close()
    assert failure_file(target).exists()
    with pytest.raises(CorruptError, match=r"0\.jsonl, line 1 is not JSON"):
        open_token_stream(target, follower)


def test_who_closes_at_once_waits_for_no_part(folder, tmp_path, monkeypatch):
    """`close` may come while the process that writes is being started, and cannot be killed."""
    started = threading.Event()

    def slowly(*arguments, **named):
        started.set()
        time.sleep(0.3)
        return PythonChild(*arguments, **named)

    monkeypatch.setattr(background, "PythonChild", slowly)
    ahead = Ahead(origin(folder), tmp_path / "out")
    ahead.prepare(1 << 40)
    assert started.wait(60)
    ahead.close()
    assert not is_token_stream(tmp_path / "out")
    assert not failure_file(tmp_path / "out").exists()


def test_a_stopped_run_is_no_failure_of_another(folder, tmp_path):
    """`close` kills the process that writes, and whoever waits for the same parts waits on."""
    target = tmp_path / "out"
    target.mkdir()
    follower = Follower(target)
    ahead = Ahead(origin(folder), target)
    ahead.prepare(1 << 40)
    while ahead._child is None:
        time.sleep(0.01)
    ahead.close()
    assert not failure_file(target).exists()
    follower.wait(1)


def test_a_failure_of_another_run_is_its_own(folder, tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    follower = Follower(target)
    ahead = Ahead(origin(folder), target)
    monkeypatch.setenv("MASTER_PORT", "1")
    of_the_run = Follower(target)
    ahead.prepare(1 << 40)
    while ahead._child is None:
        time.sleep(0.01)
    ahead._child.kill()  # as where memory is short
    ahead._thread.join()
    with pytest.raises(StorageError, match="the process that tokenizes the text"):
        of_the_run.wait(1)
    follower.wait(1)
    ahead.close()


def test_a_mixture_of_streams(folder, tmp_path):
    (tmp_path / "other.txt").write_text(sentences(9, 30_000))
    sources = (
        SourceConfig(path=str(folder), weight=3.0),
        SourceConfig(path=str(tmp_path / "other.txt")),
    )
    data = DataConfig(sources=sources, order="streamed", tokenizer="bpe:300")
    dataset = open_dataset(data)
    try:
        train = dataset.split("train")
        assert [part.beginning is not None for part in train.parts] == [True, True]
        batches = TrainingBatches(
            train, "streamed", seed=1, batch_size=4, context_length=16, weights=[3.0, 1.0]
        )
        assert isinstance(batches.mixture, Mixture)
        assert batches.rows_per_epoch is None
        batches.prepare(50)
        hashes = [batches.batch(step).hash() for step in range(50)]
    finally:
        dataset.close()
    again = open_dataset(data)
    batches = TrainingBatches(
        again.split("train"), "streamed", seed=1, batch_size=4, context_length=16,
        weights=[3.0, 1.0],
    )  # fmt: skip
    assert [batches.batch(step).hash() for step in range(50)] == hashes
    again.close()


def test_prepared_shards_are_read_in_the_same_order(folder, tmp_path):
    dataset = written(origin(folder), tmp_path / "whole")
    part = tmp_path / "whole" / "part-00000"
    shards = open_dataset(DataConfig(path=str(part), order="streamed", tokenizer="char"))
    assert shards.split("train").beginning is None
    batches = batches_of(shards)
    assert batches.rows_per_epoch == (shards.split("train").n_tokens - 1) // 16
    assert batches.batch(0).hash() == batches_of(dataset).batch(0).hash()
