"""Cleans up a PDF's text for the database and for search. Runs in the render child.

PostgreSQL refuses NUL; searches miss ligatures. Characters with a meaning (x², ½, ™) are kept.
"""

from __future__ import annotations

import re
import unicodedata

# NUL stands for a space in small-caps fonts; deleting it would glue words together.
_SPACES = re.compile("[\0\t\v\f\r\x1c-\x1f\x85\u2028\u2029]")
_UNWANTED = re.compile(
    "[\x01-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u200b\u2060\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\U0001fffe\U0001ffff]"
)
# Shapes of characters, not characters: compatibility spaces, CJK radicals and compatibility
# ideographs, Latin to Arabic presentation forms, full and half widths, mathematical alphabets.
_SHAPES = re.compile(
    "[\xa0\u2000-\u200a\u202f\u205f\u3000\u2e80-\u2fdf\uf900-\ufaff\ufb00-\ufdcf\ufdf0-\ufdff"
    "\ufe30-\ufe4f\ufe70-\ufefc\uff00-\uffef\U0001d400-\U0001d7ff]+"
)


def clean(text: str) -> str:
    """Remove control characters, surrogates and noncharacters; resolve ligatures; compose (NFC)."""
    if text.isascii() and text.isprintable():
        return text
    text = _UNWANTED.sub("", _SPACES.sub(" ", text))
    text = _SHAPES.sub(_as_letters, text)
    return unicodedata.normalize("NFC", text)


def _as_letters(shapes: re.Match[str]) -> str:
    return unicodedata.normalize("NFKC", shapes.group())
