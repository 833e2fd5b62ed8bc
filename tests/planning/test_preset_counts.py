"""The presets' published parameter counts, planned and built, and their batches and rates."""

import re

import pytest
import torch

from pentameter.config.files.load import load_config
from pentameter.config.schema import ModelConfig
from pentameter.errors import ConfigError
from pentameter.estimating.bytes.plan_estimates import plan_memory
from pentameter.model.gpt import GPT
from pentameter.optim.schedule import learning_rate
from pentameter.planning.gpt import parameter_table
from pentameter.planning.layouts.layout import stage_layers
from pentameter.planning.plan import Plan, make_plan

VOCABULARIES = {"wikitext-2": 28_782, "shakespeare": 65, "stdlib": 102}
"""Corpus → words, or characters, of its text, where the tokenizer finds them."""

# Without and with the rows that pad the vocabulary.
COUNTS = {
    "gpt2-124m": (124_439_808, 124_475_904),
    "gpt2-124m-budget": (124_439_808, 124_475_904),
    "gpt2-350m": (354_823_168, 354_871_296),
    "gpt2-774m": (774_030_080, 774_090_240),
    "gpt2-1558m": (1_557_611_200, 1_557_686_400),
    "gpt2-xl-hybrid": (1_557_686_400, 1_557_686_400),
    "gpt3-175b": (174_604_836_864, 174_604_836_864),
    "shakespeare-char": (10_745_088, 10_745_088),
    "shakespeare-fast": (4_739_328, 4_739_328),
    "modern-124m": (123_552_768, 123_588_864),
    "smollm2-135m": (134_515_008, 134_515_008),
    "qwen3-0.6b": (596_049_920, 596_049_920),
    "llama3-8b": (8_030_261_248, 8_030_261_248),
    "llama3-70b": (70_553_706_496, 70_553_706_496),
    "mixtral-8x7b": (46_702_792_704, 46_702_792_704),
    "mixtral-8x22b": (140_630_071_296, 140_630_071_296),
    "qwen3-30b-a3b": (30_532_122_624, 30_532_122_624),
    "qwen3-235b-a22b": (235_093_634_560, 235_093_634_560),
    "olmoe-1b-7b": (6_919_161_856, 6_919_161_856),
    "gpt-oss-20b": (20_914_757_184, 20_914_757_184),
    "deepseek-v2-lite": (15_706_484_224, 15_706_484_224),
    "deepseek-v3": (671_026_419_200, 671_026_419_200),
    "stdlib-moe": (2_394_016, 2_394_016),
    "wikitext2-tutorial": (1_041_444_974, 1_041_444_974),
    "wikitext2-small": (12_025_582, 12_025_582),
}


def plan_of(name: str) -> Plan:
    """The preset's plan, for a text of 1,000 rows."""
    config = load_config(name)
    own = config.model.vocab_size is None
    return make_plan(config, VOCABULARIES[config.data.corpus] if own else None, 1000)


@pytest.mark.parametrize("name", COUNTS)
def test_a_preset_has_exactly_its_parameters(name: str) -> None:
    plan = plan_of(name)
    assert (plan.n_parameters, plan.n_parameters_padded) == COUNTS[name]


ACTIVE = {
    "deepseek-v2-lite": 2_661_150_208,
    "deepseek-v3": 37_552_297_472,
    "mixtral-8x7b": 12_879_925_248,
    "qwen3-30b-a3b": 3_353_032_704,
    "mixtral-8x22b": 39_161_468_928,
    "qwen3-235b-a22b": 22_190_763_520,
    "olmoe-1b-7b": 1_282_017_280,
    "gpt-oss-20b": 4_187_440_704,
    "stdlib-moe": 821_152,
    "llama3-8b": 8_030_261_248,
}
"""Parameters that a token is multiplied with, of presets with experts and one without."""


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_meets_exactly_its_parameters(name: str) -> None:
    plan = plan_of(name)
    assert plan.n_active == ACTIVE[name]
    assert plan.to_json()["model"]["active_parameters"] == ACTIVE[name]


# From published model FLOP/s ÷ tokens/s, at 4,096 tokens.
PUBLISHED_GIGAFLOPS = {
    "qwen3-30b-a3b": (22.8, 23.1),
    "qwen3-235b-a22b": (147.7, 148.3),
    "deepseek-v3": (249.1, 249.7),
}


