import itertools
import pickle
import struct

import numpy as np
import pytest
from preparing import corpus_at

from pentameter.cli.prepare import run
from pentameter.data.prepare.from_tokens import (
    files_by_split,
    import_tokens,
    open_token_file,
    token_files,
)
from pentameter.data.shards.format import find_header
from pentameter.data.shards.opening import open_shards
from pentameter.data.tokenizers.byte_level.training import train_bpe
from pentameter.data.tokenizers.char import CharTokenizer
from pentameter.errors import ConfigError, CorruptError

SPLITS = ("train", "val", "test")
TOKENIZER = train_bpe(["to be or not to be, that is the question\n" * 9, "naïve"], 290)
END = TOKENIZER.end_of_text
TEXTS = ["to be or not to be", "naïve", "that is\nthe question"]
IDS = [[*TOKENIZER.encode(text).tolist(), END] for text in TEXTS]
FLAT = [*itertools.chain(*IDS)]


def nanogpt(path, ids=FLAT):
    np.array(ids, "<u2").tofile(path)
    return path


def llmc(path, ids=FLAT, *, magic=20240520, version=1, count=None, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())
    return path


def megatron(path, sequences=IDS, bounds=(0, 1, 2, 3), code=8, dtype="<u2", modes=b""):
    ids = np.array([*itertools.chain(*sequences)], dtype)
    ids.tofile(path)
    lengths = np.array([len(s) for s in sequences], "<i4")
    places = (np.cumsum(lengths) - lengths) * ids.itemsize
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(bounds))
    index += lengths.tobytes() + places.astype("<i8").tobytes()
    index += np.array(bounds, "<i8").tobytes() + modes
    path.with_suffix(".idx").write_bytes(index)
    return path


def imported(tmp_path, files, tokenizer=TOKENIZER, **settings):
    opened = {split: list(map(open_token_file, files.get(split, ()))) for split in SPLITS}
    import_tokens(opened, tmp_path / "out", tokenizer, **settings)
    return open_shards(find_header(tmp_path / "out"))


def in_documents(split):
    return [p.tolist() for p in np.split(np.asarray(split.tokens), split.document_starts[1:])]


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (nanogpt, "nanoGPT"),
        (llmc, "llm.c"),
        (lambda p: llmc(p, magic=20240801, version=7, dtype="<u4"), "llm.c"),
        (megatron, "Megatron"),
        (lambda p: megatron(p, code=4, dtype="<i4", modes=b"\0\0\0"), "Megatron"),
    ],
)
def test_tokens_come_as_they_are_with_their_documents(tmp_path, make, kind):
    file = make(tmp_path / "some.bin")
    assert open_token_file(file).format == kind
    split = imported(tmp_path, {"train": [file]}).split("train")
    assert in_documents(split) == IDS
    assert split.n_bytes == sum(len(text.encode()) for text in TEXTS)


def test_an_end_of_text_at_the_start_belongs_to_the_first_document(tmp_path):
    file = llmc(tmp_path / "a.bin", [END, *FLAT[:-1]])
    split = imported(tmp_path, {"train": [file]}).split("train")
    assert in_documents(split) == [[END, *IDS[0]], IDS[1], IDS[2][:-1]]


def test_megatron_documents_are_what_its_index_says(tmp_path):
    # Four sequences in two documents, and an empty one between; the ends are not looked at.
    sequences = [[1, 2], [3, END], [4], [END, 5, 6]]
    file = megatron(tmp_path / "a.bin", sequences, bounds=(0, 3, 3, 4))
    split = imported(tmp_path, {"train": [file]}).split("train")
    assert in_documents(split) == [[1, 2, 3, END, 4], [END, 5, 6]]


def test_several_files_and_splits_over_block_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr("pentameter.data.prepare.from_tokens.BLOCK_TOKENS", 5)
    train = [nanogpt(tmp_path / "train.bin"), llmc(tmp_path / "b_train_1.bin", IDS[0])]
    files = {"train": train, "val": [nanogpt(tmp_path / "val.bin", IDS[1])]}
    dataset = imported(tmp_path, files, validation_fraction=0.5)
    assert in_documents(dataset.split("train")) == [*IDS, IDS[0]]
    assert in_documents(dataset.split("val")) == [IDS[1]]


@pytest.mark.parametrize("block", [3, 1000])
def test_one_file_is_cut_by_fractions_like_text(tmp_path, monkeypatch, block):
    monkeypatch.setattr("pentameter.data.prepare.from_tokens.BLOCK_TOKENS", block)
    file = nanogpt(tmp_path / "a.bin", [1, 2, END, 3, 4, 5, END, 6, 7, END])
    dataset = imported(tmp_path, {"train": [file]}, validation_fraction=0.3, test_fraction=0.2)
    assert in_documents(dataset.split("train")) == [[1, 2, END], [3, 4]]
    assert in_documents(dataset.split("val")) == [[5, END], [6]]
    assert in_documents(dataset.split("test")) == [[7, END]]


def test_characters_of_nanogpt_and_its_meta_file_stays_closed(tmp_path):
    class Trap:
        def __reduce__(self):
            return print, ("opened",)

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Trap()))
    file = nanogpt(tmp_path / "train.bin", [0, 2, 1])
    dataset = imported(tmp_path, {"train": [file]}, CharTokenizer("aéz"))
    assert dataset.split("train").n_bytes == 4
    assert in_documents(dataset.split("train")) == [[0, 2, 1]]


def damaged_index(change):
    def make(path):
        file = megatron(path)
        index = bytearray(file.with_suffix(".idx").read_bytes())
        change(index)
        file.with_suffix(".idx").write_bytes(index)
        return file

    return make


