import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.config.data_schema import DataConfig, GrammarConfig
from pentameter.data.batches.step import TrainingBatches
from pentameter.data.open_dataset import open_dataset
from pentameter.data.prepare import preparation
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.setting import load_tokenizer
from pentameter.errors import ConfigError, CorruptError
from pentameter.evaluate.split import evaluation_batches
from pentameter.generation.prompts import encode_prompt


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pentameter" / "prepared"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "my text.txt"
    path.write_bytes("naïve\r\n日本 🙂\r\n".encode() * 20)
    return path


def content(dataset):
    splits = [dataset.split(name) for name in ("train", "val", "test")]
    return "".join(dataset.tokenizer.decode(split.tokens[:]) for split in splits)


def test_a_file_becomes_a_data_set(text_file):
    text = text_file.read_bytes().decode()
    dataset = open_dataset(DataConfig(path=str(text_file), test_fraction=0.2))
    assert content(dataset) == text
    assert dataset.vocab_size == len(set(text))
    n = len(text)
    assert [dataset.split(s).n_tokens for s in ("train", "val", "test")] == [
        int(0.7 * n),
        int(0.8 * n) - int(0.7 * n),
        n - int(0.8 * n),
    ]
    assert dataset.split("val").n_bytes == len(text[int(0.7 * n) : int(0.8 * n)].encode())
    with pytest.raises(ConfigError, match="no split 'validation'"):
        dataset.split("validation")


def test_the_second_start_prepares_nothing(text_file, monkeypatch):
    data = DataConfig(path=str(text_file))
    stages = set()
    first = open_dataset(data, progress=lambda stage, done, total: stages.add(stage))
    assert stages == {"reading", "encoding", "verifying"}
    monkeypatch.setattr(
        preparation.Preparation, "write_shards", lambda *_, **__: pytest.fail("prepared again")
    )
    assert open_dataset(data).hash == first.hash


