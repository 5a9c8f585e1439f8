"""The parser `glmocr` against the fake OCR server: each page's outcome and its requests."""

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from rag_service.config.loader import get_settings
from rag_service.errors import Draining, LeaseLost, OcrMisconfigured, OcrOutage, PageTimeout
from rag_service.layout.page_layout import LayoutBox
from rag_service.parsers import server_proof
from rag_service.parsers.answer_reader import has_writing
from rag_service.parsers.registry import make_parser
from rag_service.pdf.results import PdfWarning
from rag_service.states import GOOD, LayoutMode, PageState
from tests.fakes import ocr_server as fake
from tests.fakes.scans import HEIGHT, WIDTH
from tests.parsing import Reader, region_mark
from tests.waiting import eventually

BUDGET = len(get_settings().retry.waits) + 1


@pytest.fixture(scope="module")
def running():
    with fake.FakeOcrServer() as server:
        yield server


@pytest.fixture
def server(running, monkeypatch):
    monkeypatch.setattr(server_proof, "_OTHERS_SECONDS", 0.6)
    running.reset()
    # It reads the known page, so a bad end is the page's own.
    running.known = fake.OK
    yield running
    assert running.doubled == []


@pytest.fixture
def reader(server):
    return Reader(server)


def test_pages_are_read_in_order_and_some_at_once(reader):
    reader.server.default = fake.Reply(delay=0.1)
    stored = reader.read(9)
    assert [stored[n].markdown for n in range(1, 10)] == [reader.mark(n).text for n in range(1, 10)]
    assert {result.state for result in stored.values()} == {PageState.OCR}
    assert reader.sink.begun == sorted(reader.sink.begun)
    assert reader.server.peak == 3


def test_a_result_names_its_engine_and_model(reader):
    reader.server.models = [{"id": fake.MODEL, "owned_by": "sglang"}]
    reader.source.warnings = (PdfWarning("resolution_capped", "72 DPI", 1),)
    result = reader.read()[1]
    assert (result.engine, result.model, result.dpi) == ("sglang", fake.MODEL, 72)
    assert (result.finish_reason, result.prompt_tokens) == ("stop", 100)
    assert [warning.code for warning in result.warnings] == ["resolution_capped"]


def test_a_job_without_pages_asks_nothing(reader):
    assert reader.read(0) == {}
    assert reader.server.probes == 0


@pytest.mark.parametrize(
    "reply",
    [*map(fake.gateway, (502, 503, 504)), fake.busy(), fake.CUT, fake.DROPPED, fake.BAD_GZIP],
)
def test_temporary_errors_are_retried_on_the_schedule(reader, reply):
    reader.server.script(reader.mark(), reply, reply)
    assert reader.read()[1].state is PageState.OCR
    assert len(reader.requests()) == 3
    assert 9 <= reader.waits[0] <= 11
    assert 18 <= reader.waits[1] <= 22


def test_retry_after_is_obeyed_within_the_same_budget(reader):
    reader.server.default = fake.busy("7")
    with pytest.raises(OcrOutage, match="429"):
        reader.read()
    assert len(reader.requests()) == BUDGET
    assert all(7 <= wait <= 7.7 for wait in reader.waits)


@pytest.mark.parametrize("reply", [fake.gateway(503), fake.DROPPED])
def test_a_schedule_spent_while_nothing_succeeds_is_an_outage(reader, reply):
    reader.server.default = reply
    with pytest.raises(OcrOutage):
        reader.read()
    assert len(reader.requests()) == BUDGET
    assert reader.sink.stored == {}


def test_a_schedule_spent_while_others_succeed_gives_one_later_try(reader):
    reader.server.always(reader.mark(1), fake.gateway(503))
    stored = reader.read(4)
    assert stored[1].state is PageState.PENDING
    assert stored[1].retry_in == get_settings().retry.later_wait
    assert [stored[n].state for n in (2, 3, 4)] == [PageState.OCR] * 3
    assert len(reader.requests(1)) == BUDGET


