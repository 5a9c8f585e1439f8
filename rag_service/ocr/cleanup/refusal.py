"""Answers with which a model declines to read a picture, in place of its text."""

from __future__ import annotations

import re

# A longer text that begins with an apology is a letter.
_LONGEST = 500
_EXCUSE = re.compile(
    r"\W*(?:"
    r"(?:i['’]?m|i am|we['’]?re|my)?\s*(?:very |so |really |deepest |sincere )?(?:sorry|apolog\w+)"
    r"|unfortunately|as an? (?:ai|artificial|language model|large language)|i|there|the|this|no"
    r"|es tut mir leid|leider|ich|désolée?|je|lo siento|no|mi dispiace|non"
    r")\b",
    re.IGNORECASE,
)
_INABILITY = re.compile(
    r"\b(?:can(?:no|['’]?)t|(?:am|['’]m|was|are) (?:not able|unable)|won['’]?t be able"
    r"|do(?: not|n['’]?t) (?:see|have)|(?:kann|kein)\b.{0,40}\b(?:bild|text|nicht)"
    r"|ne (?:peux|vois)|no puedo|non posso)\b"
    r".{0,80}?\b(?:read|see|view|process|extract|assist|help|transcri\w+|recogni\w+|access|open"
    r"|analy\w+|describe|comply|fulfil\w*|image|picture|photo|text|document|bild|lesen|helfen"
    r"|lire|voir|aider|leer|ver|ayudar|leggere|vedere|aiutar\w+)\b",
    re.IGNORECASE | re.DOTALL,
)
_OTHER_SCRIPTS = re.compile(
    r"\W*(?:很?抱歉|对不起|對不起|我(?:无法|無法|不能)|申し訳|죄송)", re.IGNORECASE
)


def is_refusal(text: str) -> bool:
    """Return whether the text reads like a model that declines to read the picture."""
    text = text.strip()
    if len(text) > _LONGEST:
        return False
    declines = _EXCUSE.match(text) and _INABILITY.search(text)
    return bool(declines or _OTHER_SCRIPTS.match(text))
