"""A rank built on no memory holds what the Plan says, in a world without other ranks."""

import json
import subprocess
import sys

import pytest

from pentameter.config.load import load_config
from pentameter.errors import ConfigError
from pentameter.planning.plan import make_plan

MODEL = {
    "model.vocab_size": 250,
    "model.n_layers": 8,
    "model.n_heads": 8,
    "model.d_model": 96,
    "model.context_length": 64,
    "train.batch_size": 64,
}
CODE = """
import json, sys
from pentameter.config.load import load_config
from pentameter.parallel.dry_run import trace_rank
from pentameter.planning.layout import parse_parallel
from pentameter.planning.plan import make_plan
found = []
for layout, ranks in json.loads(sys.argv[2]):
    config = load_config("quickstart", json.loads(sys.argv[1]))
    config = config.model_copy(update={"parallel": parse_parallel(layout, config.parallel)})
    plan = make_plan(config)
    for rank in ranks:
        traced = trace_rank(plan, rank, "bf16")
        found.append([layout, rank, traced.differing, sum(traced.traced.values())])
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("layout", "rank"),
    [("data=2,tensor=2,pipeline=4,zero=1", 15), ("data=4,zero=3,tensor=4", 6)],
)
def test_a_rank_holds_the_planned_bytes(layout, rank):
    # In a process of its own: PyTorch remembers a mesh, and the place of this process in it.
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(MODEL), json.dumps([(layout, [rank])])],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ((_, _, differing, n_bytes),) = json.loads(done.stdout.splitlines()[-1])
    assert not differing
    assert n_bytes > 0


def test_a_rank_that_is_not_there_is_refused():
    from pentameter.parallel.dry_run import trace_rank

    plan = make_plan(load_config("quickstart", MODEL))
    with pytest.raises(ConfigError, match="--dry-run-rank 3 is not in 0 … 0"):
        trace_rank(plan, 3, "bf16")
