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
from pentameter.checkpoint.hugging_face.families.table import families
from pentameter.checkpoint.state import initial_weights
from pentameter.config.fields import choices_of, leaves
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.config.model.attention import LATENT_KEYS
from pentameter.config.model.former_keys import TABLES
from pentameter.config.model.rope_scaling import RopeScalingConfig
from pentameter.config.schema import Config
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.plan_estimates import plan_record
from pentameter.fused_cpu import native
from pentameter.generation.few_rows import FewRows
from pentameter.generation.token_pass import TokenPass, obstacle, token_pass
from pentameter.machine.capabilities import machine_capabilities
from pentameter.model.attention.cache import KVCache
from pentameter.model.dropout import dropout_keys
from pentameter.model.gpt import build_model
from pentameter.model.loss import AuxiliaryLoss
from pentameter.planning.fused_step import architecture_obstacle, fused_values
from pentameter.planning.gpt import parameter_table
from pentameter.planning.plan import make_plan
from pentameter.verify.cases import chosen_cases
from pentameter.verify.shrink import shrink

KEYS = tuple(architecture(ModelConfig()))
BASE = Config.model_validate(
    {
        "model": {
            "vocab_size": 19,
            "context_length": 10,
            "n_layers": 2,
            "d_model": 16,
            "bias": True,
            "dropout": 0.2,
            "init_std": 0.5,
            "attention": {"n_heads": 2, "dropout": 0.2},
        },
        "data": {"corpus": "grammar"},
        "train": {"batch_size": 4, "steps": 100, "precision": "fp32"},
    }
)

COMPANIONS: dict[str, dict[str, Any]] = {
    "rope_theta": {"positions": "rotary"},
    "window_rope_theta": {"positions": "rotary", "attention.sliding_window": 4},
    "nope_layers": {"positions": "rotary"},
    "rotary_fraction": {"positions": "rotary"},
    "rope_scaling": {"positions": "rotary"},
    "feed_forward.swiglu_alpha": {"feed_forward.activation": "swiglu_clamped"},
    "feed_forward.swiglu_limit": {"feed_forward.activation": "swiglu_clamped"},
    "attention.sliding_window_pattern": {"attention.sliding_window": 4},
    "attention.type": {"positions": "rotary"},
    **{
        f"attention.{key}": {"attention.type": "latent", "positions": "rotary"}
        for key in LATENT_KEYS
    },
    **{key: {"experts.count": 4} for key in KEYS if key.startswith(("experts.", "router."))},
    "experts.count": {},
    "experts.shared_gate": {"experts.count": 4, "experts.n_shared": 1},
    "router.groups": {"experts.count": 8, "router.groups": 4, "router.open_groups": 2},
    "router.open_groups": {"experts.count": 8, "router.groups": 4, "router.open_groups": 2},
    "router.group_scores": {"experts.count": 8, "router.groups": 2, "router.open_groups": 1},
    "router.balance_rate": {"experts.count": 4, "router.balance": "bias"},
    "router.balance_weight": {"experts.count": 4, "router.balance": "sequence"},
}
"""Keys that act beside others only, and what stands beside them."""

NOT_PLANNED = {
    "embedding_scale": "one product per element of what is kept and counted anyway",
    "norm_eps": "a number, which takes nothing",
    "logit_softcap": "one function per logit, of which none is kept more",
    "rope_theta": "a number, which takes nothing",
    "window_rope_theta": "as above",
    "nope_layers": "what is not rotated is kept alike",
    "rotary_fraction": "what turns and what does not are copied together",
    "rope_scaling": "a number, which takes nothing",
    "feed_forward.swiglu_alpha": "as above",
    "feed_forward.swiglu_limit": "as above",
    "router.score_function": "one function per score, of which none is kept more",
    "router.top_k_first": "as above",
    "router.renormalize": "as above",
    "router.scale": "as above",
    "router.groups": "decides which experts are chosen, not how many",
    "router.open_groups": "as above",
    "router.group_scores": "as above",
    "router.balance_rate": "a number, which takes nothing",
    "router.balance_weight": "a number, which takes nothing",
    "router.z_loss": "a sum over the router's logits, next to matmuls nothing",
    "experts.capacity": "a bound, which is planned as if it were not reached",
}
"""Keys that change neither a parameter nor a number of the plan, and why."""

KEPT_BY_SHRINKING = {
    "feed_forward.activation": "decides how a step is computed",
    "feed_forward.swiglu_alpha": "as above",
    "feed_forward.swiglu_limit": "as above",
    "attention.sinks": "as above",
    "norm": "as above",
    "norm_position": "as above",
    "positions": "as above",
    "attention.type": "as above",
    "tied_head": "as above",
    "head_bias": "as above",
    "attention.qkv_bias": "as above",
    "attention.out_bias": "as above",
    "bias": "as above",
    "embedding_scale": "as above",
    "attention.qk_norm": "as above",
    "norm_eps": "as above",
    "parallel_residual": "as above",
    "rope_theta": "as above",
    "window_rope_theta": "as above",
    "attention.score_size": "as above",
    "rope_scaling": "as above",
    "logit_softcap": "as above",
    "init": "decides how weights begin, which costs no time",
    "init_std": "as above",
    "residual_init_scale": "as above",
    "experts.shared_gate": "decides how a step is computed",
    **dict.fromkeys(
        (
            "router.score_function",
            "router.top_k_first",
            "router.renormalize",
            "router.scale",
            "router.bias",
        ),
        "as above",
    ),
    "router.group_scores": "as above, as long as small groups have as many experts",
    **dict.fromkeys(
        (
            "router.balance",
            "router.balance_rate",
            "router.balance_weight",
            "router.z_loss",
            "experts.capacity",
        ),
        "as above",
    ),
}
"""Keys that `verify` leaves as they are, and why; it sets every other to a size or a rate of its
own. A key that must fit a shrunk one, as heads fit a width, cannot stand here."""


