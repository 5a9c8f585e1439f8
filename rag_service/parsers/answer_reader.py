"""What the answers about one picture are worth: cut, looping or empty ones get a second reading.

Used by pages.py for whole pages and for regions alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from rag_service.layout.page_layout import Task
from rag_service.ocr.cleanup.prompt_echo import strip_prompt
from rag_service.ocr.cleanup.repetition import cut_loop
from rag_service.ocr.ocr_client import PageAnswer, Rejected, RejectedForSize, ServerFailed
from rag_service.parsers.block_markdown import PROMPTS
from rag_service.parsers.page_request import Asking, PageAtWork, PagePart, PageQuestion
from rag_service.runtime.retry import TryAgain

# A cut reading is made once more with this much more room.
_MORE_ROOM = 4.0
# The sides of a picture that the server found too large, against what they were.
SMALLER = 2 / 3


class Flaw(StrEnum):
    """What is wrong with a reading."""

    CUT = "cut"
    LOOP = "loop"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Reading:
    """A picture's text without prompt and loop; `only_loop`: there was nothing else."""

    picture: PagePart
    text: str
    finish_reason: str
    flaw: Flaw | None = None
    only_loop: bool = False

    @property
    def rank(self) -> tuple[bool, bool, int]:
        """The better of two readings has the higher rank."""
        return self.flaw is None, not self.only_loop, len(self.text)


@dataclass(frozen=True, slots=True)
class Subject:
    """Something to read: its picture now, how it is read, and how to get it smaller."""

    picture: PagePart
    task: Task
    smaller: Callable[[], Awaitable[PagePart]]


class Reader:
    """Reads pictures of one job."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking

    async def read(self, page: PageAtWork, subject: Subject) -> Reading:
        """The reading itself where it is whole or empty, else the better of two.

        Raises what Asking.ask raises about the first.
        """
        first = await self.once(page, subject)
        if first.flaw in (None, Flaw.EMPTY):
            return first
        return await self.better(page, subject, first)

    async def once(self, page: PageAtWork, subject: Subject) -> Reading:
        """One reading; at two thirds of its sides where the server finds the picture too large.

        Raises what Asking.ask raises.
        """
        question = PageQuestion(PROMPTS[subject.task])
        try:
            return await self._ask(page, subject.picture, question)
        except RejectedForSize:
            return await self._ask(page, await subject.smaller(), question)

    async def better(self, page: PageAtWork, subject: Subject, first: Reading) -> Reading:
        """The better of a flawed reading and one more; where nothing is to be gained, itself.

        Raises only where the first has no text.
        """
        question = self._second_question(subject, first)
        if question is None:
            return first
        try:
            second = await self._ask(page, first.picture, question)
        except (TryAgain, ServerFailed, Rejected):
            if first.flaw is Flaw.EMPTY:
                raise
            return first
        if first.flaw is Flaw.EMPTY and second.flaw is Flaw.EMPTY:
            return _cut_at_either(first, second)
        return max(first, second, key=lambda reading: reading.rank)

    def _second_question(self, subject: Subject, first: Reading) -> PageQuestion | None:
        prompt = PROMPTS[subject.task]
        if first.flaw is Flaw.LOOP:
            return PageQuestion(prompt, warm=True)
        if first.finish_reason != "length":
            return PageQuestion(prompt)
        widest = self._asking.budget(first.picture, _MORE_ROOM)
        if first.text and widest == self._asking.budget(first.picture, 1.0):
            return None
        return PageQuestion(prompt, room=_MORE_ROOM)

    async def _ask(self, page: PageAtWork, picture: PagePart, question: PageQuestion) -> Reading:
        answer = await self._asking.ask(page, picture, question)
        return _judged(picture, answer, question.prompt)


def _judged(picture: PagePart, answer: PageAnswer, prompt: str) -> Reading:
    said = strip_prompt(answer.text, prompt)
    cut = cut_loop(said, unfinished=answer.finish_reason == "length")
    text = cut.text.strip()
    if not has_writing(text):
        return Reading(picture, "", answer.finish_reason, Flaw.EMPTY)
    if cut.looped:
        return Reading(
            picture, text, answer.finish_reason, Flaw.LOOP, only_loop=_is_all_of(text, said)
        )
    flaw = Flaw.CUT if answer.finish_reason == "length" else None
    return Reading(picture, text, answer.finish_reason, flaw)


def _is_all_of(text: str, said: str) -> bool:
    """Whether an answer is copies of this text and nothing else, the last one perhaps broken."""
    return text.startswith(said.replace(text, "").strip())


def _cut_at_either(first: Reading, second: Reading) -> Reading:
    """Of two empty readings the one that does not prove emptiness, being cut by its limit."""
    return first if first.finish_reason == "length" else second


def has_writing(text: str) -> bool:
    """Whether anything would be seen of the text on paper."""
    return any(character.isprintable() and character != " " for character in text)
