"""Every key that shapes the model is known wherever an architecture is read, compared or rewritten.

The keys of `[model]` are walked through each of these places. A key that a place does not tell
apart fails here, until the place knows it or its list says why it need not. No other section shapes
the model: the seed draws its weights, and the tokenizer fills in `vocab_size`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pentameter.checkpoint.hugging_face.config_json import (
    accounted_keys,
    choose_family,
    from_their_config,
)
from pentameter.checkpoint.hugging_face.families.table import FAMILIES
from pentameter.checkpoint.state import initial_weights
from pentameter.config.fields import choices_of, leaves
from pentameter.config.model_schema import EXPERT_KEYS, LATENT_KEYS, ModelConfig
from pentameter.config.rope_scaling import RopeScalingConfig
from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.plan_estimates import plan_record
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import build_model
from pentameter.model.loss import AuxiliaryLoss
from pentameter.planning.fused_step import FUSES, architecture_obstacle
from pentameter.planning.gpt import parameter_table
from pentameter.planning.plan import make_plan
from pentameter.verify.cases import chosen_cases
from pentameter.verify.shrink import shrink

KEYS = tuple(ModelConfig.model_fields)
BASE = Config.model_validate(
    {
        "model": {
            "vocab_size": 19,
            "context_length": 10,
            "n_layers": 2,
            "n_heads": 2,
            "d_model": 16,
            "bias": True,
            "dropout": 0.2,
            "attention_dropout": 0.2,
            "init_std": 0.5,
        },
        "data": {"corpus": "grammar"},
        "train": {"batch_size": 4, "steps": 100, "precision": "fp32"},
    }
)

COMPANIONS: dict[str, dict[str, Any]] = {
    "rope_theta": {"positions": "rotary"},
    "rotary_fraction": {"positions": "rotary"},
    "rope_scaling": {"positions": "rotary"},
    "swiglu_alpha": {"activation": "swiglu_clamped"},
    "swiglu_limit": {"activation": "swiglu_clamped"},
    "sliding_window_pattern": {"sliding_window": 4},
    "attention": {"positions": "rotary"},
    **{key: {"attention": "latent", "positions": "rotary"} for key in LATENT_KEYS},
    **{key: {"n_experts": 4} for key in EXPERT_KEYS},
    "shared_expert_gate": {"n_experts": 4, "n_shared_experts": 1},
    "router_groups": {"n_experts": 8, "router_groups": 4, "router_open_groups": 2},
    "router_open_groups": {"n_experts": 8, "router_groups": 4, "router_open_groups": 2},
    "router_group_scores": {"n_experts": 8, "router_groups": 2, "router_open_groups": 1},
    "balance_rate": {"n_experts": 4, "balance": "bias"},
    "balance_weight": {"n_experts": 4, "balance": "sequence"},
}
"""Keys that act beside others only, and what stands beside them."""

NOT_PLANNED = {
    "embedding_scale": "one product per element of what is kept and counted anyway",
    "norm_eps": "a number, which takes nothing",
    "logit_softcap": "one function per logit, of which none is kept more",
    "rope_theta": "a number, which takes nothing",
    "rotary_fraction": "what turns and what does not are copied together",
    "rope_scaling": "a number, which takes nothing",
    "swiglu_alpha": "as above",
    "swiglu_limit": "as above",
    "router": "one function per score, of which none is kept more",
    "router_top_k_first": "as above",
    "router_renormalize": "as above",
    "router_scale": "as above",
    "router_groups": "decides which experts are chosen, not how many",
    "router_open_groups": "as above",
    "router_group_scores": "as above",
    "balance_rate": "a number, which takes nothing",
    "balance_weight": "a number, which takes nothing",
    "router_z_loss": "a sum over the router's logits, next to matmuls nothing",
    "expert_capacity": "a bound, which is planned as if it were not reached",
}
"""Keys that change neither a parameter nor a number of the plan, and why."""

KEPT_BY_SHRINKING = {
    "activation": "decides how a step is computed",
    "swiglu_alpha": "as above",
    "swiglu_limit": "as above",
    "attention_sinks": "as above",
    "norm": "as above",
    "norm_position": "as above",
    "positions": "as above",
    "attention": "as above",
    "tied_head": "as above",
    "head_bias": "as above",
    "qkv_bias": "as above",
    "bias": "as above",
    "embedding_scale": "as above",
    "qk_norm": "as above",
    "norm_eps": "as above",
    "parallel_residual": "as above",
    "rope_theta": "as above",
    "rope_scaling": "as above",
    "logit_softcap": "as above",
    "init": "decides how weights begin, which costs no time",
    "init_std": "as above",
    "residual_init_scale": "as above",
    "shared_expert_gate": "decides how a step is computed",
    **dict.fromkeys(
        ("router", "router_top_k_first", "router_renormalize", "router_scale", "router_bias"),
        "as above",
    ),
    "router_group_scores": "as above, as long as small groups have as many experts",
    **dict.fromkeys(
        ("balance", "balance_rate", "balance_weight", "router_z_loss", "expert_capacity"),
        "as above",
    ),
}
"""Keys that `verify` leaves as they are, and why; it sets every other to a size or a rate of its
own. A key that must fit a shrunk one, as heads fit a width, cannot stand here."""


def base_of(key: str) -> Config:
    """BASE with the companions of a key."""
    return with_model(COMPANIONS.get(key, {}))


def with_model(values: dict[str, Any]) -> Config:
    model = {**BASE.model.model_dump(), **values}
    return BASE.model_copy(update={"model": ModelConfig.model_validate(model)})


def other_value(key: str) -> Any:
    """Another value of a key than BASE has, which suits BASE."""
    value = getattr(BASE.model, key)
    others = {
        "n_kv_heads": 1,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "logit_softcap": 2.0,
        "swiglu_limit": 0.25,
        "rope_scaling": RopeScalingConfig(type="linear"),
        "rotary_fraction": 0.25,
        "experts_per_token": 3,
        "n_shared_experts": 3,
        "dense_layers": (1,),
        "router_groups": 2,
        "router_open_groups": 1,
        "router_group_scores": 1,
        "router_z_loss": 0.5,
        "expert_capacity": 0.5,
        "v_head_size": 6,
    }
    if key in others:
        return others[key]
    if isinstance(value, bool):
        return not value
    options = leaves()[f"model.{key}"].options
    words = [word for option in options for word in choices_of(option)]
    if words:
        return next(other for other in words if other != value)
    if key.endswith("dropout"):
        return 0.0
    if value is None:
        return 24
    return value / 2 if isinstance(value, float) else 2 * value


def with_other(key: str) -> Config:
    return with_model({**COMPANIONS.get(key, {}), key: other_value(key)})


def planned(config: Config) -> Any:
    """The parameter table, and all the numbers of a plan: operations, memory, traffic, stages."""
    return parameter_table(config.model), plan_record(make_plan(config, rows_per_epoch=100))


def computed(config: Config) -> dict[str, torch.Tensor]:
    """The initial weights, and the logits of a training step with their gradients."""
    model = build_model(config.model, config.seed, dtype=torch.float64).train()
    for module in model.modules():
        if isinstance(module, AuxiliaryLoss):
            module.start_step(1.0)
    keys = dropout_keys(config.model, config.seed, 3, range(4))
    logits = model(torch.arange(40).view(4, 10) % 19, dropout_keys=keys)
    logits.sum().backward()
    gradients = {f"{n}.grad": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {**model.state_dict(), **gradients, "logits": logits}


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() != other.keys() or any(
        one[name].shape != other[name].shape or not torch.equal(one[name], other[name])
        for name in one
    )


@pytest.mark.parametrize("key", KEYS)
def test_there_is_another_value(key):
    assert getattr(with_other(key).model, key) != getattr(BASE.model, key)


@pytest.mark.parametrize("key", KEYS)
def test_the_table_and_the_plan_know_a_key(key):
    assert (planned(with_other(key)) == planned(base_of(key))) == (key in NOT_PLANNED)


@pytest.mark.parametrize("key", KEYS)
def test_the_model_knows_a_key(key):
    # A router's bias moves between steps: `parallel/experts/balance.py` reads its rate.
    is_known = key != "balance_rate"
    assert differ(computed(with_other(key)), computed(base_of(key))) == is_known


@pytest.mark.parametrize("key", KEYS)
def test_a_fine_tuned_model_shares_a_key(monkeypatch, key):
    tokenizer = SimpleNamespace(hash="of both", hash_of_ids="of both")
    theirs = SimpleNamespace(config=base_of(key), tokenizer=tokenizer, path=Path("m"), checkpoint=1)
    monkeypatch.setattr(initial_weights, "open_model", lambda *_args, **_options: theirs)
    refusal = None
    try:
        initial_weights.initial_weights("m", with_other(key), tokenizer)
    except ConfigError as error:
        refusal = str(error)
    # A longer context than was learned is refused, a shorter one is not: a check of its own.
    may_differ = key in initial_weights.NOT_THE_ARCHITECTURE and key != "context_length"
    assert (refusal is None) == may_differ
    assert may_differ or f"model.{key}: " in refusal


@pytest.mark.parametrize("name", FAMILIES)
def test_hugging_faces_families_know_a_key_once(name):
    family = FAMILIES[name]
    accounted = accounted_keys(family)
    assert len(set(accounted)) == len(accounted)
    assert set(accounted) <= set(KEYS)
    content = {"model_type": name, "num_experts_per_tok": 2}  # which some have no default for
    read = from_their_config(content, Path("config.json"))
    assert read.keys() == set(accounted) - (family.not_needed - family.read.keys())


def test_the_fused_step_knows_keys_that_there_are():
    assert set(FUSES) <= set(KEYS)


def test_shrinking_sets_a_key_or_keeps_it_for_a_reason():
    cases = chosen_cases(BASE, "all")
    kept = {
        key
        for key in KEYS
        if getattr(shrink(with_other(key), cases).model, key) == other_value(key)
        and getattr(shrink(base_of(key), cases).model, key) == getattr(base_of(key).model, key)
    }
    assert kept == set(KEPT_BY_SHRINKING)


class WithANewKey(ModelConfig):
    """An architecture that the schema may have tomorrow."""

    made_up: bool = False
    """Changes what a model computes."""


def test_another_value_of_a_key_that_a_place_does_not_know_is_refused_there():
    values = BASE.model.model_dump()
    new, as_before = (WithANewKey(**values, made_up=made_up) for made_up in (True, False))
    assert architecture_obstacle(new) == "model.made_up=true"
    with pytest.raises(ConfigError, match=r"model\.made_up=true"):
        choose_family(new)
    assert architecture_obstacle(as_before) == architecture_obstacle(BASE.model)
    assert choose_family(as_before) == choose_family(BASE.model)
