"""Views of documents and pages, and the cost of their queries with many documents."""

import json
import re

import psycopg
import pytest
from sqlalchemy import event

from rag_service.database.document_rows import removable_documents
from rag_service.database.engine import get_engine
from rag_service.documents import deletion
from rag_service.errors import EncryptedPdf, OcrUnavailable
from rag_service.jobs import leases, live_workers, run_pages, runs, server_state
from rag_service.jobs.run_pages import StoredPage
from rag_service.knowledgebase import document_queries, page_queries
from rag_service.knowledgebase.document_queries import Filter
from rag_service.states import GOOD, PageState, Priority, RunState, Stage
from tests import simulation as sim
from tests.simulation import claim, planned_numbers, ready_run

pytestmark = pytest.mark.usefixtures("settings")
URL = "http://ocr"


def show(document_id, server=None):
    return document_queries.get_document(document_id, server)


def listed(limit=100, server=None, **chosen):
    return [one.id for one in document_queries.list_documents(Filter(**chosen), limit, server)]


def test_a_new_document_waits_for_a_worker_then_in_the_queue():
    first, second = sim.add_document(), sim.add_document()
    view = show(second)
    assert (view.status, view.waiting_for, view.queue_position) == ("queued", "worker", 2)
    assert (view.started_at, view.run_seconds, view.pages.total) == (None, None, None)
    live_workers.heartbeat("a", Stage.OCR, 2)
    assert show(first).waiting_for == "worker"
    live_workers.heartbeat("b", Stage.PREPARE, 2)
    assert (show(first).waiting_for, show(first).queue_position) == ("queue", 1)
    urgent = sim.add_document(Priority.INTERACTIVE)
    assert [show(one).queue_position for one in (urgent, first, second)] == [1, 2, 3]
    claim()
    view = show(urgent)
    assert (view.status, view.waiting_for, view.queue_position) == ("preparing", None, None)
    assert show(first).queue_position == 1


def test_each_stage_has_its_own_queue():
    run = ready_run()
    sim.add_document()
    other = sim.add_document()
    assert show(run.document_id).queue_position == 1
    assert show(other).queue_position == 2


def test_an_outage_and_a_later_try_are_reasons_to_wait():
    live_workers.heartbeat("a", Stage.OCR, 2)
    run = ready_run()
    server_state.mark_out(URL, "refused", misconfigured=False)
    assert show(run.document_id, URL).waiting_for == "ocr_server"
    assert show(run.document_id).waiting_for == "queue"
    server_state.begin_trial(URL)
    assert show(run.document_id, URL).waiting_for == "queue"
    server_state.mark_answered(URL)
    leases.release(claim(Stage.OCR), retry_in=60)
    assert show(run.document_id, URL).waiting_for == "retry"


def test_progress_is_counted_from_stored_pages():
    run = ready_run(PageState.NATIVE, PageState.BLANK, PageState.FAILED)
    view = show(run.document_id)
    assert (view.pages.total, view.pages.done) == (4, 3)
    assert (view.pages.native, view.pages.blank, view.pages.failed, view.pages.ocr) == (1, 1, 1, 0)
    sim.execute("UPDATE runs SET worked_seconds = 30")
    assert show(run.document_id).eta_seconds == 10
    sim.read(claim(Stage.OCR), 1)
    assert show(run.document_id).pages.done == 4


def test_the_status_is_the_current_runs_and_the_newest_run_is_shown_too():
    document_id = sim.processed_document(PageState.NATIVE)
    sim.add_run(document_id, sim.OTHER_OPTIONS)
    view = show(document_id)
    assert (view.status, view.latest_run.status, view.ocr) == ("processed", "queued", "auto")
    assert (view.queue_position, view.incomplete) == (1, False)
    run = claim()
    runs.fail(run, OcrUnavailable())
    view = show(document_id)
    assert (view.status, view.error) == ("processed", None)
    assert (view.latest_run.status, view.latest_run.error.code) == ("failed", "ocr_unavailable")
    assert view.latest_run.error.retryable
    assert page_queries.shown_run_id(document_id) != run.id


