"""Pages over HTTP: as JSON, as one text, as images; progress events."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pymupdf
import pytest
from PIL import Image

from rag_service.api import page_images, resources
from rag_service.documents.storage import DocumentStore, source_key
from rag_service.errors import CorruptPdf, PageTimeout
from tests.fakes import pdf_samples


def code_of(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


@pytest.fixture
def processed(api, make_pdf, work_off):
    """A processed document of three pages."""
    document_id = api.add(make_pdf("one", "two", "three"))
    work_off("# One", "two", "")
    return document_id


def test_pages_are_returned_in_order_and_in_parts(api, processed):
    first = api.client.get(f"/documents/{processed}/pages", params={"limit": 2}).json()
    assert [page["number"] for page in first["pages"]] == [1, 2]
    rest = api.client.get(
        f"/documents/{processed}/pages", params={"after": first["next_after"]}
    ).json()
    assert [page["number"] for page in rest["pages"]] == [3]
    assert rest["next_after"] is None


def test_one_page(api, processed):
    page = api.client.get(f"/documents/{processed}/pages/1").json()
    assert (page["number"], page["markdown"], page["status"]) == (1, "# One", "native")


@pytest.mark.parametrize("number", [0, 4, -1, 2**31, 10**30])
def test_an_unknown_page_is_not_found(api, processed, number):
    assert code_of(api.client.get(f"/documents/{processed}/pages/{number}")) == (404, "not_found")
    image = api.client.get(f"/documents/{processed}/pages/{number}/image")
    assert code_of(image) == (404, "not_found")


def test_the_text_has_its_page_numbers_in_comments(api, processed):
    answer = api.client.get(f"/documents/{processed}/markdown")
    assert answer.headers["content-type"] == "text/markdown; charset=utf-8"
    assert answer.text == (
        "<!-- page 1 -->\n\n# One\n\n<!-- page 2 -->\n\ntwo\n\n<!-- page 3: native -->\n\n"
    )


def test_the_text_names_missing_pages(api, make_pdf, work_off):
    document_id = api.add(make_pdf("one", "two"))
    text = api.client.get(f"/documents/{document_id}/markdown").text
    assert text == "<!-- document: queued -->\n\n"
    work_off("# One", PageTimeout())
    text = api.client.get(f"/documents/{document_id}/markdown").text
    assert text == (
        "<!-- document: failed, pages_failed -->\n\n"
        "<!-- page 1 -->\n\n# One\n\n<!-- page 2: failed, page_timeout -->\n\n"
    )


def test_a_long_text_is_complete(api, make_pdf, work_off):
    document_id = api.add(make_pdf("x"))
    work_off(*(f"text {n} ä" for n in range(1, 251)))
    text = api.client.get(f"/documents/{document_id}/markdown").text
    expected = [f"<!-- page {n} -->\n\ntext {n} ä\n\n" for n in range(1, 251)]
    assert text == "".join(expected)


def test_the_old_text_is_shown_until_the_new_run_has_ended(api, processed, work_off):
    api.client.post(f"/documents/{processed}/reprocess", json={"all_pages": True})
    assert "# One" in api.client.get(f"/documents/{processed}/markdown").text
    work_off("# New", "two", "")
    assert "# New" in api.client.get(f"/documents/{processed}/markdown").text


class TestPicture:
    def test_is_a_jpeg_that_may_be_cached(self, api, processed):
        url = f"/documents/{processed}/pages/2/image"
        answer = api.client.get(url)
        assert answer.headers["content-type"] == "image/jpeg"
        assert answer.content.startswith(b"\xff\xd8")
        assert answer.headers["cache-control"].startswith("private")
        again = api.client.get(url, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        other = api.client.get(url, params={"dpi": 50})
        assert other.headers["etag"] != answer.headers["etag"]
        assert len(other.content) < len(answer.content)

    def test_is_rendered_before_a_worker_has_claimed_the_run(self, api, make_pdf):
        document_id = api.add(make_pdf("one"))
        assert api.client.get(f"/documents/{document_id}/pages/1/image").is_success

    def test_of_several_documents_at_the_same_time(self, api, make_pdf):
        short, long = api.add(make_pdf("a")), api.add(make_pdf("a", "b"))
        urls = [f"/documents/{short}/pages/1/image", f"/documents/{long}/pages/2/image"] * 4
        wrong = f"/documents/{short}/pages/2/image"
        with ThreadPoolExecutor(9) as pool:
            answers = list(pool.map(api.client.get, [*urls, wrong]))
        assert [a.status_code for a in answers] == [200] * 8 + [404]

    def test_of_a_file_that_cannot_be_opened(self, api, make_pdf):
        damaged = api.add(b"%PDF-1.7 nothing but this line")
        assert code_of(api.client.get(f"/documents/{damaged}/pages/1/image"))[0] == 422
        locked = api.add(make_pdf("x", password="p"))
        answer = api.client.get(f"/documents/{locked}/pages/1/image")
        assert code_of(answer) == (422, "encrypted_pdf")
        fine = api.add(make_pdf("fine"))
        assert api.client.get(f"/documents/{fine}/pages/1/image").is_success

    def test_that_takes_too_long_is_refused_and_not_tried_again_at_once(
        self, start_api, make_pdf, monkeypatch
    ):
        monkeypatch.setattr(page_images, "_DRAW_SECONDS", 1.0)
        impatient = start_api()
        url = f"/documents/{impatient.add(pdf_samples.endless_page())}/pages/1/image"
        first, again = impatient.client.get(url), impatient.client.get(url)
        assert code_of(first) == code_of(again) == (422, "page_timeout")
        assert "took longer than 1 s" in first.json()["detail"]
        assert "a moment ago" in again.json()["detail"]

    def test_whose_bytes_are_missing(self, api, make_pdf, settings):
        document_id = api.add(make_pdf("a"))
        DocumentStore(settings).delete(source_key(api.get(document_id)["sha256"]))
        answer = api.client.get(f"/documents/{document_id}/pages/1/image")
        assert code_of(answer) == (404, "source_missing")

    @pytest.mark.parametrize("dpi", [0, 35, 301, "x"])
    def test_resolution_has_limits(self, api, processed, dpi):
        answer = api.client.get(f"/documents/{processed}/pages/1/image", params={"dpi": dpi})
        assert code_of(answer) == (422, "invalid_options")


class TestPart:
    @pytest.fixture
    def quarters(self, api):
        """A page whose bottom right quarter is black."""
        with pymupdf.open() as document:
            page = document.new_page(width=400, height=800)
            page.draw_rect((200, 400, 400, 800), color=0, fill=0)
            document_id = api.add(document.tobytes())
        return f"/documents/{document_id}/pages/1/image"

    def picture(self, api, url, bbox, **params) -> Image.Image:
        answer = api.client.get(url, params={"bbox": bbox, **params})
        assert answer.headers["content-type"] == "image/jpeg"
        return Image.open(BytesIO(answer.content)).convert("L")

    def test_shows_the_content_of_the_box(self, api, quarters):
        black = self.picture(api, quarters, "510,510,1000,1000", dpi=72)
        assert black.size == (196, 392)
        assert black.getextrema()[1] < 30
        white = self.picture(api, quarters, "0,0,490,1000", dpi=72)
        assert white.getextrema()[0] > 225
        assert self.picture(api, quarters, "0,0,1000,1000", dpi=144).size == (800, 1600)

    def test_has_its_own_etag(self, api, quarters):
        whole = api.client.get(quarters).headers["etag"]
        url = f"{quarters}?bbox=0,0,500,500"
        etag = api.client.get(url).headers["etag"]
        assert api.client.get(url, headers={"if-none-match": etag}).status_code == 304
        for other in (quarters, f"{quarters}?bbox=0,0,500,501"):
            answer = api.client.get(other, headers={"if-none-match": etag})
            assert answer.status_code == 200
        assert api.client.get(url, headers={"if-none-match": whole}).status_code == 200

    @pytest.mark.parametrize(
        "bbox",
        ["", "1,2,3", "1,2,3,4,5", "a,b,c,d", "-1,0,5,5", "0,0,1001,5", "5,0,5,9", "0,9,5,9",
         "0.5,0,1,1", "٠,0,5,5", " 0,0,5,5", "00000,0,5,5"],
    )  # fmt: skip
    def test_a_bad_box_is_named(self, api, quarters, bbox):
        answer = api.client.get(quarters, params={"bbox": bbox})
        assert code_of(answer) == (422, "invalid_options")
        assert "bbox" in answer.json()["detail"]


class Events:
    """The events of one stream, in order."""

    def __init__(self, response):
        self.lines = response.iter_lines()

    def next(self) -> tuple[str, dict | None]:
        name = ""
        for line in self.lines:
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))
        raise EOFError


class TestEvents:
    def test_are_sent_for_every_change_and_for_the_end(self, api, make_pdf, work_off):
        document_id = api.add(make_pdf("a"))
        with api.client.stream("GET", f"/documents/{document_id}/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            stream = Events(response)
            name, document = stream.next()
            assert (name, document["status"]) == ("progress", "queued")
            work_off("a")
            name, document = stream.next()
            assert (name, document["status"]) == ("progress", "processed")
            assert document["pages"]["done"] == 1
            name, document = stream.next()
            assert (name, document["id"]) == ("end", document_id)
            with pytest.raises(EOFError):
                stream.next()

    def test_end_at_once_if_the_run_has_ended(self, api, processed):
        with api.client.stream("GET", f"/documents/{processed}/events") as response:
            names = [line for line in response.iter_lines() if line.startswith("event")]
        assert names == ["event: progress", "event: end"]

    def test_follow_the_newest_run_of_a_processed_document(self, api, processed, work_off):
        api.client.post(f"/documents/{processed}/reprocess", json={"all_pages": True})
        with api.client.stream("GET", f"/documents/{processed}/events") as response:
            stream = Events(response)
            assert stream.next()[1]["latest_run"]["status"] == "queued"
            work_off(error=CorruptPdf())
            assert stream.next()[1]["latest_run"]["status"] == "failed"
            assert stream.next()[0] == "end"

    def test_end_when_the_document_is_deleted(self, api, make_pdf):
        document_id = api.add(make_pdf("a"))
        with api.client.stream("GET", f"/documents/{document_id}/events") as response:
            stream = Events(response)
            assert stream.next()[0] == "progress"
            api.client.delete(f"/documents/{document_id}")
            assert stream.next() == ("end", None)

    def test_the_stream_ends_when_the_client_disconnects(self, api, make_pdf):
        document_id = api.add(make_pdf("a"))
        ended = 'http_requests_total{method="GET",route="/documents/{document_id}/events"'
        with api.client.stream("GET", f"/documents/{document_id}/events") as response:
            stream = Events(response)
            assert stream.next()[0] == "progress"
            assert ended not in api.client.get("/metrics").text
        while ended not in api.client.get("/metrics").text:
            time.sleep(0.05)

    def test_too_many_streams_are_refused_until_one_has_ended(
        self, start_api, make_pdf, monkeypatch
    ):
        monkeypatch.setattr(resources, "_STREAMS_PER_CLIENT", 2)
        api = start_api()
        url = f"/documents/{api.add(make_pdf('a'))}/events"
        with api.client.stream("GET", url) as response:
            first = Events(response)
            assert first.next()[0] == "progress"
            with api.client.stream("GET", url) as other:
                second = Events(other)
                assert second.next()[0] == "progress"
                refused = api.client.get(url)
                assert code_of(refused) == (503, "busy")
                assert "2 event streams of this client are open" in refused.json()["detail"]
                assert int(refused.headers["retry-after"]) > 0
            unknown = f"/documents/{'0' * 32}/events"
            while api.client.get(unknown).status_code == 503:
                time.sleep(0.05)
            # Requests for an unknown document leave no slot taken either.
            for _ in range(3):
                assert code_of(api.client.get(unknown)) == (404, "not_found")
            with api.client.stream("GET", url) as other:
                second = Events(other)
                assert second.next()[0] == "progress"
