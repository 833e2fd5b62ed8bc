"""Clusters: what names one, what is refused, and how a group's ranks lie in nodes."""

import os

import pytest

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.estimating.search.scaling import scale
from pentameter.estimating.seconds.cluster import (
    UNKNOWN_SPREAD,
    device_of_driver,
    group_shape,
    known_devices,
    parse_cluster,
)
from pentameter.estimating.seconds.estimate import best_precision, make_estimate
from pentameter.machine.peaks import peak_flops

MINE = """
[calibrations.mine]
fitted_on = "a run of last week"
product_share = 0.5
attention_share = 0.3
memory_share = 0.7
link_share = 0.6
network_share = 0.5

[devices.my-gpu]
tflops = { bf16 = 100, fp32 = 20 }
units = 64
memory_bytes = 16e9
memory_bytes_per_second = 5e11
link_bytes_per_second = 16e9
calibration = "mine"
source = "its box"
date = "2026-11"
"""


def test_a_cluster_is_devices_in_nodes():
    cluster = parse_cluster("a100-80gb:8x128")
    assert (cluster.node_size, cluster.n_nodes, cluster.n_devices) == (8, 128, 1024)
    assert str(cluster) == "a100-80gb:8x128"
    assert 80e9 < cluster.usable_bytes < 85.1e9  # 80 GiB without the driver's context
    assert cluster.peak_flops("bf16") == 312e12
    assert parse_cluster("h200").n_devices == 1
    assert parse_cluster("h200:4").n_devices == 4


def test_every_device_says_where_its_figures_are_from():
    for name, device in known_devices().items():
        assert device.source, name
        assert device.date, name
        assert device.driver_names or name.endswith("-2023"), name
        if device.can_be_planned:
            assert device.network_bytes_per_second, name
            assert device.calibration_key, name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a100:8x4",
            r"'a100' is not known; did you mean a100-40gb or a100-80gb\? Known: .*h100-80gb",
        ),
        ("h100:8x8", r"did you mean h100-pcie or h100-80gb or h100-2023\?"),
        ("h20o", r"did you mean h200\?"),
        ("h200:0x2", "DEVICE:GPUSxNODES"),
        ("h200:00x2", "DEVICE:GPUSxNODES"),
        ("h200:8x000", "DEVICE:GPUSxNODES"),
        ("h200:8y2", "DEVICE:GPUSxNODES"),
        ("l4:1", "only the peak of l4 is known"),
        ("nowhere.toml:1x1", r"nowhere\.toml cannot be read"),
        ("no\0where.toml:1x1", r"no\\x00where\.toml cannot be the name of a file"),
    ],
)
def test_what_is_no_cluster_is_refused_with_what_is(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_cluster(text)


def test_a_device_of_ones_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    cluster = parse_cluster(f"{file}:2x1")
    assert cluster.device_key == "mine"
    assert cluster.device.calibration.fitted_on == "a run of last week"
    with pytest.raises(ConfigError, match="no network between nodes"):
        parse_cluster(f"{file}:2x2")
    file.write_text(MINE.replace("units", "unitz"))
    with pytest.raises(ConfigError, match=r"devices\.my-gpu\.unitz"):
        parse_cluster(f"{file}:2x1")
    file.write_text(MINE.replace('calibration = "mine"', 'calibration = "mind"'))
    with pytest.raises(ConfigError, match=r"'mind' is not known; known: .*mine"):
        parse_cluster(f"{file}:2x1")


def test_a_range_of_times_is_that_of_the_runs_that_tested_a_device():
    device = known_devices()["h100-80gb"]
    assert device.spread_of("bf16") == device.calibration.spread["bf16"]
    assert device.spread_of("fp32") is None  # no published run
    blackwell, borrower = known_devices()["b200"], known_devices()["rtx-4090"]
    assert blackwell.spread_of("bf16") != device.spread_of("bf16")
    assert borrower.spread_of("bf16") is None
    config = load_config("gpt2-124m")
    for text in ("h100-80gb:8x1", "rtx-4090:1x1"):
        found = make_estimate(config, parse_cluster(text))
        least, most = found.seconds_range
        assert least < found.time.seconds < most
        fewest, many = found.tokens_per_second_range
        assert (fewest * most, many * least) == pytest.approx((found.plan.tokens_per_step,) * 2)
    small = load_config(config, {"train.micro_batch_size": 1, "model.context_length": 64})
    for each in (found, make_estimate(small, parse_cluster("h100-80gb:8x1"))):
        assert each.tested_spread is None
        assert each.seconds_range[1] == UNKNOWN_SPREAD[1] * each.time.seconds


def test_drivers_names_find_their_device():
    for name, key in (
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Radeon Graphics (gfx90a)", "mi210"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx-1080-ti"),
        ("NVIDIA GeForce RTX 2070", "rtx-2070"),
        ("NVIDIA GeForce RTX 3050", "rtx-3050"),
    ):
        assert device_of_driver(name) == known_devices()[key]
    assert device_of_driver("Voodoo 2") is None
    assert device_of_driver("AMD Radeon Graphics (gfx1103)") is None  # a laptop's


