"""The reference workloads on their layouts, small: each learns, and as one process does.

What is the preset's own stays: structure, order, optimizer, schedule, the layout. Sizes are small
enough for two cores, and text comes from PENTAMETER_DATA_DIR where that is set.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch

from pentameter.checkpoint.folders.load_model import load_model
from pentameter.evaluate.split import evaluate
from pentameter.parallel.assemble import engine_of
from pentameter.planning.plan import make_plan
from trials.layout_runs import ALONE, Run, Runs, changed

ROUNDING = 1e-9
"""Relative, in fp64: sums in another order err by 1e-16, and some thirty steps amplify that."""

SINGLE = 1e-4
"""Relative, in fp32, where the same sums err by 1e-7."""

LONG_PROMPT = {"train.sample_prompt": "ba de fi go lu " * 2, "train.sample_tokens": 4}
"""A sample that outgrows 32 characters after two: each token costs every process's messages."""

COMMON = {
    "train.eval_interval": 10,
    "train.sample_interval": 20,
    "train.sample_tokens": 20,  # more than the context of two
    "train.precision": "fp64",
    "train.compile": False,
    "checkpoint.interval": 10,
    "checkpoint.keep_last": 10,
    "log.interval": 1,
}


def assert_same_training(run: Run, alone: Run, tolerance: float = ROUNDING) -> None:
    """Losses, rates and norms of every step, evaluations and what is best of them."""
    assert run.end.reason == alone.end.reason == "completed"
    for kind, keys in (
        ("train", ("step", "tokens", "loss_tokens", "loss", "learning_rate", "grad_norm")),
        ("eval", ("step", "loss", "bits_per_byte", "best")),
        ("skip", ("step",)),
    ):
        for key in keys:
            found, expected = run.numbers(key, kind), alone.numbers(key, kind)
            if key in ("step", "tokens", "loss_tokens", "best"):
                assert found == expected, (kind, key)
            else:
                assert found == pytest.approx(expected, rel=tolerance), (kind, key)
    assert run.end.state["best"]["step"] == alone.end.state["best"]["step"]
    if tolerance <= ROUNDING:
        assert run.samples() == alone.samples()


def assert_same_state(run: Run, alone: Run, step: int) -> None:
    """Weights and optimizer to ROUNDING, gathered from whatever layout saved them."""
    ours, theirs = run.tensors(step), alone.tensors(step)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        if "qkv.bias" in name:
            continue  # a key's bias has no gradient but rounding, of which Adam makes steps
        scale = max(1e-9, float(theirs[name].double().abs().max()))
        error = float((tensor.double() - theirs[name].double()).abs().max()) / scale
        assert error < ROUNDING, (name, error)


def drop(run: Run) -> float:
    """How far the loss came down: the first step's less the mean of the last three."""
    losses = run.numbers()
    return losses[0] - sum(losses[-3:]) / 3


def in_two(runs: Runs, config, step, first, then, **options) -> Run:
    """A run that stops after `step` on the first layout (size, overrides) and goes on elsewhere."""
    (size, layout), (other_size, other_layout) = first, then
    half = runs.train(changed(config, layout, {"train.steps": step}), size, **options)
    assert half.end.step == step
    whole = changed(config, other_layout)
    return runs.train(whole, other_size, folder=half.folder, **options)


# -- texts --------------------------------------------------------------------------------------


