"""What `doctor --measure` makes of its measurements, and writes of them."""

from __future__ import annotations

import pytest

from pentameter.calibrate import measured_machine
from pentameter.errors import ConfigError
from pentameter.estimating.seconds.cluster import Calibration, Device, ProductShares, read_devices

SHARES = {"product_share": 0.8, "attention_share": 0.25, "attention_backward": 2.0}
MEASURED = Device(
    name="A CPU of two cores",
    tflops={"bf16": 2.0, "fp32": 0.5, "fp64": 0.25},
    memory_bytes=16e9,
    memory_bytes_per_second=20e9,
    link_bytes_per_second=1e9,
    shared=True,
    calibration=Calibration(
        fitted_on="a test",
        **SHARES,
        step_share=0.9,
        kernel_seconds=4e-5,
        precisions={"fp32": ProductShares(**SHARES)},
        fused={"bf16": ProductShares(**SHARES, step_share=1.25)},
        memory_share=1.0,
        link_share=1.0,
        network_share=1.0,
        interference_share=1.0,
        exponential_seconds=2e-10,
        fresh_bytes_per_second=5e9,
        hop_seconds=1e-3,
    ),
    source="doctor --measure",
    date="2026-11-23",
)


def test_the_file_says_what_was_measured(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text("\n".join(measured_machine._file(MEASURED)), encoding="utf-8")
    (read,) = read_devices(path).values()
    assert read == MEASURED.model_copy(update={"calibration_key": "measured"})


@pytest.mark.parametrize("fused", [False, True])
def test_two_steps_tell_what_operations_take_within_a_step(monkeypatch, fused):
    shares = {"step_share": 0.75, "kernel_seconds": 2e-5}
    calibration = MEASURED.calibration
    within = calibration.model_copy(
        update={
            **shares,
            "fused": {"bf16": calibration.fused["bf16"].model_copy(update=shares)},
        }
    )
    there = MEASURED.model_copy(update={"calibration": within})

    def taken(plan):
        return measured_machine._planned(there, plan.config, 2e-5)

    alone = MEASURED.model_copy(
        update={
            "calibration": calibration.model_copy(
                update={"step_share": 1.0, "fused": {"bf16": ProductShares(**SHARES)}}
            )
        }
    )
    monkeypatch.setattr(measured_machine, "_passes_of_step_seconds", taken)
    found = measured_machine._within_step(alone, "bf16", fused=fused)
    # Where operations wait for the longer of two things, it is not quite linear.
    assert found == pytest.approx(shares, rel=0.03)


def test_a_busy_machine_is_not_measured(monkeypatch):
    times = iter([0.05, 0.04, 0.05, 0.05])
    monkeypatch.setattr(measured_machine, "_passes_of_step_seconds", lambda plan: next(times))
    with pytest.raises(ConfigError, match="busy"):
        measured_machine._within_step(MEASURED, "fp32", fused=False)


def test_an_operation_takes_as_long_in_precisions_that_do_not_say():
    calibration = MEASURED.calibration
    assert calibration.products("fp32").kernel_seconds == calibration.kernel_seconds
    assert calibration.products("bf16", fused=True).step_share == 1.25
