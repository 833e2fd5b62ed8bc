"""Splitting a command line into a verb's own arguments and overrides."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pentameter.config.files.load import load_config
from pentameter.config.files.overrides import parse_overrides, split_overrides
from pentameter.errors import ConfigError


def test_overrides_are_taken_out_wherever_they_stand():
    line = "--train.steps 5 quickstart --run-dir out --seed=1 --resume never --data.grammar.seed -3"
    own, overrides = split_overrides(line.split(), own_options=["run-dir", "resume"])
    assert own == ["quickstart", "--run-dir", "out", "--resume", "never"]
    assert overrides == ["--train.steps", "5", "--seed=1", "--data.grammar.seed", "-3"]


def test_with_the_verbs_options_known_a_forgotten_section_is_an_override():
    own, overrides = split_overrides(
        ["p", "--n-layers", "4", "--run_dir", "d", "--help"], own_options=["run-dir", "help"]
    )
    assert own == ["p", "--run_dir", "d", "--help"]
    assert overrides == ["--n-layers", "4"]


def test_after_two_dashes_everything_is_the_verbs_own():
    assert split_overrides(["--seed", "1", "--", "--seed", "2"], own_options=[]) == (
        ["--seed", "2"],
        ["--seed", "1"],
    )


def test_a_missing_value_is_left_for_the_parser_to_refuse():
    own, overrides = split_overrides(["--train.steps", "--resume", "auto"], own_options=["resume"])
    assert own == ["--resume", "auto"]
    with pytest.raises(ConfigError, match=r"--train\.steps needs a value"):
        parse_overrides(overrides)


def test_pairs_keep_order_and_text():
    pairs = parse_overrides(
        ["--model.n-layers", "4", "model.attention.n_heads=2", "--a.b=", "--c.d=x=y"]
    )
    expected = [
        ("model.n_layers", "4"),
        ("model.attention.n_heads", "2"),
        ("a.b", ""),
        ("c.d", "x=y"),
    ]
    assert pairs == expected


def test_splitting_a_command_line_needs_no_pydantic():
    code = "import sys, pentameter.config.files.overrides; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_key_is_refused_for_its_name_and_not_for_its_value():
    assert parse_overrides(["--gpu", "--train.gpu"]) == [("gpu", ""), ("train.gpu", "")]
    with pytest.raises(ConfigError, match="gpu is no key"):
        load_config("quickstart", ["--gpu"])
