"""docs/style.md as far as a program can check it: banned words, and "where" for "if"."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Words of docs/style.md, and others that a stranger had to look up in this code once.
BANNED = (
    r"nobody|somebody|whoever|ours|so (?:many|much)|anew|once more|mend(?:s|ed|ing)?|by itself|"
    r"is none of|away|doorbells?|rings?|rang|rung|ringing|deaf(?:ness)?|beats?|rooms?|desks?|"
    r"spool(?:s|ed)?|leash|sheets?|lingering|held run|blast wall|told|tells|lest|upon|for good|"
    r"travel(?:s|led|ling)?|eyes|lets? go|by turns|where (?:there (?:is|are)|none|it is)"
)
PHRASE = re.compile(rf"(?<![\w-])(?:{BANNED})(?![\w-])", re.IGNORECASE)
IN_A_NAME = re.compile(
    r"(?:^|_)(?:nobody|somebody|anew|mend(?:s|ed)?|away|doorbells?|rings?|rang|ringing|deaf|"
    r"beats?|rooms?|desks?|spool|leash|sheets?|lingering|told|tells)(?:_|$)",
    re.IGNORECASE,
)
# Texts of documents, lists of words, and the two files that name the banned words.
NOT_PROSE = {
    "docs/style.md",
    "rag_service/pdf/child/common_words.py",
    "samples/texts.py",
    "tests/unit/test_style.py",
}
SUFFIXES = {".md", ".py", ".sh", ".toml", ".yaml", ".yml"}
NAMES = {"Dockerfile", "Makefile", "run"}
# In four well-read projects "where" stands once for every twelve "if" or "when".
CONDITIONS_A_WHERE = 10
# The name of a Unix account, not prose.
ACCOUNT = '"nobody"'


def _files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    return [
        name
        for name in listed
        if name not in NOT_PROSE
        and (Path(name).suffix in SUFFIXES or Path(name).name in NAMES)
        and (ROOT / name).is_file()
    ]


FILES = _files()


def _python_prose(name: str) -> Iterator[tuple[int, str]]:
    """Comments, docstrings and, outside tests, all strings; line numbers from 1."""
    is_product = name.startswith(("rag_service/", "workers/", "migrations/"))
    for token in tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline):
        is_text = token.type == tokenize.STRING and (is_product or '"""' in token.string[:5])
        if token.type == tokenize.COMMENT or (is_text and token.string != ACCOUNT):
            yield from enumerate(token.string.split("\n"), token.start[0])


def _prose(name: str) -> list[tuple[int, str]]:
    if name.endswith(".py"):
        return list(_python_prose(name))
    return list(enumerate((ROOT / name).read_text().split("\n"), 1))


def _identifiers(name: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


@pytest.mark.skipif(not FILES, reason="needs a git checkout")
def test_banned_words_are_not_used() -> None:
    found = [
        f"{name}:{number}: {match[0]!r} in {line.strip()[:80]!r}"
        for name in FILES
        for number, line in _prose(name)
        for match in PHRASE.finditer(line)
    ]
    assert found == [], "docs/style.md says what to write"


@pytest.mark.skipif(not FILES, reason="needs a git checkout")
def test_names_use_the_fields_words() -> None:
    found = [
        f"{name}:{number}: {word}"
        for name in FILES
        if name.endswith(".py")
        for number, word in _identifiers(name)
        if IN_A_NAME.search(word)
    ]
    paths = [name for name in FILES if IN_A_NAME.search(Path(name).stem)]
    assert found + paths == [], "docs/style.md says what to write"


@pytest.mark.skipif(not FILES, reason="needs a git checkout")
def test_where_is_for_places() -> None:
    text = "\n".join(line for name in FILES for _, line in _prose(name))
    where = len(re.findall(r"\bwhere\b", text, re.IGNORECASE))
    conditions = len(re.findall(r"\b(?:if|when)\b", text, re.IGNORECASE))
    assert where * CONDITIONS_A_WHERE <= conditions, f"{where} where, {conditions} if or when"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Nobody answers", "Nobody"),
        ("the server is away", "away"),
        ("one of ours", "ours"),
        ("rings for the next", "rings"),
        ("a string, hours and strings", None),
        ("an away-day", None),
    ],
)
def test_the_check_finds_whole_words(line: str, expected: str | None) -> None:
    match = PHRASE.search(line)
    assert (match and match[0]) == expected