def test_a_success_before_the_schedule_began_does_not_count(reader):
    reader.in_flight = 1
    reader.server.always(reader.mark(2), fake.gateway(503))
    with pytest.raises(OcrOutage):
        reader.read(2)
    assert reader.sink.state(1) is PageState.OCR


@pytest.mark.parametrize("pages", [1, 4])
def test_the_later_try_is_the_last(reader, pages):
    """Also if there is no other page to read meanwhile: the server's health check passes."""
    reader.server.always(reader.mark(1), fake.gateway(503))
    stored = reader.read(pages, tries=1)
    assert stored[1].state is PageState.FAILED
    assert (stored[1].error.code, stored[1].error.retryable) == ("ocr_failed", True)
    assert "503" in stored[1].error.message
    assert len(reader.requests(1)) == BUDGET


def test_a_later_try_that_meets_an_outage_is_not_charged(reader):
    reader.server.default = reader.server.health = fake.gateway(503)
    with pytest.raises(OcrOutage):
        reader.read(tries=1)
    assert reader.sink.stored == {}


@pytest.mark.parametrize(
    "reply",
    [
        fake.refusal(500, "CUDA error"), fake.HTML_200, fake.TRUNCATED_JSON, fake.NO_CHOICES,
        fake.NULL_CONTENT, fake.Reply(text="half", finish_reason="abort"),
    ],
)  # fmt: skip
def test_a_failing_server_gets_one_later_try_and_no_schedule(reader, reply):
    reader.server.default = reply
    assert reader.read()[1].retry_in is not None
    assert len(reader.requests()) == 1
    again = Reader(reader.server)
    result = again.read(tries=1)[1]
    assert (result.state, result.error.code) == (PageState.FAILED, "ocr_failed")


@pytest.mark.parametrize("reply", [fake.busy("0"), fake.gateway(502), fake.CUT])
def test_a_spent_schedule_is_a_failure_that_a_reprocess_may_help(reader, reply):
    reader.server.always(reader.mark(1), reply)
    result = reader.read(2, tries=1)[1]
    assert (result.state, result.error.code) == (PageState.FAILED, "ocr_failed")
    assert result.error.retryable


@pytest.mark.parametrize("status", [400, 422])
def test_a_refused_page_fails_at_once(reader, status):
    reader.server.default = fake.refusal(status)
    result = reader.read()[1]
    assert (result.state, result.error.code) == (PageState.FAILED, "ocr_rejected")
    assert "of no use" in result.error.message
    assert len(reader.requests()) == 1


@pytest.mark.parametrize("reply", [fake.ENCODER_CACHE, fake.TOO_LARGE])
def test_a_page_refused_for_its_size_is_sent_again_at_two_thirds(reader, reply):
    reader.server.script(reader.mark(), reply)
    result = reader.read()[1]
    assert (result.state, result.dpi) == (PageState.OCR, 48)
    first, second = reader.requests()
    assert second.width == pytest.approx(first.width * 2 / 3, abs=1)
    assert second.height == pytest.approx(first.height * 2 / 3, abs=1)


def test_a_page_too_large_at_two_thirds_as_well_fails(reader):
    reader.server.default = fake.ENCODER_CACHE
    result = reader.read()[1]
    assert (result.state, result.error.code) == (PageState.FAILED, "ocr_rejected")
    assert "encoder cache" in result.error.message
    assert len(reader.requests()) == 2


def test_a_failure_at_two_thirds_counts_like_any_other(reader):
    reader.server.script(reader.mark(), fake.ENCODER_CACHE, fake.refusal(500))
    assert reader.read()[1].retry_in is not None


def test_a_cut_page_gets_one_retry_with_a_higher_token_limit(reader):
    reader.server.script(reader.mark(), fake.Reply(text="half", finish_reason="length"))
    result = reader.read()[1]
    assert (result.state, result.markdown) == (PageState.OCR, reader.mark().text)
    first, second = reader.requests()
    assert second.max_tokens == pytest.approx(first.max_tokens * 4, rel=0.01)


