"""Configurations and runs of the time when `[model]` was one flat table are read as ever."""

from __future__ import annotations

import json
import shutil
import tomllib
from pathlib import Path

import pytest
from tiny_runs import events

from pentameter.autotune.sweep import sweep_runs
from pentameter.cli.main import main
from pentameter.config.fields import leaves, values_of
from pentameter.config.files.load import load_config
from pentameter.config.files.overrides import parse_overrides
from pentameter.config.files.write import to_toml
from pentameter.config.fingerprint import config_hash
from pentameter.config.model.architecture import ModelConfig, architecture
from pentameter.config.model.attention import AttentionConfig
from pentameter.config.model.former_keys import TABLES, former_keys
from pentameter.errors import ConfigError
from pentameter.record.reading import read_run
from pentameter.report.pages.settings import settings

BEFORE = Path(__file__).parents[1] / "before_tables"
"""Presets, the hashes of their configurations, and a run, all made when `[model]` was flat."""
HASHES = json.loads((BEFORE / "hashes.json").read_text())
RUN = BEFORE / "run"
BOTH = r"model\.n_heads is a former name of model\.attention\.n_heads, and both are given"


def test_a_former_key_has_a_present_one_and_is_none_itself():
    keys = architecture(ModelConfig())
    assert set(former_keys().values()) <= keys.keys()
    assert former_keys().keys().isdisjoint(keys)
    assert {path.partition(".")[0] for path in former_keys().values()} == TABLES


@pytest.mark.parametrize("name", HASHES)
def test_a_preset_as_it_was_is_the_same_configuration(name):
    file = BEFORE / "presets" / f"{name}.toml"
    assert not TABLES & {
        key
        for key, value in tomllib.loads(file.read_text()).get("model", {}).items()
        if isinstance(value, dict)
    }
    config = load_config(file)
    assert config_hash(config) == HASHES[name]
    assert config == load_config(name)


def test_what_is_written_has_the_present_keys_alone(tmp_path):
    config = load_config(RUN / "config.toml")
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    written = tomllib.loads(file.read_text())["model"]
    assert written["attention"]["n_kv_heads"] == 1
    assert written["experts"]["count"] == 4
    assert written["router"]["score_function"] == "sigmoid"
    assert not former_keys().keys() & written.keys() - TABLES
    assert load_config(file) == config


@pytest.mark.parametrize("former", former_keys())
def test_an_option_may_have_a_former_name(former):
    present = f"model.{former_keys()[former]}"
    hyphens = former.replace("_", "-")
    for option in (f"--model.{hyphens}=7", f"--model.{former}=7", f"--{present}=7"):
        assert parse_overrides([option]) == [(present, "7")]
    assert present in leaves()


def test_python_may_use_former_names():
    expected = ModelConfig(
        attention={"n_heads": 4, "sinks": True}, feed_forward={"activation": "relu"}
    )
    assert ModelConfig(n_heads=4, attention_sinks=True, activation="relu") == expected
    assert ModelConfig(attention={"sinks": True}, n_heads=4, activation="relu") == expected
    latent = ModelConfig(attention="latent", positions="rotary")
    assert latent.attention == AttentionConfig(type="latent")
    flat = load_config("quickstart", {"model": {"n_experts": 4, "router": "sigmoid"}})
    assert (flat.model.experts.count, flat.model.router.score_function) == (4, "sigmoid")
    assert flat == load_config("quickstart", {"model.n_experts": 4, "model.router": "sigmoid"})


def test_custom_models_may_read_former_names():
    model = load_config("mixtral-8x7b").model
    assert (model.n_heads, model.d_ff, model.n_experts, model.router_scale) == (32, 14336, 8, 1.0)
    with pytest.raises(AttributeError, match="n_hands"):
        _ = model.n_hands


def test_a_file_over_one_of_the_other_form(tmp_path):
    (tmp_path / "old.toml").write_text('extends = "qwen3-0.6b"\n[model]\nn_kv_heads = 4\n')
    (tmp_path / "new.toml").write_text(
        'extends = "old.toml"\n[model.attention]\nn_kv_heads = 2\n[model]\nd_ff = 64\n'
    )
    config = load_config(tmp_path / "new.toml", ["--model.qk-norm=none"])
    assert (config.model.attention.n_kv_heads, config.model.attention.n_heads) == (2, 16)
    assert (config.model.feed_forward.width, config.model.attention.qk_norm) == (64, None)