@pytest.mark.parametrize("name", PUBLISHED_GIGAFLOPS)
def test_flops_of_a_mixture_are_those_published(name: str) -> None:
    least, most = PUBLISHED_GIGAFLOPS[name]
    counted = plan_of(name).to_json()["model"]["causal_flops_per_token"] / 1e9
    assert least * 0.995 < counted < most * 1.005


def built(model: ModelConfig, layers: range) -> dict[str, int]:
    """Elements of each parameter of the built layers, which take no memory on `meta`."""
    with torch.device("meta"):
        stage = GPT(model, first_layer=layers.start, last_layer=layers.stop)
    return {name: parameter.numel() for name, parameter in stage.named_parameters()}


@pytest.mark.parametrize("name", COUNTS)
def test_the_built_model_has_the_planned_parameters(name: str) -> None:
    """Engine by stage where the whole is too large, each parameter counted once.

    Embedding and tied head are one parameter, which the first and the last stage both hold.
    """
    plan = plan_of(name)
    model = plan.config.model
    n_stages = 16 if name == "gpt3-175b" else 1
    elements: dict[str, int] = {}
    n_held = 0
    for layers in stage_layers(model.n_layers, n_stages):
        stage = built(model, layers)
        table = parameter_table(model, first_layer=layers.start, last_layer=layers.stop)
        assert stage == {spec.name: spec.n_elements for spec in table}
        elements |= stage
        n_held += sum(stage.values())
    n_state = sum(spec.n_elements for spec in plan.table if spec.is_state)
    assert sum(elements.values()) - n_state == plan.n_parameters_padded == COUNTS[name][1]
    held_twice = elements["token_embedding.weight"] if n_stages > 1 and model.tied_head else 0
    assert n_held - held_twice - n_state == plan.n_parameters_padded


@pytest.mark.parametrize(
    ("name", "tokens_per_step", "n_micro_batches"),
    [
        ("gpt2-124m", 2**19, 32),
        ("gpt2-350m", 2**19, 64),
        ("gpt2-774m", 2**19, 128),
        ("gpt2-1558m", 2**19, 256),
        ("gpt2-124m-budget", 2**19, 128),
        ("gpt2-xl-hybrid", 192 * 1024, 192),
        ("gpt3-175b", 1536 * 2048, 1536),
        ("modern-124m", 2**19, 32),
        ("smollm2-135m", 2**20, 64),
        ("qwen3-0.6b", 2**20, 64),
        ("llama3-8b", 2**22, 512),
        ("llama3-70b", 2**22, 512),
        ("wikitext2-tutorial", 20 * 35, 10),  # 5 on each of two parts
        ("wikitext2-small", 20 * 35, 1),
    ],
)
def test_a_presets_batch(name: str, tokens_per_step: int, n_micro_batches: int) -> None:
    plan = plan_of(name)
    assert (plan.tokens_per_step, plan.n_micro_batches) == (tokens_per_step, n_micro_batches)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("gpt2-124m-budget", {0: 6e-5, 9: 6e-4, 10: 6e-4, 30: 3.3e-4, 50: 6e-5}),
        ("gpt2-124m", {0: 6e-4 / 715, 714: 6e-4, 19_073: 6e-5}),
        ("wikitext2-tutorial", {0: 5.0, 49: 5.0, 50: 4.75, 149: 4.5125}),
        ("gpt2-xl-hybrid", {0: 1.5e-4, 300: 1.5e-4}),
        ("gpt3-175b", {118: 6e-5, 82_652: 6e-6, 95_366: 6e-6}),
        ("modern-124m", {249: 1e-3, 11_444: 1e-3, 19_073: 0.0}),
        ("smollm2-135m", {499: 3e-3, 8_000: 3e-3, 9_000: 1.5e-3, 10_000: 0.0}),
        ("qwen3-0.6b", {499: 2.5e-4, 10_000: 2.5e-5}),
        ("llama3-8b", {7_999: 3e-4, 3_576_279: 3e-6}),
        ("llama3-70b", {7_999: 1.5e-4, 3_576_279: 1.5e-6}),
    ],
)
def test_a_presets_rates(name: str, rates: dict[int, float]) -> None:
    config = plan_of(name).config
    for step, rate in rates.items():
        asked = learning_rate(step, config.optimizer, config.schedule)
        assert asked == pytest.approx(rate, rel=1e-12), step


