"""How what is compared is written, named and chosen."""

import pytest

from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError
from pentameter.planning.layouts.layout import Layout, parse_layout
from pentameter.verify.cases import Case, chosen_cases, own_case
from pentameter.verify.shrink import case_config, shrink


def config(**parallel):
    return load_config("quickstart", {"parallel": parallel})


def test_all_has_every_layout_that_must_be_equal():
    written = {str(case) for case in chosen_cases(config(), "all")}
    assert written >= {
        "data=1,micro_batches=4",
        "data=1,activation_checkpoint=full",
        "data=1,activation_checkpoint=selective",
        "data=2",
        "data=2,zero=1",
        "data=2,zero=2",
        "data=2,zero=3",
        "data=4,zero=3,replicate=2",
        "tensor=2",
        "tensor=2,sequence=true",
        "pipeline=2,schedule=gpipe",
        "pipeline=2",
        "pipeline=2,schedule=zero-bubble",
        "pipeline=2,schedule=interleaved,virtual_stages=2",
        "pipeline=2,schedule=zero-bubble,virtual_stages=2",
        "pipeline=2,schedule=zero-bubble-v,virtual_stages=2",
        "data=2,tensor=2",
        "data=2,pipeline=2",
        "tensor=2,pipeline=2",
        "data=2,tensor=2,pipeline=2",
        "data=2,zero=3,activation_checkpoint=full",
        "data=2,zero=3,tensor=2,sequence=true,pipeline=2,schedule=interleaved,virtual_stages=2",
        "tensor=2,pipeline=2,tied_head=false",
        "context=2",
        "context=2,context_mode=all-to-all",
        "data=2,context=2",
        "data=2,zero=3,context=2",
        "tensor=2,sequence=true,context=2",
        "pipeline=2,schedule=zero-bubble,context=2",
        "tensor=4,pipeline=2,tensor_mode=2d",
        "tensor=4,pipeline=2,tensor_mode=2d,tied_head=false",
        "tensor=4,pipeline=2,schedule=zero-bubble,tensor_mode=2d",
        "data=2,tensor=4,pipeline=2,tensor_mode=2d",
        "data=2,zero=1,tensor=4,pipeline=2,tensor_mode=2d",
        "tensor=8,pipeline=2,tensor_mode=2.5d,tensor_depth=2",
        "tensor=8,pipeline=2,tensor_mode=3d",
    }
    assert len(written) >= 50


def test_the_other_head_is_the_one_that_the_configuration_has_not():
    untied = load_config("quickstart", {"model.tied_head": False})
    assert {case.tied_head for case in chosen_cases(config(), "all")} == {None, False}
    assert {case.tied_head for case in chosen_cases(untied, "all")} == {None, True}


def test_attention_without_dropout_is_compared_where_the_configuration_has_none():
    dropping = load_config("quickstart", {"model.attention.dropout": 0.2})
    assert {case.attention_dropout for case in chosen_cases(dropping, "all")} == {None}
    cases = [case for case in chosen_cases(config(), "all") if case.attention_dropout is False]
    assert {case.layout.context for case in cases} == {1, 2}
    small = shrink(config(), cases)
    assert small.model.attention.dropout > 0
    for case in cases:
        assert case_config(small, case).model.attention.dropout == 0
        assert case_config(small, case.alone).model.attention.dropout == 0
        assert "no attention dropout" in case.name


def test_what_is_written_is_read_back():
    for case in chosen_cases(config(), "all"):
        assert chosen_cases(config(), str(case)) == [case]


def test_a_list_of_layouts():
    found = chosen_cases(config(), " data=2 ; tensor=2, zero=1,tied-head=true;data=2;")
    assert found == [
        Case(Layout(data=2)),
        Case(Layout(tensor=2, zero=1), tied_head=True),
    ]
    assert [case.name for case in found] == ["data 2", "data 1 (ZeRO 1) × tensor 2, tied head"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names none: write 'all'"),
        ("data=2;tensr=2", "'tensr=2' must be NAME=VALUE"),
        ("data=2,micro_batches=0", "micro_batches='0' must be in 1 … 64"),
        ("data=2,activation_checkpoint=half", "must be full or selective"),
        ("tied_head=maybe", "must be true or false"),
        ("data=128", "needs 128 processes, .* at most 64"),
    ],
)
def test_what_cannot_be_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        chosen_cases(config(), text)


def test_the_configurations_own_layout_is_among_all():
    assert own_case(config()) is None
    own = config(tensor=4, pipeline=2, data=1, schedule="gpipe")
    layout = parse_layout("data=1,tensor=4,pipeline=2,schedule=gpipe")
    assert Case(layout) in chosen_cases(own, "all")
    checkpointing = load_config(own, {"train.activation_checkpoint": "full"})
    assert own_case(checkpointing) == Case(layout, activation_checkpoint="full")


@pytest.mark.parametrize(
    ("parallel", "layout"),
    [
        ({"zero": 3}, "data=2,zero=3"),  # data is the number of processes, whatever that will be
        ({"zero": 3, "replicate": 2}, "data=4,zero=3,replicate=2"),
        ({"tensor": 4}, "data=2,tensor=4"),
        ({"tensor": 4, "pipeline": 2}, "tensor=4,pipeline=2"),
        (
            {"data": 2, "context": 16, "context_mode": "all-to-all", "tensor": 4},
            "data=2,tensor=2,context=2,context_mode=all-to-all",
        ),
        ({"data": 64}, "data=2"),
        ({"data": 16, "zero": 1, "replicate": 4}, "data=4,zero=1,replicate=2"),
        (
            {"data": 3, "tensor": 4, "sequence": True, "pipeline": 4, "virtual_stages": 1},
            "data=2,tensor=2,sequence=true,pipeline=2",
        ),
    ],
)
def test_a_layout_too_large_for_a_laptop_is_verified_at_lower_degrees(parallel, layout):
    large = load_config("quickstart", {"parallel": parallel, "model.attention.n_heads": 64})
    assert own_case(large) == Case(parse_layout(layout))


def test_an_own_layout_that_training_would_refuse_is_refused():
    with pytest.raises(
        ConfigError, match=r"parallel\.tensor=2 must divide model\.attention\.n_heads=25"
    ):
        chosen_cases(load_config("gpt2-1558m", {"parallel.tensor": 2}), "all")
