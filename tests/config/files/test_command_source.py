"""What a command line names: names and paths that no file system has, too."""

from pathlib import Path

import pytest

from pentameter.config.files.command_source import configuration_of, with_tokenizer_beside
from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError


def test_a_long_texts_name_leaves_room_for_what_follows_it(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text('extends = "quickstart"\n', encoding="utf-8")
    text = tmp_path / f"{'x' * 120}.txt"
    text.write_text("a text", encoding="utf-8")
    for source, given in ((str(text), []), (None, ["--data.path", str(text)])):
        config = load_config(*configuration_of(source, given, lambda: file))
        assert config.name == f"{'x' * 94}-tuned"


@pytest.mark.parametrize(
    ("own", "said"), [(None, "what to train is not said"), (Path, "add --data.path FILE")]
)
def test_a_command_line_without_a_source_says_what_is_missing(own, said):
    with pytest.raises(ConfigError, match=said):
        configuration_of(None, [], own)


def test_a_pattern_longer_than_any_name_is_a_pattern():
    source, overrides = configuration_of("*" * 300, [])
    assert (source, overrides) == ("quickstart", {"data.path": "*" * 300})


def test_folders_longer_than_any_name_are_not_there():
    folder = Path("y" * 300)
    config = load_config("quickstart", {"data.tokenizer": str(folder / "tokenizer.json")})
    assert with_tokenizer_beside(config, folder) == (config, [])
