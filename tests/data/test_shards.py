import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from preparing import prepare, text_of_documents

from pentameter.data.prepare.splits import Splitting
from pentameter.data.shards.format import find_header, header_hash
from pentameter.data.shards.opening import open_shards
from pentameter.data.shards.writer import ShardWriter
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.data.tokenizers.word import WordTokenizer
from pentameter.errors import ConfigError, CorruptError, StorageError

SPLITS = ("train", "val", "test")
TEXT = "the quick brown fox jumps over the lazy dog. " * 4


def text_of(content, *, name="text", pieces=1):
    cut = -(-len(content) // pieces) or 1
    parts = [content[i : i + cut] for i in range(0, len(content), cut)]
    return text_of_documents(lambda: iter([iter(parts)]), name=name, n_bytes=len(content.encode()))


@pytest.fixture
def folder(tmp_path):
    prepare(text_of(TEXT), tmp_path / "out", splitting=Splitting(0.1, 0.1), shard_tokens=50)
    return tmp_path / "out"


@given(
    st.text(st.characters(codec="utf-8"), min_size=1),
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from([(0.0, 0.0), (0.1, 0.0), (0.5, 0.3), (0.0, 0.3)]),
)
def test_text_comes_back_from_shards(tmp_path_factory, content, pieces, shard_tokens, held_out):
    out = tmp_path_factory.mktemp("shards") / "out"
    prepare(
        text_of(content, pieces=pieces),
        out,
        splitting=Splitting(*held_out),
        shard_tokens=shard_tokens,
    )
    dataset = open_shards(out / "text.json")
    splits = [dataset.split(name) for name in SPLITS]
    texts = [dataset.tokenizer.decode(split.tokens[:]) for split in splits]
    assert "".join(texts) == content
    assert [split.n_bytes for split in splits] == [len(text.encode()) for text in texts]
    assert [split.n_tokens for split in splits] == [len(text) for text in texts]


@pytest.mark.parametrize("vocab_size", [1 << 16, (1 << 16) + 1])
def test_ids_take_two_bytes_while_they_fit(tmp_path, vocab_size):
    characters = [chr(c) for c in range(vocab_size + 0x1000) if not 0xD800 <= c < 0xE000]
    tokenizer = CharTokenizer(characters[:vocab_size])
    ids = np.array([0, vocab_size - 1, 1])
    with ShardWriter(tmp_path, "big", tokenizer) as writer:
        writer.write("train", ids, 3, [0])
        writer.finish({})
    tokens = open_shards(tmp_path / "big.json").split("train").tokens
    assert tokens.dtype == ("<u2" if vocab_size <= 1 << 16 else "<u4")
    assert tokens[:].tolist() == ids.tolist()


def test_shards_of_the_same_text_are_the_same_bytes(tmp_path):
    for name, pieces in (("a", 1), ("b", 7)):
        prepare(text_of(TEXT, pieces=pieces), tmp_path / name)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == [
        "text-00000.bin",
        "text-00001.bin",
        "text-documents.bin",
        "text.json",
        "tokenizer.json",
    ]
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_tokens_read_like_an_array_over_file_borders(folder):
    assert len(list(folder.glob("text-0000?.bin"))) == 5
    train = open_shards(folder / "text.json").split("train").tokens
    whole = np.asarray(train)
    assert len(train) == whole.size == 144
    rng = np.random.default_rng(0)
    for start, stop in rng.integers(-200, 200, (200, 2)):
        np.testing.assert_array_equal(train[start:stop], whole[start:stop])
    assert [train[i] for i in (0, 49, 50, -1)] == whole[[0, 49, 50, -1]].tolist()
    with pytest.raises(IndexError):
        train[144]
    with pytest.raises(ValueError, match="steps of 1"):
        train[::2]


def rewrite(folder, change, *, rehash=True):
    path = folder / "text.json"
    header = json.loads(path.read_text())
    change(header)
    if rehash:
        header["sha256"] = header_hash(header)
    path.write_text(json.dumps(header))


def put(*keys, value):
    def change(header):
        place = header
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return lambda folder: rewrite(folder, change)


def poke(place, value):
    def change(folder):
        ids = np.fromfile(folder / "text-00001.bin", dtype="<u2")
        ids[place] = value
        ids.tofile(folder / "text-00001.bin")

    return change


def resize(change_bytes):
    def change(folder):
        path = folder / "text-00002.bin"
        data = path.read_bytes()
        path.write_bytes(data[:change_bytes] if change_bytes < 0 else data + bytes(change_bytes))

    return change


def other_tokenizer(characters):
    return lambda folder: CharTokenizer(characters).save(folder / "tokenizer.json")


def remove(name):
    return lambda folder: (folder / name).unlink()


def swap(folder):
    (folder / "text-00001.bin").rename(folder / "x")
    (folder / "text-00003.bin").rename(folder / "text-00001.bin")
    (folder / "x").rename(folder / "text-00003.bin")


def starts(*places):
    return lambda folder: np.array(places, "<u8").tofile(folder / "text-documents.bin")


DAMAGE = {
    "file missing": (remove("text-00001.bin"), "text-00001.bin is missing"),
    "header missing": (remove("text.json"), "text.json is missing"),
    "tokenizer missing": (remove("tokenizer.json"), "tokenizer.json is missing"),
    "tokenizer of another text": (other_tokenizer("abc"), "not the tokenizer that wrote"),
    "truncated": (resize(-2), "text-00002.bin is truncated: 86 bytes"),
    "cut inside a token": (resize(-1), "text-00002.bin is truncated: 87 bytes"),
    "emptied": (resize(-88), "text-00002.bin is truncated: 0 bytes"),
    "too long": (resize(4), "text-00002.bin is too long: 92 bytes"),
    "documents missing": (remove("text-documents.bin"), "text-documents.bin is missing"),
    "documents truncated": (starts(0, 0), "text-documents.bin is truncated: 16 bytes"),
    "document beyond its split": (starts(0, 0, 1 << 62), "must start at 0"),
    "first document late": (starts(1, 0, 0), "'train' must start at 0"),
    "documents elsewhere": (put("documents", "name", value="../x"), '"documents" names'),
    "documents uncounted": (put("splits", "val", "documents", value=-1), "not a count"),
    "files swapped": (swap, "text-00001.bin is truncated"),
    "id beyond the vocabulary": (poke(7, 28), r"text-00001.bin: token 7 \(byte 14\) has id 28"),
    "id far beyond": (poke(0, 65535), r"token 0 \(byte 0\) has id 65535"),
    "header cut": (
        lambda folder: (folder / "text.json").write_text('{"format": "pentameter-sh'),
        "text.json is damaged: it is not JSON",
    ),
    "header not text": (
        lambda folder: (folder / "text.json").write_bytes(b"\x80\x04\x95\xff"),
        "text.json is damaged: not UTF-8",
    ),
    "header a list": (lambda folder: (folder / "text.json").write_text("[]"), "not a JSON object"),
    "header edited": (
        lambda folder: rewrite(folder, lambda h: h.update(bytes_per_token=2.0), rehash=False),
        'match its "sha256"',
    ),
    "version": (put("version", value=4), '"version" is 4'),
    "name": (put("name", value="other"), "the file is named 'text'"),
    "dtype unknown": (put("dtype", value="float32"), '"dtype" is'),
    "dtype of another width": (put("dtype", value="uint32"), "truncated"),
    "vocabulary too small": (put("vocab_size", value=5), '"vocab_size" is 5'),
    "vocabulary too large": (put("vocab_size", value=1 << 17), "does not fit"),
    "count a float": (put("n_tokens", value=180.0), "not a count"),
    "count negative": (put("n_tokens", value=-1), "not a count"),
    "counts disagree": (put("n_tokens", value=181), "its files have 180"),
    "file elsewhere": (put("files", 0, "name", value="../../etc/passwd"), "is named"),
    "file hash no hash": (put("files", 0, "sha256", value="x"), "sha256"),
    "files no list": (put("files", value=3), "not a header of shards"),
    "no files": (put("files", value=[]), "its files have 0"),
    "splits overlap": (put("splits", "val", "start", value=100), "must start at 144"),
    "splits end early": (put("splits", "test", "stop", value=170), "splits end at 170"),
    "split missing": (
        lambda folder: rewrite(folder, lambda header: header["splits"].pop("test")),
        "not .'train', 'val', 'test'",
    ),
    "tokenizer hash missing": (put("tokenizer", value={}), "KeyError 'hash'"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_kind_of_damage_is_found_on_opening(folder, kind):
    damage, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(CorruptError, match=message) as error:
        open_shards(find_header(folder))
    assert str(folder) in str(error.value)
    assert error.value.exit_code == 65


@pytest.mark.parametrize("name", ["text-00001.bin", "text-00004.bin"])
def test_a_flipped_bit_inside_the_vocabulary_is_found_on_opening(folder, name):
    path = folder / name
    ids = np.fromfile(path, dtype="<u2")
    assert ids[3] ^ 1 < 28  # an id like any other
    ids[3] ^= 1
    ids.tofile(path)
    with pytest.raises(CorruptError, match=rf"{name} was changed: sha256 .*prepare the data again"):
        open_shards(folder / "text.json")
    open_shards(folder / "text.json", verify=False)  # another process looks


def test_other_documents_are_found_on_opening(tmp_path):
    with ShardWriter(tmp_path, "text", CharTokenizer("abc")) as writer:
        for _ in range(2):
            writer.write("train", np.array([0, 1, 2]), 3, [0])
        writer.finish({})
    np.array([0, 2], "<u8").tofile(tmp_path / "text-documents.bin")  # as good as 0, 3
    with pytest.raises(CorruptError, match=r"text-documents\.bin was changed: sha256"):
        open_shards(tmp_path / "text.json")


def test_the_first_damaged_file_is_named_and_progress_told(folder, monkeypatch):
    monkeypatch.setattr("pentameter.data.shards.opening.CHECK_TOKENS", 7)
    told = []
    open_shards(folder / "text.json", progress=lambda *pass_: told.append(pass_))
    assert told == [("verifying", 2 * n, 360) for n in (50, 100, 144, 162, 180)]
    for name in ("text-00003.bin", "text-00001.bin"):
        path = folder / name
        path.write_bytes(path.read_bytes()[::-1][1:] + b"\0")
    with pytest.raises(CorruptError, match=r"text-00001\.bin"):
        open_shards(folder / "text.json")


@given(st.integers(0, 10**6), st.integers(0, 7))
def test_no_flipped_bit_of_the_header_is_accepted_or_crashes(tmp_path_factory, place, bit):
    folder = tmp_path_factory.mktemp("flip")
    shutil.rmtree(folder)
    prepare(text_of("abcabcabc"), folder)
    path = folder / "text.json"
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(data)
    try:
        shards = open_shards(path)
    except CorruptError:
        pass
    else:  # only white space can change without changing the content
        assert shards.hash == json.loads(data)["sha256"] == header_hash(json.loads(data))


def test_version_1_opens_with_a_document_per_split(folder):
    def older(header):
        header["version"] = 1
        del header["documents"]
        for part in header["splits"].values():
            del part["documents"]

    rewrite(folder, older)
    (folder / "text-documents.bin").unlink()
    dataset = open_shards(folder / "text.json")
    assert [dataset.split(s).document_starts.tolist() for s in SPLITS] == [[0], [0], [0]]


@pytest.mark.parametrize(("starts", "wrong"), [([0, 3, 3], 2), ([0, 4, 2], 2), ([0, 2, 9], 2)])
def test_starts_of_documents_rise_within_their_split(tmp_path, starts, wrong):
    with ShardWriter(tmp_path, "text", CharTokenizer("abc")) as writer:
        for _ in range(3):
            writer.write("train", np.array([0, 1, 2]), 3, [0])
        writer.finish({})
    np.array(starts, "<u8").tofile(tmp_path / "text-documents.bin")
    with pytest.raises(CorruptError, match=rf"document {wrong} of 'train' starts at"):
        open_shards(tmp_path / "text.json")


def test_a_folder_with_two_data_sets_asks_for_one(folder):
    for file in list(folder.glob("text*")):
        shutil.copy(file, folder / file.name.replace("text", "more", 1))
    with pytest.raises(ConfigError, match=r"several prepared data sets.*more\.json"):
        find_header(folder)
    assert find_header(folder / "text.json") == folder / "text.json"


def test_what_is_not_prepared_has_no_header(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "b.txt").write_text("text")
    assert find_header(tmp_path) is None
    assert find_header(tmp_path / "a.json") is None
    assert find_header(tmp_path / "no") is None
    os.mkfifo(tmp_path / "pipe.json")  # which nobody writes to
    assert find_header(tmp_path) is None


@pytest.mark.parametrize(
    ("n", "val", "test", "ends"),
    [
        (1_115_394, 0.1, 0.0, (1_003_854, 1_115_394)),  # int(0.9 n), as nanoGPT
        (100, 0.1, 0.2, (70, 80)),
        (10, 0.0, 0.0, (10, 10)),
        (3, 0.1, 0.1, (2, 2)),
    ],
)
def test_ends_of_splits(n, val, test, ends):
    assert Splitting(val, test).ends(n) == (*ends, n)


def test_a_text_that_changes_while_it_is_read_is_refused_and_leaves_nothing(tmp_path):
    versions = iter(["abcabc", "abcbca"])
    text = text_of_documents(lambda: iter([iter([next(versions)])]))
    with pytest.raises(StorageError, match="changed while it was read"):
        prepare(text, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_unseen_character_is_placed_in_the_whole_text(tmp_path):
    tokenizer = CharTokenizer("abc")
    text = text_of("abcabcabcabcabéc", pieces=5)
    with pytest.raises(ConfigError, match=r"U\+00E9\) at position 14 of the text 'text'"):
        prepare(text, tmp_path / "out", tokenizer=tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_text_without_a_token_is_refused_in_words(tmp_path):
    words = WordTokenizer.from_documents(["a b"])
    with pytest.raises(ConfigError, match="the tokenizer makes no token of 'text'"):
        prepare(text_of("  "), tmp_path / "out", tokenizer=words)
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_never_overwritten(tmp_path):
    (tmp_path / "out").mkdir()
    prepare(text_of(TEXT), tmp_path / "out")  # an empty one will do
    before = (tmp_path / "out" / "text.json").read_bytes()
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        prepare(text_of("other text"), tmp_path / "out")
    assert (tmp_path / "out" / "text.json").read_bytes() == before


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(self, *arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ShardWriter, "finish", full)
    with pytest.raises(StorageError, match="No space left on device"):
        prepare(text_of(TEXT), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
