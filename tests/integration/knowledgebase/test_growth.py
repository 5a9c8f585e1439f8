"""No statement that is sent often reads a large table from end to end."""

from decimal import Decimal

import pytest
from sqlalchemy import text

from rag_service.database import document_rows, totals
from rag_service.database.engine import begin, get_engine
from rag_service.errors import Cancelled
from rag_service.jobs import runs
from rag_service.knowledgebase import document_queries
from rag_service.knowledgebase.selection import Selectors, select_documents
from rag_service.states import PageState, Priority, Stage
from tests import simulation as sim
from tests.archive import Archive, fill
from tests.archive_actions import all_cases
from tests.derived_status import assert_stored_agrees_with_derived
from tests.plans import LARGE, plans_of

pytestmark = pytest.mark.usefixtures("settings")
# A reprocess by what pages say of their engine reads pages; with matches, as much as it selects.
MAY_SCAN = {
    "--model-was, none", "--failed", "--error", "--error of pages", "--truncated",
    "--since the last hour", "--collection rare",
}  # fmt: skip


@pytest.fixture
def archive():
    with begin() as connection:
        fill(connection, Archive(12_000, queued=500))
    with get_engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM (ANALYZE) documents, runs, pages, remote_jobs"))


@pytest.mark.timeout(300)
def test_nothing_that_is_asked_often_scans_a_large_table(archive):
    assert_stored_agrees_with_derived()
    scanning = {
        f"{group}: {name}": (plan.scanned, plan.statement)
        for group, name, action in all_cases()
        for plan in plans_of(action)
        if plan.scanned and name not in MAY_SCAN
    }
    assert scanning == {}
    assert_stored_agrees_with_derived()
    no_large_table_is_scanned_by_triggers()


def no_large_table_is_scanned_by_triggers():
    """The plans above are of statements alone, without those of their triggers."""
    # A connection of its own: an older one may still count the scans of transactions before this.
    get_engine().dispose()
    with begin() as connection:
        before = scans_of_large_tables(connection)
        new = document_rows.NewDocument("default", "ab" * 32, "a.pdf", "application/pdf", 9)
        document_id = document_rows.insert_document(connection, new, "key")
        runs.add_run(connection, document_id, sim.OPTIONS, Priority.BULK)
        assert runs.cancel(connection, document_id, Cancelled())
        assert document_rows.mark_deleted(connection, document_id)
        document_rows.remove(connection, document_id)
        assert scans_of_large_tables(connection) == before


def scans_of_large_tables(connection):
    """Sequential scans by this connection, those of earlier transactions included."""
    query = "SELECT relname, seq_scan FROM pg_stat_xact_user_tables"
    return {
        row.relname: row.seq_scan for row in connection.execute(text(query)) if row.relname in LARGE
    }


def test_changes_are_added_to_their_totals_and_counted_before_that_too():
    sim.processed_document(PageState.NATIVE, PageState.NATIVE)
    failed = sim.processed_document(PageState.FAILED)
    before = totals.read_totals()
    assert (before.documents, before.pages) == ({"processed": 1, "failed": 1}, 3)
    assert totals.add_changes() > 0
    assert totals.add_changes() == 0
    assert sim.rows("SELECT 1 FROM total_changes") == []
    with begin() as connection:
        document_rows.mark_deleted(connection, failed)
    after = totals.read_totals()
    assert (after.documents, after.runs) == ({"processed": 1}, {"processed": 1, "failed": 1})
    with begin() as connection:
        document_rows.remove(connection, failed)
        assert totals.stored_totals(connection)["runs:failed"] == Decimal(0)
    assert totals.read_totals().runs == {"processed": 1}


def test_counting_waits_for_no_other_transaction():
    first, second = sim.add_document(), sim.add_document()
    with begin() as slow:
        assert runs.cancel(slow, first, Cancelled())
        with begin() as other:
            other.execute(text("SET LOCAL lock_timeout = '2s'"))
            assert runs.cancel(other, second, Cancelled())
        assert totals.add_changes() > 0
        assert totals.read_totals().runs == {"cancelled": 1, "queued": 1}
    assert totals.read_totals().runs == {"cancelled": 2}


def test_a_place_beyond_the_counted_ones_is_not_given(monkeypatch):
    monkeypatch.setattr(document_queries, "_PLACES_COUNTED", 2)
    ids = [sim.add_document() for _ in range(3)]
    found = [document_queries.get_document(one, None) for one in ids]
    assert [view.queue_position for view in found] == [1, 2, None]
    assert [view.waiting_for for view in found] == ["worker"] * 3


def test_status_and_error_are_those_that_the_listing_filters_by():
    document_id = sim.processed_document(PageState.NATIVE)
    sim.add_run(document_id, sim.OTHER_OPTIONS)
    with begin() as connection:
        runs.cancel(connection, document_id, Cancelled())
    row = sim.document_row(document_id)
    assert (row.status, row.latest_error, row.page_count) == ("processed", "cancelled", 1)
    for chosen in (
        document_queries.Filter(error="cancelled"),
        document_queries.Filter(status="processed", error="cancelled"),
    ):
        assert [v.id for v in document_queries.list_documents(chosen, 9, None)] == [document_id]
    assert sim.try_claim(Stage.PREPARE) is None


def test_the_listing_and_a_reprocess_select_the_same_documents_by_error():
    with begin() as connection:
        fill(connection, Archive(400, queued=20))
    codes = {row.code for row in sim.rows(
        "SELECT error_code AS code FROM runs UNION SELECT error_code FROM pages"
    ) if row.code}  # fmt: skip
    assert {"corrupt_pdf", "page_timeout"} <= codes
    for code in codes:
        listed = document_queries.list_documents(document_queries.Filter(error=code), 1000, None)
        with begin() as connection:
            selected = select_documents(connection, Selectors(error=code))
        assert {view.id for view in listed} == {one.id for one in selected}
        assert [v.created_at for v in listed] == sorted(
            (v.created_at for v in listed), reverse=True
        )
        some = document_queries.list_documents(document_queries.Filter(error=code), 2, None)
        assert [view.id for view in some] == [view.id for view in listed[:2]]
