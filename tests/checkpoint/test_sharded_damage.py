"""Files of pieces that do not make up a tensor: found when a checkpoint's tensors are opened."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pentameter.checkpoint.folders.opening import open_checkpoint
from pentameter.checkpoint.format.safetensors_format import (
    METADATA_KEY,
    Piece,
    piece_key,
    plan_file,
)
from pentameter.checkpoint.format.tensor_reader import StoredRegion, StoredTensors, check_cover
from pentameter.checkpoint.state.state_dicts import load_model_state
from pentameter.disk.atomic import FileRecord, write_hashed
from pentameter.errors import CorruptError

WHOLE = torch.arange(60.0).view(10, 6)


def piece_of(rows, columns, shape=(10, 6), name="w"):
    """Key, piece and numbers of a region of WHOLE."""
    tensor = WHOLE[slice(*rows), slice(*columns)].clone()
    piece = Piece(name, shape, (rows[0], columns[0]))
    return piece_key(piece, tensor.shape), piece, tensor


def write(path, entries, whole=None):
    tensors = {key: tensor for key, _, tensor in entries} | (whole or {})
    path.unlink(missing_ok=True)
    return write_hashed(path, plan_file(tensors, {key: p for key, p, _ in entries}).chunks())


FIRST = [piece_of((0, 4), (0, 6)), piece_of((4, 10), (0, 2))]
SECOND = [piece_of((4, 10), (2, 6))]


@pytest.fixture
def files(tmp_path):
    def make(first=FIRST, second=SECOND, whole=None):
        paths = [tmp_path / f"model-{n:05d}-of-00002.safetensors" for n in (0, 1)]
        write(paths[0], first, {"b": torch.ones(3)})
        write(paths[1], second, whole)
        return StoredTensors(paths)

    return make


def test_pieces_of_any_cut_make_up_the_tensor(files):
    stored = files()
    assert set(stored) == {"w", "b"}
    assert torch.equal(stored["w"][...], WHOLE)
    assert stored["w"].shape == (10, 6)

    def load(w: torch.Tensor, name: str = "w") -> torch.Tensor:
        target = nn.ParameterDict({name: w, "b": torch.zeros(3)})
        load_model_state(target, stored)
        return target[name]

    assert torch.equal(load(torch.zeros(10, 6)), WHOLE)
    for wrong in (torch.zeros(6, 10), torch.zeros(10, 6, dtype=torch.float64)):
        with pytest.raises(CorruptError, match=r"checkpoint's w is \(10, 6\) of torch.float32"):
            load(wrong)
    with pytest.raises(CorruptError, match="missing: x; unexpected: w"):
        load(torch.zeros(10, 6), "x")


@pytest.mark.parametrize("rows", [(0, 10), (0, 4), (4, 10), (2, 3), (3, 7), (5, 5)])
@pytest.mark.parametrize("columns", [(0, 6), (1, 4)])
def test_any_region_is_the_same_region_of_the_whole(files, rows, columns):
    region = (slice(*rows), slice(*columns))
    assert torch.equal(files()["w"][region], WHOLE[region])


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (FIRST[:1], SECOND, r"a piece of 'w' is missing: .*model-00000.*48 of its 60"),
        (FIRST, [], r"a piece of 'w' is missing: .* 36 of its 60"),
        (FIRST, [*SECOND, FIRST[0]], r"model-0000[01].* holds 'w' a second time"),
        (FIRST, [piece_of((3, 10), (2, 6))], r"'w\[.*\]' overlaps 'w\[.*\]' of model-0000"),
        (
            FIRST,
            [(SECOND[0][0], Piece("w", (10, 6), (5, 2)), SECOND[0][2])],
            r"model-00001.*is not inside of 'w', which is \(10, 6\): it begins at \(5, 2\)",
        ),
        (FIRST, [piece_of((4, 10), (2, 6), (10, 7))], r"model-00001.*of shape \(10, 7\)"),
        (FIRST, [(*SECOND[0][:2], SECOND[0][2].double())], r"model-00001.*float64.*float32"),
        (FIRST, [(*SECOND[0][:2], SECOND[0][2].flatten())], r"is not inside of 'w'"),
        (FIRST, [(SECOND[0][0], Piece("w", (10, 6), (4,)), SECOND[0][2])], r"is not inside"),
        (FIRST, [*SECOND, piece_of((10, 10), (0, 6))], r"is an empty piece"),
        (
            FIRST,
            [(SECOND[0][0], Piece("w", (10, 10**30), (4, 2)), SECOND[0][2])],
            r"of a tensor of shape",
        ),
    ],
)
def test_pieces_that_do_not_fit_are_refused(files, first, second, message):
    with pytest.raises(CorruptError, match=message):
        files(first, second)


def test_a_tensor_that_is_whole_beside_its_pieces_is_refused(files):
    with pytest.raises(CorruptError, match=r"holds|overlaps"):
        files(whole={"w": WHOLE})


@pytest.mark.parametrize(
    "lie",
    [
        "",
        "[]",
        "3",
        "{",
        "[" * 100_000,
        json.dumps({"absent": {"name": "w", "shape": [10, 6], "offset": [0, 0]}}),
        json.dumps({"w": {"name": "w", "shape": [10, 6]}}),
        json.dumps({"w": {"name": "w", "shape": [10, 6], "offset": [-1, 0]}}),
        json.dumps({"w": {"name": "w", "shape": [10, 6], "offset": [0.0, 0]}}),
        json.dumps({"w": {"name": "w", "shape": [10, True], "offset": [0, 0]}}),
        json.dumps({"w": {"name": "w", "shape": "10,6", "offset": [0, 0]}}),
        json.dumps({"w": {"name": "w", "shape": [10, 6], "offset": None}}),
        json.dumps({"w": 3}),
        "NaN",
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, lie):
    path = tmp_path / "model.safetensors"
    body = {
        "__metadata__": {"format": "pt", METADATA_KEY: lie},
        "w": {"dtype": "F32", "shape": [10, 6], "data_offsets": [0, 240]},
    }
    header = json.dumps(body).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + WHOLE.numpy().tobytes())
    with pytest.raises(CorruptError, match=r"model.safetensors is malformed"):
        StoredTensors([path])


def test_a_checkpoint_with_a_true_manifest_over_damaged_pieces_is_refused(store, save):
    """What no hash can find: the files are as they were written, but were written wrongly."""
    from test_checkpoint_damage import rewrite

    path = save(store, 2).path
    for n, entries in enumerate((FIRST, [])):
        write(path / f"m{n}.safetensors", entries)

    def change(content):
        for n in (0, 1):
            data = (path / f"m{n}.safetensors").read_bytes()
            record = FileRecord("", len(data), hashlib.sha256(data).hexdigest())
            content["files"][f"m{n}.safetensors"] = {
                key: value for key, value in dataclasses.asdict(record).items() if key != "name"
            }
        content["groups"]["model"] = ["m0.safetensors", "m1.safetensors"]

    rewrite(path, change)
    with pytest.raises(CorruptError, match=r"step-00000002: a piece of 'w' is missing.*m0"):
        open_checkpoint(path).tensors("model")


def test_a_pickle_among_the_pieces_is_never_run(files, tmp_path):
    files()
    path = tmp_path / "model-00001-of-00002.safetensors"
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(CorruptError, match="model-00001-of-00002"):
        StoredTensors([path])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_cover_is_told_from_what_is_none(tmp_path_factory, data):
    """Against the definition: every element in exactly one region."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    path = tmp_path_factory.getbasetemp() / "m.safetensors"

    def cut(offset, sizes):
        """A tiling of a box, by cutting it in two again and again."""
        wide = [dim for dim, size in enumerate(sizes) if size > 1]
        if not wide or data.draw(st.integers(0, 2)) == 0:
            return [(offset, sizes)]
        dim = data.draw(st.sampled_from(wide))
        at = data.draw(st.integers(1, sizes[dim] - 1))
        left, right, start = [*sizes], [*sizes], [*offset]
        left[dim], right[dim], start[dim] = at, sizes[dim] - at, offset[dim] + at
        return cut(offset, tuple(left)) + cut(tuple(start), tuple(right))

    boxes = cut((0,) * len(shape), shape)
    change = data.draw(st.sampled_from(["none", "drop", "repeat", "move"]))
    n = data.draw(st.integers(0, len(boxes) - 1))
    if change == "drop" and len(boxes) > 1:
        boxes.pop(n)
    elif change == "repeat":
        boxes.append(boxes[n])
    elif change == "move":
        dim = data.draw(st.integers(0, len(shape) - 1))
        moved = list(boxes[n][0])
        moved[dim] += 1
        boxes[n] = (tuple(moved), boxes[n][1])
    regions = [StoredRegion(path, str(n), *box) for n, box in enumerate(boxes)]
    count = torch.zeros([2 * size + 2 for size in shape], dtype=torch.int64)
    for offset, sizes in boxes:
        box = tuple(slice(start, start + n) for start, n in zip(offset, sizes, strict=True))
        count[box] += 1
    inside = count[tuple(slice(size) for size in shape)]
    if bool((inside == 1).all()) and int(count.sum()) == inside.numel():
        check_cover("w", shape, regions)
    else:
        with pytest.raises(CorruptError, match=r"m\.safetensors"):
            check_cover("w", shape, regions)
