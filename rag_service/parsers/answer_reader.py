"""Reads one picture, a whole page or a region: a cut, looping or empty answer is read again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from rag_service.layout.page_layout import Task
from rag_service.ocr.cleanup.prompt_echo import strip_prompt
from rag_service.ocr.cleanup.refusal import is_refusal
from rag_service.ocr.cleanup.repetition import cut_loop
from rag_service.ocr.ocr_client import PageAnswer, Rejected, RejectedForSize, ServerFailed
from rag_service.parsers.block_markdown import PROMPTS
from rag_service.parsers.page_request import PageInProgress, PagePart, PageQuestion, PageRequester
from rag_service.runtime.retry import TryAgain

# The factor of the token limit for the second reading of a cut answer.
_MORE_TOKENS = 4.0
# The scale of the sides for a picture that the server refused as too large.
SMALLER = 2 / 3


class Flaw(StrEnum):
    """A defect of a reading."""

    CUT = "cut"
    LOOP = "loop"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Reading:
    """A picture's text without prompt and loop; `only_loop`: the answer was only a loop."""

    picture: PagePart
    text: str
    finish_reason: str
    flaw: Flaw | None = None
    only_loop: bool = False

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """The order of readings: the better one has the higher rank."""
        return self.flaw is None, not self.only_loop, len(self.text)


@dataclass(frozen=True, slots=True)
class PictureToRead:
    """A picture, how it is read, and how to draw it smaller."""

    picture: PagePart
    task: Task
    smaller: Callable[[], Awaitable[PagePart]]


class PictureReader:
    """Reads the pictures of one job."""

    def __init__(self, requester: PageRequester) -> None:
        self._requester = requester

    async def read(self, page: PageInProgress, target: PictureToRead) -> Reading:
        """Return the reading if it is whole or empty, else the better of two.

        Raises what PageRequester.ask raises about the first.
        """
        first = await self.read_once(page, target)
        if first.flaw in (None, Flaw.EMPTY):
            return first
        return await self.better_of_two(page, target, first)

    async def read_once(self, page: PageInProgress, target: PictureToRead) -> Reading:
        """Return one reading, at two thirds of the sides if the server refuses the size.

        Raises what PageRequester.ask raises.
        """
        question = PageQuestion(PROMPTS[target.task])
        try:
            return await self._ask(page, target.picture, question)
        except RejectedForSize:
            return await self._ask(page, await target.smaller(), question)

    async def better_of_two(
        self, page: PageInProgress, target: PictureToRead, first: Reading
    ) -> Reading:
        """Return the better of a flawed reading and a second one, if a second one can help.

        Raises only if the first has no text.
        """
        question = self._second_question(target, first)
        if question is None:
            return first
        try:
            second = await self._ask(page, first.picture, question)
        except (TryAgain, ServerFailed, Rejected):
            if first.flaw is Flaw.EMPTY:
                raise
            return first
        if first.flaw is Flaw.EMPTY and second.flaw is Flaw.EMPTY:
            return _cut_one(first, second)
        return max(first, second, key=lambda reading: reading.rank)

    def _second_question(self, target: PictureToRead, first: Reading) -> PageQuestion | None:
        prompt = PROMPTS[target.task]
        if first.flaw is Flaw.LOOP:
            return PageQuestion(prompt, warm=True)
        if first.finish_reason != "length":
            return PageQuestion(prompt)
        widest = self._requester.budget(first.picture, _MORE_TOKENS)
        if first.text and widest == self._requester.budget(first.picture, 1.0):
            return None
        return PageQuestion(prompt, token_factor=_MORE_TOKENS)

    async def _ask(
        self, page: PageInProgress, picture: PagePart, question: PageQuestion
    ) -> Reading:
        answer = await self._requester.ask(page, picture, question)
        reading = reading_of(picture, answer, question.prompt)
        if is_refusal(reading.text):
            page.refused = True
        elif reading.text and not reading.only_loop:
            await self._requester.note_read()
        return reading


def reading_of(picture: PagePart, answer: PageAnswer, prompt: str) -> Reading:
    """Clean up an answer and find its flaw."""
    stripped = strip_prompt(answer.text, prompt)
    without_loops = cut_loop(stripped, unfinished=answer.finish_reason == "length")
    text = without_loops.text.strip()
    if not has_writing(text):
        return Reading(picture, "", answer.finish_reason, Flaw.EMPTY)
    if without_loops.looped:
        only_loop = _is_only_copies(text, stripped)
        return Reading(picture, text, answer.finish_reason, Flaw.LOOP, only_loop)
    flaw = Flaw.CUT if answer.finish_reason == "length" else None
    return Reading(picture, text, answer.finish_reason, flaw)


def _is_only_copies(text: str, answer: str) -> bool:
    """Return True if an answer consists of copies of this text, the last one perhaps broken."""
    return text.startswith(answer.replace(text, "").strip())


def _cut_one(first: Reading, second: Reading) -> Reading:
    """Of two empty readings, return one cut by its limit, which does not prove an empty page."""
    return first if first.finish_reason == "length" else second


def has_writing(text: str) -> bool:
    """Return True if the text has visible characters."""
    return any(character.isprintable() and character != " " for character in text)