def words(n_words: int, seed: int) -> list[str]:
    """A text that can be learnt: each word has four that may follow."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    known = [draw.choice(syllables) + draw.choice(syllables) for _ in range(120)]
    follow = {word: draw.sample(known, 4) for word in known}
    text = [known[0]]
    while len(text) < n_words:
        text.append(draw.choices(follow[text[-1]], (8, 4, 2, 1))[0])
    return text


def data_file(name: str) -> Path | None:
    """A file of the public data, where it is at hand."""
    folder = os.environ.get("PENTAMETER_DATA_DIR")
    path = None if folder is None else Path(folder) / name
    return path if path is not None and path.exists() else None


# -- 1. character GPT ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def character_config(tmp_path_factory):
    text = tmp_path_factory.mktemp("characters") / "input.txt"
    source = data_file("shakespeare/input.txt")
    whole = " ".join(words(12_000, 1)) if source is None else source.read_text(encoding="utf-8")
    text.write_text(whole[:60_000], encoding="utf-8")
    return changed(
        "shakespeare-char",
        COMMON,
        {
            "model.n_layers": 2,
            "model.attention.n_heads": 2,
            "model.d_model": 32,
            "model.context_length": 32,
            "data.corpus": None,
            "data.path": str(text),
            "schedule.warmup_steps": 4,
            "schedule.decay_steps": 40,
            "train.steps": 40,
            "train.batch_size": 16,
        },
        LONG_PROMPT,
    )


@pytest.fixture(scope="module")
def characters_alone(runs, character_config):
    return runs.train(character_config)


def test_the_character_gpt_on_two_processes_is_the_one_process(
    runs, character_config, characters_alone
):
    """The global batch is the configuration's: 8 rows each, not 16."""
    run = runs.train(character_config, 2)
    assert run.events("start")[0]["tokens_per_step"] == 16 * 32
    assert_same_training(run, characters_alone)
    assert_same_state(run, characters_alone, 40)
    assert drop(run) > 0.2


def test_the_character_gpt_goes_on_on_another_layout(runs, character_config, characters_alone):
    layouts = (2, {"parallel.zero": 2}), (2, {"parallel.tensor": 2})
    run = in_two(runs, character_config, 20, *layouts)
    assert_same_training(run, characters_alone)
    assert_same_state(run, characters_alone, 40)
    assert "resume  from step 20, saved by data=2,zero=2" in run.log()
    (start,), (resume,) = run.events("start"), run.events("resume")
    assert (start["layout"], start["world_size"]) == ("data=2,zero=2", 2)
    assert (resume["layout"], resume["world_size"]) == ("tensor=2", 2)


def test_the_character_gpt_in_fp32(runs, character_config):
    config = changed(character_config, {"train.precision": "fp32"})
    assert_same_training(runs.train(config, 2), runs.train(config), SINGLE)


# -- 3. GPT-2 by its global token budget --------------------------------------------------------


@pytest.fixture(scope="module")
def budget_config(tmp_path_factory):
    """16 micro-batches on one device, 8 on two, as the preset has 128 and 64."""
    text = tmp_path_factory.mktemp("budget") / "input.txt"
    source = data_file("shakespeare/input.txt")
    whole = " ".join(words(12_000, 2)) if source is None else source.read_text(encoding="utf-8")
    text.write_text(whole[:60_000], encoding="utf-8")
    return changed(
        "gpt2-124m-budget",
        COMMON,
        {
            "model.vocab_size": None,
            "model.n_layers": 2,
            "model.attention.n_heads": 2,
            "model.d_model": 48,
            "model.context_length": 16,
            "data.corpus": None,
            "data.path": str(text),
            "data.tokenizer": "bpe:300",
            "train.tokens_per_step": 1024,
            "train.micro_batch_size": 4,
        },
    )


@pytest.fixture(scope="module")
def budget_alone(runs, budget_config):
    return runs.train(budget_config)


def test_the_token_budget_is_kept_on_two_processes(runs, budget_config, budget_alone):
    run = runs.train(budget_config, 2)
    for each, n_micro_batches in ((budget_alone, 16), (run, 8)):
        plan = json.loads((each.folder / "plan.json").read_text())
        assert plan["batch"]["tokens_per_step"] == 1024
        assert plan["batch"]["n_micro_batches"] == n_micro_batches
        assert (plan["model"]["vocab_size_padded"]) == 384  # 3 × 128
    rates = run.numbers("learning_rate")
    assert [rates[step] for step in (0, 9, 30)] == pytest.approx([6e-5, 6e-4, 3.3e-4])
    assert_same_training(run, budget_alone)
    assert_same_state(run, budget_alone, 50)
    assert drop(run) > 0.2


def test_the_token_budget_goes_on_in_one_process(runs, budget_config, budget_alone):
    layouts = (2, {"parallel.zero": 1}), (1, {})
    assert_same_training(in_two(runs, budget_config, 20, *layouts), budget_alone)


