"""Health, metrics and the API reference; and outages as callers see them."""

import shutil
import socket

import pytest
from pydantic import SecretStr

from rag_service.database import engine
from rag_service.database.engine import begin
from rag_service.database.schema import newest_revision
from rag_service.documents import deletion
from rag_service.jobs import live_workers, remote_jobs, server_state
from rag_service.jobs.remote_jobs import PollNote
from rag_service.states import LayoutMode, Stage
from tests.posts import held_run, live_job, open_job, read_page, settle
from tests.simulation import ready_run

UNREACHABLE = "127.0.0.1:1"
SERVER = "http://ocr.example:30000"


def ready(api) -> tuple[int, dict]:
    answer = api.client.get("/health/ready")
    return answer.status_code, answer.json()


def names(faults: list[dict]) -> list[str]:
    assert all(fault["message"] for fault in faults)
    return [fault["name"] for fault in faults]


def execute(statement: str) -> None:
    with begin() as connection:
        connection.exec_driver_sql(statement)


@pytest.fixture
def busy_fleet(settings):
    """Workers and maintenance with fresh heartbeats."""
    live_workers.heartbeat("p", Stage.PREPARE, 2)
    live_workers.heartbeat("o", Stage.OCR, 8)
    live_workers.claim_maintenance("m", 30)


def test_ready_without_faults(start_api, busy_fleet):
    api = start_api(ocr={"base_url": SERVER})
    server_state.mark_answered(SERVER)
    assert ready(api) == (200, {"status": "ready", "failed": [], "degraded": []})


def test_each_missing_process_is_named(api):
    status, body = ready(api)
    assert (status, body["status"], body["failed"]) == (200, "degraded", [])
    assert names(body["degraded"]) == ["prepare_worker", "ocr_worker", "maintenance", "ocr_server"]


def test_alarms_are_named_beside_the_state_and_an_outage_once(start_api, busy_fleet):
    api = start_api(ocr={"base_url": SERVER})
    server_state.mark_answered(SERVER)
    server_state.set_alarms(SERVER, {"ocr_server": "down: no answer", "no_gpu_workers": "none"})
    assert names(ready(api)[1]["degraded"]) == ["ocr_server", "no_gpu_workers"]
    server_state.mark_out(SERVER, "refused", misconfigured=False)
    degraded = ready(api)[1]["degraded"]
    assert names(degraded) == ["ocr_server", "no_gpu_workers"]
    assert degraded[0]["message"] == "down: refused"


def test_a_server_on_trial_is_a_fault(start_api, busy_fleet):
    """Until its first answer all documents but one wait for it."""
    api = start_api(ocr={"base_url": SERVER})
    ready_run()
    server_state.mark_out(SERVER, "401 from the server", misconfigured=True)
    server_state.begin_trial(SERVER)
    assert ready(api)[1]["degraded"][0]["message"] == "trial: 401 from the server"
    server_state.mark_answered(SERVER)
    assert ready(api)[1]["degraded"] == []


@pytest.mark.parametrize("misconfigured", [False, True])
def test_an_ocr_server_in_outage_is_named_with_its_reason(start_api, busy_fleet, misconfigured):
    api = start_api(ocr={"base_url": SERVER})
    server_state.mark_out(SERVER, "401 from the server", misconfigured=misconfigured)
    status, body = ready(api)
    assert (status, names(body["degraded"])) == (200, ["ocr_server"])
    word = "misconfigured" if misconfigured else "down"
    assert body["degraded"][0]["message"] == f"{word}: 401 from the server"


@pytest.mark.parametrize(
    ("transport", "shrinking", "missing"),
    [("runpod", True, True), ("runpod", False, False), ("direct", True, False)],
)
def test_a_missing_shrinker_is_named_if_jobs_need_it(
    start_api, busy_fleet, monkeypatch, transport, shrinking, missing
):
    monkeypatch.setenv("PATH", "/nonexistent")
    api = start_api(
        ocr={"base_url": SERVER, "transport": transport},
        runpod={"endpoint_id": "e"},
        pdf={"downsample_oversized": shrinking},
    )
    status, body = ready(api)
    assert (status, "ghostscript" in names(body["degraded"])) == (200, missing)


def test_documents_are_accepted_without_a_broker(environment, start_api, make_pdf):
    environment(REDIS_URL=f"redis://{UNREACHABLE}/0")
    api = start_api(redis={"url": SecretStr(f"redis://{UNREACHABLE}/0")})
    document_id = api.add(make_pdf("a"))
    assert api.get(document_id)["status"] == "queued"
    status, body = ready(api)
    assert status == 200
    assert "broker" in names(body["degraded"])
    assert "rag_service_broker_up 0.0" in api.client.get("/metrics").text


