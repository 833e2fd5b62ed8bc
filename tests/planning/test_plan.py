"""The Plan: accumulation, resolution, refusals with the nearest possible values."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.config.files.load import load_config
from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.plan_estimates import plan_memory, plan_record, plan_state_bytes
from pentameter.planning.layouts.layout import Layout, parse_layout, stage_layers
from pentameter.planning.layouts.layout_checks import check_tied_within
from pentameter.planning.outline import tied_parameters
from pentameter.planning.plan import make_plan


def config(**train) -> Config:
    return Config.model_validate(
        {
            "model": {"context_length": 16, "n_layers": 2, "n_heads": 2, "d_model": 8},
            "data": {"corpus": "grammar"},
            "train": {"steps": 20, **train},
        }
    )


def test_a_token_budget_becomes_accumulation():
    plan = make_plan(config(tokens_per_step=16 * 12, micro_batch_size=4), vocab_size=10)
    assert (plan.batch_size, plan.micro_batch_size, plan.n_micro_batches) == (12, 4, 3)
    assert plan.tokens_per_step == 192
    assert plan.total_tokens == 192 * 20


def test_everything_derivable_is_resolved():
    plan = make_plan(config(batch_size=12, eval_interval=5), vocab_size=10)
    resolved = plan.config
    assert resolved.model.vocab_size == 10
    assert resolved.model.feed_forward.width == 32
    assert resolved.train.micro_batch_size == 12
    assert resolved.schedule.decay_steps == 20
    assert resolved.checkpoint.interval == 5
    assert make_plan(plan.portable_config, vocab_size=10) == plan


@pytest.mark.parametrize(
    ("steps", "interval"),
    [(1, 1), (9, 1), (10, 2), (100, 20), (1200, 200), (4999, 500), (5000, 1000), (10**6, 1000)],
)
def test_an_automatic_interval_follows_the_steps(steps, interval):
    train = make_plan(
        config(batch_size=4, steps=steps, eval_interval="auto", sample_interval="auto"), 10
    ).config.train
    assert (train.eval_interval, train.sample_interval) == (interval, interval)


def test_what_a_layout_implied_stays_out_of_the_configuration_for_another():
    plan = make_plan(config(batch_size=12), vocab_size=10)
    halves = make_plan(plan.portable_config, vocab_size=10, world_size=2)
    assert (plan.micro_batch_size, halves.micro_batch_size) == (12, 6)
    asked = make_plan(config(batch_size=12, micro_batch_size=3), vocab_size=10)
    assert asked.portable_config.train.micro_batch_size == 3


@pytest.mark.parametrize(
    ("train", "vocab_size", "words"),
    [
        ({"tokens_per_step": 100}, 10, ("tokens_per_step=100", "96, 112")),
        ({"tokens_per_step": 3}, 10, ("tokens_per_step=3", "16")),
        ({"batch_size": 12, "micro_batch_size": 5}, 10, ("micro_batch_size=5", "4, 6")),
        ({"batch_size": 4}, None, ("model.vocab_size",)),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(train, vocab_size, words):
    with pytest.raises(ConfigError) as caught:
        make_plan(config(**train), vocab_size)
    for word in words:
        assert word in str(caught.value)


def test_a_vocabulary_below_the_tokenizers_is_refused():
    asked = config(batch_size=2)
    asked = asked.model_copy(update={"model": asked.model.model_copy(update={"vocab_size": 9})})
    with pytest.raises(ConfigError, match="vocab_size=9 is smaller than the tokenizer's 10"):
        make_plan(asked, 10)


def test_flops_of_the_character_gpt():
    """The character GPT's accounting: 71.0 MFLOP per token, 1.16e12 per step."""
    plan = make_plan(load_config("shakespeare-char"), 65)
    assert plan.flops_per_token / 1e6 == pytest.approx(71.0, abs=0.05)
    assert plan.flops_per_token * plan.tokens_per_step == pytest.approx(1.16e12, rel=5e-3)


def test_padded_vocabulary_counts_separately():
    asked = config(batch_size=2)
    model = asked.model.model_copy(update={"vocab_multiple": 8, "head_bias": True})
    plan = make_plan(asked.model_copy(update={"model": model}), 10)
    assert plan.vocab_size_padded == 16
    assert plan.n_parameters_padded - plan.n_parameters == 6 * (8 + 1)


def test_memory_is_exact_bytes_per_parameter():
    plan = make_plan(config(batch_size=2), 10)
    held = plan_state_bytes(plan)
    assert held.weights_bytes == held.gradients_bytes == 4 * plan.n_parameters_padded
    assert held.optimizer_bytes == 8 * plan.n_parameters_padded


def test_a_vocabulary_that_leaves_a_process_nothing_is_to_be_padded():
    few = config(batch_size=8)
    few = load_config(few, {"model.attention.n_heads": 4, "parallel.tensor": 4})
    with pytest.raises(ConfigError, match=r"tensor=4 cuts the 9 rows .* --model.vocab-multiple 4"):
        make_plan(few, vocab_size=9)
    make_plan(load_config(few, {"model.vocab_multiple": 4}), vocab_size=9)
    make_plan(few, vocab_size=10)  # 3, 3, 3, 1


