"""A failing OCR server: documents wait, are retried or fail with an error; none is lost."""

import pytest

from rag_service.jobs import fork_loads, server_state
from tests.fakes import ocr_server as fake
from tests.processes import PATIENCE
from tests.service import Scan, open_service

# One request, and one more after each wait of the quick schedule.
BUDGET = 6


@pytest.fixture(scope="module")
def running(stack, tmp_path_factory):
    with open_service(stack, tmp_path_factory.mktemp("outages")) as service:
        programs = service.programs
        programs.start_maintenance()
        programs.wait_ready(programs.start_worker("prepare", 2), programs.start_worker("ocr", 4))
        yield service


@pytest.fixture
def service(running):
    """The service with a healthy server and no document in progress."""
    running.ocr.reset()
    server_state.mark_answered(running.ocr.url)
    yield running
    assert running.ocr.doubled == []


def answered(service, *pages_of_replies):
    """Process a one-page scan whose page gets these replies."""
    one = Scan(service, 1, set_up=lambda s: service.ocr.script(s.mark(), *pages_of_replies))
    one.ended()
    return one


def test_a_scan_is_read_page_by_page(service):
    three = Scan(service, 3)
    view = three.ended()
    assert (view.status, view.pages.ocr, view.warnings) == ("processed", 3, [])
    for number in (1, 2, 3):
        assert three.page(number).markdown == three.mark(number).text
        assert len(three.requests(number)) == 1


def test_an_unreachable_server_parks_its_documents_and_one_page_tries_it_again(service):
    service.ocr.refuse()
    scans = [Scan(service, 3) for _ in range(4)]
    for one in scans:
        one.parked()
        assert one.charges() == (0, 0, 0)
    assert service.server_state() == "down"
    service.ocr.default = fake.Reply(delay=0.5)
    service.ocr.listen()
    assert [one.ended().status for one in scans] == ["processed"] * 4
    first, *others = service.ocr.requests
    assert all(other.started >= first.ended for other in others)
    assert len(others) == 11


def test_the_load_of_a_fork_is_stored_while_it_reads_and_removed_with_the_document(service):
    wait_until = service.programs.wait_until
    in_flight = lambda: fork_loads.in_flight(service.ocr.url)  # noqa: E731
    service.ocr.default = fake.Reply(delay=1.0)
    one = Scan(service, 30)
    wait_until(lambda: in_flight() > 0, "the requests in flight are stored")
    service.ocr.default = fake.OK
    one.ended()
    wait_until(lambda: service.rows("SELECT fork FROM fork_loads") == [], "the load is removed")


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_model_is_reported_and_waited_out(service, status):
    service.ocr.default, service.ocr.models_status = fake.refusal(status), status
    one = Scan(service, 2)
    one.parked()
    assert service.server_state() == "misconfigured"
    assert one.charges() == (0, 0, 0)
    service.ocr.default, service.ocr.models_status = fake.OK, 200
    assert one.ended().status == "processed"


def test_a_server_that_loads_its_model_is_waited_for(service):
    """It lists its models and answers 503, to pages and to health."""
    service.ocr.default = service.ocr.health = fake.gateway(503)
    one = Scan(service, 1)
    one.parked()
    seen = service.ocr.probes
    service.programs.wait_until(lambda: service.ocr.probes > seen + 1, "it is probed")
    assert len(one.requests()) == BUDGET
    assert one.charges() == (0, 0, 0)
    service.ocr.default = service.ocr.health = fake.OK
    assert one.ended().status == "processed"


def test_a_healthy_probe_before_failing_pages_charges_no_document(service):
    service.ocr.default = fake.gateway(502)
    one = Scan(service, 1)
    trials = lambda: len(one.requests()) >= 2 * BUDGET  # noqa: E731
    service.programs.wait_until(trials, "a second trial")
    assert one.charges() == (0, 0, 0)
    service.ocr.default = fake.OK
    assert one.ended().status == "processed"


def test_a_page_on_which_the_server_fails_does_not_hold_up_other_documents(service):
    killer = Scan(service, 1, set_up=lambda s: service.ocr.always(s.mark(), fake.gateway(502)))
    killer.parked()
    others = [Scan(service, 1) for _ in range(3)]
    assert [one.ended().status for one in others] == ["processed"] * 3
    service.cancel(killer.id)