def test_a_failed_document_with_good_pages_is_incomplete():
    document_id = sim.processed_document(PageState.NATIVE, PageState.FAILED)
    view = show(document_id)
    assert (view.status, view.incomplete, view.error.code) == ("failed", True, "pages_failed")
    [good, bad] = page_queries.list_pages(page_queries.shown_run_id(document_id))
    assert (good.markdown, good.error) == ("some text", None)
    assert (bad.status, bad.error.code) == ("failed", "page_unrenderable")


@pytest.mark.parametrize(
    ("kept", "incomplete"),
    [
        ((PageState.FAILED,), False),
        ((PageState.FAILED, PageState.FAILED), False),
        *(((good, PageState.FAILED), True) for good in sorted(GOOD)),
    ],
)
def test_incomplete_means_failed_with_at_least_one_good_page(kept, incomplete):
    view = show(sim.processed_document(*kept))
    assert (view.status, view.incomplete) == ("failed", incomplete)


def test_documents_without_a_current_run_are_not_incomplete():
    locked = sim.add_document()
    runs.fail(claim(), EncryptedPdf())
    assert (show(locked).status, show(locked).incomplete) == ("failed", False)
    run = ready_run(PageState.NATIVE)
    deletion.cancel(run.document_id)
    view = show(run.document_id)
    assert (view.status, view.pages.native, view.incomplete) == ("cancelled", 1, False)


def test_a_run_without_renewals_waits_for_a_worker_before_its_lease_expires(settings):
    sim.add_document()
    run = claim()
    lease = settings.lease
    silent = "UPDATE runs SET lease_expires_at = now() + (:left * interval '1 s')"
    sim.execute(silent, left=lease.seconds - lease.renew_every)
    assert show(run.document_id).waiting_for is None
    sim.execute(silent, left=lease.seconds - lease.give_up_after - 1)
    view = show(run.document_id)
    assert (view.status, view.waiting_for, view.queue_position) == ("preparing", "worker", None)
    runs.fail(run, EncryptedPdf())
    assert show(run.document_id).waiting_for is None


def test_pages_are_listed_in_order_and_in_parts():
    document_id = sim.processed_document(*[PageState.NATIVE] * 5)
    run_id = page_queries.shown_run_id(document_id)
    assert [p.number for p in page_queries.list_pages(run_id, after=2, limit=2)] == [3, 4]
    assert page_queries.get_page(run_id, 5).number == 5
    assert page_queries.get_page(run_id, 6) is None
    assert page_queries.get_page("unknown", 1) is None


def test_unknown_and_deleted_documents_are_not_shown():
    document_id = sim.add_document()
    sim.execute("UPDATE documents SET deleted_at = now()")
    assert show(document_id) is show("unknown") is None
    assert page_queries.shown_run_id(document_id) is None
    assert document_queries.get_source(document_id) is None
    assert listed() == []


def test_every_document_of_a_listing_shows_its_own_warnings():
    """Also if another document has more warnings than are shown."""
    documents = []
    for count in (300, 1, 300):
        documents.append(sim.add_document())
        run = claim()
        sim.plan(run, *[PageState.PENDING] * count)
        warning = {"code": "page_truncated", "message": "cut"}
        for number in range(1, count + 1):
            outcome = StoredPage(number, PageState.TRUNCATED, "t", {}, [warning])
            run_pages.store(run, outcome)
        runs.store_preflight(run, count, [{"code": "repaired_pdf", "message": "repaired"}])
        runs.finish(run)
    views = {view.id: view for view in document_queries.list_documents(Filter(), 10, None)}
    assert [len(views[one].warnings) for one in documents] == [201, 2, 201]
    small = views[documents[1]].warnings
    assert [(w.code, w.page) for w in small] == [("repaired_pdf", None), ("page_truncated", 1)]
    assert views[documents[0]].warnings[-1].page == 200


