"""The RunPod handler as RunPod runs it: in runpod's own worker loop, beside an OCR server.

The control plane is tests.fakes.runpod_service; the fake OCR server reads the pages.
"""

from __future__ import annotations

import io
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.endpoint import MIB, Endpoint, inline, job_input, open_endpoint
from tests.fakes.ocr_server import EMPTY, Reply, refusal
from tests.fakes.page_pictures import numbered_scan
from tests.fakes.scans import Mark, new_number, scan

# Limits for documents with real pictures.
LARGE_DOCUMENTS = {"RAG_SERVICE_HANDLER_MAX_DOCUMENT_BYTES": str(64 * MIB)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """One worker for all tests that do not change it."""
    with open_endpoint(tmp_path_factory.mktemp("shared"), workers=1) as endpoint:
        yield endpoint


@pytest.fixture
def endpoint(shared: Endpoint) -> Endpoint:
    shared.ocr.reset()
    return shared


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Endpoint]:
    """An endpoint without workers yet."""
    with open_endpoint(tmp_path) as endpoint:
        yield endpoint


def zipped(*files: bytes) -> dict[str, str]:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, data in enumerate(files):
            archive.writestr(f"{number}.pdf", data)
    return {**inline(out.getvalue()), "encoding": "zip+base64"}


def url(address: str) -> dict[str, str]:
    return {"kind": "url", "url": address, "sha256": "0" * 64}


# Outputs.


@pytest.mark.parametrize("layout", ["page", "auto"])
def test_the_output_has_the_pages_original_numbers(endpoint: Endpoint, layout: str) -> None:
    number = new_number()
    options = {"dpi": 72, "layout": layout, "max_tokens": 4096}
    work = job_input(number, [3, 7, 9], options=options)
    work["document"] = zipped(scan(number, 3))
    output = endpoint.output(endpoint.post(work))
    assert [(page["page"], page["markdown"]) for page in output["pages"]] == [
        (original, Mark(number, place).text) for place, original in enumerate([3, 7, 9], start=1)
    ]
    for page in output["pages"]:
        assert page["finish_reason"] == "stop"
        assert page["tokens"]["prompt"] == 100
        assert page["seconds"] > 0
        assert page["error"] is None
    assert output["request_key"] == work["request_key"]
    assert output["remaining_pages"] == []
    assert output["engine"]["model"] == "glm-ocr"
    assert any("3 pages of scan.pdf" in line for line in output["debug"])


def test_a_page_cut_at_the_token_limit_has_finish_reason_length(endpoint: Endpoint) -> None:
    number = new_number()
    cut = Reply(text="Only half of", finish_reason="length")
    endpoint.ocr.always(Mark(number, 1), cut)
    (page,) = endpoint.output(endpoint.post(job_input(number, [1])))["pages"]
    assert page["finish_reason"] == "length"
    assert page["markdown"] == "Only half of"


def test_half_characters_of_a_model_are_replaced(endpoint: Endpoint) -> None:
    number = new_number()
    endpoint.ocr.always(Mark(number, 1), Reply(text="a \ud83d b"))
    (page,) = endpoint.output(endpoint.post(job_input(number, [1])))["pages"]
    assert page["markdown"] == "a \ufffd b"


def test_only_a_failed_page_is_read_again_under_the_same_key(endpoint: Endpoint) -> None:
    number = new_number()
    work = job_input(number, [1, 2, 3])
    endpoint.ocr.always(Mark(number, 2), refusal(400))
    first = endpoint.output(endpoint.post(work))["pages"]
    assert [page["error"] and page["error"]["code"] for page in first] == [
        None, "ocr_rejected", None,
    ]  # fmt: skip
    endpoint.ocr.reset()
    second = endpoint.output(endpoint.post(work))["pages"]
    assert [page["error"] for page in second] == [None, None, None]
    assert [request.mark for request in endpoint.ocr.requests] == [Mark(number, 2)]


def test_a_page_that_fails_once_gets_its_later_try(endpoint: Endpoint) -> None:
    number = new_number()
    endpoint.ocr.script(Mark(number, 1), Reply(500, body=b"boom"))
    pages = endpoint.output(endpoint.post(job_input(number, [1, 2])))["pages"]
    assert [page["error"] for page in pages] == [None, None]
    assert len(endpoint.ocr.of(Mark(number, 1))) == 2


def long_text(length: int) -> str:
    """A text of this length without repetitions."""
    return " ".join(map(str, range(length)))[:length]


def test_pages_that_do_not_fit_the_answer_remain_for_another_job(endpoint: Endpoint) -> None:
    number = new_number()
    for page in (1, 2, 3):
        endpoint.ocr.always(Mark(number, page), Reply(text=long_text(40_000)))
    work = job_input(number, [11, 12, 13])
    first = endpoint.output(endpoint.post(work))
    assert [page["page"] for page in first["pages"]] == [11, 12]
    assert first["remaining_pages"] == [13]
    rest = job_input(number, [13], request_key=work["request_key"] + "rest")
    rest["document"] = inline(scan(number, [3]))
    second = endpoint.output(endpoint.post(rest))
    assert [page["page"] for page in second["pages"]] == [13]


