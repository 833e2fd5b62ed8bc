"""What a command line names: names and paths that no file system has, too."""

from pathlib import Path

from pentameter.config.files.command_source import configuration_of, with_tokenizer_beside
from pentameter.config.files.load import load_config


def test_a_long_texts_name_leaves_room_for_what_follows_it(tmp_path):
    (tmp_path / "config.toml").write_text('extends = "quickstart"\n', encoding="utf-8")
    text = tmp_path / f"{'x' * 120}.txt"
    text.write_text("a text", encoding="utf-8")
    config = load_config(*configuration_of(str(text), [], tmp_path))
    assert config.name == f"{'x' * 94}-tuned"


def test_a_pattern_longer_than_any_name_is_a_pattern():
    source, overrides = configuration_of("*" * 300, [])
    assert (source, overrides) == ("quickstart", {"data.path": "*" * 300})


def test_folders_longer_than_any_name_are_not_there(tmp_path):
    folder = Path("y" * 300)
    text = tmp_path / "a.txt"
    text.write_text("a text", encoding="utf-8")
    assert configuration_of(str(text), [], folder)[0] == "quickstart"
    config = load_config("quickstart", {"data.tokenizer": str(folder / "tokenizer.json")})
    assert with_tokenizer_beside(config, folder) == (config, [])
