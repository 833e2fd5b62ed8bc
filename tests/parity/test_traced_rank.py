"""A rank built on no memory holds what the Plan says, in a world without other ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.planning.plan import make_plan

MODEL = {
    "model.vocab_size": 250,
    "model.n_layers": 8,
    "model.attention.n_heads": 8,
    "model.d_model": 96,
    "model.context_length": 64,
    "train.batch_size": 64,
}
EXPERTS = {"model.experts.count": 8, "model.experts.per_token": 2, "model.experts.width": 64}
CODE = """
import json, sys
from pentameter.config.files.load import load_config
from trials.traced_rank import trace_rank
from pentameter.planning.layouts.layout import parse_parallel
from pentameter.planning.plan import make_plan
layout, rank, settings = json.loads(sys.argv[1])
config = load_config("quickstart", settings)
config = config.model_copy(update={"parallel": parse_parallel(layout, config.parallel)})
traced = trace_rank(make_plan(config), rank, "bf16")
print(json.dumps([traced.differing, traced.gradients, traced.activations,
                  traced.planned_activations]))
"""


@pytest.mark.parametrize(
    ("layout", "rank", "more"),
    [
        ("data=2,tensor=2,pipeline=4,zero=1", 15, {}),
        ("data=4,zero=3,tensor=4", 6, {"train.activation_checkpoint": "full"}),
        ("pipeline=4,schedule=interleaved,virtual_stages=2", 1, {}),
        ("data=2,zero=1,tensor=4,tensor_mode=2d,pipeline=2", 15, {}),
        ("tensor=8,tensor_mode=2.5d,context=2,context_mode=all-to-all,pipeline=2", 27, {}),
        ("tensor=8,tensor_mode=3d,pipeline=2", 14, {"train.activation_checkpoint": "full"}),
        ("data=4,tensor=2,pipeline=2,zero=1,expert=2,expert_tensor=2", 9, EXPERTS),
        ("data=2,zero=3", 1, {"lora.rank": 4, "train.activation_checkpoint": "full"}),
        ("data=2", 1, {**EXPERTS, "model.router.balance": "bias"}),
    ],
)
def test_a_rank_holds_the_planned_bytes(layout, rank, more):
    # In a process of its own: PyTorch remembers a mesh, and the place of this process in it.
    arguments = json.dumps([layout, rank, {**MODEL, **more}])
    done = subprocess.run(
        [sys.executable, "-c", CODE, arguments],
        capture_output=True, text=True, check=False, timeout=300, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    differing, gradients, activations, planned = json.loads(done.stdout.splitlines()[-1])
    assert not differing
    assert min(gradients.values()) > 0
    # Means and deviations of norms, two numbers a token, are not planned: here 1 % of 96 channels.
    # Nor are the numbers by which rows are sorted, two int64 a row.
    assert planned < activations < (1.03 if "expert" in layout else 1.02) * planned


def test_a_rank_that_is_not_there_is_refused():
    from trials.traced_rank import trace_rank

    plan = make_plan(load_config("quickstart", MODEL))
    with pytest.raises(ConfigError, match="rank 3 is not in 0 … 0"):
        trace_rank(plan, 3, "bf16")