def test_a_page_cut_twice_keeps_its_text_with_a_warning(reader):
    reader.server.default = fake.HALF
    result = reader.read()[1]
    assert result.state is PageState.TRUNCATED
    assert result.markdown == "Half of the"
    assert [warning.code for warning in result.warnings] == ["page_truncated"]
    assert len(reader.requests()) == 2


def test_a_cut_page_is_not_read_twice_if_no_higher_limit_is_possible(reader):
    reader.changes = {"max_tokens": 300}
    reader.server.default = fake.HALF
    assert reader.read()[1].state is PageState.TRUNCATED
    assert len(reader.requests()) == 1


@pytest.mark.parametrize(
    "second", [fake.refusal(500), fake.refusal(400), fake.ENCODER_CACHE, fake.LOOP, fake.EMPTY]
)
def test_a_cut_page_whose_retry_has_no_text_keeps_the_first_text(reader, second):
    reader.server.script(reader.mark(), fake.Reply(text="half", finish_reason="length"), second)
    result = reader.read()[1]
    assert (result.state, result.markdown) == (PageState.TRUNCATED, "half")


@pytest.mark.parametrize("nothing", ["", " \n\t ", "\x00\x00"])
def test_two_readings_without_text_are_a_page_without_text(reader, nothing):
    reader.server.default = fake.Reply(text=nothing)
    result = reader.read()[1]
    assert result.state is PageState.NO_TEXT
    assert [warning.code for warning in result.warnings] == ["page_without_text"]
    assert len(reader.requests()) == 2


def test_an_empty_answer_is_checked_by_a_second_reading(reader):
    reader.server.script(reader.mark(), fake.EMPTY)
    assert reader.read()[1].state is PageState.OCR


@pytest.mark.parametrize("reasons", [("length", "stop"), ("stop", "length"), ("length", "length")])
def test_an_empty_answer_that_was_cut_fails_the_page(reader, reasons):
    replies = [fake.Reply(text="", finish_reason=reason) for reason in reasons]
    reader.server.script(reader.mark(), *replies)
    result = reader.read()[1]
    assert (result.state, result.error.code) == (PageState.FAILED, "ocr_empty")


def test_an_empty_answer_and_a_failure_get_a_later_try(reader):
    reader.server.script(reader.mark(), fake.EMPTY, fake.refusal(500))
    assert reader.read()[1].retry_in is not None


def test_the_token_limit_stays_within_the_ceiling_and_the_context(reader):
    reader.changes = {"max_tokens": 600}
    reader.read()
    assert reader.requests()[0].max_tokens == 600
    narrow = Reader(reader.server)
    reader.server.models = [{"id": fake.MODEL, "max_model_len": 1500}]
    narrow.read()
    vision = WIDTH * HEIGHT // 784
    assert narrow.requests()[0].max_tokens <= 1500 - vision - 64


def test_a_page_that_cannot_be_rendered_fails_alone(reader):
    reader.source.errors = {2: PageTimeout(page=2)}
    stored = reader.read(3)
    assert stored[2].error.code == "page_timeout"
    assert (stored[1].state, stored[3].state) == (PageState.OCR, PageState.OCR)
    assert reader.requests(2) == []


def test_an_unreachable_server_is_an_outage_after_one_probe(reader):
    reader.server.refuse()
    with pytest.raises(OcrOutage):
        reader.read(5)
    assert reader.waits == []


def test_a_refused_connection_to_a_living_server_is_asked_again(reader):
    """It refused while it restarted, and answers the probe."""
    reader.server.refuse()
    listened = asyncio.Event()

    async def listen_first():
        if not listened.is_set():
            reader.server.listen()
            listened.set()

    reader.sink.require_lease = listen_first
    assert reader.read()[1].state is PageState.OCR


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_misconfigured_server_is_an_outage_of_its_own_kind(reader, status):
    reader.server.default = fake.refusal(status)
    with pytest.raises(OcrMisconfigured):
        reader.read(3)
    assert reader.sink.stored == {}


