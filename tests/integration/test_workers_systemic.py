"""A server that reads no page at all: no document pays for it. One bad document is no outage."""

import threading

import pytest

from rag_service.config.loader import get_settings
from rag_service.jobs import server_samples, server_state
from rag_service.monitoring import readiness
from tests.fakes import ocr_server as fake
from tests.processes import PATIENCE
from tests.service import Scan, open_service

DOCUMENTS = 12
OUT_OF_MEMORY = fake.refusal(500, "CUDA out of memory")
# What the server answers to every page, and words by which health names it.
FAULTS = [
    (fake.refusal(400, "glm-ocr is not a multimodal model"), "every page is refused"),
    (OUT_OF_MEMORY, "every page fails"),
    (fake.EMPTY, "have no text"),
    (fake.LOOP, "only repeat"),
    (fake.Reply(text="I'm sorry, but I can't assist with that image."), "the model answers"),
]


@pytest.fixture(scope="module")
def running(stack, tmp_path_factory):
    with open_service(stack, tmp_path_factory.mktemp("systemic")) as service:
        programs = service.programs
        programs.start_maintenance()
        workers = [programs.start_worker("ocr", 2) for _ in range(2)]
        programs.wait_ready(programs.start_worker("prepare", 2), *workers)
        yield service


@pytest.fixture
def service(running):
    running.ocr.reset()
    server_state.mark_answered(running.ocr.url)
    yield running
    assert running.ocr.doubled == []


def faults_of_server():
    faults = readiness.processing_faults(get_settings())
    return [fault.message for fault in faults if fault.name == server_state.FAULT]


def test_no_document_pays_for_a_server_that_reads_nothing(service):
    """Whatever it answers, and also if that changes while the documents wait."""
    wait_until = service.programs.wait_until
    scans = None
    for reply, words in FAULTS:
        service.ocr.default = reply
        scans = scans or [Scan(service, 1 + number % 2) for number in range(DOCUMENTS)]
        health = f"health says: {words}"
        wait_until(lambda: any(words in message for message in faults_of_server()), health)  # noqa: B023
    for one in scans:
        one.parked()
    assert {service.view(one.id).status for one in scans} <= {"ready", "ocr"}
    assert [one.charges() for one in scans] == [(0, 0, 0)] * DOCUMENTS
    assert server_samples.page_queue().pages_per_minute == 0
    service.ocr.default = fake.OK
    assert [one.ended().status for one in scans] == ["processed"] * DOCUMENTS
    assert faults_of_server() == []


def test_a_server_that_breaks_in_the_middle_of_a_pile_fails_no_document(service):
    ocr, broken = service.ocr, threading.Event()
    ocr.default = fake.Reply(delay=0.05)

    def break_after_some(_):
        if len(ocr.requests) == DOCUMENTS:
            ocr.default = OUT_OF_MEMORY
            broken.set()

    ocr.on_request = break_after_some
    scans = [Scan(service, 3) for _ in range(DOCUMENTS)]
    assert broken.wait(PATIENCE)
    service.programs.wait_until(lambda: bool(faults_of_server()), "health names the server")
    assert "failed" not in {service.view(one.id).status for one in scans}
    ocr.default = fake.OK
    assert [one.ended().status for one in scans] == ["processed"] * DOCUMENTS


@pytest.mark.parametrize(
    ("reply", "status", "code"),
    [
        (fake.refusal(400), "failed", "ocr_rejected"),
        (fake.EMPTY, "processed", "page_without_text"),
    ],
)
def test_a_bad_document_ends_by_itself_and_a_pile_of_them_is_no_outage(
    service, reply, status, code
):
    """Also if no other document is read meanwhile: the server reads the known page."""
    states = set()
    service.ocr.on_request = lambda _: states.add(service.server_state())
    bad = [
        Scan(service, 1, set_up=lambda one: service.ocr.always(one.mark(), reply))
        for _ in range(DOCUMENTS // 2)
    ]
    good = Scan(service, 1)
    for one in bad:
        view = one.ended()
        codes = [warning.code for warning in view.warnings]
        page_error = one.page().error
        assert view.status == status
        assert code in (codes if page_error is None else [page_error.code])
    assert good.ended().status == "processed"
    assert states == {"up"}
    assert service.ocr.known_pages > 0
