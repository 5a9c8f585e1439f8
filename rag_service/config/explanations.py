"""Sentences about bad settings: what a value must be, and which name was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from rag_service.config.option_list import PREFIXES, Option, derived_env, options

# Pydantic's type of error for a key that is not in the tree.
_UNKNOWN_KEY = "extra_forbidden"
# What is wrong with a value, by pydantic's type of error; the braces are filled from its context.
_MESSAGES = {
    "missing": "is required",
    "extra_forbidden": "is unknown",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} items",
    "string_pattern_mismatch": "must match {pattern}",
    "datetime_from_date_parsing": "must be a time such as 2026-03-01T14:30:00Z",
    "datetime_parsing": "must be a time such as 2026-03-01T14:30:00Z",
    "datetime_type": "must be a time such as 2026-03-01T14:30:00Z",
    "timezone_aware": "must have an offset, as in 2026-03-01T14:30:00Z",
    "json_invalid": "is not valid JSON: {error}",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be a path",
    "list_type": "must be a list",
    "model_type": "must be a section with keys and values",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
}
# Least similarity, 0 to 1, of two names that may be the same, of their letters alone, and the most
# that a second proposal may be behind the first; found with the names in
# tests/unit/test_setting_names.py.
_NEAR = 0.75
_NEAR_LETTERS = 0.8
_SECOND_BEST = 0.1
_NEAR_WITHOUT_PREFIX = 0.85


def explain(error: ValidationError) -> str:
    """Return a sentence that names every bad key, its variable and what its value must be."""
    by_key = {option.key: option for option in options()}
    lines = []
    for problem in error.errors():
        parts = [str(part) for part in problem["loc"]]
        option = next((by_key[key] for key in _prefixes(parts) if key in by_key), None)
        if option:
            lines.append(f"{option.key}: {message_of(problem)} (environment: {option.env})")
        elif problem["type"] == _UNKNOWN_KEY:
            key = ".".join(parts)
            lines.append(f"{key}: unknown setting.{did_you_mean(near_keys(key))}")
        else:
            lines.append(f"{'.'.join(parts)}: {message_of(problem)}")
    return "Bad settings: " + "; ".join(dict.fromkeys(lines))


def message_of(problem: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, in plain words. The value itself is not shown."""
    if (form := _MESSAGES.get(problem["type"])) is not None:
        return form.format(**problem.get("ctx", {}))
    message: str = problem["msg"]
    return message.removeprefix("Value error, ")


def did_you_mean(names: list[str]) -> str:
    """Return the question, with a space before it, or "" without names."""
    return f" Did you mean {' or '.join(names)}?" if names else ""


def near_keys(key: str) -> list[str]:
    """Return up to two keys or sections that may have been meant by an unknown key."""
    sections = {option.path[0]: option.path[0] for option in options() if len(option.path) > 1}
    spellings = sections | _spellings(lambda option: option.key)
    return _near(key, spellings)


def near_variables(name: str) -> list[str]:
    """Return up to two variables that may have been meant by an unknown one.

    A name without a prefix of rag_service must be much closer: it may be another program's.
    """
    if name.startswith(PREFIXES):
        return _near(name, _spellings(lambda option: option.env))
    unprefixed = [o.env for o in options() if not o.env.startswith(PREFIXES)]
    return difflib.get_close_matches(name, unprefixed, n=1, cutoff=_NEAR_WITHOUT_PREFIX)


def _spellings(shown: Any) -> dict[str, str]:
    """Return the shown name of every option by each name that people may try for it."""
    found: dict[str, str] = {}
    for option in options():
        for name in _tried_names(option):
            found.setdefault(name, shown(option))
    return found


def _tried_names(option: Option) -> Iterator[str]:
    yield from (option.key, option.env, derived_env(option.path))
    yield from option.variables


def _near(name: str, spellings: Mapping[str, str]) -> list[str]:
    """Return the shown names of the nearest spellings, the best first.

    Words in another order, a missing word and a key in the wrong section count as near.
    """
    words = _words(name)
    scores: dict[str, float] = {}
    for spelling, shown in spellings.items():
        score = _similarity(words, _words(spelling))
        scores[shown] = max(score, scores.get(shown, 0.0))
    least = max(_NEAR, max(scores.values()) - _SECOND_BEST)
    best = sorted((shown for shown in scores if scores[shown] >= least), key=lambda s: -scores[s])
    return best[:2]


def _similarity(tried: list[str], known: list[str]) -> float:
    """Return 0 to 1: the similarity of the letters, or of the words in any order."""
    letters = _ratio("".join(tried), "".join(known))
    if letters >= _NEAR_LETTERS:
        return letters
    if tried[1:] == known[1:] != [] or (set(tried) < set(known) and tried[-1] == known[-1]):
        # The right name in the wrong section, or without its section.
        return _NEAR + 0.01 * letters
    return (_found_in(tried, known) + _found_in(known, tried)) / (len(tried) + len(known))


def _found_in(words: list[str], others: list[str]) -> float:
    """Return how many of the words have a near one among the others."""
    return sum(max(_ratio(word, other) for other in others) ** 3 for word in words)


def _ratio(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second, autojunk=False).ratio()


def _words(name: str) -> list[str]:
    """Return the words of a key or variable, without the product's own prefix."""
    bare = name.upper().removeprefix("RAG_SERVICE_")
    return [word for word in re.split(r"[^A-Z0-9]+", bare) if word] or [bare]


def _prefixes(parts: list[str]) -> Iterator[str]:
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])