def test_a_wrong_key_is_not_blamed_on_the_page(reader):
    reader.server.key = "right"
    reader.changes = {"api_key": SecretStr("wrong")}
    with pytest.raises(OcrMisconfigured):
        reader.read()


def test_after_an_outage_one_page_goes_first_and_alone(reader):
    reader.watch.up = False
    reader.server.default = fake.Reply(delay=0.2)
    assert len(reader.read(6)) == 6
    first, *others = reader.server.requests
    assert first.mark == reader.mark(1)
    assert all(other.started >= first.ended for other in others)
    assert reader.server.peak > 1


def test_a_trial_ends_with_its_first_page_if_the_server_reads_nothing(reader):
    reader.watch.up = False
    reader.server.default, reader.server.known = fake.refusal(500), None
    with pytest.raises(OcrOutage, match="every page fails"):
        reader.read(4)
    assert (len(reader.server.requests), reader.sink.stored) == (1, {})


NO_READING = {
    "every page is refused: .*multimodal": fake.refusal(400, "not a multimodal model"),
    "every page is refused: .*422": fake.refusal(422),
    "every page is refused: .*413": fake.TOO_LARGE,
    "every page fails: .*out of memory": fake.refusal(500, "CUDA out of memory"),
    "every page fails: .*501": fake.gateway(501),
    "every page fails: .*Sign in": fake.HTML_200,
    "every page fails: .*without any text": fake.NULL_CONTENT,
    "every page fails: .*abort": fake.Reply(text="x", finish_reason="abort"),
    "have no text": fake.EMPTY,
    "have no text, not": fake.Reply(text="", finish_reason="length"),
    "have no text, not even": fake.Reply(text="Text Recognition:"),
    "only repeat 'The same": fake.LOOP,
    "every page is refused: the model": fake.Reply(text="Sorry, I cannot read this image."),
}


@pytest.mark.parametrize("tries", [0, 1])
@pytest.mark.parametrize("mode", [LayoutMode.PAGE, LayoutMode.AUTO])
@pytest.mark.parametrize("words", NO_READING)
def test_no_page_ends_while_the_server_reads_none(reader, words, mode, tries):
    reader.layout = mode
    reader.server.default, reader.server.known = NO_READING[words], None
    with pytest.raises(OcrOutage, match=words):
        reader.read(4, tries)
    assert reader.sink.stored == {}


def test_a_refusal_of_one_page_is_kept_with_a_warning(reader):
    reader.server.script(reader.mark(1), fake.Reply(text="I can't read this picture."))
    result = reader.read(2)[1]
    assert (result.state, result.markdown) == (PageState.OCR, "I can't read this picture.")
    assert [warning.code for warning in result.warnings] == ["model_refusal"]


@pytest.mark.parametrize("tries", [0, 1])
def test_a_server_that_reads_others_but_not_the_known_page_is_not_out(reader, tries):
    """The bad page gets its later try, and fails after that."""
    reader.server.known = fake.refusal(400)
    reader.server.always(reader.mark(1), fake.Reply(400, delay=0.3))
    for number, delay in {2: 0.1, 3: 0.6, 4: 0.8}.items():
        reader.server.always(reader.mark(number), fake.Reply(delay=delay))
    page = reader.read(4, tries)[1]
    assert page.state is (PageState.FAILED if tries else PageState.PENDING)
    assert tries == 0 or page.error.code == "ocr_rejected"


def test_pages_that_were_read_before_the_server_broke_do_not_count(reader):
    """The last page to be read is answered before the known page is."""
    reader.in_flight = 1
    reader.server.script(reader.mark(2), fake.refusal(500))
    reader.server.known = fake.refusal(500)
    with pytest.raises(OcrOutage, match="every page fails"):
        reader.read(2, tries=1)
    assert reader.sink.state(1) is PageState.OCR
    assert 2 not in reader.sink.stored


def test_a_trial_goes_on_if_its_page_is_at_fault(reader):
    reader.watch.up = False
    reader.server.always(reader.mark(1), fake.refusal(400))
    stored = reader.read(6)
    assert stored[1].error.code == "ocr_rejected"
    assert {stored[n].state for n in range(2, 7)} == {PageState.OCR}