def test_a_text_too_large_for_any_answer_is_an_error_of_its_page(endpoint: Endpoint) -> None:
    number = new_number()
    endpoint.ocr.always(Mark(number, 1), Reply(text=long_text(200_000)))
    output = endpoint.output(endpoint.post(job_input(number, [5, 6])))
    assert [page["error"] and page["error"]["code"] for page in output["pages"]] == [
        "payload_too_large", None,
    ]  # fmt: skip
    assert output["remaining_pages"] == []


def test_progress_is_reported_and_never_overwrites_the_result(endpoint: Endpoint) -> None:
    number = new_number()
    # Eight are in flight, so three are done, one waits, and nothing moves until the gates open.
    gates = [endpoint.ocr.hold(Mark(number, page)) for page in range(4, 12)]
    remote_id = endpoint.post(job_input(number, list(range(1, 13))))
    job = endpoint.service.job(remote_id)
    endpoint.programs.wait_until(
        lambda: {"pages_done": 3, "pages": 12} in job.progress, "the progress is reported"
    )
    for gate in gates:
        gate.open()
    assert len(endpoint.output(remote_id)["pages"]) == 12
    # No update is sent when the job is near its end.
    assert max(update["pages_done"] for update in job.progress) == 3


# Refused jobs, each with its code.


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"version": 2}, "unsupported_version"),
        ({"pages": []}, "invalid_job"),
        ({"pages": [1, 1]}, "invalid_job"),
        ({"pages": [0, 1]}, "invalid_job"),
        ({"options": {"dpi": 72, "layout": "columns", "max_tokens": 1}}, "invalid_job"),
        ({"options": {"dpi": 72, "layout": "regions", "max_tokens": 1}}, "unsupported_layout"),
        ({"pages": [1, 2, 3]}, "pages_mismatch"),
        ({"document": {**inline(b""), "data": "no base64 §"}}, "bad_document"),
        ({"document": inline(b"GIF89a and more")}, "bad_document"),
        ({"document": inline(b"%PDF-1.4 nothing of a PDF")}, "corrupt_pdf"),
        ({"document": {**inline(b"no zip"), "encoding": "zip+base64"}}, "bad_document"),
        ({"document": zipped(b"%PDF-", b"%PDF-")}, "bad_document"),
        ({"document": zipped(bytes(2 * MIB))}, "document_too_large"),
        ({"document": url("http://example.com/a.pdf")}, "url_refused"),
        ({"document": url("https://user:word@example.com/a.pdf")}, "url_refused"),
        ({"document": url("https://localhost/a.pdf")}, "url_refused"),
        ({"document": url("https://127.0.0.1:8443/a.pdf")}, "url_refused"),
        ({"document": url("https://169.254.169.254/latest/meta-data")}, "url_refused"),
        ({"document": url("https://[::ffff:10.0.0.1]/a.pdf")}, "url_refused"),
        ({"document": url("file:///etc/passwd")}, "url_refused"),
    ],
)
def test_a_job_that_cannot_be_done_fails_with_its_code(
    endpoint: Endpoint, changes: dict[str, Any], code: str
) -> None:
    number = new_number()
    error = endpoint.error(endpoint.post({**job_input(number, [1, 2]), **changes}))
    assert error["error_type"] == code
    assert error["error_message"].startswith(f"{code}: ")
    assert endpoint.ocr.of_document(number) == []


def test_an_unhealthy_server_fails_the_job_and_not_the_next(endpoint: Endpoint) -> None:
    number = new_number()
    endpoint.ocr.health = Reply(503, body=b"")
    error = endpoint.error(endpoint.post(job_input(number, [1])))
    assert error["error_type"] == "ocr_server_unhealthy"
    assert f"{endpoint.ocr.url}/health: HTTP 503" in error["error_message"]
    endpoint.ocr.reset()
    assert endpoint.output(endpoint.post(job_input(number, [1])))["pages"][0]["error"] is None


@pytest.mark.parametrize("reply", [refusal(400, "No pictures."), refusal(500), EMPTY])
def test_a_server_that_reads_no_page_fails_the_job_and_calls_no_page_bad(
    endpoint: Endpoint, reply: Reply
) -> None:
    number = new_number()
    endpoint.ocr.default = reply
    error = endpoint.error(endpoint.post(job_input(number, [1, 2])))
    assert error["error_type"] == "ocr_server_unhealthy"
    assert "The OCR server stopped reading pages: " in error["error_message"]
    endpoint.ocr.reset()
    assert endpoint.output(endpoint.post(job_input(number, [1])))["pages"][0]["error"] is None


