"""The native layer's tables of activations are the formulas."""

import pytest
import torch

from pentameter.fused_cpu.activations import ACTIVATIONS, RANGE, curve


@pytest.mark.parametrize("kind", RANGE)
def test_a_table_is_its_formula(kind):
    table = curve(kind)
    x = torch.linspace(-1.5 * RANGE[kind], 1.5 * RANGE[kind], 20_001, dtype=torch.float64)
    at = (x.abs() * table.per_unit).clamp(max=31.999998)
    t, pieces = at.frac(), table.coefficients.double()[:, at.long()]
    u = pieces[0] + t * (pieces[1] + t * (pieces[2] + t * pieces[3]))
    rise = (pieces[1] + t * (2 * pieces[2] + t * 3 * pieces[3])) * table.per_unit
    y, slope = ACTIVATIONS[kind](x, True)
    torch.testing.assert_close(x / 2 + x.abs() * u, y, rtol=0, atol=3e-5)
    side = torch.where(x > 0, 1.0, -1.0)
    torch.testing.assert_close(0.5 + side * (u + x.abs() * rise), slope, rtol=0, atol=2e-4)


def test_only_squared_relu_has_no_table():
    assert [kind for kind in ACTIVATIONS if curve(kind) is None] == ["relu2"]