def test_a_draining_worker_stores_the_pages_in_flight_and_begins_no_more(reader):
    reader.server.default = fake.Reply(delay=0.1)
    reader.sink.stop_at, reader.sink.stop = 3, Draining()
    with pytest.raises(Draining):
        reader.read(9)
    assert sorted(reader.sink.stored) == [1, 2, 3]


def test_a_lost_lease_closes_every_request(reader):
    gate = fake.Gate()
    reader.server.default = fake.Reply(gate=gate)
    reader.server.always(reader.mark(3), fake.OK)
    # Three requests and two pages drawn ahead.
    reader.sink.stop_at, reader.sink.stop = 5, LeaseLost()
    with pytest.raises(LeaseLost):
        reader.read(9)
    reader.server.default = fake.OK
    eventually(lambda: not reader.server.alive())
    assert {r.outcome for n in (1, 2) for r in reader.requests(n)} == {"disconnected"}


def test_no_request_is_sent_after_the_lease_was_lost(reader):
    reader.sink.lost = True
    with pytest.raises(LeaseLost):
        reader.read(2)
    assert reader.server.requests == []


def test_the_registry_makes_this_parser(server):
    parser = make_parser("glmocr", get_settings())
    assert (parser.name, bool(parser.version)) == ("glmocr", True)


ANY_REPLY = st.sampled_from(
    [
        fake.OK, fake.EMPTY, fake.HALF, fake.LOOP, fake.CUT, fake.DROPPED,
        fake.HTML_200, fake.NULL_CONTENT,
        fake.ENCODER_CACHE, fake.TOO_LARGE, fake.BROKEN_CHARACTERS, fake.busy("1"),
        fake.gateway(502), fake.gateway(503), fake.refusal(400), fake.refusal(500),
        fake.Reply(text="", finish_reason="length"), fake.Reply(text="x", finish_reason="abort"),
    ]
)  # fmt: skip


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    script=st.lists(ANY_REPLY, max_size=8),
    then=ANY_REPLY,
    known=ANY_REPLY,
    tries=st.integers(0, 1),
    mode=st.sampled_from(LayoutMode),
)
def test_no_page_fails_unless_the_server_reads_a_page(server, script, then, known, tries, mode):
    server.reset()
    server.next(*script)
    server.default, server.known = then, known
    reader = Reader(server)
    reader.layout = mode
    try:
        reader.read(3, tries)
    except OcrOutage:
        return
    finally:
        states = {result.state for result in reader.sink.stored.values()}
    if states & {PageState.FAILED, PageState.NO_TEXT}:
        assert reader.watch.last is not None


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    script=st.lists(ANY_REPLY, max_size=14),
    of_region=st.lists(ANY_REPLY, max_size=6),
    tries=st.integers(0, 1),
    mode=st.sampled_from(LayoutMode),
)
def test_each_page_ends_once_and_a_good_page_has_text_whatever_the_server_does(
    server, script, of_region, tries, mode
):
    reader = Reader(server)
    reader.layout, reader.layouts.boxes[1] = mode, [LayoutBox("text", 0.9, (100, 100, 900, 190))]
    server.script(reader.mark(1), *script)
    server.script(region_mark(reader.document, 1, (100, 100, 900, 190)), *of_region)
    try:
        stored = reader.read(2, tries)
    except OcrOutage:
        assert len(server.requests) >= BUDGET
        return
    assert sorted(stored) == [1, 2]
    page = stored[1]
    if page.state in GOOD - {PageState.NO_TEXT}:
        assert has_writing(page.markdown)
    elif page.state is PageState.FAILED:
        assert page.error.code in {"ocr_failed", "ocr_rejected", "ocr_empty", "ocr_repetition"}
    elif page.state is PageState.PENDING:
        assert page.retry_in is not None
        assert tries == 0
    # Two readings, each through one schedule, each at two sizes at most.
    assert len(reader.requests(1)) <= 4 * BUDGET