def test_a_page_that_the_server_never_reads_fails_after_one_later_try(service):
    def set_up(one):
        service.ocr.always(one.mark(1), fake.gateway(503))
        service.ocr.always(one.mark(3), fake.Reply(delay=0.3))

    three = Scan(service, 3, set_up=set_up)
    view = three.ended()
    assert (view.status, view.incomplete, view.error.code) == ("failed", True, "pages_failed")
    assert (view.pages.ocr, view.pages.failed) == (2, 1)
    assert "page 1" in view.error.message
    assert three.page(1).error.code == "ocr_failed"
    assert len(three.requests(1)) == 2 * BUDGET


def test_a_500_gets_one_later_try_and_no_schedule(service):
    once = answered(service, fake.refusal(500))
    twice = answered(service, fake.refusal(500), fake.refusal(500, "CUDA error"))
    assert service.view(once.id).status == "processed"
    assert service.view(twice.id).status == "failed"
    error = twice.page().error
    assert (error.code, error.retryable) == ("ocr_failed", True)
    assert "CUDA error" in error.message
    assert (len(once.requests()), len(twice.requests())) == (2, 2)


def test_an_answer_without_text_is_never_called_a_success(service):
    view = service.view(answered(service, fake.HTML_200, fake.NULL_CONTENT).id)
    assert (view.status, view.pages.ocr, view.pages.failed) == ("failed", 0, 1)


def test_a_request_whose_connection_is_cut_is_sent_again(service):
    one = answered(service, fake.CUT, fake.DROPPED, fake.busy("0"))
    assert service.view(one.id).status == "processed"
    assert len(one.requests()) == 4


def test_a_refused_page_fails_at_once_with_its_error(service):
    one = answered(service, fake.refusal(400, "This picture is of no use."))
    assert one.page().error.code == "ocr_rejected"
    assert "of no use" in one.page().error.message
    assert len(one.requests()) == 1


def test_a_picture_too_large_for_the_server_is_read_at_two_thirds(service):
    one = answered(service, fake.ENCODER_CACHE)
    assert (one.page().status, one.page().dpi) == ("ocr", 48)
    first, second = one.requests()
    assert second.width == pytest.approx(first.width * 2 / 3, abs=1)


def test_a_text_cut_twice_is_kept_as_truncated_with_a_warning(service):
    one = answered(service, fake.HALF, fake.HALF)
    view = service.view(one.id)
    assert (view.status, view.pages.truncated) == ("processed", 1)
    assert [(warning.code, warning.page) for warning in view.warnings] == [("page_truncated", 1)]
    first, second = one.requests()
    assert second.max_tokens > first.max_tokens


def test_two_empty_readings_are_a_page_without_text(service):
    view = service.view(answered(service, fake.EMPTY, fake.EMPTY).id)
    assert (view.status, view.pages.no_text) == ("processed", 1)
    assert [warning.code for warning in view.warnings] == ["page_without_text"]


def test_nothing_but_a_cut_answer_is_a_failed_page(service):
    cut = fake.Reply(text="", finish_reason="length")
    one = answered(service, cut, cut)
    assert one.page().error.code == "ocr_empty"
    assert service.view(one.id).status == "failed"


def test_characters_that_no_database_takes_do_not_lose_the_page(service):
    one = answered(service, fake.BROKEN_CHARACTERS)
    assert service.view(one.id).status == "processed"
    assert one.page().markdown == "a b  c"


def test_a_cancel_reaches_the_server(service):
    gates = []
    one = Scan(service, 1, set_up=lambda s: gates.append(service.ocr.hold(s.mark())))
    assert gates[0].arrived.wait(PATIENCE)
    assert service.cancel(one.id)
    gone = lambda: one.requests()[0].outcome == "disconnected"  # noqa: E731
    service.programs.wait_until(gone, "the request is closed")
    view = service.view(one.id)
    assert (view.status, view.error.code) == ("cancelled", "cancelled")
    assert answered(service).ended().status == "processed"
