"""How a batching OCR server spends its time: front end, prefill, decode, slots, cache.

Pure and without a clock of its own: told the time, it says what is done by then and when something
ends next. Served over HTTP by simulated_server.py, driven in virtual time by tests.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

_SOON = 1e-9


@dataclass(frozen=True, slots=True)
class Rates:
    """A server. Rates are a second and for all requests together; `decode_one` is for one alone.

    `front`: pictures decoded; `prefill`: vision tokens; `decode`: answer tokens; `cache`: tokens
    that its KV cache holds. `serial`: least and most seconds a page where it reads one at a time.
    """

    name: str
    slots: int
    front: float = math.inf
    prefill: float = math.inf
    decode: float = math.inf
    decode_one: float = math.inf
    cache: float = math.inf
    vision_tokens: int = 3600
    answer_tokens: int = 450
    # Answers are this share longer or shorter.
    spread: float = 0.3
    serial: tuple[float, float] | None = None


# The report's: Gemma4 on vLLM; 4 in flight give 87 documents of 9 pages an hour, 64 give 222.
REPORT = Rates("report", 64, prefill=2052, decode=260, decode_one=27.7)
SERIAL = Rates("serial", 1, decode_one=100, serial=(8, 15))
FRONT_END = Rates(
    "front end", 64, front=1.5, prefill=40_000, decode=4000, decode_one=60,
    vision_tokens=2772, answer_tokens=1000,
)  # fmt: skip
FAST = Rates(
    "fast", 256, prefill=60_000, decode=12_000, decode_one=100,
    vision_tokens=2772, answer_tokens=1000,
)  # fmt: skip
# vLLM with GLM-OCR on an H200, pages of 150 DPI through one front end, as measured.
H200 = Rates(
    "h200", 64, front=6.0, prefill=37_000, decode=6800, decode_one=300,
    vision_tokens=2772, answer_tokens=1000,
)  # fmt: skip
SERVERS = {rates.name: rates for rates in (SERIAL, REPORT, FRONT_END, FAST, H200)}


@dataclass(slots=True)
class _Page:
    key: Hashable
    vision: float
    answer: float


@dataclass
class Batch:
    """The requests in a server and how far each is."""

    rates: Rates
    seed: int = 0
    now: float = 0.0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0
    finished: int = 0
    _front: deque[_Page] = field(default_factory=deque)
    _front_left: float = 0.0
    _queue: deque[_Page] = field(default_factory=deque)
    _prefill: deque[_Page] = field(default_factory=deque)
    _prefill_left: float = 0.0
    # Each decoding page by the decode progress at which it is done; all progress alike.
    _decode: list[tuple[float, int, _Page]] = field(default_factory=list)
    _progress: float = 0.0
    _order: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._prefill) + len(self._decode)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot; those in the front end are not seen, as in vLLM."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        return len(self._front) + self.waiting + self.running

    @property
    def cache_use(self) -> float:
        """The share of the KV cache in use."""
        return 0.0 if math.isinf(self.rates.cache) else self._held() / self.rates.cache

    def arrive(self, key: Hashable) -> None:
        """A request comes in now."""
        page = self._drawn(key)
        if math.isinf(self.rates.front):
            self._wait(page)
            return
        self._front.append(page)
        if len(self._front) == 1:
            self._front_left = 1 / self.rates.front

    def leave(self, key: Hashable) -> None:
        """Its client has gone."""
        if self._front and self._front[0].key == key:
            self._front_left = 1 / self.rates.front
        if self._prefill and self._prefill[0].key == key:
            self._begin_prefill(skip=1)
        for line in (self._front, self._queue, self._prefill):
            for page in [page for page in line if page.key == key]:
                line.remove(page)
        self._decode = [entry for entry in self._decode if entry[2].key != key]
        heapq.heapify(self._decode)
        self._fill()

    def next_event(self) -> float:
        """When something ends next; infinity where nothing is going on."""
        ends = []
        if self._front:
            ends.append(self._front_left)
        if self._prefill:
            ends.append(self._prefill_left / self.rates.prefill)
        if self._decode:
            ends.append((self._decode[0][0] - self._progress) / self._pace())
        return self.now + max(0.0, min(ends)) if ends else math.inf

    def advance(self, until: float) -> list[Hashable]:
        """Let time pass; the requests that were answered, in order."""
        answered: list[Hashable] = []
        while (event := self.next_event()) <= until:
            answered += self._pass(event - self.now)
        # What ends a rounding error later ends now.
        return answered + self._pass(until - self.now)

    def _pass(self, seconds: float) -> list[Hashable]:
        """Up to the next event at most."""
        self.now += seconds
        done = self._pace() * seconds
        self._progress += done
        self.answer_tokens += done * len(self._decode)
        self._front_left -= seconds
        if self._prefill:
            self._prefill_left -= self.rates.prefill * seconds
            self.prompt_tokens += self.rates.prefill * seconds
        return self._ended()

    def _ended(self) -> list[Hashable]:
        answered = []
        while self._decode and self._decode[0][0] <= self._progress + _SOON:
            answered.append(heapq.heappop(self._decode)[2].key)
        self.finished += len(answered)
        if self._front and self._front_left <= _SOON:
            self._wait(self._front.popleft())
            self._front_left = 1 / self.rates.front
        if self._prefill and self._prefill_left <= _SOON * self.rates.prefill:
            self._start_decode(self._prefill.popleft())
            self._begin_prefill()
        self._fill()
        return answered

    def _pace(self) -> float:
        """Answer tokens a second of each decoding page."""
        if not self._decode:
            return 0.0
        return min(self.rates.decode_one, self.rates.decode / len(self._decode))

    def _drawn(self, key: Hashable) -> _Page:
        rates = self.rates
        if rates.serial is not None:
            return _Page(key, 0.0, self._random.uniform(*rates.serial) * rates.decode_one)
        spread = self._random.uniform(1 - rates.spread, 1 + rates.spread)
        return _Page(key, rates.vision_tokens, rates.answer_tokens * spread)

    def _wait(self, page: _Page) -> None:
        self._queue.append(page)
        self._fill()

    def _fill(self) -> None:
        while self._queue and self.running < self.rates.slots and self._has_room(self._queue[0]):
            page = self._queue.popleft()
            if math.isinf(self.rates.prefill) or page.vision == 0:
                self._start_decode(page)
                continue
            self._prefill.append(page)
            if len(self._prefill) == 1:
                self._begin_prefill()

    def _has_room(self, page: _Page) -> bool:
        return self._held() + page.vision + page.answer <= self.rates.cache or not self.running

    def _held(self) -> float:
        if math.isinf(self.rates.cache):
            return 0.0
        held = [*self._prefill, *(page for _, _, page in self._decode)]
        return sum(page.vision + page.answer for page in held)

    def _begin_prefill(self, skip: int = 0) -> None:
        if len(self._prefill) > skip:
            self._prefill_left = self._prefill[skip].vision

    def _start_decode(self, page: _Page) -> None:
        self._order += 1
        heapq.heappush(self._decode, (self._progress + page.answer, self._order, page))
