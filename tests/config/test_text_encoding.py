"""Which encodings `data.encoding` takes."""

import pytest

from pentameter.config.data_schema import USUAL_ENCODINGS, encoding_problem
from pentameter.config.files.load import load_config
from pentameter.errors import ConfigError


@pytest.mark.parametrize(
    "name", [*USUAL_ENCODINGS.split(", "), "UTF8", "Latin1", "iso-8859-1", "windows_1252", "sjis"]
)
def test_encodings_of_text_files_are_taken(name):
    assert encoding_problem(name) is None
    data = {"data": {"path": "a.txt", "encoding": name}}
    assert load_config("quickstart", data).data.encoding == name


@pytest.mark.parametrize(
    "name",
    [
        *("base64", "rot13", "rot_13", "zlib", "bz2", "hex", "uu", "quopri", "undefined"),
        *("idna", "punycode", "unicode_escape", "raw_unicode_escape"),
    ],
)
def test_codecs_of_other_things_are_refused(name):
    with pytest.raises(ConfigError, match=rf"data\.encoding='{name}' is no encoding of text files"):
        load_config("quickstart", {"data": {"path": "a.txt", "encoding": name}})


@pytest.mark.parametrize(
    ("name", "near"),
    [("gb18303", "gb18030"), ("utf-61", "utf-16"), ("UTF_9", "utf-8"), ("shift-jsi", "shift-jis")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, near):
    with pytest.raises(ConfigError, match=rf"data\.encoding='{name}' is not known; .*{near}\?"):
        load_config("quickstart", ["--data.path", "a.txt", "--data.encoding", name])


@pytest.mark.parametrize("name", ["", "a\0b", "é", "x" * 5000, "../../codec", "a.b"])
def test_any_other_name_is_one_sentence(name):
    with pytest.raises(ConfigError, match=r"data\.encoding="):
        load_config("quickstart", {"data": {"path": "a.txt", "encoding": name}})


@pytest.mark.parametrize(("key", "value"), [("encoding", "gb18030"), ("text_field", "content")])
def test_a_corpus_knows_how_its_files_are_written(key, value):
    with pytest.raises(ConfigError, match=rf"data\.{key}='{value}' is of the files at data\.path"):
        load_config("quickstart", {"data": {key: value}})
    assert getattr(load_config("quickstart", {"data": {"path": "a.txt", key: value}}).data, key)
