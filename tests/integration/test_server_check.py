"""A wrong address, key or model is found when the service starts, and said in health."""

import pytest

from rag_service.cli.checks import server_warning
from rag_service.config.loader import get_settings
from rag_service.jobs import server_state
from rag_service.monitoring import readiness
from tests.conftest import changed_settings
from tests.fakes import ocr_server as fake
from tests.service import Scan, open_service


@pytest.fixture(scope="module")
def service(stack, tmp_path_factory):
    """A service with maintenance, and no ocr worker yet."""
    with open_service(stack, tmp_path_factory.mktemp("check")) as service:
        service.programs.start_maintenance()
        yield service


def faults_of_server():
    faults = readiness.processing_faults(get_settings())
    return [fault.message for fault in faults if fault.name == server_state.FAULT]


def wait_for_fault(service, words):
    found = lambda: any(words in message for message in faults_of_server())  # noqa: E731
    service.programs.wait_until(found, f"health says: {words}")


def test_a_worker_finds_what_is_wrong_at_its_start_and_health_says_it(service):
    """Until it is repaired, and without any document."""
    ocr, programs = service.ocr, service.programs
    ocr.not_models = fake.HTML_200
    workers = [programs.start_worker("ocr", 1), programs.start_worker("prepare", 1)]
    wait_for_fault(service, "misconfigured: ")
    assert "a web page, 'Sign in'; check GLMOCR_BASE_URL" in faults_of_server()[0]
    ocr.not_models, ocr.key = None, "sesame"
    wait_for_fault(service, "HTTP 401; check GLMOCR_API_KEY")
    ocr.key, ocr.models = None, [{"id": "qwen"}]
    wait_for_fault(service, "does not serve the model 'glm-ocr' (GLMOCR_MODEL); it serves: qwen")
    # Some servers read pages under any name.
    programs.wait_ready(*workers)
    assert Scan(service, 1).ended().status == "processed"
    assert ocr.requests
    ocr.models = [{"id": fake.MODEL}]
    programs.wait_until(lambda: faults_of_server() == [], "health says nothing more")


def test_a_document_that_waits_says_what_is_wrong_with_the_server(service):
    service.ocr.reset()
    service.ocr.key = "sesame"
    one = Scan(service, 1)
    one.parked()
    assert "HTTP 401" in service.view(one.id).waiting_message
    assert service.view(one.id).waiting_message.endswith("check GLMOCR_API_KEY, which is not set")
    service.ocr.key = None
    assert one.ended().waiting_message is None


@pytest.mark.parametrize(
    ("not_models", "model", "words"),
    [
        (None, fake.MODEL, None),
        (fake.HTML_200, fake.MODEL, "a web page"),
        (None, "qwen", "does not serve the model 'qwen'"),
        (fake.CUT, fake.MODEL, "no page can be read"),
    ],
)
def test_the_start_warns_of_a_server_that_cannot_read(service, not_models, model, words):
    service.ocr.reset()
    service.ocr.not_models = not_models
    settings = get_settings()
    warning = server_warning(changed_settings(settings, ocr={"model": model}))
    assert (words is None) == (warning is None)
    assert words is None or words in warning