def test_the_token_budget_in_bf16(runs, budget_config):
    """The micro-batches are the same ones, so products round alike; only sums of gradients, in
    fp32, are made in another order, and now and then that tips a weight's rounding to 8 bits."""
    config = changed(budget_config, {"train.precision": "bf16", "train.steps": 30})
    assert_same_training(runs.train(config, 2), runs.train(config), 1e-3)


# -- 4. Transformer on words, data × pipeline ---------------------------------------------------


@pytest.fixture(scope="module")
def words_config(tmp_path_factory):
    """32 columns: 8 micro-batches of two for each of two parts of the data."""
    folder = tmp_path_factory.mktemp("words")
    source = data_file("wikitext-2/valid.txt")
    text = words(24_000, 3) if source is None else source.read_text(encoding="utf-8").split(" ")
    paths = {}
    for number, (name, n) in enumerate((("path", 16_000), ("validation_path", 2000),
                                        ("test_path", 2000))):  # fmt: skip
        start = 16_000 * (number > 0) + 2000 * (number > 1)
        path = folder / f"{name}.txt"
        path.write_text(" ".join(text[start : start + n]), encoding="utf-8")
        paths[f"data.{name}"] = str(path)
    return changed(
        "wikitext2-tutorial",
        COMMON,
        paths,
        {
            "model.vocab_size": None,
            "model.n_layers": 4,
            "model.attention.n_heads": 2,
            "model.d_model": 32,
            "model.feed_forward.width": 32,
            "model.context_length": 12,
            "data.corpus": None,
            "schedule.decay_interval": 10,
            "train.steps": 40,
            "train.batch_size": 32,
        },
    )


@pytest.fixture(scope="module")
def words_alone(runs, words_config):
    return runs.train(changed(words_config, ALONE))


def loss_on_test(run: Run) -> float:
    """The loss of the best checkpoint, opened in one process, over the test split."""
    from pentameter.data.open_dataset import open_dataset

    loaded = load_model(run.folder, device="cpu")
    config = changed(loaded.config, ALONE)
    plan = make_plan(config)
    engine = engine_of(loaded.model.double(), plan, torch.device("cpu"), "fp64")
    split = open_dataset(config.data).split("test")
    metrics = evaluate(engine, split, name="test", step=loaded.step, batch_size=10)
    assert metrics is not None
    return metrics.loss


