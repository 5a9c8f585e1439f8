"""What a model says around its answer: the prompt once more, a code fence. Used by parsers."""

from __future__ import annotations

import re

_FENCE = "```"
# A fence that names one of these holds the answer itself, not a listing on the page.
_OPENING = re.compile(r"```[ \t]*(?:markdown|md|html|latex|tex)[ \t]*\r?\n", re.IGNORECASE)
# Signs that open or end a turn. GLM-OCR ends by <|user|>; servers that know only <|endoftext|>
# let it through and the model goes on, mostly with empty fences (ollama issue 17113).
_TURNS = ("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")


def strip_prompt(text: str, prompt: str) -> str:
    """The answer alone: no prompt before it or on a line of its own after it, no fence around."""
    answer = _Answer(text, prompt.strip())
    while answer.lost_start() or answer.lost_fence() or answer.lost_end():
        pass
    return answer.text()


class _Answer:
    """text[start:end], narrowed from both sides without copies; `fences` stand within."""

    def __init__(self, text: str, prompt: str) -> None:
        self._text = text
        self._said = (prompt, *_TURNS) if prompt else _TURNS
        self._start, self._end = 0, len(text)
        self._fences = text.count(_FENCE)
        self._changed = False

    def text(self) -> str:
        """What remains; the whole text as it came where nothing was lost."""
        return self._text[self._start : self._end].strip() if self._changed else self._text

    def lost_start(self) -> bool:
        """Whether a prompt or the sign of a turn stood first."""
        start = self._first()
        for said in self._said:
            if self._text.startswith(said, start, self._end):
                return self._narrow(start + len(said), self._end)
        return False

    def lost_end(self) -> bool:
        """Whether a sign, a prompt on a line of its own or an empty fence stood last."""
        end = self._last()
        for said in self._said:
            begin = end - len(said)
            if self._text.endswith(said, self._start, end) and (
                said in _TURNS or self._begins_line(begin)
            ):
                return self._narrow(self._start, begin)
        return self._lost_empty_fence(end)

    def _lost_empty_fence(self, end: int) -> bool:
        """A fence with nothing after it that opens a block, or closes one that holds nothing."""
        begin = end - len(_FENCE)
        if not self._text.endswith(_FENCE, self._start, end) or not self._begins_line(begin):
            return False
        if self._fences % 2 == 0:
            before = self._last(begin)
            opens = before - len(_FENCE)
            if not self._text.endswith(_FENCE, self._start, before) or not self._begins_line(opens):
                return False
            begin = opens
            self._fences -= 1
        self._fences -= 1
        return self._narrow(self._start, begin)

    def lost_fence(self) -> bool:
        """Whether a fence stood around the whole; a missing end is forgiven."""
        opening = _OPENING.match(self._text, self._first(), self._end)
        if not opening:
            return False
        last = self._last()
        if self._fences == 1:
            end = last
        elif self._fences % 2 == 0 and self._text.endswith(_FENCE, opening.end(), last):
            end = last - len(_FENCE)
        else:
            return False
        self._fences = max(0, self._fences - 2)
        return self._narrow(opening.end(), end)

    def _narrow(self, start: int, end: int) -> bool:
        self._start, self._end, self._changed = start, end, True
        return True

    def _first(self) -> int:
        """Where the first visible character stands."""
        while self._start < self._end and self._text[self._start].isspace():
            self._start += 1
        return self._start

    def _last(self, end: int | None = None) -> int:
        """Where the last visible character before `end` ends."""
        end = self._end if end is None else end
        while end > self._start and self._text[end - 1].isspace():
            end -= 1
        return end

    def _begins_line(self, place: int) -> bool:
        while place > self._start and self._text[place - 1] in " \t":
            place -= 1
        return place == self._start or self._text[place - 1] == "\n"
