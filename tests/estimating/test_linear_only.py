"""Number formats of linear layers' matmuls alone."""

import pytest

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.estimating.search.search import search
from pentameter.estimating.seconds.cluster import parse_cluster
from pentameter.estimating.seconds.estimate import make_estimate

GPT = {
    "model.vocab_size": 50304,
    "model.n_layers": 8,
    "model.attention.n_heads": 16,
    "model.d_model": 2048,
    "model.context_length": 2048,
    "train.batch_size": 64,
    "train.micro_batch_size": 4,
}


def estimate(matmuls=None, cluster="h100-80gb:8x1", **changes):
    config = load_config("quickstart", {**GPT, **changes})
    return make_estimate(config, parse_cluster(cluster), layout="zero=1", matmuls=matmuls)


def test_linear_layers_are_faster_and_all_else_is_as_in_bf16():
    wide, narrow = estimate(**{"train.precision": "bf16"}), estimate("fp8")
    assert (wide.precision, narrow.precision) == ("bf16", "fp8")
    assert 0.5 * wide.time.compute < narrow.time.compute < wide.time.compute
    assert narrow.memory == wide.memory
    assert narrow.communication == wide.communication
    assert narrow.time.optimizer == wide.time.optimizer
    # MFU counts the peak in 8 bits, which is twice as high.
    ratio = wide.time.seconds / narrow.time.seconds
    assert narrow.mfu == pytest.approx(wide.mfu * ratio / 2, rel=1e-3)


def test_such_a_plan_says_that_it_is_one():
    own = estimate(**{"train.matmuls": "fp8"})
    for each in (estimate("fp8"), own):
        (said,) = [text for text in each.warnings() if "fp8" in text]
        assert said == (
            "fp8: memory and messages are those of bf16, and no run of pentameter calibrated its "
            "time"
        )
    assert not any("fp8" in text for text in estimate().warnings())


def test_what_is_trained_takes_longer_than_all_in_8_bits():
    """Weights' gradients stay in bf16. A device without 8 bits is planned in bf16."""
    asked = {"train.matmuls": "fp8"}
    wide, own, narrow = estimate(), estimate(**asked), estimate("fp8")
    assert own.precision == "fp8"
    assert narrow.time.compute < own.time.compute < wide.time.compute
    assert estimate(cluster="a100-80gb:8x1", **asked).precision == "bf16"


def test_layouts_are_searched_in_it():
    config = load_config("quickstart", GPT)
    found = search(config, parse_cluster("h100-80gb:8x1"), n_best=1, matmuls="fp8")
    assert found.estimates[0].precision == "fp8"


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"matmuls": "fp7"}, "--matmuls fp7: choose fp8"),
        (
            {"matmuls": "fp8", "train.precision": "fp32"},
            "--matmuls fp8 goes with train.precision='bf16'",
        ),
        (
            {"matmuls": "fp8", "cluster": "a100-80gb:8x1"},
            "--matmuls fp8: a peak in fp8 is not known of a100-80gb",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(asked, error):
    with pytest.raises(ConfigError, match=error):
        estimate(**asked).time.seconds  # noqa: B018