def test_the_cache_knows_a_changed_text_by_its_content(text_file):
    data = DataConfig(path=str(text_file))
    first = open_dataset(data)
    before = text_file.stat()
    changed = text_file.read_bytes().replace(b"na", b"an")
    text_file.write_bytes(changed)
    os.utime(text_file, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time
    assert content(open_dataset(data)) == changed.decode()
    assert first.hash != open_dataset(data).hash


@pytest.mark.parametrize(
    "settings",
    [
        {"validation_fraction": 0.2},
        {"test_fraction": 0.1},
        {"max_bytes": 101},
        {"split_by": "document"},
    ],
)
def test_settings_that_shape_the_tokens_have_their_own_entry(text_file, settings, cache):
    plain = open_dataset(DataConfig(path=str(text_file)))
    other = open_dataset(DataConfig(path=str(text_file), **settings))
    assert plain.hash != other.hash
    assert len(list(cache.iterdir())) == 2
    if "max_bytes" in settings:
        assert len(content(other).encode()) in range(98, 102)


def test_damage_in_the_cache_is_found_and_says_what_to_delete(text_file, cache):
    data = DataConfig(path=str(text_file))
    open_dataset(data)
    shard = next(cache.glob("*/*-00000.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(CorruptError, match=rf"truncated.*delete {shard.parent}"):
        open_dataset(data)
    shutil.rmtree(shard.parent)
    open_dataset(data)
    content = bytearray(shard.read_bytes())
    content[0] ^= 1  # another id of the vocabulary
    shard.write_bytes(content)
    with pytest.raises(CorruptError, match=rf"{shard} was changed.*delete {shard.parent}"):
        open_dataset(data)
    next(cache.glob("*/my-text.json")).unlink()
    with pytest.raises(CorruptError, match=rf"is missing.*delete {shard.parent}"):
        open_dataset(data)


PREPARE_WHEN_TOLD = """
import sys
from pentameter.config.data_schema import DataConfig
from pentameter.data.open_dataset import open_dataset
from pentameter.data.prepare import preparation
print("ready", flush=True)
sys.stdin.readline()
print(open_dataset(DataConfig(path=sys.argv[1])).hash)
"""


def test_processes_that_prepare_at_once_agree(text_file, cache):
    # Fresh interpreters: forking this one, whose libraries have threads, may hang the child.
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PREPARE_WHEN_TOLD, str(text_file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 4
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    hashes = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert hashes == {open_dataset(DataConfig(path=str(text_file))).hash}
    assert len(list(cache.iterdir())) == 1  # no temporary folder is left


def test_what_a_killed_process_left_is_removed(text_file, cache):
    data = DataConfig(path=str(text_file))
    script = (
        "import os, sys\n"
        "from pentameter.config.data_schema import DataConfig\n"
        "from pentameter.data.open_dataset import open_dataset\n"
        "def kill(stage, done, total):\n"
        "    if stage == 'encoding': os.kill(os.getpid(), 9)\n"
        "open_dataset(DataConfig(path=sys.argv[1]), progress=kill)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(text_file)], check=False)
    assert [folder.name for folder in cache.iterdir() if folder.name.endswith(".part")]
    open_dataset(data)
    assert not [folder.name for folder in cache.iterdir() if folder.name.endswith(".part")]


def test_prepared_shards_are_opened_as_they_are(text_file, cache):
    open_dataset(DataConfig(path=str(text_file), validation_fraction=0.3))
    (folder,) = cache.iterdir()
    dataset = open_dataset(DataConfig(path=str(folder)))
    assert dataset.split("val").n_tokens == pytest.approx(0.3 * len(content(dataset)), abs=1)
    assert open_dataset(DataConfig(path=str(folder / "my-text.json"))).hash == dataset.hash
    assert len(list(cache.iterdir())) == 1
    with pytest.raises(ConfigError, match="max_bytes=5 cannot change prepared shards"):
        open_dataset(DataConfig(path=str(folder), max_bytes=5))
    with pytest.raises(ConfigError, match="written by another tokenizer"):
        open_dataset(DataConfig(path=str(folder)), tokenizer=CharTokenizer("abc"))


def test_a_given_tokenizer_is_used_and_shares_the_entry_where_it_is_the_same(text_file, cache):
    data = DataConfig(path=str(text_file))
    own = open_dataset(data)
    assert open_dataset(data, tokenizer=own.tokenizer).hash == own.hash
    assert len(list(cache.iterdir())) == 1
    wider = CharTokenizer([*own.tokenizer.characters, "z"])
    assert open_dataset(data, tokenizer=wider).vocab_size == own.vocab_size + 1
    wider.save(text_file.parent / "wider.json")
    by_file = DataConfig(path=str(text_file), tokenizer=str(text_file.parent / "wider.json"))
    assert open_dataset(by_file).tokenizer.hash == wider.hash
    with pytest.raises(ConfigError, match="not in the tokenizer's vocabulary"):
        open_dataset(data, tokenizer=CharTokenizer("na"))
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "settings",
    [
        {"path": "pairs.jsonl", "tokenizer": "bpe:270"},
        {"path": "pairs.jsonl"},
        {"corpus": "grammar", "grammar": GrammarConfig(n_characters=5000)},  # known without reading
    ],
    ids=["conversations", "characters", "grammar"],
)
def test_a_trained_models_tokenizer_finds_what_its_setting_made_of_any_corpus(
    tmp_path, cache, monkeypatch, settings
):
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n' * 20)
    own = open_dataset(DataConfig(**settings))
    again = open_dataset(DataConfig(**settings), tokenizer=own.tokenizer)
    assert again.hash == own.hash
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("tokenizer", ["word", "bpe:300"])
def test_vocabularies_are_made_from_the_train_split(text_file, cache, tokenizer):
    text_file.write_text("to learn from, to learn from\n" * 20 + "held\n" * 2)
    data = DataConfig(path=str(text_file), tokenizer=tokenizer, validation_fraction=0.05)
    dataset = open_dataset(data)
    assert dataset.tokenizer.kind == tokenizer.partition(":")[0]
    assert "held" not in dataset.tokenizer.to_bytes().decode()
    # A trained model's own tokenizer finds the same entry.
    assert open_dataset(data, tokenizer=dataset.tokenizer).hash == dataset.hash
    assert len(list(cache.iterdir())) == 1
    by_shards = DataConfig(path=str(next(cache.iterdir())), tokenizer="gpt2")
    with pytest.raises(ConfigError, match=r"bpe:5'.*size must be at least"):
        open_dataset(by_shards.model_copy(update={"tokenizer": "bpe:5"}))
    other = "word" if tokenizer != "word" else "bpe:300"
    with pytest.raises(ConfigError, match=f"not data.tokenizer='{other}'"):
        open_dataset(by_shards.model_copy(update={"tokenizer": other}))


def test_texts_of_their_own_are_held_out(text_file, cache, tmp_path):
    val, test = tmp_path / "val.txt", tmp_path / "test.jsonl"
    val.write_text("a validation text")
    test.write_text('{"text": "Q"}\n{"text": "R!"}\n')
    held_out = {"validation_path": str(val), "test_path": str(test)}
    data = DataConfig(path=str(text_file), **held_out)
    dataset = open_dataset(data)
    splits = [dataset.split(name) for name in ("train", "val", "test")]
    texts = [dataset.tokenizer.decode(split.tokens[:]) for split in splits]
    assert texts == [text_file.read_bytes().decode(), "a validation text", "QR!"]
    assert splits[2].document_starts.tolist() == [0, 1]
    test.write_text('{"text": "QR"}\n{"text": "!"}\n')  # the same text, cut elsewhere
    assert open_dataset(data).split("test").document_starts.tolist() == [0, 2]
    assert len(list(cache.iterdir())) == 2
    with pytest.raises(ConfigError, match=r"validation_path=.* cannot change prepared shards"):
        open_dataset(DataConfig(path=str(next(cache.iterdir())), **held_out))


def test_empty_tiny_and_missing_texts(tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    with pytest.raises(ConfigError, match="'empty' is empty"):
        open_dataset(DataConfig(path=str(empty)))
    tiny = tmp_path / "tiny.txt"
    tiny.write_bytes(b"tiny text, twenty ch")
    dataset = open_dataset(DataConfig(path=str(tiny)))
    with pytest.raises(ConfigError, match=r"'train' has 18 tokens.*context_length of at most 17"):
        TrainingBatches(dataset.split("train"), "random", seed=0, batch_size=1, context_length=64)
    (batch,) = evaluation_batches(dataset.split("val"), context_length=64, batch_size=8)
    assert (batch.targets >= 0).sum() == 1
    with pytest.raises(ConfigError, match="does not exist"):
        open_dataset(DataConfig(path=str(tmp_path / "missing.txt")))


def test_the_grammar_is_prepared_without_reading_it_twice(cache):
    data = DataConfig(corpus="grammar", grammar=GrammarConfig(n_characters=5000))
    dataset = open_dataset(data)
    assert dataset.split("train").n_tokens == 4500
    assert dataset.vocab_size == 16
    stages = []
    open_dataset(data, progress=lambda stage, done, total: stages.append(stage))
    assert set(stages) == {"verifying"}


def test_data_needs_no_torch():
    code = "import sys, pentameter.data, pentameter.cli.prepare; assert 'torch' not in sys.modules"
    source = Path(preparation.__file__).parents[3]
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(source)}
    )


def test_the_same_text_in_another_encoding_is_the_same_data_set(text_file, tmp_path):
    text = text_file.read_bytes().decode()
    other, records = tmp_path / "other", tmp_path / "records"
    for folder in (other, records):
        folder.mkdir()
    (other / text_file.name).write_text(text, encoding="utf-16", newline="")
    whole, held_out = json.dumps({"body": text}), json.dumps({"body": text[:40]})
    (records / "my text.jsonl").write_text(whole, encoding="gb18030")
    (records / "val.jsonl").write_text(held_out, encoding="gb18030")
    plain = open_dataset(DataConfig(path=str(text_file)))
    settings = {"path": str(other / text_file.name), "encoding": "utf-16"}
    assert open_dataset(DataConfig(**settings)).hash == plain.hash  # bytes of text are UTF-8's
    settings = {
        "path": str(records / "my text.jsonl"),
        "validation_path": str(records / "val.jsonl"),
        "encoding": "gb18030",
        "text_field": "body",
    }
    dataset = open_dataset(DataConfig(**settings))
    assert content(dataset) == text + text[:40]
    assert dataset.split("val").n_bytes == len(text[:40].encode())


@pytest.mark.parametrize(("key", "value"), [("encoding", "gb18030"), ("text_field", "content")])
def test_prepared_shards_have_no_encoding(text_file, cache, key, value):
    open_dataset(DataConfig(path=str(text_file)))
    shards = str(next(cache.iterdir()))
    with pytest.raises(ConfigError, match=rf"data\.{key}='{value}' cannot change prepared shards"):
        open_dataset(DataConfig(path=shards, **{key: value}))


def many_texts(folder, n_documents, line):
    folder.mkdir()
    for number in range(n_documents):
        (folder / f"{number:03}.txt").write_text(f"{number} {line}" * 20)
    return DataConfig(path=str(folder), tokenizer="bpe:300", validation_fraction=0.05)


def test_an_empty_prompt_becomes_what_the_text_teaches(tmp_path):
    documents = open_dataset(many_texts(tmp_path / "many", 120, "né à Paris\n")).tokenizer
    assert documents.opening == ()
    assert encode_prompt(documents, "").tolist() == [documents.end_of_text]

    lines = open_dataset(many_texts(tmp_path / "few", 3, "né à Paris\n")).tokenizer
    assert encode_prompt(lines, "").tolist() == lines.encode("\n").tolist()
    assert encode_prompt(lines, "é").tolist() == lines.encode("é").tolist()

    dna = open_dataset(many_texts(tmp_path / "dna", 3, "GATTACA" * 20)).tokenizer
    assert "GATTACA" in dna.decode(encode_prompt(dna, ""))


def test_what_an_empty_prompt_becomes_is_kept_with_the_tokenizer(tmp_path):
    tokenizer = open_dataset(many_texts(tmp_path / "few", 3, "né à Paris\n")).tokenizer
    tokenizer.save(tmp_path / "tokenizer.json")
    kept = load_tokenizer(tmp_path / "tokenizer.json")
    assert kept.opening == tuple(tokenizer.opening) != ()
    assert kept.hash == tokenizer.hash

    whole = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "wrong.json").write_text(json.dumps({**whole, "opening": [kept.vocab_size]}))
    with pytest.raises(CorruptError, match='"opening" is not a list of token ids'):
        load_tokenizer(tmp_path / "wrong.json")


def test_a_prefix_stays_before_an_empty_prompt(tmp_path):
    tokenizer = open_dataset(many_texts(tmp_path / "few", 3, "né à Paris\n")).tokenizer
    tokenizer.prefix = (5,)
    assert encode_prompt(tokenizer, "").tolist() == [5, *tokenizer.encode("\n")]
