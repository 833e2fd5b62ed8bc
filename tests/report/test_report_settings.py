import re
import tomllib

import pytest

from pentameter.config.files.load import load_config, preset_names
from pentameter.config.files.write import to_toml
from pentameter.planning.plan import make_plan
from pentameter.record.reading import read_run
from pentameter.report.pages.page import render_page
from pentameter.report.pages.settings import choices, settings


def resolved(preset, **overrides):
    """config.toml of a run with 65 tokens and 1,000 rows an epoch, as `settings` reads it."""
    config = load_config(preset, {key.replace("__", "."): v for key, v in overrides.items()})
    plan = make_plan(config, config.model.vocab_size or 65, 1000)
    return settings(tomllib.loads(to_toml(plan.portable_config)))


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_as_it_is_differs_in_nothing(preset):
    found = choices(resolved(preset), 1000)
    assert (found.preset, found.before) == (preset, {})


def test_what_follows_from_a_choice_is_no_choice():
    # d_ff, decay_steps, checkpoint.interval follow from these
    found = choices(
        resolved("quickstart", model__d_model=256, train__steps=500, train__eval_interval=50), 1000
    )
    assert found.preset == "quickstart"
    assert found.before == {
        "model.d_model": 128, "train.steps": 1200, "train.eval_interval": 200,
    }  # fmt: skip


def test_what_would_follow_and_was_chosen_otherwise_is_a_choice():
    found = choices(resolved("quickstart", model__d_ff=100, data__path="novel.txt"), 1000)
    assert found.before == {
        "data.corpus": "stdlib", "data.path": None, "model.feed_forward.width": 512,
    }  # fmt: skip


def test_a_batch_in_tokens_is_a_batch():
    tokens = 24 * 128 * 2
    found = choices(resolved("quickstart", train__tokens_per_step=tokens), 1000)
    assert found.before == {"train.batch_size": 24}


def test_absent_values_are_none_and_texts_stay():
    found = settings({"data": {"corpus": "none"}, "train": {"sample_prompt": "none"}, "own": 1})
    assert found == {"data.corpus": None, "train.sample_prompt": "none", "own": 1}


@pytest.mark.parametrize("config", ["", "[model]\nn_layers = 'x'\nd_model = -1", "x = 1"])
def test_a_damaged_configuration_still_makes_a_page(make_run, config):
    assert "</html>" in render_page(read_run(make_run(config=config)))


def test_the_page_shows_choices_and_folds_the_rest(make_run):
    config = load_config("quickstart", {"optimizer.learning_rate": 5e-4})
    toml = to_toml(make_plan(config, 65, 1000).portable_config)
    page = render_page(read_run(make_run(config=toml, plan_json='{"rows_per_epoch": 1000}')))
    rows = re.findall(r'<tr><th scope="row">optimizer\..*?</tr>', page)
    assert rows == [
        '<tr><th scope="row">optimizer.<wbr>learning_<wbr>rate</th>'
        "<td>0.0005</td><td>0.002</td></tr>"
    ]
    assert "settings differ from the preset quickstart" in page.replace("1 of", "")
    everything = page[page.index('<details id="all-settings"><summary>All ') :]
    assert '<th scope="row">d_model</th><td>128</td>' in everything


def test_an_interval_that_follows_the_steps_is_no_choice():
    found = choices(resolved("quickstart", train__steps=100), 1000)
    assert found.before == {"train.steps": 1200}
