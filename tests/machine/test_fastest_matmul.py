"""The ceiling that MFU is a share of: the best that this machine has ever shown."""

import json
import math

import pytest
import torch

from pentameter.machine.fastest_matmul import Ceiling, ceiling
from pentameter.machine.load.other_programs import OtherPrograms

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The file in which ceilings are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "pentameter" / "ceilings.json"


@pytest.fixture
def measured(monkeypatch):
    """`measured(flops, busy_cores)`: the ceiling, where measuring gives these."""

    def measured(flops, busy_cores=0.0, **options):
        monkeypatch.setattr(OtherPrograms, "cores", lambda self, collect: busy_cores)
        return ceiling("a CPU", CPU, torch.float32, measure=lambda *_: flops, **options)

    return measured


def test_the_best_that_was_ever_measured_counts(cache, measured):
    assert measured(2.8e9, busy_cores=1.9) == Ceiling(2.8e9, 1.9)
    assert measured(0.85e12) == Ceiling(0.85e12)
    assert measured(2.8e9, busy_cores=1.9) == Ceiling(0.85e12)  # a busy hour takes nothing away
    (entry,) = json.loads(cache.read_text()).values()
    assert entry == {"flops": 0.85e12, "busy_cores": 0.0}


def test_what_was_measured_otherwise_is_another_ceiling(cache, measured, monkeypatch):
    assert measured(1e12).flops == 1e12
    assert measured(1e9, n_processes=2).flops == 1e9
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert measured(1e9).flops == 1e9
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert measured(1e8).flops == 1e8
    other = ceiling("a CPU", CPU, torch.bfloat16, measure=lambda *_: 1e7)
    assert other.flops == 1e7
    assert len(json.loads(cache.read_text())) == 5


def test_a_ceiling_from_a_busy_machine_says_so(cache, measured):
    assert str(measured(2.8e9, busy_cores=1.9).warning()).startswith(
        "MFU is a share of 2.8 GFLOP/s, measured while other programs kept 1.9 cores busy"
    )
    assert measured(3e9, busy_cores=0.1).warning() is None


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b"[" * 100_000, b"\xff", b'{"KEY": 5}', b'{"KEY": {"flops": 1e400}}',
     b'{"KEY": {"flops": "x"}}', b'{"KEY": {"flops": -1}}', b'{"KEY": {"flops": 1e30}}',
     b'{"KEY": {"flops": NaN}}', b'{"KEY": {"speed": 1}}',
     b'{"KEY": {"flops": 1, "busy_cores": NaN}}', b'{"KEY": {"flops": 1' + b"0" * 400 + b"}}"],
)  # fmt: skip
def test_a_damaged_cache_is_written_anew(cache, measured, content):
    measured(1e9)
    (key,) = json.loads(cache.read_text())
    cache.write_bytes(content.replace(b'"KEY"', json.dumps(key, ensure_ascii=False).encode()))
    assert measured(1e8).flops == 1e8
    assert json.loads(cache.read_text()) == {key: {"flops": 1e8, "busy_cores": 0.0}}


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch, measured):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measured(1e9).flops == 1e9


def test_a_real_product_is_measured(cache):
    found = ceiling("a CPU", CPU, torch.float32)
    assert 1e8 < found.flops < 1e14
    assert math.isfinite(found.busy_cores)