def base_of(key: str) -> Config:
    """BASE with the companions of a key."""
    return with_model(COMPANIONS.get(key, {}))


def with_model(values: dict[str, Any]) -> Config:
    model = BASE.model.updated(values)
    return BASE.updated({"model": ModelConfig.model_validate(model.model_dump())})


def other_value(key: str) -> Any:
    """Another value of a key than BASE has, which suits BASE."""
    value = architecture(BASE.model)[key]
    others = {
        "attention.n_kv_heads": 1,
        "attention.sliding_window": 4,
        "attention.sliding_window_pattern": (0,),
        "logit_softcap": 2.0,
        "nope_layers": (1,),
        "attention.out_bias": False,
        "feed_forward.swiglu_limit": 0.25,
        "rope_scaling": RopeScalingConfig(type="linear"),
        "rotary_fraction": 0.25,
        "experts.per_token": 3,
        "experts.n_shared": 3,
        "experts.dense_layers": (1,),
        "router.groups": 2,
        "router.open_groups": 1,
        "router.group_scores": 1,
        "router.z_loss": 0.5,
        "experts.capacity": 0.5,
        "attention.v_head_size": 6,
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


def architecture_keys(section: dict[str, Any]) -> set[str]:
    """The keys that `[model]`, as nested tables, has."""
    return {
        f"{key}.{inner}" if key in TABLES else key
        for key, value in section.items()
        for inner in (value if key in TABLES else [key])
    }


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
    assert architecture(with_other(key).model)[key] != architecture(BASE.model)[key]


@pytest.mark.parametrize("key", KEYS)
def test_the_table_and_the_plan_know_a_key(key):
    assert (planned(with_other(key)) == planned(base_of(key))) == (key in NOT_PLANNED)


@pytest.mark.parametrize("key", KEYS)
def test_the_model_knows_a_key(key):
    # A router's bias moves between steps: `parallel/experts/balance.py` reads its rate.
    is_known = key != "router.balance_rate"
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
    may_differ = key in initial_weights.not_the_architecture() and key != "context_length"
    assert (refusal is None) == may_differ
    assert may_differ or f"model.{key}: " in refusal


@pytest.mark.parametrize("name", families())
def test_hugging_faces_families_know_a_key_once(name):
    family = families()[name]
    accounted = accounted_keys(family)
    assert len(set(accounted)) == len(accounted)
    assert set(accounted) <= set(KEYS)
    # Which some have no default for, or one that is refused.
    content = {"model_type": name, "num_experts_per_tok": 2, "attn_logit_softcapping": None}
    read = architecture_keys(from_their_config(content, Path("config.json")))
    assert read == set(accounted) - (family.not_needed - family.read.keys())


def test_the_fused_step_knows_keys_that_there_are():
    assert set(fused_values()) <= set(KEYS)


def test_shrinking_sets_a_key_or_keeps_it_for_a_reason():
    cases = chosen_cases(BASE, "all")

    def shrunk(config: Config) -> dict[str, Any]:
        return architecture(shrink(config, cases).model)

    kept = {
        key
        for key in KEYS
        if shrunk(with_other(key))[key] == other_value(key)
        and shrunk(base_of(key))[key] == architecture(base_of(key).model)[key]
    }
    assert kept == set(KEPT_BY_SHRINKING)


@pytest.mark.parametrize("key", KEYS)
def test_a_pass_over_one_token_computes_a_key_or_leaves_it_to_pytorch(key):
    if (why := native.load("rows", machine_capabilities())) is not None:
        pytest.skip(why)
    sizes = {"d_model": 64, "feed_forward.width": 96, "attention.n_heads": 2}
    other = {"d_model": 96, "attention.n_heads": 4}
    value = other.get(key, other_value(key))
    config = with_model({**sizes, **COMPANIONS.get(key, {}), key: value}).model
    model = build_model(config, 1).eval()
    matmul, cache = FewRows(), KVCache(config, 1)
    if obstacle(model, matmul) is not None:
        assert token_pass(model, matmul, cache.keys, cache.values) is None
        return
    tokens = torch.arange(config.context_length) % 19
    with torch.inference_mode():
        in_one_call = TokenPass(model, matmul, cache.keys, cache.values)
        found = [in_one_call([n], [t], [0]).clone() for t, n in enumerate(tokens.tolist())]
        # Sums in another order, of numbers up to some tens: a key that is left out gives far more.
        torch.testing.assert_close(torch.cat(found)[None], model(tokens[None]), rtol=0, atol=1e-3)


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