def test_a_listing_is_filtered_and_paged():
    failed = sim.add_document(collection="a")
    runs.fail(claim(), EncryptedPdf())
    good = sim.processed_document(PageState.NATIVE)
    waiting = sim.add_document(collection="a")
    assert listed() == [waiting, good, failed]
    assert listed(status=RunState.FAILED) == [failed]
    assert listed(status=RunState.QUEUED) == [waiting]
    assert listed(collection="a") == [waiting, failed]
    assert listed(error="encrypted_pdf", collection="a") == [failed]
    place, seen = None, []
    while found := document_queries.list_documents(Filter(after=place), 1, None):
        seen.append(found[0].id)
        place = (found[0].created_at, found[0].id)
    assert seen == [waiting, good, failed]


def test_the_error_filter_uses_the_newest_run_and_status_the_current_one():
    document_id = sim.processed_document(PageState.NATIVE)
    sim.add_run(document_id, sim.OTHER_OPTIONS)
    runs.fail(claim(), EncryptedPdf())
    assert listed(error="encrypted_pdf") == [document_id]
    assert listed(status=RunState.PROCESSED) == [document_id]
    assert listed(status=RunState.FAILED) == []


def test_documents_with_the_same_time_are_paged_without_loss():
    ids = {sim.add_document() for _ in range(5)}
    sim.execute("UPDATE documents SET created_at = '2026-01-01'")
    place, seen = None, []
    while found := document_queries.list_documents(Filter(after=place), 2, None):
        seen += [one.id for one in found]
        place = (found[-1].created_at, found[-1].id)
    assert sorted(seen) == sorted(ids)
    assert len(seen) == 5


WAITING, ENDED, PAGES = 10_000, 3_000, 10


@pytest.fixture
def many():
    """10,000 waiting runs and 3,000 ended runs with ten pages each, and jobs."""
    sim.execute(
        "INSERT INTO documents (id, collection, sha256, filename, media_type, bytes, source_key,"
        " created_at) SELECT lpad(to_hex(n), 32, '0'), 'default', n::text, 'a.pdf', 'x', 1, 'k',"
        " now() - n * interval '1 s' FROM generate_series(1, :count) n",
        count=WAITING + ENDED,
    )
    sim.execute(
        "INSERT INTO runs (id, document_id, number, state, parser, model, ocr, dpi, layout,"
        " fingerprint, priority, reuse_pages, redo_pages, epoch, crashes, expiries, worked_seconds,"
        " warnings, created_at, queued_at)"
        " SELECT id, id, 1, CASE WHEN row_number() OVER (ORDER BY id) > :waiting THEN 'processed'"
        " WHEN random() < 0.5 THEN 'ready' ELSE 'queued' END,"
        " 'glmocr', 'm', 'auto', 150, 'auto', 'f', 1, true, '{}', 0, 0, 0, 0, '[]',"
        " created_at, created_at FROM documents",
        waiting=WAITING,
    )
    sim.execute(
        "INSERT INTO pages (run_id, number, plan, plan_reason, state, width_pt, height_pt,"
        " markdown, regions, fingerprint, reused, tries, warnings)"
        " SELECT id, n, 'ocr', '', 'pending', 1, 1, 'text', '[]', 'f', false, 0, '[]'"
        " FROM runs, generate_series(1, :pages) n WHERE state <> 'queued'",
        pages=PAGES,
    )
    sim.execute(
        "INSERT INTO remote_jobs (id, run_id, kind, base_url, endpoint_id, token_sha256,"
        " request_key, pages, reason, state, epoch, cancel_wanted, deadline_passed, expires_at,"
        " next_poll_at, polls, usd_per_second)"
        " SELECT id, id, 'runpod', 'b', 'e', id, 'k', '{1}', 'first', 'ended', 0, false, false,"
        " now(), now(), 0, 0 FROM runs WHERE state <> 'queued'"
    )
    with get_engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("ANALYZE")


def statements_of(action):
    """Return the statements that the action sends, with their parameters."""
    sent = []

    def note(connection, cursor, statement, parameters, *_):
        if re.match(r"\s*(WITH|SELECT|UPDATE)", statement):
            sent.append((statement, parameters))

    event.listen(get_engine(), "before_cursor_execute", note)
    try:
        action()
    finally:
        event.remove(get_engine(), "before_cursor_execute", note)
    return sent


