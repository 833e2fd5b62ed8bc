"""Published runs of dense models lie in the planned range of times, and fit as they ran."""

import importlib
from pathlib import Path

import pytest

from pentameter.config.files.load import load_config
from pentameter.estimating.bytes.fit import MEMORY_MARGIN
from pentameter.estimating.seconds.cluster import known_devices, parse_cluster
from pentameter.estimating.seconds.estimate import make_estimate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def planner(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("planner")


@pytest.mark.parametrize(
    ("cluster", "matmuls", "published"),
    [
        ("h100-2023:8x1", None, 6_667),  # torchtitan, December 2024, compiled
        ("h100-2023:8x1", "fp8", 8_532),
        ("h100-2023:8x16", None, 6_514),
        ("h200-2023:8x4", "fp8", 10_938),  # torchtitan, June 2025
        ("h200-2023:8x8", "fp8", 10_753),
        ("h200:8x4", "fp8", 10_938),
    ],
)
def test_torchtitans_tables_lie_in_the_range(planner, cluster, matmuls, published):
    """Llama 3 8B, FSDP, two sequences of 8,192 a GPU, tokens per second of each."""
    n = parse_cluster(cluster).n_devices
    settings = {
        **planner.GPT, **planner.llama3_8b(8192), "train.batch_size": 2 * n, "train.compile": True,
        "train.micro_batch_size": 2, "train.activation_checkpoint": "selective",
    }  # fmt: skip
    config = load_config("quickstart", settings)
    found = make_estimate(
        config, parse_cluster(cluster), layout=f"data={n},zero=3", matmuls=matmuls
    )
    fewest, most = found.tokens_per_second_range
    assert fewest < n * published < most


@pytest.fixture
def published(planner):
    if planner.data_folder() is None:
        pytest.skip("the published rows are in PENTAMETER_DATA_DIR")
    return planner.published_rows()


@pytest.mark.slow
def test_no_published_run_is_refused(planner, published):
    outcomes = [planner.Outcome(row, row.estimate()) for row in published]
    assert len(outcomes) > 100
    refused = [each.row.label for each in outcomes if each.verdict == "does not fit"]
    assert refused == []
    # Published bytes, which an allocator reserved, of the program whose state is as ours.
    errors = [each.memory_error for each in outcomes if "torchtitan" in each.row.source]
    assert errors
    assert min(errors) > 1 / (1 + MEMORY_MARGIN) - 1


@pytest.mark.slow
def test_no_published_mixture_is_refused_that_ran_nor_fits_that_did_not(planner, published):
    facts = planner.read_rows(planner.MIXTURE_ROWS)["rows"]
    verdicts = {True: set(), False: set()}
    for row in planner.mixture_rows(facts):
        verdicts[row.is_out_of_memory].add((row.label, row.estimate.verdict))
    assert len(verdicts[False]) > 100
    assert verdicts[True]
    assert [label for label, verdict in verdicts[False] if verdict == "does not fit"] == []
    assert [label for label, verdict in verdicts[True] if verdict == "fits"] == []


@pytest.mark.slow
def test_the_spreads_are_those_of_the_published_rows(planner, published):
    outcomes = [planner.Outcome(row, row.estimate()) for row in published]
    stored = {
        **{
            device.calibration_key: device.calibration.spread for device in known_devices().values()
        },
        "blackwell": known_devices()["b200"].spread,
    }
    found = planner.all_spreads(outcomes)
    assert set(found) >= {("ampere", "bf16"), ("hopper", "bf16"), ("hopper-2023", "bf16")}
    for (name, precision), (least, most) in found.items():
        assert stored[name][precision] == pytest.approx((least, most), abs=0.005)
