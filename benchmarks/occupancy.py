"""How full `auto` keeps a server, against the best fixed setting, on simulated servers.

    python -m benchmarks.occupancy [--servers report fast …] [--full] [--no-plots]

Eight processes without messages between them, each with the product's own limiter, send pages to a
simulated server (tests/simulators) in virtual time. They start from cold, and the first two minutes
do not count.
Prints documents of nine pages an hour, answer times and lost requests, with gauges and without,
medians of three, and writes results/occupancy.json and a plot for each server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks import plot
from benchmarks.stack import RESULTS
from rag_service.ocr.concurrency.limiter import Fixed, Governor, Limiter, LimiterLoad
from rag_service.ocr.concurrency.search import ConcurrencySearch
from rag_service.ocr.concurrency.search_state import Aim
from rag_service.ocr.ocr_client import AnswerTimedOut
from rag_service.ocr.server_gauges import ServerGauges, parse_gauges
from tests.simulators import virtual_time
from tests.simulators.simulated_batch import SERVERS, Rates
from tests.simulators.simulated_server import GaugeNames, SimulatedServer

PROCESSES = 8
PAGES_A_DOCUMENT = 9
TIMEOUT = 120.0
WARM_UP, LENGTH = 120.0, 2400.0
# A fast server answers enough pages in half the time.
MANY_PAGES_A_SECOND, SHORTER = 4.0, 1200.0
LOOK_EVERY = 10.0
SEEDS = (1, 2, 3)
SWEEP = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SHOWN = ("serial", "report", "front end", "fast", "h200")
MEDIANS = ("documents_an_hour", "seconds_an_answer", "in_flight", "running", "waiting")
# Share of what runs at the best setting with the shortest answers.
FULL = 0.95
TOLERANCE = {True: 0.03, False: 0.08}


@dataclass
class Look:
    """One moment: what all processes have open, what runs and what waits."""

    at: float
    in_flight: int
    running: int
    waiting: int


@dataclass
class Outcome:
    """The result of a setting."""

    documents_an_hour: float
    seconds_an_answer: float
    in_flight: float
    running: float
    waiting: float
    timed_out: int
    lost: int
    looks: list[Look] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    """A server with one setting, medians over the seeds."""

    server: str
    gauges: str
    setting: str
    documents_an_hour: float
    seconds_an_answer: float
    in_flight: float
    running: float
    waiting: float
    timed_out: int
    lost: int


class Client:
    """One process that sends endless pages through one limiter."""

    def __init__(self, limiter: Limiter, server: SimulatedServer) -> None:
        self.limiter = limiter
        self.answered: list[tuple[float, float]] = []
        self.timed_out = self.asked = 0
        self._server = server

    async def work(self, look: Callable[[], Awaitable[ServerGauges | None]]) -> None:
        """Send pages until cancelled."""
        async with self.limiter.at_work(look, _report_to_no_one), asyncio.TaskGroup() as pages:
            while True:
                await self._begin(pages)

    async def _begin(self, pages: asyncio.TaskGroup) -> None:
        begun = asyncio.Event()
        pages.create_task(self._page(begun))
        await begun.wait()

    async def _page(self, begun: asyncio.Event) -> None:
        async with self.limiter.page():
            begun.set()
            while not await self._ask():
                pass

    async def _ask(self) -> bool:
        try:
            async with self.limiter.request():
                began = asyncio.get_running_loop().time()
                await self._answer()
        except AnswerTimedOut:
            self.timed_out += 1
            return False
        now = asyncio.get_running_loop().time()
        self.answered.append((now, now - began))
        return True

    async def _answer(self) -> None:
        self.asked += 1
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        key = self._server.arrive(lambda: answer.cancelled() or answer.set_result(None))
        try:
            async with asyncio.timeout(TIMEOUT):
                await answer
        except TimeoutError as error:
            raise AnswerTimedOut("Not in time.") from error
        finally:
            self._server.leave(key)


async def simulate(
    rates: Rates, names: GaugeNames, governor: Callable[[], Governor], seed: int
) -> Outcome:
    """Run all processes on one server from cold."""
    loop = asyncio.get_running_loop()
    server = SimulatedServer(rates, names, seed=seed, clock=loop.time)
    clients = [Client(Limiter(governor(), now=loop.time), server) for _ in range(PROCESSES)]

    async def look() -> ServerGauges | None:
        if names is GaugeNames.NONE:
            return None
        text = server.metrics()
        return None if text is None else parse_gauges(text)

    work = [asyncio.ensure_future(client.work(look)) for client in clients]
    looks = await _watch(server, clients, _length(rates))
    await _hear_answers()
    outcome = _outcome(rates, clients, looks, server.open)
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    return outcome


async def _hear_answers() -> None:
    """Let the clients take the answers that have just come, so that none counts as lost."""
    for _ in range(8):
        await asyncio.sleep(0)


async def _watch(server: SimulatedServer, clients: Sequence[Client], length: float) -> list[Look]:
    looks = []
    for step in range(int(length / LOOK_EVERY)):
        await asyncio.sleep(LOOK_EVERY)
        server.metrics()
        open_now = sum(client.limiter.in_flight for client in clients)
        batch = server.batch
        looks.append(Look((step + 1) * LOOK_EVERY, open_now, batch.running, batch.waiting))
    return looks


def _outcome(
    rates: Rates, clients: Sequence[Client], looks: list[Look], still_open: int
) -> Outcome:
    answers = [answer for client in clients for answer in client.answered]
    counted = [seconds for at, seconds in answers if at > WARM_UP]
    hours = (_length(rates) - WARM_UP) / 3600
    warm = [look for look in looks if look.at > WARM_UP]
    ended = len(answers) + sum(client.timed_out for client in clients)
    asked = sum(client.asked for client in clients)
    return Outcome(
        documents_an_hour=len(counted) / PAGES_A_DOCUMENT / hours,
        seconds_an_answer=statistics.median(counted) if counted else 0.0,
        in_flight=statistics.fmean(look.in_flight for look in warm),
        running=statistics.fmean(look.running for look in warm),
        waiting=statistics.fmean(look.waiting for look in warm),
        timed_out=sum(client.timed_out for client in clients),
        lost=asked - ended - still_open,
        looks=looks,
    )


def _length(rates: Rates) -> float:
    fast = min(rates.front, rates.prefill / rates.vision_tokens) > MANY_PAGES_A_SECOND
    return SHORTER if fast and rates.serial is None else LENGTH


async def _report_to_no_one(load: LimiterLoad) -> None: ...


def measure(
    rates: Rates, names: GaugeNames, setting: str, seeds: Sequence[int]
) -> tuple[Row, Outcome]:
    """Return the medians of a setting, and its first outcome for the plot."""

    def governor() -> Governor:
        if setting == "auto":
            return ConcurrencySearch(Aim(timeout=TIMEOUT))
        return Fixed(int(setting))

    outcomes = [virtual_time.run(simulate(rates, names, governor, seed)) for seed in seeds]
    row = Row(
        rates.name, names, setting,
        *(round(statistics.median(getattr(each, name) for each in outcomes), 1)
          for name in MEDIANS),
        timed_out=sum(each.timed_out for each in outcomes),
        lost=sum(each.lost for each in outcomes),
    )  # fmt: skip
    return row, outcomes[0]


@dataclass(frozen=True)
class Verdict:
    """`auto` on one server against the best fixed setting."""

    server: str
    gauges: str
    auto: Row
    best: Row
    least: Row
    share_of_best: float
    times_least_latency: float

    @property
    def within(self) -> bool:
        allowed = TOLERANCE[self.gauges != GaugeNames.NONE]
        return (
            self.share_of_best >= 1 - allowed
            and self.times_least_latency <= 2
            and (self.auto.running >= FULL * self.least.running or self.auto.waiting > 0)
            and not self.auto.timed_out
            and not self.auto.lost
        )


def judge(auto: Row, fixed: Sequence[Row]) -> Verdict:
    """Best: most documents without a lost request. Least: shortest answers within 3 % of it."""
    sound = [row for row in fixed if not row.timed_out] or list(fixed)
    best = max(sound, key=lambda row: row.documents_an_hour)
    near = [row for row in sound if row.documents_an_hour >= 0.97 * best.documents_an_hour]
    least = min(near, key=lambda row: row.seconds_an_answer)
    return Verdict(
        auto.server, auto.gauges, auto, best, least,
        round(auto.documents_an_hour / best.documents_an_hour, 3),
        round(auto.seconds_an_answer / least.seconds_an_answer, 2),
    )  # fmt: skip


def compare(rates: Rates, names: Sequence[GaugeNames], *, plots: bool) -> list[Verdict]:
    """Measure a sweep of fixed settings, then `auto` with each kind of gauges."""
    fixed = []
    for number in SWEEP:
        row, _ = measure(rates, GaugeNames.NONE, str(number), SEEDS[:1])
        fixed.append(row)
        _print_row(row)
        if len(fixed) > 3 and row.documents_an_hour <= fixed[-3].documents_an_hour * 1.001:
            break
    verdicts = []
    for name in names:
        auto, outcome = measure(rates, name, "auto", SEEDS)
        verdicts.append(judge(auto, fixed))
        _print_row(auto)
        if plots:
            _plot(rates, name, outcome)
    return verdicts


def _plot(rates: Rates, names: GaugeNames, outcome: Outcome) -> None:
    series = {
        name: [(look.at, float(getattr(look, name))) for look in outcome.looks]
        for name in ("in_flight", "running", "waiting")
    }
    title = f"{rates.name}, gauges: {names}, auto, {PROCESSES} processes from cold"
    path = RESULTS / f"occupancy_{rates.name.replace(' ', '_')}_{names}.svg"
    path.write_text(plot.lines(title, "seconds", "requests", series))


def _print_row(row: Row) -> None:
    print(
        f"{row.server:10} {row.gauges:7} {row.setting:>5} {row.documents_an_hour:9.1f} "
        f"{row.seconds_an_answer:9.1f} {row.in_flight:9.1f} {row.running:7.1f} {row.waiting:7.1f} "
        f"{row.timed_out:6} {row.lost:5}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", nargs="*", choices=sorted(SERVERS), default=SHOWN)
    parser.add_argument("--full", action="store_true", help="SGLang's gauges too, all servers")
    parser.add_argument("--no-plots", action="store_true")
    options = parser.parse_args()
    names = [GaugeNames.VLLM, GaugeNames.NONE]
    servers = [*SERVERS] if options.full else options.servers
    if options.full:
        names.insert(1, GaugeNames.SGLANG)
    print("server     gauges  setting   docs/h  s/answer in flight running waiting  late  lost")
    verdicts = [
        verdict
        for server in servers
        for verdict in compare(SERVERS[server], names, plots=not options.no_plots)
    ]
    print("\nserver     gauges   auto/best  latency/least")
    for each in verdicts:
        print(f"{each.server:10} {each.gauges:7} {each.share_of_best:9.3f} "
              f"{each.times_least_latency:9.2f}  {'' if each.within else 'MISSED'}")  # fmt: skip
    found = [asdict(each) | {"within": each.within} for each in verdicts]
    (RESULTS / "occupancy.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(each.within for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