def test_epochs_of_documents_become_steps() -> None:
    config = load_config("gpt2-xl-hybrid")
    plan = make_plan(config, rows_per_epoch=19_200)
    assert plan.steps == 60 * 100
    assert plan.config.train.eval_interval == 100


@pytest.mark.parametrize(
    ("name", "n_processes", "degrees", "n_micro_batches"),
    [
        ("wikitext2-tutorial", 4, (2, 1, 2), 5),
        ("wikitext2-tutorial", 2, (1, 1, 2), 10),
        ("wikitext2-small", 1, (1, 1, 1), 1),
        ("gpt2-xl-hybrid", 8, (2, 2, 2), 96),
        ("gpt2-xl-hybrid", 64, (16, 2, 2), 12),
        ("gpt3-175b", 128, (1, 8, 16), 1536),
        ("gpt3-175b", 1024, (8, 8, 16), 192),
        ("llama3-8b", 8, (8, 1, 1), 64),
        ("llama3-70b", 32, (1, 8, 4), 512),
        ("llama3-70b", 128, (4, 8, 4), 128),
    ],
)
def test_a_presets_layout(
    name: str, n_processes: int, degrees: tuple[int, int, int], n_micro_batches: int
) -> None:
    words = VOCABULARIES["wikitext-2"] if name == "wikitext2-small" else None
    plan = make_plan(load_config(name), words, 1000, world_size=n_processes)
    layout = plan.layout
    assert (layout.data, layout.tensor, layout.pipeline) == degrees
    assert (plan.n_micro_batches, plan.tokens_per_step) == (
        n_micro_batches,
        make_plan(load_config(name), words, 1000).tokens_per_step,
    )


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("wikitext2-tutorial", "parallel.pipeline=2 needs a multiple of 2 processes, there is 1"),
        (
            "gpt2-xl-hybrid",
            "parallel.tensor=2 × parallel.pipeline=2 need a multiple of 4 processes, there is 1: "
            "start 4 (--nproc 4, or torchrun's --nproc-per-node), or lower a degree "
            "(--parallel.tensor 1 --parallel.pipeline 1)",
        ),
        ("gpt3-175b", "start 128 (--nproc 128, or torchrun"),
    ],
)
def test_one_process_is_told_what_a_presets_layout_needs(name: str, needs: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(needs)):
        make_plan(load_config(name), rows_per_epoch=1000, world_size=1)


def test_a_presets_layout_can_be_put_down_to_one_process() -> None:
    config = load_config("gpt2-xl-hybrid", {"parallel.tensor": 1, "parallel.pipeline": 1})
    assert make_plan(config, rows_per_epoch=1000, world_size=1).n_micro_batches == 192
    config = load_config("wikitext2-tutorial", {"parallel.pipeline": 1})
    assert make_plan(config, world_size=1).n_micro_batches == 10


ONE_MACHINE = {
    "parallel.tensor": 1,
    "parallel.sequence": False,
    "parallel.pipeline": 1,
    "parallel.zero": 3,
    "train.offload": True,
}


@pytest.mark.parametrize(
    ("name", "n_processes", "gigabytes"),
    [
        ("llama3-8b", 8, 61),
        ("llama3-70b", 32, 45),
        ("llama3-70b", 64, 31),
        ("llama3-70b", 128, 24),
    ],
)
def test_a_presets_layouts_fit_as_its_comments_say(
    name: str, n_processes: int, gigabytes: int
) -> None:
    plan = make_plan(load_config(name), rows_per_epoch=1000, world_size=n_processes)
    assert round(plan_memory(plan).total_bytes / 1e9) == gigabytes


def test_llama3_70b_on_one_machine_lies_in_the_hosts_memory() -> None:
    plan = make_plan(load_config("llama3-70b", ONE_MACHINE), rows_per_epoch=1000, world_size=8)
    memory = plan_memory(plan)
    in_host = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert round(in_host / 1e9) == 141
    assert round((memory.total_bytes - in_host) / 1e9) == 52
