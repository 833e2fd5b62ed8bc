"""The loss scale of fp16."""

from pentameter.parallel.precision import LossScale


def test_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps():
    scale = LossScale(scale=8.0, growth_interval=3)
    scale.update(finite=False)
    assert scale.scale == 4.0
    for _ in range(3):
        scale.update(finite=True)
    assert scale.scale == 8.0
    for _ in range(20):
        scale.update(finite=False)
    assert scale.scale == 1.0
