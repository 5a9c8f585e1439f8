"""Text cleaned up for the database and the search index."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.pdf.child.text_cleanup import clean


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ("REDAKTION\x00VON\x00HEUTE", "REDAKTION VON HEUTE"),
        ("de\ufb01ne the \ufb02ag", "define the flag"),
        ("a\x01b\x08c\x1bd\x7fe", "abcde"),
        ("tab\there", "tab here"),
        ("lone \ud800 half", "lone  half"),
        ("\ufffe\uffffnothing", "nothing"),
        ("e\u0301te\u0301", "\u00e9t\u00e9"),
        ("no\xa0break", "no break"),
        ("\uff21\uff22\uff23", "ABC"),
        ("\ufee1\ufea4\ufee4\ufeaa", "محمد"),
        ("soft\xadhyphen", "softhyphen"),
        ("x² + ½ m³ ™ ①", "x² + ½ m³ ™ ①"),
        ("鈴木さん、日本語。", "鈴木さん、日本語。"),
        ("lost \ufffd sign", "lost \ufffd sign"),
    ],
)
def test_text_is_cleaned(raw: str, wanted: str) -> None:
    assert clean(raw) == wanted


@given(st.text(st.characters(exclude_categories=())))
def test_the_database_accepts_it_and_cleaning_again_changes_nothing(raw: str) -> None:
    text = clean(raw)
    text.encode("utf-8")
    assert not any(unicodedata.category(sign) == "Cc" for sign in text if sign != "\n")
    assert clean(text) == text
