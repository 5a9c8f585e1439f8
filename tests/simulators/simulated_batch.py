"""A model of how a batching OCR server spends its time: front end, prefill, decode, slots, cache.

Pure and without a clock of its own: it is given the time, and returns what has ended by then and
when the next thing ends.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

_SOON = 1e-9


@dataclass(frozen=True, slots=True)
class Rates:
    """A server. Rates are per second and for all requests together; `decode_one` is for one alone.

    `front`: pictures decoded, shared by all that are there; `prefill`: vision tokens; `decode`:
    answer tokens; `cache`: tokens that its KV cache holds. `serial`: least and most seconds for a
    page if it reads one at a time. `bends`: each further request slows all others down, instead
    of none until the rate is reached. `beside_prefill`: the share of the decode pace that is left
    during a prefill. `long_share`: the share of answers that are `long_factor` times as long.
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
    # Answers are at most this share longer or shorter; prompts likewise.
    spread: float = 0.3
    vision_spread: float = 0.0
    long_share: float = 0.0
    long_factor: float = 1.0
    serial: tuple[float, float] | None = None
    bends: bool = False
    beside_prefill: float = 1.0


# The server of the user's report: Gemma4 on vLLM. 4 in flight give 87 documents of 9 pages an
# hour, 64 give 222.
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
# vLLM with GLM-OCR on an H200, pages of 150 DPI, as measured: 1.9 pages/s with 8 in flight, 4.1
# with 32, 5.5 with 64. Pages that were sent together stay together.
H200 = Rates(
    "h200", 64, front=20.0, prefill=37_000, decode=18_000, decode_one=318,
    vision_tokens=2772, answer_tokens=1000, bends=True, beside_prefill=0.05,
)  # fmt: skip
# The same with answers that are all equally long, as a model with random weights gives them.
LOCKSTEP = replace(H200, name="lockstep", spread=0.0)
SERVERS = {rates.name: rates for rates in (SERIAL, REPORT, FRONT_END, FAST, H200, LOCKSTEP)}
# Two servers that the search was never tuned on. The first has slots that its cache cannot fill:
# long prompts leave space for few requests. The second has 24 slots, a slow prefill and answers
# of two kinds, one of them six times as long.
KV_PRESSURE = Rates(
    "kv pressure", 48, prefill=16_000, decode=3000, decode_one=80, cache=60_000,
    vision_tokens=2772, vision_spread=0.8, answer_tokens=900, spread=0.5,
)  # fmt: skip
BIMODAL = Rates(
    "bimodal", 24, prefill=7000, decode=2400, decode_one=120,
    vision_tokens=2772, answer_tokens=400, spread=0.2, long_share=0.15, long_factor=6.0,
)  # fmt: skip
UNTUNED = {rates.name: rates for rates in (KV_PRESSURE, BIMODAL)}


@dataclass(slots=True)
class _Page:
    key: Hashable
    vision: float
    answer: float


@dataclass
class _Shared:
    """Pages that progress at one pace; each ends when the common progress reaches its work."""

    progress: float = 0.0
    _order: int = 0
    _pages: list[tuple[float, int, _Page]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._pages)

    def __iter__(self) -> Iterator[_Page]:
        return (page for _, _, page in self._pages)

    def add(self, page: _Page, work: float) -> None:
        self._order += 1
        heapq.heappush(self._pages, (self.progress + work, self._order, page))

    def remove(self, key: Hashable) -> None:
        self._pages = [entry for entry in self._pages if entry[2].key != key]
        heapq.heapify(self._pages)

    def seconds_left(self, pace: float) -> float:
        """Return the seconds until the first ends."""
        return (self._pages[0][0] - self.progress) / pace if self._pages else math.inf

    def ended(self) -> list[_Page]:
        """Take out and return the pages that are done."""
        done = []
        while self._pages and self._pages[0][0] <= self.progress + _SOON:
            done.append(heapq.heappop(self._pages)[2])
        return done


