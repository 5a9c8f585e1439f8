"""Reprocessing over HTTP: one document, many, with a password, as a dry run."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rag_service.documents import bulk_reprocess
from rag_service.documents.storage import DocumentStore, source_key, working_key
from rag_service.errors import CorruptPdf, EncryptedPdf, PageTimeout, WorkerCrashed
from rag_service.jobs import runs
from rag_service.states import PageState, Stage
from tests import simulation as sim


def code_of(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["code"]


@pytest.fixture
def failed(api, make_pdf, work_off):
    """A document of two pages, one of which failed."""
    document_id = api.add(make_pdf("one", "two"))
    work_off("one", PageTimeout())
    return document_id


class TestOne:
    def test_redoes_only_what_failed(self, api, failed, work_off):
        answer = api.client.post(f"/documents/{failed}/reprocess")
        assert answer.status_code == 202
        redo = answer.json()
        assert (redo["action"], redo["pages_reused"], redo["pages_redone"]) == ("queued", 1, 1)
        assert api.get(failed)["latest_run"]["id"] == redo["run_id"]
        work_off("one", "two")
        assert api.get(failed)["status"] == "processed"

    def test_is_refused_while_a_run_is_active(self, api, make_pdf):
        document_id = api.add(make_pdf("a"))
        answer = api.client.post(f"/documents/{document_id}/reprocess")
        assert code_of(answer) == (409, "already_active")

    def test_many_at_the_same_time_make_one_run(self, api, failed):
        url = f"/documents/{failed}/reprocess"
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: api.client.post(url), range(8)))
        assert sorted(a.status_code for a in answers) == [202] + [409] * 7

    def test_reports_that_there_is_nothing_to_read_again(self, api, make_pdf, work_off):
        document_id = api.add(make_pdf("a"))
        work_off("a")
        answer = api.client.post(f"/documents/{document_id}/reprocess", json={})
        assert (answer.status_code, answer.json()["action"]) == (200, "nothing_to_redo")
        answer = api.client.post(f"/documents/{document_id}/reprocess", json={"all_pages": True})
        assert (answer.status_code, answer.json()["action"]) == (202, "queued")

    @pytest.mark.parametrize("kind", ["json", "data"])
    def test_reads_only_the_named_pages(self, api, make_pdf, work_off, kind):
        document_id = api.add(make_pdf("a", "b", "c"))
        work_off("a", "b", "c")
        url = f"/documents/{document_id}/reprocess"
        none = api.client.post(url, **{kind: {"pages": "4-5"}})
        assert (none.status_code, none.json()["action"]) == (200, "no_such_page")
        redo = api.client.post(url, **{kind: {"pages": "1,3-9", "ocr": "force"}}).json()
        assert (redo["action"], redo["pages_reused"], redo["pages_redone"]) == ("queued", 1, 2)

    @pytest.mark.parametrize(
        "way",
        [
            {"json": {"ocr": "off", "priority": "interactive"}},
            {"data": {"ocr": "off", "priority": "interactive"}},
            {"files": {"ocr": (None, "off"), "priority": (None, "interactive")}},
        ],
    )
    def test_takes_json_and_both_kinds_of_form(self, api, failed, work_off, way):
        answer = api.client.post(f"/documents/{failed}/reprocess", **way)
        assert answer.status_code == 202
        work_off("one", "two")
        assert api.get(failed)["ocr"] == "off"

    @pytest.mark.parametrize(
        "way",
        [
            {"json": {"ocr": "maybe"}},
            {"json": {"parser": "nobody"}},
            {"json": {"parser": "a\x00b"}},
            {"json": {"priority": "urgent"}},
            {"json": {"alle_pages": True}},
            {"json": {"pages": "3-"}},
            {"json": {"pages": [3]}},
            {"json": {"pages": "1", "all_pages": True}},
            {"json": {"truncated": True}},
            {"data": {"pages": "0"}},
            {"json": ["ocr"]},
            {"content": b"{", "headers": {"content-type": "application/json"}},
            {"content": b"\xff\xfe\x00"},
            {"data": {"ocr": "maybe"}},
            {"files": {"file": ("a.pdf", b"%PDF")}},
            {"files": {"ocr": (None, "maybe")}},
        ],
    )
    def test_bad_options(self, api, failed, way):
        answer = api.client.post(f"/documents/{failed}/reprocess", **way)
        assert code_of(answer) == (422, "invalid_options")
        assert api.get(failed)["latest_run"]["status"] == "failed"

    def test_a_huge_body_is_refused(self, api, failed):
        answer = api.client.post(f"/documents/{failed}/reprocess", content=b" " * 10**6)
        assert code_of(answer) == (413, "too_large")


class TestPassword:
    @pytest.fixture
    def encrypted(self, api, make_pdf, work_off):
        document_id = api.add(make_pdf("secret", password="right"))
        work_off(error=EncryptedPdf())
        return document_id

    def test_opens_the_stored_document(self, api, encrypted, settings):
        body = {"password": "right"}
        answer = api.client.post(f"/documents/{encrypted}/reprocess", json=body)
        assert answer.status_code == 202
        assert api.client.get(f"/documents/{encrypted}/pages/1/image").is_success
        store = DocumentStore(settings)
        assert store.exists(working_key(encrypted))
        assert not store.exists(source_key(api.get(encrypted)["sha256"]))

    def test_the_bytes_are_kept_for_another_document(self, api, encrypted, make_pdf, settings):
        with DocumentStore(settings).open_local(source_key(api.get(encrypted)["sha256"])) as path:
            other = api.add(path.read_bytes(), collection="other")
        api.client.post(f"/documents/{encrypted}/reprocess", data={"password": "right"})
        assert DocumentStore(settings).exists(source_key(api.get(other)["sha256"]))
        answer = api.client.get(f"/documents/{other}/pages/1/image")
        assert code_of(answer) == (422, "encrypted_pdf")

    def test_a_wrong_password_changes_nothing(self, api, encrypted):
        body = {"password": "wrong-password-here"}
        answer = api.client.post(f"/documents/{encrypted}/reprocess", json=body)
        assert code_of(answer) == (422, "wrong_password")
        assert api.get(encrypted)["latest_run"]["error"]["code"] == "encrypted_pdf"

    def test_is_not_repeated_in_an_answer(self, api, encrypted):
        body = {"password": ["wrong-password-here"], "ocr": "wrong-password-here"}
        answer = api.client.post(f"/documents/{encrypted}/reprocess", json=body)
        assert code_of(answer) == (422, "invalid_options")
        assert "wrong-password-here" not in answer.text

    def test_is_refused_with_an_active_run(self, api, make_pdf):
        document_id = api.add(make_pdf("secret", password="right"))
        body = {"password": "right"}
        answer = api.client.post(f"/documents/{document_id}/reprocess", json=body)
        assert code_of(answer) == (409, "already_active")


class TestMany:
    def test_by_error_code(self, api, make_pdf, work_off):
        damaged = api.add(make_pdf("a"))
        work_off(error=CorruptPdf())
        api.add(make_pdf("b"))
        work_off(error=EncryptedPdf())
        answer = api.client.post("/reprocess", json={"error": "corrupt_pdf"})
        assert answer.status_code == 200
        assert answer.json()["counts"] == {"queued": 1}
        assert [redo["id"] for redo in answer.json()["documents"]] == [damaged]

    def test_a_dry_run_does_nothing(self, api, failed):
        answer = api.client.post("/reprocess", json={"failed": True, "dry_run": True}).json()
        assert answer["counts"] == {"would_queue": 1}
        assert answer["dry_run"] is True
        assert answer["documents"][0]["pages_redone"] == 1
        assert api.get(failed)["latest_run"]["status"] == "failed"

    def test_active_documents_are_counted_and_skipped(self, api, failed, make_pdf):
        waiting = api.add(make_pdf("b"))
        answer = api.client.post("/reprocess", json={"ids": [failed, waiting]}).json()
        assert answer["counts"] == {"queued": 1, "skipped_active": 1}

    def test_a_document_that_crashes_workers_is_selected_by_id_only(self, api, make_pdf, work_off):
        document_id = api.add(make_pdf("a"))
        work_off(error=WorkerCrashed())
        for selectors in ({"failed": True}, {"error": "worker_crashed"}):
            assert api.client.post("/reprocess", json=selectors).json()["documents"] == []
        answer = api.client.post("/reprocess", json={"ids": [document_id]}).json()
        assert answer["counts"] == {"queued": 1}

    @pytest.mark.parametrize(
        ("body", "expected"),
        [
            ({}, (422, "invalid_options")),
            ({"dry_run": True}, (422, "invalid_options")),
            ({"failed": True, "parser": "nobody"}, (422, "invalid_options")),
            ({"fialed": True}, (422, "invalid_options")),
            ({"error": "a\x00"}, (422, "invalid_options")),
            ({"ids": ["'; DROP TABLE documents; --"]}, (404, "not_found")),
            ({"ids": ["\x00"]}, (422, "invalid_options")),
            ({"error": "encryptd_pdf"}, (422, "invalid_options")),
            ({"error": "not_found"}, (422, "invalid_options")),
            ({"pages": "1"}, (422, "invalid_options")),
            ({"failed": True, "pages": "1-"}, (422, "invalid_options")),
            ({"since": "2026-03-01"}, (422, "invalid_options")),
            ({"since": "2026-03-01T00:00:00"}, (422, "invalid_options")),
            ({"since": "yesterday"}, (422, "invalid_options")),
            (
                {"since": "2026-03-02T00:00Z", "before": "2026-03-01T00:00Z"},
                (422, "invalid_options"),
            ),
            ({"dpi_was": 0}, (422, "invalid_options")),
            ({"dpi_was": 10**30}, (422, "invalid_options")),
            ({"model_was": "a\x00"}, (422, "invalid_options")),
            ({"ids": ["0" * 32]}, (404, "not_found")),
        ],
    )
    def test_refused(self, api, failed, body, expected):
        assert code_of(api.client.post("/reprocess", json=body)) == expected
        assert api.get(failed)["latest_run"]["status"] == "failed"

    def test_by_attributes_and_times_of_pages(self, api, failed, settings):
        run = sim.ready_run()
        held = sim.claim(Stage.OCR)
        sim.read(held, 1, PageState.TRUNCATED, columns={
            "model": "old", "engine": "e", "parser_version": "1", "dpi": 150.0,
        })  # fmt: skip
        runs.finish(held)
        every = {
            "truncated": True, "model_was": "old", "engine_was": "e", "version_was": "1",
            "dpi_was": 150, "parser_was": "glmocr", "since": "2020-01-01T00:00:00Z",
            "before": "2999-01-01T00:00:00+01:00", "pages": "1",
        }  # fmt: skip
        redo = every | {"dry_run": True}
        [one] = api.client.post("/reprocess", json=redo).json()["documents"]
        assert (one["id"], one["action"]) == (run.document_id, "would_queue")
        assert (one["pages_reused"], one["pages_redone"]) == (0, 1)
        for name, other in {
            "model_was": "new", "engine_was": "x", "version_was": "2", "dpi_was": 72,
            "parser_was": "other", "since": "2998-01-01T00:00:00Z",
            "before": "2020-01-02T00:00:00Z",
        }.items():  # fmt: skip
            answer = api.client.post("/reprocess", json=redo | {name: other})
            assert answer.json()["documents"] == [], name
        answer = api.client.post("/reprocess", json=every).json()
        assert answer["counts"] == {"queued": 1}

    def test_unreadable_json(self, api):
        headers = {"content-type": "application/json"}
        for body in (b"{bad", b"\xff", b'{"error": "\\ud800"}', b"[" * 50_000):
            answer = api.client.post("/reprocess", content=body, headers=headers)
            assert code_of(answer) == (422, "invalid_options")

    def test_a_huge_body_is_refused(self, api):
        answer = api.client.post("/reprocess", content=b" " * 10**6)
        assert code_of(answer) == (413, "too_large")

    def test_unknown_ids_are_each_named_and_nothing_is_done(self, api, failed):
        answer = api.client.post("/reprocess", json={"ids": [failed, "nope", "0" * 32]})
        assert code_of(answer) == (404, "not_found")
        detail = answer.json()["detail"]
        assert "nope" in detail
        assert "0" * 32 in detail
        assert failed not in detail
        assert api.get(failed)["latest_run"]["status"] == "failed"

    def test_all_selectors_must_match(self, api, failed):
        for other in ({"error": "encrypted_pdf"}, {"collection": "elsewhere"}):
            answer = api.client.post("/reprocess", json={"ids": [failed], "failed": True} | other)
            assert answer.json()["documents"] == []
        answer = api.client.post("/reprocess", json={"ids": [failed], "error": "pages_failed"})
        assert answer.json()["counts"] == {"queued": 1}


class TestJobs:
    @pytest.fixture
    def job(self, api, make_pdf, work_off, monkeypatch):
        """A job of three failed documents."""
        monkeypatch.setattr(bulk_reprocess, "AT_ONCE", 2)
        for name in "abc":
            api.add(make_pdf(name))
            work_off(error=CorruptPdf())
        answer = api.client.post("/reprocess", json={"failed": True})
        assert answer.status_code == 202
        assert answer.headers["location"] == f"/reprocess-jobs/{answer.json()['id']}"
        return answer.json()

    def test_is_shown_with_its_progress(self, api, job):
        url = f"/reprocess-jobs/{job['id']}"
        assert (job["state"], job["total"], job["handled"]) == ("running", 3, 0)
        assert api.client.get("/summary").json()["reprocess_jobs"] == [job]
        bulk_reprocess.advance(api.settings, threading.Event())
        done = api.client.get(url).json()
        assert (done["state"], done["counts"], done["runs_active"]) == ("done", {"queued": 3}, 3)
        assert api.client.get("/reprocess-jobs").json()["jobs"] == [done]
        assert api.client.get("/summary").json()["reprocess_jobs"] == []
        assert api.client.post(url + "/cancel").json()["cancelled"] is False

    def test_is_cancelled(self, api, job):
        url = f"/reprocess-jobs/{job['id']}"
        assert api.client.post(url + "/cancel").json() == {"id": job["id"], "cancelled": True}
        assert bulk_reprocess.advance(api.settings, threading.Event()) == 0
        assert api.client.get(url).json()["state"] == "cancelled"

    @pytest.mark.parametrize("job_id", ["nope", "a%00b", "x" * 99])
    def test_an_unknown_job_is_not_found(self, api, job_id):
        for answer in (
            api.client.get(f"/reprocess-jobs/{job_id}"),
            api.client.post(f"/reprocess-jobs/{job_id}/cancel"),
        ):
            assert code_of(answer) == (404, "not_found")

    def test_a_dry_run_adds_no_job(self, api, job):
        answer = api.client.post("/reprocess", json={"failed": True, "dry_run": True})
        assert (answer.status_code, answer.json()["selected"]) == (200, 3)
        assert len(api.client.get("/reprocess-jobs").json()["jobs"]) == 1


def test_a_full_backlog_refuses_a_bulk_redo_and_takes_an_interactive_one(
    start_api, make_pdf, work_off
):
    api = start_api(limits={"max_backlog": 1})
    failed = api.add(make_pdf("a"))
    work_off(error=CorruptPdf())
    api.add(make_pdf("b"))
    url = f"/documents/{failed}/reprocess"
    assert code_of(api.client.post(url)) == (503, "backlog_full")
    assert api.client.post(url, json={"priority": "interactive"}).status_code == 202