def test_a_batch_too_small_for_a_pipeline_is_to_be_raised():
    few = load_config(config(batch_size=2), {"parallel.pipeline": 2, "model.n_layers": 2})
    with pytest.raises(ConfigError, match=r"there are 1; raise train.batch_size to 4, or lower"):
        make_plan(few, vocab_size=10, world_size=4)
    few = load_config(few, {"train.batch_size": 4, "train.micro_batch_size": 2})
    with pytest.raises(ConfigError, match=r"there are 1; lower train.micro_batch_size, or"):
        make_plan(few, vocab_size=10, world_size=4)


def test_more_parts_than_sequences_are_refused_with_one_batch():
    with pytest.raises(ConfigError, match=r"or a batch of 32 sequences$"):
        make_plan(config(batch_size=16), vocab_size=10, world_size=32)


def test_gpt3_fits_its_own_layout():
    """One pipeline for all 1,536 sequences of a step has as many messages under way as one of
    eight, and fits a device of 80 GB."""
    alone = make_plan(load_config("gpt3-175b"), world_size=128)
    shared = make_plan(load_config("gpt3-175b"), world_size=1024)
    assert alone.n_micro_batches == 8 * shared.n_micro_batches
    assert plan_memory(alone).received_bytes == plan_memory(shared).received_bytes
    assert plan_memory(alone).activations_bytes == plan_memory(shared).activations_bytes
    assert plan_memory(alone).total_bytes < 40e9
    assert plan_record(shared)["layout"]["world_size"] == 1024


@given(n_layers=st.integers(1, 100), n_stages=st.integers(1, 16))
def test_stage_layers_partition_evenly(n_layers, n_stages):
    stages = stage_layers(n_layers, n_stages)
    assert [layer for stage in stages for layer in stage] == list(range(n_layers))
    sizes = [len(stage) for stage in stages]
    assert len(sizes) == n_stages
    assert max(sizes) - min(sizes) <= 1


def test_one_process_is_the_default_layout():
    assert Layout().world_size == 1
    assert Layout(data=2, tensor=2, pipeline=2).world_size == 8


def test_a_parameter_of_several_stages_is_owned_by_the_first():
    names = [frozenset(each) for each in ("ab", "bc", "cd", "de")]  # stages 0, 2 lie on one process
    layout = Layout(pipeline=2, schedule="interleaved", virtual_stages=2)
    tied = tied_parameters(layout, names)
    assert tied == {"b": (0, 1), "c": (1, 0), "d": (0, 1)}
    check_tied_within(replace(layout, data=2, zero=3), names, tied)
    both = [frozenset(each) for each in ("ab", "c", "bd", "e")]
    tied = tied_parameters(layout, both)
    assert tied == {"b": (0,)}
    with pytest.raises(ConfigError, match="two copies of b on one of them"):
        check_tied_within(replace(layout, data=2, zero=3), both, tied)
    check_tied_within(replace(layout, data=2), both, tied)  # whole in each


def test_counts_that_no_run_reaches_are_planned_or_refused_at_once():
    """Counting up to them would take minutes."""
    prime = {"train.batch_size": 2**31 - 1, "parallel.pipeline": 2}
    assert make_plan(load_config("quickstart", prime), 64).micro_batch_size == 1
    whole = make_plan(load_config("quickstart", {"train.batch_size": 2**31 - 1}), 64)
    assert whole.micro_batch_size == 2**31 - 1
    experts = {"model.experts.count": 2**31 - 1, "parallel.expert": 2}
    with pytest.raises(ConfigError, match="possible: 1, 2147483647"):
        make_plan(load_config("quickstart", experts), 64)
    loads = {0: 3.0, 4999: 4.0}  # layers that the ends weigh as much as
    sizes = list(map(len, stage_layers(10_000, 5_000, *loads.values())))
    assert max(size + loads.get(stage, 0.0) for stage, size in enumerate(sizes)) == 5.0


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"epochs": 20_000_000}, "at most 2,147,483,647"),
        ({"tokens_per_step": 128 * 2**31}, "makes 2,147,483,648 sequences"),
        ({"tokens_per_step": 10}, "nearest possible: 128$"),
    ],
)
def test_what_no_resolved_configuration_may_hold_is_refused(train, said):
    """Else the run's config.toml would be written, and refused when the run is resumed."""
    with pytest.raises(ConfigError, match=said):
        make_plan(load_config("quickstart", {"train": train}), 64, 50_000)


def test_the_text_of_a_layout_may_have_any_number():
    with pytest.raises(ConfigError, match=r"data='999.* must be a whole number"):
        parse_layout(f"data={'9' * 5000}")
    with pytest.raises(ConfigError, match="nearest possible: 16"):
        parse_layout("tensor=2,tensor_mode=2.5d,tensor_depth=4")