@dataclass
class Batch:
    """The requests in a server and the progress of each."""

    rates: Rates
    seed: int = 0
    now: float = 0.0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0
    finished: int = 0
    _front: _Shared = field(default_factory=_Shared)
    _queue: deque[_Page] = field(default_factory=deque)
    _prefill: deque[_Page] = field(default_factory=deque)
    _prefill_left: float = 0.0
    _decode: _Shared = field(default_factory=_Shared)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._prefill) + len(self._decode)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot; those in the front end do not count, as in vLLM."""
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        return len(self._front) + self.waiting + self.running

    @property
    def cache_use(self) -> float:
        """The share of the KV cache in use."""
        return 0.0 if math.isinf(self.rates.cache) else self._held() / self.rates.cache

    def arrive(self, key: Hashable) -> None:
        """Take in a request now."""
        page = self._draw_page(key)
        if math.isinf(self.rates.front):
            self._enqueue(page)
            return
        self._front.add(page, 1.0)

    def leave(self, key: Hashable) -> None:
        """Drop a request whose client has gone."""
        if self._prefill and self._prefill[0].key == key:
            self._begin_prefill(skip=1)
        for line in (self._queue, self._prefill):
            for page in [page for page in line if page.key == key]:
                line.remove(page)
        for shared in (self._front, self._decode):
            shared.remove(key)
        self._fill()

    def next_event(self) -> float:
        """Return when the next thing ends; infinity if nothing is in progress."""
        prefill = self._prefill_left / self.rates.prefill if self._prefill else math.inf
        front = self._front.seconds_left(self._front_pace())
        return self.now + max(0.0, min(front, prefill, self._decode.seconds_left(self._pace())))

    def advance(self, until: float) -> list[Hashable]:
        """Let time pass; return the requests that were answered, in order."""
        answered: list[Hashable] = []
        while (event := self.next_event()) <= until:
            answered += self._pass(event - self.now)
        # What would end a rounding error later ends now.
        return answered + self._pass(until - self.now)

    def _pass(self, seconds: float) -> list[Hashable]:
        """Let time pass, at most up to the next event."""
        self.now += seconds
        done = self._pace() * seconds
        self.answer_tokens += done * len(self._decode)
        self._decode.progress += done
        self._front.progress += self._front_pace() * seconds
        if self._prefill:
            self._prefill_left -= self.rates.prefill * seconds
            self.prompt_tokens += self.rates.prefill * seconds
        return self._end_pages()

    def _end_pages(self) -> list[Hashable]:
        answered = [page.key for page in self._decode.ended()]
        self.finished += len(answered)
        for page in self._front.ended():
            self._enqueue(page)
        if self._prefill and self._prefill_left <= _SOON * self.rates.prefill:
            page = self._prefill.popleft()
            self._decode.add(page, page.answer)
            self._begin_prefill()
        self._fill()
        return answered

    def _front_pace(self) -> float:
        """Return the share of each picture that is decoded in a second."""
        return self.rates.front / max(1, len(self._front))

    def _pace(self) -> float:
        """Return the answer tokens a second of each decoding page."""
        rates, each = self.rates, self.rates.decode / max(1, len(self._decode))
        pace = min(rates.decode_one, each)
        if rates.bends:
            pace = 1 / (1 / rates.decode_one + 1 / each)
        return pace * (rates.beside_prefill if self._prefill else 1.0)

    def _draw_page(self, key: Hashable) -> _Page:
        rates = self.rates
        if rates.serial is not None:
            return _Page(key, 0.0, self._random.uniform(*rates.serial) * rates.decode_one)
        spread = self._random.uniform(1 - rates.spread, 1 + rates.spread)
        vision, answer = float(rates.vision_tokens), rates.answer_tokens * spread
        # Draws that other servers do not need would change their pages.
        if rates.vision_spread:
            vision *= self._random.uniform(1 - rates.vision_spread, 1 + rates.vision_spread)
        if rates.long_share and self._random.random() < rates.long_share:
            answer *= rates.long_factor
        return _Page(key, vision, answer)

    def _enqueue(self, page: _Page) -> None:
        self._queue.append(page)
        self._fill()

    def _fill(self) -> None:
        while self._queue and self.running < self.rates.slots and self._fits(self._queue[0]):
            page = self._queue.popleft()
            if math.isinf(self.rates.prefill) or page.vision == 0:
                self._decode.add(page, page.answer)
                continue
            self._prefill.append(page)
            if len(self._prefill) == 1:
                self._begin_prefill()

    def _fits(self, page: _Page) -> bool:
        """Whether the cache has space for the page; one page alone is always taken."""
        return self._held() + page.vision + page.answer <= self.rates.cache or not self.running

    def _held(self) -> float:
        if math.isinf(self.rates.cache):
            return 0.0
        held = [*self._prefill, *self._decode]
        return sum(page.vision + page.answer for page in held)

    def _begin_prefill(self, skip: int = 0) -> None:
        if len(self._prefill) > skip:
            self._prefill_left = self._prefill[skip].vision
