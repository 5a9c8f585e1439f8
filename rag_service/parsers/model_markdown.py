"""A model's answer as Markdown: formulas, lists, paragraphs, titles.

The rules are those of glmocr 0.1.5, so that the text looks as its users know it. A rule that would
change what the page says is narrower here; a comment says so.
"""

from __future__ import annotations

import re

# The heading of a document, and of its parts.
TOP, PART = "#", "##"

# Leaders and lines of a form are shortened to three characters.
_LEADER = re.compile(r"(\.|·|_|\\_)\1{3,}")
# Tabs that a model wrote as \t; \theta and \text begin like one and are kept, unlike in the SDK.
_SPACE_BEFORE = re.compile(r"(?:\\t(?![a-z])|\s)*")
_SPACE_AFTER_REVERSED = re.compile(r"(?:t\\(?!\\)|\s)*")

_INLINE = re.compile(r"(?<![\\$])\$((?:[^$\\\n]|\\.|\n(?![^\S\n]*\n))+)\$(?!\$)", re.DOTALL)
_MATHEMATICAL = re.compile(r"[\\^_={}<>+]")
_AMOUNT_AND_MORE = re.compile(r"\d[\d.,]*\s")

_HEADING_SIGNS = re.compile(r"\A#+\s*")
_BULLET = re.compile(r"(?:[·•]|\* )\s*")
_IN_BRACKETS = re.compile(r"[(（](\d+|[A-Za-z])[)）][^\S\n]*([^\n]*)")
_BEFORE_BRACKET = re.compile(r"(\d+|[A-Za-z])[)）][^\S\n]*([^\n]*)")
# Unlike in the SDK, no space is inserted into 3.14, 1.2.3, e.g. and U.S.
_BEFORE_DOT = re.compile(
    r"(\d+(?!\.\d)|[A-Za-z](?!\.[A-Za-z](?![A-Za-z])))\.(?!\.)[^\S\n]*([^\n]*)"
)

# Unlike in the SDK, lines of listings, tables and formulas stay together: a blank line ends them.
_UNBROKEN = re.compile(
    r"^[ \t]*```.*?(?:^[ \t]*```[ \t]*$|\Z)|<table[\s>].*?(?:</table>|\Z)|\$\$.*?\$\$"
    r"|^[ \t]*\|[^\n]*(?:\n[ \t]*\|[^\n]*)*",
    re.MULTILINE | re.DOTALL | re.IGNORECASE,
)
_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")
_FORMULA_OPENS, _FORMULA_CLOSES = ("$$", "\\[", "\\("), ("$$", "\\]", "\\)")


def clean(text: str) -> str:
    """Remove written-out tabs around the text, shorten leaders, space inline formulas evenly."""
    before = _SPACE_BEFORE.match(text)
    text = text[before.end() :] if before else text
    after = _SPACE_AFTER_REVERSED.match(text[::-1])
    text = text[: len(text) - after.end()] if after else text
    return _even_formulas(_LEADER.sub(r"\1\1\1", text)).strip()


def paragraph(text: str) -> str:
    """Return a block of text, its list marker in Markdown's form, each line a paragraph."""
    text = clean(text)
    if text.startswith("```") and not text.endswith("```"):
        text += "\n```"
    return _lines_apart(_with_list_marker(text)).strip()


def title(text: str, sign: str) -> str:
    """Return a heading with this sign instead of its own; below the top, also of a bullet."""
    words = clean(text)
    if sign != TOP and words.startswith(("- ", "* ")):
        words = words[2:].lstrip()
    words = _lines_apart(_HEADING_SIGNS.sub("", words, count=1)).strip()
    return f"{sign} {words}" if words else ""


def formula(text: str) -> str:
    """Return a display formula; "" if there is none. Its delimiters, also single $, are removed."""
    words = text.strip()
    if not (words.startswith("$$") and words.endswith("$$")):
        words = clean(words)
    if words.startswith(_FORMULA_OPENS):
        words = words[2:].strip()
    if words.endswith(_FORMULA_CLOSES):
        words = words[:-2].strip()
    if len(words) > 1 and words[0] == words[-1] == "$" and words.count("$") == 2:
        words = words[1:-1].strip()
    return f"$$\n{words}\n$$" if words else ""


def _with_list_marker(text: str) -> str:
    bullet = _BULLET.match(text)
    if bullet:
        return f"- {text[bullet.end() :]}"
    for pattern, form in (
        (_IN_BRACKETS, "({}) {}"),
        (_BEFORE_BRACKET, "{}) {}"),
        (_BEFORE_DOT, "{}. {}"),
    ):
        item = pattern.fullmatch(text)
        if item:
            return form.format(*item.groups())
    return text


def _lines_apart(text: str) -> str:
    """Replace each single line break by a blank line, except in listings, tables and formulas."""
    parts: list[str] = []
    place = 0
    for unbroken in _UNBROKEN.finditer(text):
        parts += [_LINE_BREAK.sub("\n\n", text[place : unbroken.start()]), unbroken[0]]
        place = unbroken.end()
    return "".join([*parts, _LINE_BREAK.sub("\n\n", text[place:])])


def _even_formulas(text: str) -> str:
    """Rewrite `a$ x $b` as `a $x$ b`."""
    parts: list[str] = []
    written = place = 0
    while found := _INLINE.search(text, place):
        place = found.start() + 1
        if not _is_formula(found[1], text[found.end() : found.end() + 1]):
            continue
        before = text[written : found.start()]
        parts += [before, " " * before[-1:].isalnum(), f"${found[1].strip()}$"]
        written = place = found.end()
        parts.append(" " * text[written : written + 1].isalnum())
    return "".join([*parts, text[written:]])


def _is_formula(inner: str, following: str) -> bool:
    """Return True if two dollars delimit a formula, not two amounts, as the SDK would think."""
    words = inner.strip()
    amount = words[:1].isdigit()
    if not words or (amount and following.isdigit()):
        return False
    if _MATHEMATICAL.search(words):
        return True
    if amount:
        return inner == words and not _AMOUNT_AND_MORE.match(words)
    lopsided = inner[0].isspace() != inner[-1].isspace()
    return not lopsided or len(words.split()) == 1
