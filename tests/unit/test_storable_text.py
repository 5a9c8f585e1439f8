"""Cleaning of text from files and servers for PostgreSQL."""

import json

from hypothesis import given
from hypothesis import strategies as st

from rag_service.database.storable_text import clean, clean_tree

ANY_TEXT = st.text(st.characters(), max_size=60)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(ANY_TEXT, inner, max_size=4),
    max_leaves=12,
)


def test_nul_becomes_a_space_and_other_controls_are_removed():
    assert clean("a\x00b\x01\x1b\x7fc") == "a bc"


def test_lone_surrogates_and_noncharacters_are_removed():
    assert clean("a\ud800b\udfffc\ufffed\uffff") == "abcd"


def test_line_breaks_tabs_and_all_languages_are_kept():
    text = "line\r\n\ttab – Größe 漢字 \U0001f600 العربية \u200f\ufffd\x85\xa0"
    assert clean(text) == text


@given(ANY_TEXT)
def test_cleaned_text_can_be_encoded_and_does_not_change_again(text):
    cleaned = clean(text)
    assert "\x00" not in cleaned
    cleaned.encode("utf-8")
    assert clean(cleaned) == cleaned


@given(st.text(st.characters(exclude_categories=["Cc", "Cs", "Cn"]), max_size=60))
def test_ordinary_text_is_not_changed(text):
    assert clean(text) == text


@given(TREES)
def test_every_string_of_a_tree_is_cleaned_and_the_rest_is_kept(tree):
    cleaned = clean_tree(tree)
    dumped = json.dumps(cleaned, ensure_ascii=False)
    dumped.encode("utf-8")
    assert "\\u0000" not in dumped
    assert clean_tree(cleaned) == cleaned


def test_keys_are_cleaned_too():
    assert clean_tree({"a\x00": [("b\ud800", 1.5)], 7: None}) == {"a ": [["b", 1.5]], "7": None}
