"""What shrinking keeps, and what it makes sure of."""

from operator import attrgetter

import pytest

from pentameter.config.files.load import load_config, preset_names
from pentameter.config.model.architecture import architecture
from pentameter.model import loss
from pentameter.model.loss import exceeds_chunk
from pentameter.parallel.context import ring_attention
from pentameter.planning.gpt import parameter_table
from pentameter.planning.plan import make_plan
from pentameter.verify.cases import chosen_cases
from pentameter.verify.shrink import case_config, described_changes, shrink
from pentameter.verify.steps import made_up_batch, several_blocks

STRUCTURE = {
    "model": (
        "feed_forward.activation feed_forward.swiglu_alpha feed_forward.swiglu_limit "
        "attention.type attention.sinks norm norm_position norm_eps attention.qk_norm "
        "positions rope_theta window_rope_theta attention.score_size rope_scaling "
        "parallel_residual logit_softcap tied_head "
        "head_bias attention.qkv_bias attention.out_bias bias embedding_scale experts.shared_gate "
        "router.score_function router.top_k_first router.renormalize router.scale "
        "router.bias router.balance router.balance_rate router.balance_weight "
        "router.z_loss experts.capacity"
    ),
    "optimizer": "name betas decay momentum",
}
"""Keys that decide how a step is computed: verified as the configuration has them."""
SIZES = {
    "model": (
        "n_layers attention.n_heads attention.n_kv_heads attention.head_size "
        "rotary_fraction nope_layers attention.sliding_window attention.sliding_window_pattern "
        "d_model feed_forward.width context_length vocab_size vocab_multiple dropout "
        "attention.dropout embedding_dropout experts.count experts.per_token "
        "experts.width experts.n_shared experts.dense_layers router.groups "
        "router.open_groups router.group_scores attention.kv_rank attention.q_rank "
        "attention.rope_head_size attention.v_head_size"
    ),
    "optimizer": "learning_rate eps weight_decay clip_norm",
}
"""Keys that shrinking may change."""
REPLACED = {"model": "init init_std residual_init_scale", "optimizer": ""}
"""Keys of the initial weights: verify draws its own, where every parameter matters."""


@pytest.mark.parametrize("section", STRUCTURE)
def test_every_key_of_the_model_and_the_optimizer_is_known_to_shrinking(section):
    config = load_config("quickstart")
    fields = architecture(config.model) if section == "model" else dict(config.optimizer)
    known = f"{STRUCTURE[section]} {SIZES[section]} {REPLACED[section]}".split()
    assert sorted(fields) == sorted(known), "shrink it, or say that it is structure"


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_shrinks_to_something_small_of_the_same_structure(preset):
    config = load_config(preset)
    cases = chosen_cases(config, "all")
    small = shrink(config, cases)
    for section, keys in STRUCTURE.items():
        for key in keys.split():
            before, after = (attrgetter(f"{section}.{key}")(each) for each in (config, small))
            assert before == after, key
    kinds = {name.split(".")[-2:][0] for name in names(config)}
    assert kinds == {name.split(".")[-2:][0] for name in names(small)}
    # Heads that share keys are twice as many, so that these can be divided as well; experts four.
    is_larger = (
        small.model.attention.n_kv_heads is not None or small.model.experts.count is not None
    )
    most = 20_000 if is_larger else 10_000
    assert sum(spec.n_elements for spec in parameter_table(small.model)) < most
    assert small.model.dropout >= 0.1
    assert small.model.attention.dropout >= 0.1
    assert small.seed == config.seed
    for case in cases:
        plan = make_plan(case_config(small, case))  # which refuses what cannot be
        assert plan.layout == case.layout
        assert plan.n_micro_batches == case.n_micro_batches
        assert plan.vocab_size_padded % 2 == 1


def names(config):
    known = config.model.model_copy(update={"vocab_size": config.model.vocab_size or 100})
    return [spec.name for spec in parameter_table(known)]


def test_a_padded_vocabulary_stays_padded_and_uneven():
    config = load_config("quickstart", {"model.vocab_multiple": 128})
    for layout in ("tensor=2", "tensor=3", "tensor=4", "tensor=6"):
        (case,) = chosen_cases(config, layout)
        plan = make_plan(case_config(shrink(config, [case]), case))
        assert plan.vocab_size_padded > plan.config.model.vocab_size
        assert plan.vocab_size_padded % case.layout.tensor


def test_layouts_of_higher_degrees_get_heads_layers_and_rows_enough():
    config = load_config("quickstart")
    layouts = "tensor=4;tensor=3,sequence=1,context=2;pipeline=7;data=5"
    cases = chosen_cases(config, f"{layouts};tensor=2,context=4,context_mode=all-to-all")
    small = shrink(config, cases)
    assert small.model.attention.n_heads == 24
    assert small.model.n_layers == 8  # more than stages: the cut is uneven
    for case in cases:
        make_plan(case_config(small, case))


def test_what_is_computed_in_blocks_has_several():
    """Windows that divide a longer context; in layouts, tiles of a ring's chunk and chunks of the
    loss, the last ones smaller; and no block is small for the one process."""
    config = load_config("gpt-oss-20b")
    cases = chosen_cases(config, "context=2;tensor=2;data=2,micro_batches=4")
    small = shrink(config, cases)
    T, window = small.model.context_length, small.model.attention.sliding_window
    assert T % window == 0
    assert 2 * window < T
    tiles, limit = ring_attention.TILE, loss.MAX_LOGITS
    with several_blocks():
        assert 1 < ring_attention.TILE < T // 4 < 2 * ring_attention.TILE
        for case in cases:
            plan = make_plan(case_config(small, case))
            n_rows = plan.micro_batch_size * T // case.layout.context
            assert exceeds_chunk(n_rows, plan.vocab_size_padded // case.layout.tensor)
    assert (tiles, limit) == (ring_attention.TILE, loss.MAX_LOGITS)


def test_made_up_targets_have_holes():
    config = load_config("quickstart")
    (case,) = chosen_cases(config, "data=2")
    plan = make_plan(case_config(shrink(config, [case]), case))
    for step in range(3):
        counted = made_up_batch(plan, step).targets >= 0
        ends = [row.nonzero()[0].max(initial=-1) + 1 for row in counted]
        assert min(ends) == 0
        assert sum(ends) > counted.sum() > 0


def test_the_changes_are_told():
    config = load_config("quickstart")
    told = list(described_changes(config, shrink(config, chosen_cases(config, "data=2"))))
    assert "n_layers 4 → 5" in told
    assert "dropout 0 → 0.1" in told
    assert "vocab_size unset → 13" in told
    assert not [change for change in told if "tied_head" in change]
