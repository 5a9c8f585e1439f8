"""Loops in what a model wrote: one piece of text again and again, found and cut. Used by parsers.

How often a piece must stand in a row depends on how much it says and on what fits on a page, so
that dot leaders, forms, columns of zeros and refrains stay.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A loop is found where a sample of this length stands again at most so much further on.
_SAMPLE = 32
_LONGEST_UNIT = 4000
# Samples that stand several times within the unit itself hide its length from the first few.
_OCCURRENCES = 8

# Each pair: what proves a loop anywhere, and what does so at the end of an answer that was cut by
# its limit. Least characters of a loop.
_SHORTEST = (300, 100)
# Copies of a piece with line or row ends, whatever it says: no page has more of the same.
_LINES = (120, 30)
# Characters without a letter or a digit between them: leaders, rules, cells.
_FILLING = (1000, 200)
# Copies of figures alone.
_NUMBERS = (300, 60)
# Copies of words, by the letters of the different words in the piece.
_WORDS = ((150, 6, 3), (40, 10, 4), (10, 20, 6), (1, 100, 20))
# One sign of Chinese, Japanese or Korean says as much as three letters.
_WIDE_SIGNS, _WIDE_WEIGHT = "\u2e80", 3
# Forms and tables are made of lines that are the same.
_FORMS = (60, 12)
_FORM = re.compile(r"_{3}|\.{3}|…|\||</t[dh]\s*>", re.IGNORECASE)

# What stays of filling, so that three dots remain three dots.
_FILLING_KEPT = 3
_MARKUP = re.compile(r"<[^<>]{0,200}>|&\w{1,8};")
_WORD = re.compile(r"[^\W_]+")
_LINE_END = re.compile(r"\n|</tr\s*>", re.IGNORECASE)
# Where a text may end, best first.
_LONGEST_END = 8
_ENDS = (
    re.compile(r"</tr\s*>|\n", re.IGNORECASE),
    re.compile(r"[.!?](?=\s)|[。！？]"),
    re.compile(r"\s"),
)


@dataclass(frozen=True, slots=True)
class Cut:
    """A text without its loops, and whether it had any."""

    text: str
    looped: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """text[start:end], in which every character stands again `period` further on."""

    start: int
    end: int
    period: int


def cut_loop(text: str, *, unfinished: bool = False) -> Cut:
    """The text with one copy kept of what loops in it.

    `unfinished`: the answer was cut by its token limit, so far fewer copies at its end are proof.
    Takes time by the length of the text; never gives more than it got.
    """
    looped = False
    while (shorter := _Search(text, unfinished).cut()) != text:
        text, looped = shorter, True
    return Cut(text, looped)


class _Search:
    """One pass over a text. Loops may stand within a larger one, which shows in the next."""

    def __init__(self, text: str, unfinished: bool) -> None:
        self._text = text
        # A limit can cut a character in two.
        self._last = len(text.rstrip(" \t\r\n\ufffd"))
        self._unfinished = unfinished
        # Where runs end that are no loops, by their period.
        self._seen: dict[int, int] = {}

    def cut(self) -> str:
        """The text with one copy of each loop."""
        kept: list[str] = []
        written = place = 0
        while place + _SAMPLE < len(self._text):
            run = self._loop_at(place)
            if run is None:
                place += _SAMPLE
                continue
            stop, resume = self._seam(run)
            kept.append(self._text[written:stop])
            place, written = run.end, resume
        return "".join([*kept, self._text[written:]])

    def _loop_at(self, place: int) -> _Run | None:
        """The loop that the sample at this place is a part of."""
        sample = self._text[place : place + _SAMPLE]
        again = place
        for _ in range(_OCCURRENCES):
            again = self._text.find(sample, again + 1, place + _SAMPLE + _LONGEST_UNIT)
            if again < 0:
                return None
            period = again - place
            if self._seen.get(period, -1) >= again + _SAMPLE:
                continue
            run = _run_around(self._text, place, period)
            if self._is_loop(run):
                return run
            self._seen[period] = run.end
        return None

    def _is_loop(self, run: _Run) -> bool:
        length = run.end - run.start
        at_end = self._unfinished and run.end >= self._last
        if length < max(_SHORTEST[at_end], 2 * run.period):
            return False
        unit = self._text[run.start : run.start + run.period]
        return length // run.period >= _copies_needed(unit, at_end)

    def _seam(self, run: _Run) -> tuple[int, int]:
        """Where to stop within the loop and where to go on, so that what follows joins well.

        At the end of the text nothing follows: the loop's last, broken copy goes too.
        """
        unit = self._text[run.start : run.start + run.period]
        copies = 1 if _WORD.search(unit) else -(-_FILLING_KEPT // run.period)
        stop = run.start + copies * run.period
        if run.end < self._last:
            return stop, stop + (run.end - stop) // run.period * run.period
        # A sentence ends before the space that parts the copies.
        copy = self._text[run.start : stop].rstrip()
        least = run.start + len(copy) if copy else stop
        return self._good_end(least, min(run.end, stop + run.period)), len(self._text)

    def _good_end(self, least: int, most: int) -> int:
        """The first place to end after one whole copy: after a row or line, a sentence, a word."""
        for end in _ENDS:
            for found in end.finditer(self._text, max(0, least - _LONGEST_END), most):
                if found.end() >= least:
                    return found.end()
        return least


def _run_around(text: str, place: int, period: int) -> _Run:
    ahead = _same_ahead(text, place, place + period)
    behind = _same_behind(text, place, place + period)
    return _Run(place - behind, place + period + ahead, period)


def _same_ahead(text: str, left: int, right: int) -> int:
    """How many characters from `right` on are those from `left` on."""
    length, step = 0, _SAMPLE
    while step:
        one = text[right + length : right + length + step]
        if len(one) == step and one == text[left + length : left + length + step]:
            length, step = length + step, step * 2
        else:
            step //= 2
    return length


def _same_behind(text: str, left: int, right: int) -> int:
    """How many characters before `right` are those before `left`."""
    length, step = 0, _SAMPLE
    while step:
        first = left - length - step
        same = text[first : left - length] == text[right - length - step : right - length]
        if first >= 0 and same:
            length, step = length + step, step * 2
        else:
            step //= 2
    return length


def _copies_needed(unit: str, at_end: bool) -> int:
    lines = _LINE_END.search(unit) is not None
    words = set(_WORD.findall(_MARKUP.sub(" ", unit)))
    if not words:
        # A form may be full of empty lines, however long.
        return _LINES[at_end] if lines else -(-_FILLING[at_end] // len(unit))
    if all(word.isdecimal() for word in words):
        return min(_NUMBERS[at_end], _LINES[at_end]) if lines else _NUMBERS[at_end]
    weight = sum(len(word) * (_WIDE_WEIGHT if word >= _WIDE_SIGNS else 1) for word in words)
    needed = next(copies[at_end] for least, *copies in _WORDS if weight >= least)
    return max(needed, _FORMS[at_end]) if _FORM.search(unit) else needed
