"""Scaling: each row says how many devices it uses."""

from __future__ import annotations

import pytest

from pentameter.config.files.load import load_config
from pentameter.estimating.search.scaling import scale
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.planning.layouts.layout import parse_layout


def test_a_row_says_how_many_devices_it_uses() -> None:
    """Nodes of six hold no power of two: beyond one node, whole nodes count."""
    settings = {
        "model.vocab_size": 50304,
        "model.attention.n_heads": 12,
        "model.d_model": 768,
        "train.batch_size": 144,
        "train.precision": "bf16",
    }
    points = list(
        scale(load_config("quickstart", settings), parse_cluster("h100-80gb:6x2"), most=18)
    )
    assert [point.n_devices for point in points] == [1, 2, 4, 12, 18]
    for point in points:
        assert point.best is not None
        assert parse_layout(str(point.best.plan.layout)).world_size == point.n_devices
        a_device = point.best.tokens_per_second / point.n_devices
        assert points[0].best is not None
        assert point.efficiency == pytest.approx(a_device / points[0].best.tokens_per_second)
        assert point.efficiency <= 1