OLDER = ["v100", "v100-32gb", "v100-pcie", "t4", "rtx-2070", "gtx-1080-ti"]


@pytest.mark.parametrize("name", OLDER)
def test_older_cards_have_neither_bf16_nor_tf32(name):
    """Volta's and Turing's matrix units take fp16, Pascal has none: there nothing is faster."""
    cluster = parse_cluster(name)
    with pytest.raises(ConfigError, match=rf"bf16 is not known of {name}, .*fp16, fp32"):
        cluster.peak_flops("bf16")
    best = best_precision(load_config("gpt2-124m"), cluster)
    assert best == ("fp32" if name == "gtx-1080-ti" else "fp16")
    assert cluster.peak_flops("fp32", "high") == cluster.peak_flops("fp32")


@pytest.mark.parametrize(
    ("precision", "matmul_precision", "teraflops"),
    [
        ("fp32", None, 19.5),
        ("fp32", "highest", 19.5),
        ("fp32", "high", 156),
        ("fp32", "medium", 156),
        ("tf32", None, 156),
        ("tf32", "highest", 19.5),
        ("bf16", "high", 312),
        ("fp64", "medium", 19.5),
    ],
)
def test_the_peak_is_that_of_what_is_multiplied(precision, matmul_precision, teraflops):
    assert peak_flops("NVIDIA A100-SXM4-80GB", precision, matmul_precision) == teraflops * 1e12
    values = {"train.precision": precision, "train.matmul_precision": matmul_precision}
    estimate = make_estimate(load_config("gpt2-124m", values), parse_cluster("a100-80gb"))
    flops = estimate.plan.flops_per_token * estimate.tokens_per_second
    assert estimate.mfu == pytest.approx(flops / (teraflops * 1e12))
    same = load_config("gpt2-124m", {"train.precision": "tf32"})
    if teraflops == 156:
        time = make_estimate(same, parse_cluster("a100-80gb")).time
        assert estimate.time.seconds == pytest.approx(time.seconds)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("memory_bytes = true", r"memory_bytes=true: .*valid number"),
        ("memory_bytes = 5e-324", r"memory_bytes=5e-324: .*greater"),
        (f"memory_bytes = {'9' * 400}", r"memory_bytes=9{50,}…: .*valid number"),
        ("memory_bytes = 1e400", r"memory_bytes=inf"),
        ("memory_bytes = nan", r"memory_bytes=nan"),
        ("link_bytes_per_second = 5e-324", r"link_bytes_per_second=5e-324: .*greater"),
        ("tflops = { bf16 = true }", r"tflops\.bf16=true"),
        ("tflops = { bf16 = -1 }", r"tflops\.bf16=-1"),
        ("units = true", r"units=true"),
        ('memory_bytes_per_second = "fast"', r"memory_bytes_per_second='fast'"),
    ],
)
def test_numbers_that_no_device_has(tmp_path, line, said):
    key = line.partition(" ")[0]
    file = tmp_path / "mine.toml"
    kept = [each for each in MINE.splitlines() if not each.startswith(f"{key} ")]
    file.write_text("\n".join([*kept, line]))
    with pytest.raises(ConfigError, match=rf"mine\.toml: devices\.my-gpu\.{said}.*planner\.md"):
        parse_cluster(f"{file}:2x1")
    file.write_text(MINE.replace("product_share = 0.5", "product_share = true"))
    with pytest.raises(ConfigError, match=r"calibration\.product_share=true"):
        parse_cluster(f"{file}:2x1")


@pytest.mark.parametrize(
    ("stride", "size", "shape"),
    [
        (1, 8, (8, 1)),
        (8, 16, (1, 16)),
        (2, 8, (4, 2)),
        (1, 64, (8, 8)),
        (4, 2, (2, 1)),
        (1, 1, (1, 1)),
    ],
)
def test_groups_lie_in_nodes_of_eight(stride, size, shape):
    assert group_shape(stride, size, 8) == shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("calibrations = 3\n[devices]", r"must hold tables \[devices\.NAME\]"),
        (f"x = {'[' * 2000}{']' * 2000}", "nested too deeply"),
        (b"x = '\xff'", "not UTF-8"),
        ("#" * (1 << 21), "larger than"),
    ],
)
def test_a_file_that_describes_no_device(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=said):
        parse_cluster(f"{path}:1x1")


def test_a_pipe_describes_no_device(tmp_path):
    os.mkfifo(tmp_path / "mine.toml")
    with pytest.raises(ConfigError, match="a device or a pipe"):
        parse_cluster(f"{tmp_path / 'mine.toml'}:1x1")


def test_scaling_ends_where_no_network_is_known():
    known = parse_cluster("a100-40gb:2x1")
    device = known.device.model_copy(update={"network_bytes_per_second": None})
    config = load_config("quickstart", {"model.vocab_size": 64, "train.steps": 10})
    points = list(scale(config, known.model_copy(update={"device": device}), most=16))
    assert [point.n_devices for point in points] == [1, 2, 4]
    assert [point.best is None for point in points] == [False, False, True]
    assert "no network between nodes" in points[-1].why