def test_the_word_transformer_over_data_and_pipeline_is_the_one_process(
    runs, words_config, words_alone, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = runs.train(words_config, 4)
    plan = json.loads((run.folder / "plan.json").read_text())
    assert (plan["layout"]["data"], plan["layout"]["pipeline"]) == (2, 2)
    assert plan["batch"]["n_micro_batches"] == 8
    assert [run.numbers("learning_rate")[step] for step in (0, 10, 39)] == [
        5.0, 5.0 * 0.95, pytest.approx(5.0 * 0.95**3),
    ]  # fmt: skip
    assert_same_training(run, words_alone)
    assert_same_state(run, words_alone, 40)
    assert drop(run) > 0.5
    assert run.numbers("grad_norm")[1] > words_config.optimizer.clip_norm  # clipping acted
    assert loss_on_test(run) == pytest.approx(loss_on_test(words_alone), rel=ROUNDING)


def test_the_word_transformer_goes_on_without_its_pipeline(runs, words_config, words_alone):
    without = {"parallel.pipeline": 1, "parallel.zero": 3, "train.micro_batch_size": 8}
    layouts = (2, {}), (2, without)
    assert_same_training(in_two(runs, words_config, 20, *layouts), words_alone)


# -- 5. hybrid parallel -------------------------------------------------------------------------

INTERLEAVED = {"parallel.schedule": "interleaved", "parallel.virtual_stages": 2}
PIPELINE_ONLY = {"parallel.tensor": 1}


@pytest.fixture(scope="module")
def hybrid_config(tmp_path_factory):
    """Documents shorter and longer than a row, of one sequence a micro-batch; more rows of the
    vocabulary than tokens, as 50,304 are more than 50,257."""
    path = tmp_path_factory.mktemp("documents") / "documents.jsonl"
    draw, text = random.Random(4), words(8000, 4)
    lines = []
    while text:
        n = draw.randint(2, 16)
        lines.append(json.dumps({"text": " ".join(text[:n])}))
        text = text[n:]
    path.write_text("\n".join(lines), encoding="utf-8")
    return changed(
        "gpt2-xl-hybrid",
        COMMON,
        {
            "model.vocab_size": 32,
            "model.n_layers": 4,
            "model.attention.n_heads": 4,
            "model.d_model": 32,
            "model.context_length": 32,
            "data.corpus": None,
            "data.path": str(path),
            "data.tokenizer": "char",
            "data.validation_fraction": 0.05,
            "optimizer.learning_rate": 2e-3,  # 16 steps at 1.5e-4 would show nothing
            "train.epochs": None,
            "train.steps": 16,
            "train.batch_size": 8,
            "train.eval_interval": 8,
            "train.sample_interval": 8,
            "checkpoint.interval": 8,
        },
        LONG_PROMPT,
    )


@pytest.fixture(scope="module")
def hybrid_alone(runs, hybrid_config):
    return runs.train(changed(hybrid_config, ALONE))


def test_the_hybrid_is_the_one_process_interleaved_or_not(runs, hybrid_config, hybrid_alone):
    """Half of it as the preset has it, half interleaved: one curve, one state."""
    run = in_two(runs, hybrid_config, 8, (8, {}), (8, INTERLEAVED))
    plan = json.loads((run.folder / "plan.json").read_text())
    layout = plan["layout"]
    assert (layout["data"], layout["tensor"], layout["pipeline"]) == (2, 2, 2)
    assert (layout["virtual_stages"], plan["batch"]["n_micro_batches"]) == (2, 4)
    assert run.numbers("loss_tokens")[0] < 8 * 32  # padding is no token
    assert_same_training(run, hybrid_alone)
    assert_same_state(run, hybrid_alone, 16)
    assert drop(run) > 0.3


def test_the_hybrid_on_a_pipeline_alone(runs, hybrid_config, hybrid_alone):
    """And from there to the interleaved pipeline, and the other way."""
    layouts = (4, PIPELINE_ONLY), (2, {**PIPELINE_ONLY, **INTERLEAVED})
    run = in_two(runs, hybrid_config, 8, *layouts)
    assert_same_training(run, hybrid_alone)
    assert_same_state(run, hybrid_alone, 16)


@pytest.fixture(scope="module")
def coarse_alone(runs, hybrid_config):
    """Shorter runs of one process, by precision."""
    made = {}

    def run(precision):
        if precision not in made:
            config = changed(hybrid_config, ALONE, COARSE, {"train.precision": precision})
            made[precision] = runs.train(config)
        return made[precision]

    return run


COARSE = {"train.steps": 10, "train.micro_batch_size": 2, "train.sample_interval": None}


@pytest.mark.parametrize(
    ("precision", "layout", "tolerance"),
    [
        pytest.param("fp32", INTERLEAVED, SINGLE, marks=pytest.mark.slow),
        # A product of two halves is rounded twice where the whole is once, to 11 or to 8 bits.
        pytest.param("fp16", {}, 2**-9, marks=pytest.mark.slow),
        pytest.param("fp16", INTERLEAVED, 2**-9, marks=pytest.mark.slow),
        pytest.param("bf16", INTERLEAVED, 2**-6, marks=pytest.mark.slow),
    ],
)
def test_the_hybrid_in_a_lower_precision(
    runs, hybrid_config, coarse_alone, precision, layout, tolerance
):
    """In the quick tier each of its dimensions has fp16 alone: test_composition.py."""
    config = changed(hybrid_config, COARSE, layout, {"train.precision": precision})
    run, alone = runs.train(config, 8), coarse_alone(precision)
    assert_same_training(run, alone, tolerance)
    assert drop(run) > 0.2
    assert run.end.state["loss_scale"] == alone.end.state["loss_scale"]
