"""A configuration written and read again; the hash and the differences that guard a resume."""

from __future__ import annotations

import pytest
from reference_pages import DOCS, configuration_page

from pentameter.config.fields import leaves
from pentameter.config.files.load import load_config, preset_names
from pentameter.config.files.write import to_toml
from pentameter.config.fingerprint import config_hash, diff_configs, not_the_training


@pytest.mark.parametrize("name", preset_names())
def test_presets_survive_writing(name, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(load_config(name)), encoding="utf-8")
    assert load_config(path) == load_config(name)


def test_every_key_is_written_with_its_meaning():
    text = to_toml(load_config("quickstart"))
    assert "# Tokens the model sees at once (T).\ncontext_length = 128\n" in text
    assert 'path = "none"' in text
    assert max(map(len, text.splitlines())) <= 100


def test_every_key_has_a_description():
    assert [path for path, leaf in leaves().items() if not leaf.description] == []


def test_reference_page_is_up_to_date():
    page = DOCS / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_page(), "run `make docs`"


FREE = ["--name=other", "--train.micro-batch-size=1", "--train.device=cpu", "--log.interval=1",
        "--train.eval-interval=none", "--checkpoint.keep-last=9", "--train.patience=2"]  # fmt: skip
DEFINING = ["--seed=1", "--model.dropout=0.1", "--data.order=shuffled", "--train.batch-size=2",
            "--optimizer.learning-rate=5e-4", "--train.precision=fp32", "--train.steps=10",
            "--schedule.min-learning-rate=0", "--data.max-bytes=5"]  # fmt: skip


@pytest.mark.parametrize("override", FREE)
def test_free_keys_do_not_change_the_hash(override):
    old, new = load_config("quickstart"), load_config("quickstart", [override])
    assert old != new
    assert config_hash(old) == config_hash(new)
    assert diff_configs(old, new) == []


@pytest.mark.parametrize("override", DEFINING)
def test_defining_keys_change_the_hash_and_are_named(override):
    old, new = load_config("quickstart"), load_config("quickstart", [override])
    assert config_hash(old) != config_hash(new)
    (difference,) = diff_configs(old, new)
    key = override[2:].partition("=")[0].replace("-", "_")
    # A cosine without an end of its own follows train.steps.
    key = "schedule.decay_steps" if key == "train.steps" else key
    assert difference.startswith(f"{key}: ")


def test_more_steps_continue_a_constant_schedule():
    old = load_config("shakespeare-tutorial")
    new = load_config("shakespeare-tutorial", ["--train.steps", "6000"])
    assert config_hash(old) == config_hash(new)


def test_free_keys_exist_and_carry_a_reason():
    assert set(not_the_training()) <= set(leaves())
    assert all(not_the_training().values())


@pytest.mark.parametrize(("value", "written"), [("auto", False), (False, True)])
def test_a_default_that_is_left_out_reads_back(tmp_path, value, written):
    """A checkpoint leaves these out, so that a version that does not know a key opens it."""
    config = load_config("quickstart", {"checkpoint.asynchronous": value})
    text = to_toml(config, left_out_at_default=not_the_training())
    assert ("\nasynchronous =" in text) == written
    path = tmp_path / "config.toml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path) == config