def test_without_a_database_answers_are_503_with_retry_after(environment, start_api, make_pdf):
    environment(DATABASE_URL=f"postgresql://x@{UNREACHABLE}/x?connect_timeout=1")
    api = start_api()
    for answer in (api.upload(make_pdf("a")), api.client.get("/documents")):
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
        assert answer.json()["retryable"]
        assert int(answer.headers["retry-after"]) > 0
        assert UNREACHABLE not in answer.text
    status, body = ready(api)
    assert (status, body["status"], names(body["failed"])) == (503, "unavailable", ["database"])
    assert api.client.get("/health/live").is_success
    metrics = api.client.get("/metrics")
    assert metrics.is_success
    assert "rag_service_database_up 0.0" in metrics.text
    assert list((api.settings.data_dir / "documents").glob("incoming/*")) == []


def test_a_database_that_is_not_migrated_is_not_ready(api):
    execute("ALTER TABLE documents RENAME TO elsewhere")
    execute("UPDATE alembic_version SET version_num = '0001'")
    try:
        status, body = ready(api)
        answer = api.client.get("/documents")
    finally:
        execute("ALTER TABLE elsewhere RENAME TO documents")
        execute(f"UPDATE alembic_version SET version_num = '{newest_revision()}'")
    assert (status, names(body["failed"])) == (503, ["database"])
    assert "rag-service migrate" in body["failed"][0]["message"]
    assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
    assert "rag-service migrate" in answer.json()["detail"]


def test_without_its_store_the_service_is_not_ready(api, make_pdf):
    folder = api.settings.data_dir / "documents"
    document_id = api.add(make_pdf("a"))
    shutil.rmtree(folder)
    folder.write_text("a file instead of the folder")
    status, body = ready(api)
    assert (status, names(body["failed"])) == (503, ["storage"])
    for answer in (
        api.upload(make_pdf("b")),
        api.client.get(f"/documents/{document_id}/pages/1/image"),
    ):
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
    assert len(api.client.get("/documents").json()["documents"]) == 1


def test_an_unexpected_error_is_answered_without_its_details(api, monkeypatch):
    def fail(_: str) -> bool:
        raise RuntimeError("details for the log")

    monkeypatch.setattr(deletion, "cancel", fail)
    answer = api.client.post(f"/documents/{'0' * 32}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "details" not in answer.text.replace("the log has the details", "")


class TestMetrics:
    def test_count_what_is_stored(self, api, make_pdf, work_off, busy_fleet):
        api.add(make_pdf("a", "b"))
        work_off("a", "b")
        api.add(make_pdf("c"))
        answer = api.client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.text.splitlines()
        for line in (
            'rag_service_documents{status="processed"} 1.0',
            'rag_service_documents{status="queued"} 1.0',
            'rag_service_runs{state="queued"} 1.0',
            "rag_service_pages 2.0",
            'rag_service_wake_up_messages{stage="prepare"} 2.0',
            'rag_service_workers{stage="ocr"} 1.0',
            'rag_service_forks{stage="ocr"} 8.0',
            'rag_service_forks_busy{stage="ocr"} 0.0',
            'rag_service_fork_deaths_in_a_row{stage="ocr"} 0.0',
            "rag_service_database_up 1.0",
            "rag_service_broker_up 1.0",
        ):
            assert line in lines
        [age] = [x for x in lines if x.startswith('rag_service_oldest_waiting_seconds{stage="prep')]
        assert float(age.split()[1]) > 0

    def test_count_jobs_on_runpod_and_what_they_cost(self, api):
        def figures():
            lines = api.client.get("/metrics").text.splitlines()
            return dict(line.rsplit(" ", 1) for line in lines if line.startswith(name))

        name = "rag_service_remote_"
        assert set(figures().values()) == {"0.0"}
        run = held_run(4)
        jobs = [live_job(run, number) for number in (1, 2, 3)]
        open_job(run, 4)
        remote_jobs.note_poll(jobs[0].id, PollNote(next_in=9, status="IN_QUEUE", error=""))
        remote_jobs.note_poll(jobs[1].id, PollNote(next_in=9, status="HIBERNATING", error=""))
        settle(jobs[2], read_page(3), execution_ms=1500)
        found = {key: value for key, value in figures().items() if value != "0.0"}
        assert found == {
            name + 'jobs_live{status="IN_QUEUE"}': "1.0",
            name + 'jobs_live{status="other"}': "1.0",
            name + 'jobs_live{status="submitting"}': "1.0",
            name + 'jobs_ended{outcome="completed"}': "1.0",
            name + "gpu_seconds": "1.5",
            name + "usd": "0.75",
        }

    def test_count_requests_by_route_and_not_by_id(self, api, make_pdf):
        document_id = api.add(make_pdf("a"))
        api.get(document_id)
        api.client.get("/made/up")
        api.client.request("BREW", "/documents")
        text = api.client.get("/metrics").text
        name = "rag_service_http_requests_total"
        assert f'{name}{{method="POST",route="/documents",status="202"}} 1.0' in text
        assert f'{name}{{method="GET",route="/documents/{{document_id}}",status="200"}} 1.0' in text
        assert f'{name}{{method="GET",route="other",status="404"}} 1.0' in text
        assert document_id not in text
        assert "/made/up" not in text
        assert "BREW" not in text


class TestReference:
    def test_lists_every_operation_and_loads_nothing(self, api):
        page = api.client.get("/docs")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        for path, operations in api.client.get("/openapi.json").json()["paths"].items():
            assert f"<code>{path}</code>" in page.text
            for method in operations:
                assert f"<b>{method.upper()}</b>" in page.text
        for word in ("<script", "src=", "<link", "@import", "https://"):
            assert word not in page.text

    def test_every_operation_is_described_with_its_errors(self, api):
        answer = api.client.get("/openapi.json")
        paths = answer.json()["paths"]
        assert "#/$defs" not in answer.text
        for operations in paths.values():
            for operation in operations.values():
                assert operation["summary"]
                assert operation["description"]
        answers = paths["/documents"]["post"]["responses"]
        assert {"401", "403"} <= set(answers)
        codes = {
            code
            for answer in answers.values()
            for code in answer["content"].get("application/problem+json", {}).get("examples", {})
        }
        assert codes == {
            "internal",
            "method_not_allowed",
            "unsupported_type",
            "empty_file",
            "invalid_options",
            "wrong_password",
            "too_large",
            "options_differ",
            "backlog_full",
            "unauthorized",
            "forbidden",
            "storage_unavailable",
            "database_unavailable",
        }

    def test_the_errors_of_the_router_are_described(self, api):
        description = api.client.get("/openapi.json").json()["info"]["description"]
        for code in ("unauthorized", "forbidden", "not_found", "method_not_allowed"):
            assert f"`{code}`" in description


def test_an_unreachable_layout_server_of_this_node_is_named(start_api, busy_fleet):
    api = start_api(ocr={"base_url": SERVER, "layout": LayoutMode.AUTO})
    server_state.mark_answered(SERVER)
    assert ready(api)[1]["degraded"] == []
    assert "layout_up" not in api.client.get("/metrics").text
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(api.settings.data_dir / "layout.sock"))
    status, body = ready(api)
    assert (status, names(body["degraded"])) == (200, ["layout_server"])
    assert "rag_service_layout_up 0.0" in api.client.get("/metrics").text


