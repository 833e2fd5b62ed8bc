"""Clusters: what names one, what is refused, and how a group's ranks lie in nodes."""

import pytest

from pentameter.errors import ConfigError
from pentameter.planning.cluster import (
    device_of_driver,
    group_shape,
    known_devices,
    parse_cluster,
)

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
        assert device.driver_names, name
        if device.can_be_planned:
            assert device.network_bytes_per_second, name
            assert device.calibration_key, name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a100:8x4", r"'a100' is not known; did you mean a100-80gb\? Known: .*h100-80gb"),
        ("h200:0x2", "DEVICE:GPUSxNODES"),
        ("h200:8y2", "DEVICE:GPUSxNODES"),
        ("l4:1", "only the peak of l4 is known"),
        ("nowhere.toml:1x1", r"nowhere\.toml cannot be read"),
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


def test_drivers_names_find_their_device():
    for name, key in (
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("AMD Instinct MI300X", "mi300x"),
    ):
        assert device_of_driver(name) == known_devices()[key]
    assert device_of_driver("Voodoo 2") is None


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
