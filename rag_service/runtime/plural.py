"""Numbers with their nouns in the singular or plural."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return `1 page` or `2 pages`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