def plan_of(statement, parameters, analyze=False):
    """Return PostgreSQL's plan as a list of nodes."""
    raw = get_engine().raw_connection()
    try:
        cursor = psycopg.ClientCursor(raw.driver_connection)
        sql = cursor.mogrify(statement, parameters)
        options = "ANALYZE, TIMING OFF, FORMAT JSON" if analyze else "FORMAT JSON"
        tree = cursor.execute(f"EXPLAIN ({options}) {sql}").fetchone()[0]
    finally:
        raw.rollback()
        raw.close()
    tree = tree if isinstance(tree, list) else json.loads(tree)
    return list(nodes_of(tree[0]["Plan"]))


def nodes_of(node):
    yield node
    for child in node.get("Plans", []):
        yield from nodes_of(child)


def sequential_scans(action):
    return {
        node["Relation Name"]
        for statement, parameters in statements_of(action)
        for node in plan_of(statement, parameters)
        if node["Node Type"] == "Seq Scan"
    }


def test_a_claim_uses_its_index(many):
    for stage in Stage:
        sent = statements_of(lambda stage=stage: sim.try_claim(stage, server=URL))
        [choosing] = [(s, p) for s, p in sent if "SKIP LOCKED" in s]
        nodes = plan_of(*choosing)
        print(choosing)
        [print({k: v for k, v in n.items() if k != "Plans"}) for n in nodes]
        assert "ix_runs_claim" in {node.get("Index Name") for node in nodes}
        assert not {"Sort", "Incremental Sort", "Seq Scan"} & {
            node["Node Type"] for node in nodes if node.get("Relation Name") != "ocr_servers"
        }


def test_a_prepared_claim_uses_its_index_too(many):
    """A generic plan does not know a parameter, so the state must be a literal in the text."""
    sent = statements_of(sim.try_claim)
    [(statement, parameters)] = [(s, p) for s, p in sent if "SKIP LOCKED" in s]
    names = {name: f"${place}" for place, name in enumerate(parameters, start=1)}
    generic = re.sub(r"%\((\w+)\)s", lambda match: names[match[1]], statement)
    raw = get_engine().raw_connection()
    try:
        cursor = raw.driver_connection.cursor()
        rows = cursor.execute(f"EXPLAIN (GENERIC_PLAN) {generic}").fetchall()
    finally:
        raw.close()
    assert any("ix_runs_claim" in line for (line,) in rows)


def test_a_workers_queries_never_scan_whole_tables(many):
    run = claim()

    def work():
        leases.renew(run, sim.lease())
        leases.is_valid(run)
        run_pages.pending(run)
        planned_numbers(run)
        run_pages.seconds_until_due(run)
        run_pages.mark_in_progress(run, 1)
        sim.read(run, 1)
        leases.release(run)

    assert sequential_scans(work) <= {"ocr_servers", "workers"}


def test_queries_of_maintenance_never_scan_pages_or_documents(many):
    def look():
        removable_documents(100)
        leases.release_expired(sim.lease())
        show(f"{7:032x}", URL)
        page_queries.list_pages(f"{7:032x}")
        runs.next_claimable(Stage.PREPARE, URL, 8)

    assert not {"documents", "pages"} & sequential_scans(look)


def test_a_listing_scans_no_table_and_reads_each_waiting_run_once(many):
    """100 of 10,000 waiting documents: the queue is numbered once, not for each document."""
    sent = statements_of(lambda: document_queries.list_documents(Filter(), 100, URL))
    touched = 0
    for statement, parameters in sent:
        for node in plan_of(statement, parameters, analyze=True):
            relation = node.get("Relation Name")
            assert (node["Node Type"], relation) != ("Seq Scan", "pages")
            assert (node["Node Type"], relation) != ("Seq Scan", "documents")
            if relation == "runs":
                touched += node["Actual Rows"] * node["Actual Loops"]
    assert WAITING <= touched <= WAITING + ENDED + 2_000
    views = document_queries.list_documents(Filter(), 100, URL)
    assert sorted(view.queue_position for view in views)[-1] > WAITING / 3