def test_a_server_lost_during_a_job_is_named_in_the_error(endpoint: Endpoint) -> None:
    number = new_number()
    endpoint.ocr.hold(Mark(number, 1))
    remote_id = endpoint.post(job_input(number, [1]))
    endpoint.wait_for_request(Mark(number, 1))
    endpoint.ocr.refuse()
    error = endpoint.error(remote_id)
    assert error["error_type"] == "ocr_server_unhealthy"
    assert endpoint.ocr.url in error["error_message"]


def test_a_cancelled_job_closes_its_requests_and_frees_its_key(endpoint: Endpoint) -> None:
    number = new_number()
    gate = endpoint.ocr.hold(Mark(number, 1))
    work = job_input(number, [1])
    remote_id = endpoint.post(work)
    endpoint.wait_for_request(Mark(number, 1))
    endpoint.service.table.cancel(remote_id)
    endpoint.programs.wait_until(lambda: not endpoint.ocr.alive(), "the request is closed")
    assert endpoint.service.job(remote_id).status == "CANCELLED"
    gate.open()
    assert endpoint.output(endpoint.post(work))["pages"][0]["error"] is None


# One key, several workers.


def test_two_jobs_of_one_key_are_read_once(fresh: Endpoint) -> None:
    fresh.workers.start(2)
    fresh.workers.wait_ready()
    number = new_number()
    work = job_input(number, [1, 2, 3])
    gate = fresh.ocr.hold(Mark(number, 3))
    first = fresh.post(work)
    fresh.wait_for_request(Mark(number, 3))
    second = fresh.post(work)
    fresh.programs.wait_until(
        lambda: any("Another job works on this key" in w.program.text for w in fresh.workers.all),
        "the second worker waits",
    )
    gate.open()
    assert fresh.output(first)["pages"] == fresh.output(second)["pages"]
    assert fresh.service.job(first).takes != fresh.service.job(second).takes
    assert sorted(request.mark for request in fresh.ocr.requests) == [
        Mark(number, page) for page in (1, 2, 3)
    ]


def test_another_worker_continues_the_job_of_a_killed_one(fresh: Endpoint) -> None:
    fresh.workers.start(2)
    fresh.workers.wait_ready()
    number = new_number()
    gate = fresh.ocr.hold(Mark(number, 3))
    remote_id = fresh.post(job_input(number, [1, 2, 3]))
    fresh.wait_for_request(Mark(number, 3))
    fresh.programs.wait_until(lambda: len(fresh.stored_pages) == 2, "two pages are stored")
    victim = fresh.service.job(remote_id).takes[0]
    fresh.workers.kill(victim)
    gate.open()
    pages = fresh.output(remote_id)["pages"]
    assert [page["markdown"] for page in pages] == [Mark(number, page).text for page in (1, 2, 3)]
    assert fresh.service.job(remote_id).takes[1:] not in ([], [victim])
    assert [len(fresh.ocr.of(Mark(number, page))) for page in (1, 2, 3)] == [1, 1, 2]
    assert fresh.ocr.doubled == []


def test_the_handler_works_without_a_volume_and_logs_it(fresh: Endpoint) -> None:
    fresh.workers.start(RUNPOD_HANDLER_VOLUME="/nonexistent/volume")
    output = fresh.output(fresh.post(job_input(new_number(), [1])))
    assert output["pages"][0]["error"] is None
    assert any("There is no network volume" in line for line in output["debug"])


def test_the_current_job_ends_after_sigterm(fresh: Endpoint) -> None:
    fresh.workers.start()
    number = new_number()
    gate = fresh.ocr.hold(Mark(number, 1))
    remote_id = fresh.post(job_input(number, [1]))
    fresh.wait_for_request(Mark(number, 1))
    (worker,) = fresh.workers.all
    worker.program.signal(signal.SIGTERM)
    gate.open()
    assert fresh.output(remote_id)["pages"][0]["error"] is None
    assert worker.program.wait() == 0


# Regions.


def test_a_job_with_layout_returns_regions_with_their_boxes(fresh: Endpoint) -> None:
    fresh.ocr.default = Reply(text="Some words of it.")
    fresh.workers.start(RAG_SERVICE_OCR_LAYOUT="auto", **LARGE_DOCUMENTS)
    options = {"dpi": 72, "layout": "regions", "max_tokens": 4096}
    work = {**job_input(1, [4, 7]), "document": inline(numbered_scan(2)), "options": options}
    first, second = fresh.output(fresh.post(work))["pages"]
    assert [page["page"] for page in (first, second)] == [4, 7]
    for page in (first, second):
        assert [region["label"] for region in page["regions"]] == ["text"] * 4
        assert [region["index"] for region in page["regions"]] == [0, 1, 2, 3]
        tops = [region["bbox_2d"][1] for region in page["regions"]]
        assert tops == sorted(tops)
        assert page["markdown"].count("Some words of it.") == 4
