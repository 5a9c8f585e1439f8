"""Finds and removes repetition loops in a model's answer.

How often a piece must repeat to be a loop depends on its content and on what fits on a page, so
that dot leaders, forms, columns of zeros and refrains are kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A loop is found if a sample of this length occurs again within this distance.
_SAMPLE = 32
_LONGEST_UNIT = 4000
# How many occurrences are tried as the period: a sample may also repeat within one copy.
_OCCURRENCES = 8

# Each pair: the threshold anywhere, and the one at the end of an answer that was cut by its limit.
# Minimum length of a loop, in characters.
_SHORTEST = (300, 100)
# Copies of a piece with line or row ends, whatever its content: no page has more.
_LINES = (120, 30)
# Characters without a letter or a digit between them: leaders, rules, cells.
_FILLING = (1000, 200)
# Copies of numbers only.
_NUMBERS = (300, 60)
# Copies of words, by the number of letters in the piece's distinct words.
_WORDS = ((150, 6, 3), (40, 10, 4), (10, 20, 6), (1, 100, 20))
# From this code point on (Chinese, Japanese, Korean), a character counts as three letters.
_FIRST_CJK, _CJK_WEIGHT = "\u2e80", 3
# Copies of lines of forms and tables, which often repeat.
_FORMS = (60, 12)
_FORM = re.compile(r"_{3}|\.{3}|…|\||</t[dh]\s*>", re.IGNORECASE)

# Characters of filling that are kept, so that three dots remain three dots.
_FILLING_KEPT = 3
_MARKUP = re.compile(r"<[^<>]{0,200}>|&\w{1,8};")
_WORD = re.compile(r"[^\W_]+")
_LINE_END = re.compile(r"\n|</tr\s*>", re.IGNORECASE)
# The places at which a text may end, best first.
_LONGEST_END = 8
_ENDS = (
    re.compile(r"</tr\s*>|\n", re.IGNORECASE),
    re.compile(r"[.!?](?=\s)|[。！？]"),
    re.compile(r"\s"),
)


@dataclass(frozen=True, slots=True)
class WithoutLoops:
    """A text without its loops, and whether it had any."""

    text: str
    looped: bool


@dataclass(frozen=True, slots=True)
class _Run:
    """text[start:end], in which every character occurs again `period` further on."""

    start: int
    end: int
    period: int


def cut_loop(text: str, *, unfinished: bool = False) -> WithoutLoops:
    """Return the text with one copy of each loop.

    `unfinished`: the answer was cut by its token limit, so fewer copies at its end are a loop.
    Takes time in proportion to the text's length; the result is never longer than the text.
    """
    looped = False
    while (shorter := _LoopSearch(text, unfinished).cut()) != text:
        text, looped = shorter, True
    return WithoutLoops(text, looped)


class _LoopSearch:
    """One pass over a text. A larger loop that contains loops is found by the next pass."""

    def __init__(self, text: str, unfinished: bool) -> None:
        self._text = text
        # The token limit can cut a character in two.
        self._last = len(text.rstrip(" \t\r\n\ufffd"))
        self._unfinished = unfinished
        # The ends of the last runs that are not loops, by their period.
        self._rejected: dict[int, int] = {}

    def cut(self) -> str:
        """Return the text with one copy of each loop."""
        kept: list[str] = []
        written = place = 0
        while place + _SAMPLE < len(self._text):
            run = self._loop_at(place)
            if run is None:
                place += _SAMPLE
                continue
            stop, resume = self._cut_points(run)
            kept.append(self._text[written:stop])
            place, written = run.end, resume
        return "".join([*kept, self._text[written:]])

    def _loop_at(self, place: int) -> _Run | None:
        """Return the loop that contains the sample at this place, or None."""
        sample = self._text[place : place + _SAMPLE]
        again = place
        for _ in range(_OCCURRENCES):
            again = self._text.find(sample, again + 1, place + _SAMPLE + _LONGEST_UNIT)
            if again < 0:
                return None
            period = again - place
            if self._rejected.get(period, -1) >= again + _SAMPLE:
                continue
            run = _run_around(self._text, place, period)
            if self._is_loop(run):
                return run
            self._rejected[period] = run.end
        return None

    def _is_loop(self, run: _Run) -> bool:
        length = run.end - run.start
        at_end = self._unfinished and run.end >= self._last
        if length < max(_SHORTEST[at_end], 2 * run.period):
            return False
        unit = self._text[run.start : run.start + run.period]
        return length // run.period >= _copies_needed(unit, at_end)

    def _cut_points(self, run: _Run) -> tuple[int, int]:
        """Return the indexes at which to stop within the loop and to continue after it.

        At the end of the text the loop's last, broken copy is removed too.
        """
        unit = self._text[run.start : run.start + run.period]
        copies = 1 if _WORD.search(unit) else -(-_FILLING_KEPT // run.period)
        stop = run.start + copies * run.period
        if run.end < self._last:
            return stop, stop + (run.end - stop) // run.period * run.period
        # A sentence ends before the space between two copies.
        copy = self._text[run.start : stop].rstrip()
        least = run.start + len(copy) if copy else stop
        return self._good_end(least, min(run.end, stop + run.period)), len(self._text)

    def _good_end(self, least: int, most: int) -> int:
        """Return the first good end after one copy: of a row or line, a sentence, or a word."""
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
    """Return how many characters from `right` on equal those from `left` on."""
    length, step = 0, _SAMPLE
    while step:
        one = text[right + length : right + length + step]
        if len(one) == step and one == text[left + length : left + length + step]:
            length, step = length + step, step * 2
        else:
            step //= 2
    return length


def _same_behind(text: str, left: int, right: int) -> int:
    """Return how many characters before `right` equal those before `left`."""
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
        # A form may consist of empty lines of any length.
        return _LINES[at_end] if lines else -(-_FILLING[at_end] // len(unit))
    if all(word.isdecimal() for word in words):
        return min(_NUMBERS[at_end], _LINES[at_end]) if lines else _NUMBERS[at_end]
    weight = sum(len(word) * (_CJK_WEIGHT if word >= _FIRST_CJK else 1) for word in words)
    needed = next(copies[at_end] for least, *copies in _WORDS if weight >= least)
    return max(needed, _FORMS[at_end]) if _FORM.search(unit) else needed
