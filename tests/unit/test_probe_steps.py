"""Where a probe stops and what follows from its steps."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rag_service.cli.advice import advise
from rag_service.cli.plot import draw
from rag_service.occupancy import Verdict
from rag_service.ocr.sheets import Sheets
from rag_service.ocr.steps import Bounds, Ending, Step, conclude, next_in_flight

BOUNDS = Bounds()


def step(in_flight: int, speed: float | None, **more) -> Step:
    seconds = None if speed is None else in_flight / speed
    known = {"median": seconds, "p95": seconds, "slowest": seconds, "open": in_flight, "answers": 6}
    return Step(in_flight=in_flight, pages_per_second=speed, **(known | more))


def climb(speed_at, bounds: Bounds = BOUNDS, slots: int | None = None, **more):
    """All steps on a server that reads so many pages a second at each number in flight."""
    steps: list[Step] = []
    while not isinstance(following := next_in_flight(steps, bounds, slots), Ending):
        steps.append(step(following, speed_at(following), **more))
    return steps, following


def batching(most: float, alone: float = 0.5):
    return lambda in_flight: min(most, in_flight * alone)


def test_it_doubles_until_two_doublings_bring_nothing() -> None:
    steps, ending = climb(batching(8.0))
    assert ending is Ending.NO_GROWTH
    assert [one.in_flight for one in steps] == [1, 2, 4, 8, 16, 32, 64]
    findings = conclude(steps, ending)
    assert findings is not None
    assert findings.batches
    assert (findings.throughput.in_flight, findings.latency.in_flight) == (16, 16)


def test_short_answers_are_had_for_a_tenth_of_the_throughput() -> None:
    speeds = {1: 1.0, 2: 2.0, 4: 3.7, 8: 4.0, 16: 4.0}
    findings = conclude([step(*one) for one in speeds.items()], Ending.NO_GROWTH)
    assert findings is not None
    assert (findings.throughput.in_flight, findings.latency.in_flight) == (8, 4)


def test_a_serialising_server_is_asked_no_more_than_four_at_once() -> None:
    steps, ending = climb(lambda in_flight: 0.09 if in_flight == 1 else 0.1)
    assert (steps[-1].in_flight, ending) == (4, Ending.SERIALISES)


def test_where_it_says_that_it_has_one_slot_two_are_enough() -> None:
    for more in ({"slots": 1}, {"full_at": 1}):
        steps, ending = climb(lambda _: 0.1, **more)
        assert (steps[-1].in_flight, ending) == (2, Ending.SERIALISES)


def test_one_that_runs_while_another_waits_does_not_make_a_batching_server_serial() -> None:
    steps = [step(1, 1.0), step(2, 1.9, full_at=1)]
    assert next_in_flight(steps, BOUNDS) == 4


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        (step(2, 2.0, p95=121.0), Ending.LATENCY),
        (step(2, 2.0, too_slow=True), Ending.LATENCY),
        (step(2, None), Ending.LATENCY),
        (step(2, 2.0, slowest=900.0), Ending.TIMEOUT),
        (step(2, 2.0, error="HTTP 503"), Ending.ERROR),
        (step(256, 20.0), Ending.MOST),
    ],
)
def test_what_else_stops_it(last: Step, ending: Ending) -> None:
    assert next_in_flight([step(1, 1.0), last], BOUNDS) is ending


@given(
    alone=st.floats(0.01, 5.0),
    slots=st.integers(1, 500),
    timeout=st.floats(5.0, 1800.0),
    latency=st.floats(1.0, 300.0),
)
def test_on_no_steady_server_is_a_request_given_up(
    alone: float, slots: int, timeout: float, latency: float
) -> None:
    bounds = Bounds(latency=latency, timeout=timeout)
    steps, _ = climb(lambda in_flight: alone * min(in_flight, slots), bounds)
    assert all((one.slowest or 0.0) < timeout for one in steps[1:])
    assert all((one.p95 or 0.0) <= latency for one in steps[:-1])
    assert steps[-1].in_flight <= bounds.most


def test_without_a_measured_step_there_are_no_findings() -> None:
    assert conclude([], Ending.INTERRUPTED) is None
    assert conclude([step(1, None, too_slow=True)], Ending.LATENCY) is None


@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({}, Verdict.SATURATED),
        ({"running": 30.0, "waiting": 20.0}, Verdict.SATURATED),
        ({"running": 5.0, "waiting": 0.0}, Verdict.FRONT_END_BOUND),
        ({"running": 9.0, "waiting": 9.0, "cache_use": 0.97}, Verdict.KV_BOUND),
    ],
)
def test_who_is_the_bottleneck(more: dict[str, float], verdict: Verdict) -> None:
    steps, ending = climb(batching(8.0), **more)
    findings = conclude(steps, ending)
    assert findings is not None
    assert advise(steps, findings, 8).verdict is verdict


def test_a_server_that_could_take_more_is_starved() -> None:
    steps, ending = climb(batching(1000.0), Bounds(most=8))
    findings = conclude(steps, ending)
    assert findings is not None
    assert advise(steps, findings, 8).verdict is Verdict.STARVED


def test_the_advised_settings_multiply_to_the_number_in_flight() -> None:
    for most, product in ((16.0, 32), (1.0, 2)):
        steps, ending = climb(batching(most))
        findings = conclude(steps, ending)
        assert findings is not None
        advised = advise(steps, findings, 8).settings_for_throughput
        documents = int(advised["OCR_WORKER_CONCURRENCY"])
        assert documents <= 8
        assert documents * int(advised["GLMOCR_PIPELINE_MAX_WORKERS"]) == product


def test_the_plot_has_a_point_a_measured_step_and_no_markup_of_the_title() -> None:
    steps = [step(1, 1.0), step(2, 2.0), step(4, None)]
    picture = draw("http://<b>&", steps)
    assert picture.count("<circle") == 2 * 2
    assert "<b>" not in picture


def test_no_two_pages_are_alike_not_even_of_two_probes() -> None:
    piles = [Sheets(72) for _ in range(2)]
    pages = [pile.draw() for pile in piles for _ in range(20)]
    assert len(set(pages)) == len(pages)
    with Image.open(io.BytesIO(pages[0])) as page:
        assert (page.size, page.mode) == ((595, 842), "L")
        assert page.getextrema()[0] < 64, "there is ink"