def shorter(make, n_bytes=3):
    def cut(path):
        path = make(path)
        path.write_bytes(path.read_bytes()[:-n_bytes])
        return path

    return cut


def put(place, value):
    return damaged_index(lambda index: index.__setitem__(slice(place, place + len(value)), value))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (shorter(nanogpt), CorruptError, "cut short"),
        (shorter(llmc), CorruptError, "cut short"),
        (lambda p: llmc(p, count=-5), CorruptError, "expected -5"),
        (lambda p: llmc(p, version=2), ConfigError, "version 2"),
        (lambda p: llmc(p, magic=20240522), ConfigError, "multiple-choice"),
        (shorter(megatron), CorruptError, "cut short"),
        (put(0, b"XX"), CorruptError, "not a Megatron index"),
        (put(9, b"\2"), ConfigError, "version 2"),
        (put(17, b"\6"), ConfigError, "type 6"),
        (put(18, b"\4"), CorruptError, "is damaged"),
        (damaged_index(lambda index: index.__delitem__(-1)), CorruptError, "is damaged"),
        (lambda p: megatron(p, bounds=(0, 9)), CorruptError, "ends beyond sequence 3"),
        (
            lambda p: megatron(p, bounds=(0, 2, 1, 3)),
            CorruptError,
            r"document 1 begins at sequence 2 and ends before it, at 1 \(byte 86\)",
        ),
        (put(46, b"\7"), ConfigError, "do not follow one another"),
    ],
)
def test_damaged_and_unknown_files_are_refused(tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        open_token_file(make(tmp_path / "a.bin"))


def test_ids_outside_the_vocabulary_are_refused_and_leave_nothing(tmp_path):
    file = nanogpt(tmp_path / "a.bin", [*FLAT, TOKENIZER.vocab_size])
    with pytest.raises(ConfigError, match=rf"token {len(FLAT)} has id 281.*vocabulary has 281"):
        imported(tmp_path, {"train": [file]})
    negative = megatron(tmp_path / "b.bin", [[5, -1]], bounds=(0, 1), code=4, dtype="<i4")
    with pytest.raises(ConfigError, match="token 1 has id -1"):
        imported(tmp_path, {"train": [negative]})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "beside", "val"),
    [
        ("train.bin", ["val.bin", "other.bin"], ["val.bin"]),
        ("f_train_000001.bin", ["f_val_000000.bin", "f_val_000001.bin"], None),
        ("fineweb_training.bin", ["fineweb_val.bin"], []),
        ("a.bin", ["val.bin"], []),
        ("a[1]_train.bin", ["a[1]_val.bin"], None),
    ],
)
def test_validation_files_beside_are_found(tmp_path, given, beside, val):
    for name in [given, *beside]:
        nanogpt(tmp_path / name)
    found = files_by_split([tmp_path / given])
    assert [path.name for path in found["train"]] == [given]
    assert [path.name for path in found["val"]] == (beside if val is None else val)
    assert not found["test"]


def test_the_command_says_which_format_it_took(tmp_path, capsys):
    nanogpt(tmp_path / "train.bin")
    nanogpt(tmp_path / "val.bin", IDS[1])
    TOKENIZER.save(tmp_path / "tok.json")
    arguments = [str(tmp_path / "train.bin"), "--tokenizer", str(tmp_path / "tok.json")]
    assert run([*arguments, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert f"train.bin: nanoGPT, {len(FLAT)} tokens, train" in said
    assert f"val.bin: nanoGPT, {len(IDS[1])} tokens, val" in said
    assert f"train {len(FLAT)}, val {len(IDS[1])}) in 4 documents" in said
    with pytest.raises(ConfigError, match=r"--tokenizer char cannot be made from tokens"):
        run([arguments[0], "--out", str(tmp_path / "other")])
    with pytest.raises(ConfigError, match="max-bytes"):
        run([*arguments, "--max-bytes", "5", "--out", str(tmp_path / "other")])
    with pytest.raises(ConfigError, match="--split-by document goes by each document's text"):
        run([*arguments, "--split-by", "document", "--out", str(tmp_path / "other")])
    for fraction, message in (
        ("1.5", r"data\.validation_fraction=1\.5"),
        ("-0.5", r"data\.validation_fraction=-0\.5"),
        ("nan", r"data\.validation_fraction=nan"),
    ):
        with pytest.raises(ConfigError, match=message):
            run([*arguments, "--validation-fraction", fraction, "--out", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("fractions", [(1.5, 0.0), (-0.5, 0.0), (float("nan"), 0.0), (0.5, 0.5)])
def test_impossible_fractions_are_refused(tmp_path, fractions):
    file = nanogpt(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"validation_fraction=.*their sum below 1"):
        imported(
            tmp_path, {"train": [file]}, validation_fraction=fractions[0],
            test_fraction=fractions[1],
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_folder_of_token_files_is_its_files(tmp_path):
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    nanogpt(folder / "train.bin")
    nanogpt(folder / "val.bin", FLAT[:4])
    (folder / "readme.md").write_text("how it was made")
    (folder / "._train.bin").write_bytes(b"Mac OS X".ljust(120, b"\0"))
    assert token_files([folder]) == [folder / "train.bin", folder / "val.bin"]
    (folder / "more.txt").write_text("text too")
    assert token_files([folder]) == []
    with pytest.raises(CorruptError, match=r"are these token ids\? `pentameter prepare FILE\.bin"):
        [*corpus_at(nanogpt(tmp_path / "raw.bin", [0xFFFD] * 9)).chunks()]
