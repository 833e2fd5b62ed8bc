"""Names: what is one, and that any text has one made of it."""

from unicodedata import normalize

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentameter.config.naming import checked_name, name_of


@given(st.text(max_size=300))
def test_what_is_made_of_a_text_is_a_name(text):
    name = name_of(text)
    assert checked_name(name) == name
    assert name == normalize("NFC", name)
    assert len(name.encode()) <= 180
    assert name_of(name) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [("\u0301abc", "abc"), ("-\u0301", "text"), ("\u0301\u0302 a\u0301", "\u00e1")],
)
def test_no_name_begins_with_a_mark(text, name):
    assert checked_name(name_of(text)) == name


@given(st.text(max_size=300))
def test_what_follows_a_name_is_kept(text):
    name = name_of(text, "-tuned")
    assert checked_name(name) == name
    assert name.endswith("-tuned")
    assert name_of(text).startswith(name.removesuffix("-tuned"))


def test_names_are_safe_as_files(tmp_path):
    assert name_of("../my text (1)") == "my-text-1"
    assert name_of("日本") == "日本"
    assert name_of("𠀀" * 300) == "𠀀" * 45
    (tmp_path / f"{name_of('記' * 300)}-00000.bin.tmp-12345678").touch()


@pytest.mark.parametrize(
    "name", ["a\u200bb", "a\u202eb", "a\ufeffb", "a\u2044b", "a\ud800", "a\\b"]
)
def test_what_is_not_seen_or_divides_paths_is_in_no_name(name):
    with pytest.raises(ValueError):  # noqa: PT011 - UnicodeEncodeError is one too
        checked_name(name)
