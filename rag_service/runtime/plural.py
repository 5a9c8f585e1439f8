"""Numbers with their nouns, as sentences want them. Used by verdicts and the command line."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
