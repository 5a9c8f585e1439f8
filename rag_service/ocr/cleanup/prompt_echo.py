"""Removes what a model writes around its answer: the prompt, a code fence, turn markers."""

from __future__ import annotations

import re

_FENCE = "```"
# A fence that names one of these contains the answer itself, not a listing on the page.
_OPENING = re.compile(r"```[ \t]*(?:markdown|md|html|latex|tex)[ \t]*\r?\n", re.IGNORECASE)
# Markers that begin or end a turn. GLM-OCR ends with <|user|>; servers that know only
# <|endoftext|> pass it on and the model continues, mostly with empty fences (ollama issue 17113).
_TURNS = ("<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")


def strip_prompt(text: str, prompt: str) -> str:
    """Return the answer without a prompt before it or on its own line after it, and unfenced."""
    answer = _Answer(text, prompt.strip())
    while answer.strip_start() or answer.strip_fence() or answer.strip_end():
        pass
    return answer.text()


class _Answer:
    """text[start:end], narrowed from both sides without copies; `fences` counts those within."""

    def __init__(self, text: str, prompt: str) -> None:
        self._text = text
        self._echoes = (prompt, *_TURNS) if prompt else _TURNS
        self._start, self._end = 0, len(text)
        self._fences = text.count(_FENCE)
        self._changed = False

    def text(self) -> str:
        """Return what remains; the unchanged text if nothing was removed."""
        return self._text[self._start : self._end].strip() if self._changed else self._text

    def strip_start(self) -> bool:
        """Remove a prompt or a turn marker at the start. Return True if there was one."""
        start = self._first()
        for echo in self._echoes:
            if self._text.startswith(echo, start, self._end):
                return self._narrow(start + len(echo), self._end)
        return False

    def strip_end(self) -> bool:
        """Remove a turn marker, a prompt on its own line or an empty fence at the end."""
        end = self._last()
        for echo in self._echoes:
            begin = end - len(echo)
            if self._text.endswith(echo, self._start, end) and (
                echo in _TURNS or self._begins_line(begin)
            ):
                return self._narrow(self._start, begin)
        return self._strip_empty_fence(end)

    def _strip_empty_fence(self, end: int) -> bool:
        """Remove a last fence that opens a block, or closes an empty one."""
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

    def strip_fence(self) -> bool:
        """Remove a fence around the whole answer; its end may be missing."""
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
        """Return the index of the first visible character."""
        while self._start < self._end and self._text[self._start].isspace():
            self._start += 1
        return self._start

    def _last(self, end: int | None = None) -> int:
        """Return the index after the last visible character before `end`."""
        end = self._end if end is None else end
        while end > self._start and self._text[end - 1].isspace():
            end -= 1
        return end

    def _begins_line(self, place: int) -> bool:
        while place > self._start and self._text[place - 1] in " \t":
            place -= 1
        return place == self._start or self._text[place - 1] == "\n"
