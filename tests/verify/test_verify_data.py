"""The same batches on every layout, and a fault in who reads what."""

import pytest

from pentameter.cli import verify as command
from pentameter.config.files.load import load_config
from pentameter.data.batches.step import training_batches
from pentameter.data.open_dataset import open_dataset
from pentameter.errors import ConfigError
from pentameter.planning.batch_sizes import global_batch_size
from pentameter.planning.layouts.layout import Layout, parse_layout
from pentameter.verify.cases import chosen_cases
from pentameter.verify.data import chosen_steps, verify_data

GRAMMAR = ["--data.grammar.n-characters", "20000"]


def batches_of(order, batch_size=12, **data):
    config = load_config(
        "grammar",
        {
            "data": {"order": order, "grammar": {"n_characters": 3000}, **data},
            "train": {"batch_size": batch_size},
            "model.context_length": 32,
        },
    )
    batches = training_batches(config, open_dataset(config.data).split("train"))
    return config, batches, global_batch_size(config)


@pytest.mark.parametrize("order", ["random", "shuffled", "sequential", "columns", "documents"])
def test_every_layout_reads_what_one_process_reads(order):
    config, batches, batch_size = batches_of(order)
    layouts = [case.layout for case in chosen_cases(config, "all")]
    steps = chosen_steps(batches, batch_size, 3)
    outcomes = list(verify_data(batches, batch_size, layouts, steps))
    assert len({outcome.hash for outcome in outcomes}) == 1
    assert all(outcome.passed for outcome in outcomes)


def test_the_steps_cross_the_ends_of_epochs():
    _, batches, batch_size = batches_of("shuffled", batch_size=8)
    assert batches.rows_per_epoch % batch_size
    steps = chosen_steps(batches, batch_size, 3)
    assert {0, 1, 2} <= set(steps)
    for n_epochs in (1, 2):
        end = n_epochs * batches.rows_per_epoch
        assert any(step * batch_size < end < (step + 1) * batch_size for step in steps)
    assert len(set(steps)) == len(steps)


@pytest.mark.parametrize("layout", ["data=2", "tensor=4,tensor_mode=2d"])
def test_a_layout_that_does_not_divide_the_batch_is_no_failure(layout):
    _, batches, batch_size = batches_of("random", batch_size=9)
    one, two = verify_data(batches, batch_size, [parse_layout(layout)], [0])
    assert one.passed
    assert two.passed is None
    assert two.to_json()["problem"] == "2 parts do not divide the 9 sequences of a step"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lambda layout, rank, size: range(size // layout.data), "the batch of step 0 is not"),
        (
            lambda layout, rank, size: range(rank % 2 * 3, rank % 2 * 3 + 3),
            "in step 0, rank 1 reads other rows than those it shares part 0 of the batch with",
        ),
    ],
    ids=["all read the first", "tensor-parallel processes read different ones"],
)
def test_wrong_rows_are_caught(rows, said, monkeypatch):
    _, batches, batch_size = batches_of("shuffled")
    monkeypatch.setattr(Layout, "rows", rows)
    outcomes = list(verify_data(batches, batch_size, [parse_layout("data=2,tensor=2")], [0, 1]))
    assert said in outcomes[1].problem
    assert outcomes[1].passed is False


def test_the_command(capsys):
    arguments = ["grammar", "--data", "--layouts", "data=2;data=4,tensor=2", *GRAMMAR]
    assert command.run(arguments) == 0
    assert "2 of 2 layouts equal one process:" in capsys.readouterr().out


def test_a_layout_that_no_run_can_have_is_no_success(capsys):
    arguments = ["grammar", "--data", *GRAMMAR, "--layouts"]
    assert command.run([*arguments, "data=2;data=3"]) == 0
    assert "1 of 1 layouts equal one process; not possible: data 3:" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"'data=3': no run can have any"):
        command.run([*arguments, "data=3"])