def test_one_key_given_both_ways_is_refused_with_both(tmp_path):
    file = tmp_path / "both.toml"
    file.write_text('extends = "quickstart"\n[model]\nn_heads = 2\nattention.n_heads = 4\n')
    with pytest.raises(ConfigError, match=rf"both\.toml: {BOTH}"):
        load_config(file)
    with pytest.raises(ConfigError, match=BOTH):
        load_config("quickstart", ["--model.n-heads=2", "--model.attention.n-heads=4"])
    with pytest.raises(ConfigError, match=BOTH):
        load_config("quickstart", {"model": {"n_heads": 2}, "model.attention.n_heads": 4})
    with pytest.raises(ValueError, match=BOTH):
        ModelConfig(n_heads=2, attention={"n_heads": 4})
    with pytest.raises(ValueError, match=BOTH):
        ModelConfig(n_heads=2, attention=AttentionConfig())


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("model.n-head", "model.attention.n_heads"),  # a former name, misspelt
        ("model.score-function", "model.router.score_function"),  # in no table
        ("model.atention.n-heads", "model.attention.n_heads"),  # a table, misspelt
        ("model.expert.width", "model.experts.width"),  # as above, and two tables have the key
        ("model.attention.qknorm", "model.attention.qk_norm"),
        ("model.router.count", "model.experts.count"),  # in another table
        ("n-heads", "model.attention.n_heads"),
    ],
)
def test_a_key_near_one_of_a_table_is_told_where_it_is(option, meant):
    with pytest.raises(ConfigError, match=f"is no key; did you mean {meant}?"):
        load_config("quickstart", [f"--{option}", "4"])


def test_a_misspelt_table_in_a_file_is_told_which_there_is(tmp_path):
    file = tmp_path / "file.toml"
    file.write_text('extends = "quickstart"\n[model.atention]\nn_heads = 2\n')
    with pytest.raises(ConfigError, match=r"model\.atention is no key; did you mean model\.att"):
        load_config(file)
    with pytest.raises(ConfigError, match=r"model\.experts is a section, not a value; it has coun"):
        load_config("quickstart", ["--model.experts", "4"])


def test_a_sweep_may_have_either_name_and_its_runs_are_called_alike():
    def load(settings):
        return load_config("quickstart", settings)

    former, present = (
        sweep_runs({f"model.{key}": ["2", "4"], "seed": ["1"]}, {}, load)
        for key in ("n_experts", "experts.count")
    )
    assert former == present
    assert [run.label for run in present] == ["n_experts-2_seed-1", "n_experts-4_seed-1"]
    assert present[0].settings == {"model.experts.count": "2", "seed": "1"}
    swept = {"model.n_kv_heads": ["1", "2"]}
    with pytest.raises(ConfigError, match=r"--model\.attention\.n_kv_heads is swept, too"):
        sweep_runs(swept, {"model.attention.n_kv_heads": "1"}, load)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory, short_measurement):
    """A copy of the run of before, with two more steps."""
    folder = tmp_path_factory.mktemp("runs") / "before-tables"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        shutil.copytree(RUN, folder)
        again = ["train", str(RUN / "config.toml"), f"--run-dir={folder}", "--train.steps=6"]
        assert main([*again, "--resume", "auto"]) == 0
        yield folder


def test_a_run_of_before_is_read():
    recorded = read_run(RUN)
    assert not recorded.unread
    found = settings(recorded.config)
    added_since = {"train.matmuls": None, "train.stream": "weights"}
    added_since |= {"data.form": "auto", "data.bad_rows": "refuse", "train.eval_tokens": None}
    added_since |= {"checkpoint.keep_before_cooldown": False}
    added_since |= dict.fromkeys(("model.window_rope_theta", "model.nope_layers"))
    added_since |= dict.fromkeys(("model.attention.score_size", "model.attention.out_bias"))
    added_since |= {f"model.rope_scaling.{length}_factors": [] for length in ("long", "short")}
    assert found | added_since == {
        path: list(value) if isinstance(value, tuple) else value
        for path, value in values_of(load_config(RUN / "config.toml")).items()
    }
    assert not {f"model.{former}" for former in former_keys()} & found.keys()


def test_a_run_of_before_is_resumed(resumed):
    *begun, end = events(RUN)
    assert (end["event"], events(resumed)[: len(begun)]) == ("end", begun)
    assert [each["step"] for each in events(resumed, "resume")] == [4]
    assert [each["step"] for each in events(resumed, "train")] == [1, 2, 3, 4, 5, 6]
    assert load_config(resumed / "config.toml") == load_config(
        RUN / "config.toml", ["--train.steps=6"]
    )


def test_a_run_of_before_is_reported_compared_and_replayed(resumed, tmp_path, capsys):
    assert main(["report", str(resumed), "--out", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "2 layers of width 8" in page
    assert '<th scope="row">experts.count</th><td>4</td>' in page
    assert main(["compare", str(RUN), str(resumed), "--out", str(tmp_path / "both.html")]) == 0
    assert "model.n_heads" not in (tmp_path / "both.html").read_text()
    capsys.readouterr()
    assert main(["replay", str(resumed), "--step", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 5