def test_a_layout_server_of_another_node_is_checked_by_its_url(start_api, busy_fleet):
    url = {"url": f"http://{UNREACHABLE}"}
    api = start_api(ocr={"base_url": SERVER, "layout": LayoutMode.REGIONS}, layout=url)
    server_state.mark_answered(SERVER)
    assert names(ready(api)[1]["degraded"]) == ["layout_server"]
    api = start_api(ocr={"base_url": SERVER, "layout": LayoutMode.PAGE}, layout=url)
    assert ready(api)[1]["degraded"] == []
    assert "layout_up" not in api.client.get("/metrics").text


def test_a_disk_that_runs_low_is_degraded_and_a_metric(start_api, busy_fleet):
    api = start_api(ocr={"base_url": SERVER}, storage={"min_free_bytes": 1 << 60})
    server_state.mark_answered(SERVER)
    status, body = ready(api)
    assert (status, names(body["degraded"])) == (200, ["disk_low"])
    assert "GiB are free in" in body["degraded"][0]["message"]
    assert "storage.min_free_bytes" in body["degraded"][0]["message"]
    metrics = api.client.get("/metrics").text
    assert "rag_service_storage_up 1.0" in metrics
    for use in ("documents", "data"):
        [line] = [line for line in metrics.splitlines() if f'free_bytes{{use="{use}"}}' in line]
        assert 0 < float(line.split()[-1]) < 1 << 60
    assert f"rag_service_disk_min_free_bytes {float(1 << 60)}" in metrics


def test_a_read_that_takes_too_long_is_ended_and_says_so(api, make_pdf, monkeypatch):
    document_id = api.add(make_pdf("a"))
    monkeypatch.setattr(engine, "READ_SECONDS", 0.2)
    reads = ["", f"/{document_id}", f"/{document_id}/pages", f"/{document_id}/jobs"]
    with begin() as other:
        other.exec_driver_sql("LOCK TABLE documents, runs, pages, remote_jobs")
        for path in [f"/documents{read}" for read in reads] + ["/summary"]:
            answer = api.client.get(path)
            assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
            assert "took too long" in answer.json()["detail"]
        metrics = api.client.get("/metrics")
        assert metrics.status_code == 200
        assert "rag_service_database_up 0.0" in metrics.text
    assert api.client.get(f"/documents/{document_id}").status_code == 200
    assert "rag_service_database_up 1.0" in api.client.get("/metrics").text
