"""When a probe stops, and what follows from its steps."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rag_service.cli.probe_plot import draw
from rag_service.diagnosis.bottleneck import Verdict
from rag_service.diagnosis.probe_advice import advise
from rag_service.jobs.leases import Claimant
from rag_service.ocr.probe.findings import (
    Bounds,
    Ending,
    Step,
    conclude,
    next_in_flight,
    serialises,
)
from rag_service.ocr.probe.sample_pages import SamplePages

BOUNDS = Bounds()


def step(in_flight: int, speed: float | None, **more) -> Step:
    seconds = None if speed is None else in_flight / speed
    known = {"median": seconds, "p95": seconds, "slowest": seconds, "open": in_flight, "answers": 6}
    return Step(in_flight=in_flight, pages_per_second=speed, **(known | more))


def climb(speed_at, bounds: Bounds = BOUNDS, slots: int | None = None, **more):
    """All steps on a server with this throughput at each number in flight."""
    steps: list[Step] = []
    while not isinstance(following := next_in_flight(steps, bounds, slots), Ending):
        steps.append(step(following, speed_at(following), **more))
    return steps, following


def batching(most: float, alone: float = 0.5):
    return lambda in_flight: min(most, in_flight * alone)


def test_it_doubles_until_two_doublings_have_no_gain() -> None:
    steps, ending = climb(batching(8.0))
    assert ending is Ending.NO_GROWTH
    assert [one.in_flight for one in steps] == [1, 2, 4, 8, 16, 32, 64]
    findings = conclude(steps, ending)
    assert findings is not None
    assert findings.batches
    assert (findings.throughput.in_flight, findings.latency.in_flight) == (16, 16)


def test_latency_gives_up_a_tenth_of_the_throughput() -> None:
    speeds = {1: 1.0, 2: 2.0, 4: 3.7, 8: 4.0, 16: 4.0}
    findings = conclude([step(*one) for one in speeds.items()], Ending.NO_GROWTH)
    assert findings is not None
    assert (findings.throughput.in_flight, findings.latency.in_flight) == (8, 4)


def test_a_serial_server_gets_at_most_four_requests_at_once() -> None:
    steps, ending = climb(lambda in_flight: 0.09 if in_flight == 1 else 0.1)
    assert (steps[-1].in_flight, ending) == (4, Ending.SERIALISES)


def test_two_are_enough_if_the_server_shows_one_slot() -> None:
    for more in ({"slots": 1}, {"full_at": 1}):
        steps, ending = climb(lambda _: 0.1, **more)
        assert (steps[-1].in_flight, ending) == (2, Ending.SERIALISES)


def test_one_running_and_one_waiting_request_do_not_make_a_batching_server_serial() -> None:
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
def test_limits_and_errors_stop_it(last: Step, ending: Ending) -> None:
    assert next_in_flight([step(1, 1.0), last], BOUNDS) is ending


@given(
    alone=st.floats(0.01, 5.0),
    slots=st.integers(1, 500),
    timeout=st.floats(5.0, 1800.0),
    latency=st.floats(1.0, 300.0),
)
def test_no_request_times_out_on_a_steady_server(
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
def test_the_bottleneck(more: dict[str, float], verdict: Verdict) -> None:
    steps, ending = climb(batching(8.0), **more)
    findings = conclude(steps, ending)
    assert findings is not None
    assert advise(steps, findings, 8).verdict is verdict


def verdict_of(steps: list[Step], ending: Ending) -> tuple[Verdict, str]:
    findings = conclude(steps, ending)
    assert findings is not None
    advice = advise(steps, findings, 8)
    return advice.verdict, advice.sentence


@pytest.mark.parametrize("ending", [Ending.NO_GROWTH, Ending.MOST, Ending.INTERRUPTED])
@pytest.mark.parametrize(
    ("more", "verdict"),
    [
        ({}, Verdict.SATURATED),
        ({"running": 60.0, "waiting": 0.0}, Verdict.SATURATED),
        ({"running": 23.7, "waiting": 0.0}, Verdict.FRONT_END_BOUND),
    ],
)
def test_growth_that_ended_gives_a_verdict_for_every_ending(
    ending: Ending, more: dict[str, float], verdict: Verdict
) -> None:
    speeds = {1: 0.8, 2: 1.6, 4: 3.2, 8: 6.4, 16: 10.0, 32: 13.0}
    steps = [step(*one) for one in speeds.items()]
    steps.append(step(64, 13.8, **more))
    assert verdict_of(steps, ending)[0] is verdict


@pytest.mark.parametrize(
    ("before", "running", "verdict"),
    [
        (11.5, 24.0, Verdict.FRONT_END_BOUND),
        (11.5, 60.0, Verdict.STARVED),
        (7.0, 24.0, Verdict.STARVED),
    ],
)
def test_a_little_growth_does_not_exclude_the_front_end(
    before: float, running: float, verdict: Verdict
) -> None:
    steps = [step(8, 4.0), step(16, 6.5), step(32, before), step(64, 13.8, running=running)]
    assert verdict_of(steps, Ending.INTERRUPTED)[0] is verdict


@pytest.mark.parametrize(
    ("ending", "verdict", "remedy"),
    [
        (Ending.MOST, Verdict.STARVED, "--most"),
        (Ending.INTERRUPTED, Verdict.STARVED, "to its end"),
        (Ending.LATENCY, Verdict.UNKNOWN, "--max-latency"),
        (Ending.TIMEOUT, Verdict.UNKNOWN, "ocr.read_timeout"),
    ],
)
def test_if_throughput_still_grew_it_says_how_to_measure_more(
    ending: Ending, verdict: Verdict, remedy: str
) -> None:
    steps, _ = climb(batching(1000.0), Bounds(most=8))
    found, sentence = verdict_of(steps, ending)
    assert (found, remedy in sentence) == (verdict, True)


@pytest.mark.parametrize("speeds", [{1: 1.0}, {1: 1.0, 2: 1.1}])
@pytest.mark.parametrize("ending", [Ending.MOST, Ending.INTERRUPTED])
def test_too_few_steps_give_no_verdict(speeds: dict[int, float], ending: Ending) -> None:
    steps = [step(*one) for one in speeds.items()]
    assert verdict_of(steps, ending)[0] is Verdict.UNKNOWN


def test_the_advice_for_a_serial_server_depends_on_its_kind() -> None:
    steps, ending = climb(lambda _: 0.1, full_at=1)
    verdict, sentence = verdict_of(steps, ending)
    assert verdict is Verdict.SERIALISING
    assert "use a server that batches" in sentence
    assert "let the server batch (vLLM: --max-num-seqs" in sentence


@given(
    speeds=st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8),
    short=st.sampled_from(["last", "most"]),
    ending=st.sampled_from([Ending.NO_GROWTH, Ending.MOST, Ending.INTERRUPTED, Ending.LATENCY]),
    gauges=st.sampled_from(
        [{}, {"running": 1.0, "waiting": 0.0}, {"running": 1.0, "waiting": 9.0, "cache_use": 0.99}]
    ),
)
def test_a_probe_that_lacked_cpu_gives_no_verdict(
    speeds: list[float], short: str, ending: Ending, gauges: dict[str, float]
) -> None:
    at = len(speeds) - 1 if short == "last" else speeds.index(max(speeds))
    steps = [
        step(2**number, speed, client_cpu=0.9 if number == at else 0.3, **gauges)
        for number, speed in enumerate(speeds)
    ]
    verdict, sentence = verdict_of(steps, ending)
    assert (verdict, "more CPU" in sentence) == (Verdict.UNKNOWN, True)
    assert ("in flight are valid" in sentence) == (at > 0)
    assert at == 0 or f"up to {2 ** (at - 1)} in flight" in sentence


def test_a_probe_without_cpu_calls_no_server_serial_unless_the_server_shows_it() -> None:
    steps = [step(count, 50.0, client_cpu=0.95) for count in (1, 2, 4)]
    assert not serialises(steps)
    assert serialises([one.model_copy(update={"full_at": 1}) for one in steps])


def test_a_lack_of_cpu_without_effect_is_a_warning_beside_the_verdict() -> None:
    steps, ending = climb(batching(8.0))
    steps[1] = steps[1].model_copy(update={"client_cpu": 0.9})
    findings = conclude(steps, ending)
    assert findings is not None
    advice = advise(steps, findings, 8)
    assert advice.verdict is Verdict.SATURATED
    assert "at its limit" in "\n".join(advice.lines(findings))


@given(in_flight=st.integers(1, 1024), forks=st.integers(1, 32))
def test_with_the_advised_settings_bulk_documents_reach_the_number_in_flight(
    in_flight: int, forks: int
) -> None:
    steps = [step(in_flight, 1.0)]
    findings = conclude(steps, Ending.MOST)
    assert findings is not None
    advised = advise(steps, findings, forks).settings_for_throughput
    advised_forks = int(advised["OCR_WORKER_CONCURRENCY"])
    pages = int(advised["GLMOCR_PIPELINE_MAX_WORKERS"])
    bulk = Claimant("", "", advised_forks).bulk_limit
    assert in_flight <= bulk * pages < in_flight + bulk
    assert bulk <= pages
    assert 2 <= advised_forks <= max(2, forks)


def test_it_says_that_a_fork_is_reserved_and_that_auto_needs_no_number() -> None:
    steps, ending = climb(batching(8.0))
    findings = conclude(steps, ending)
    assert findings is not None
    said = "\n".join(advise(steps, findings, 8).lines(findings))
    assert "OCR_WORKER_CONCURRENCY=5 GLMOCR_PIPELINE_MAX_WORKERS=4" in said
    assert "is reserved for interactive documents" in said
    assert "auto, the default, finds the number automatically" in said


@pytest.mark.parametrize("empty", [0, 1, 6])
def test_empty_answers_give_a_warning(empty: int) -> None:
    steps = [step(1, 1.0), step(2, 2.0, empty=empty)]
    findings = conclude(steps, Ending.MOST)
    assert findings is not None
    advice = advise(steps, findings, 8)
    assert advice.empty_answers == empty
    said = f"{empty} of 12 answers were empty" in "\n".join(advice.lines(findings))
    assert said == (empty > 0)


def test_the_plot_has_a_point_a_measured_step_and_no_markup_of_the_title() -> None:
    steps = [step(1, 1.0), step(2, 2.0), step(4, None)]
    picture = draw("http://<b>&", steps)
    assert picture.count("<circle") == 2 * 2
    assert "<b>" not in picture


def test_no_two_pages_are_alike_not_even_of_two_probes() -> None:
    both = [SamplePages(72) for _ in range(2)]
    pages = [series.draw() for series in both for _ in range(20)]
    assert len(set(pages)) == len(pages)
    with Image.open(io.BytesIO(pages[0])) as page:
        assert (page.size, page.mode) == ((595, 842), "L")
        assert page.getextrema()[0] < 64, "there is ink"
