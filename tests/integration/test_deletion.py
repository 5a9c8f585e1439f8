"""Cancel, delete and removal, also concurrent with workers."""

import pytest

from rag_service.documents import deletion
from rag_service.documents.storage import DocumentStore, working_key
from rag_service.errors import LeaseLost, NotFound, StorageUnavailable
from rag_service.jobs import leases, runs
from rag_service.knowledgebase import document_queries
from rag_service.states import PageState, RunState
from tests import simulation as sim
from tests.simulation import at_once, claim, document_row, newest_run

ROUNDS = 20


@pytest.fixture
def store(settings):
    """The store, which is marked before there are documents."""
    store = DocumentStore(settings)
    store.check()
    return store


def put(store, document_id, key=None):
    """Store bytes for the document and return their key."""
    row = document_row(document_id)
    path = store.incoming() / "given"
    path.write_bytes(b"%PDF")
    store.put_file(key or row.source_key, path)
    return key or row.source_key


def test_cancel_returns_whether_a_run_was_active(settings):
    document_id = sim.add_document()
    assert deletion.cancel(document_id)
    assert not deletion.cancel(document_id)
    assert newest_run(document_id).state == RunState.CANCELLED
    with pytest.raises(NotFound):
        deletion.cancel("unknown")


def test_the_owner_of_a_cancelled_run_loses_its_lease(settings):
    sim.add_document()
    run = claim()
    deletion.cancel(run.document_id)
    assert not leases.renew(run, settings.lease)
    with pytest.raises(LeaseLost):
        sim.plan(run, PageState.NATIVE)


def test_done_pages_stay_after_a_cancel(settings):
    run = sim.ready_run(PageState.NATIVE)
    deletion.cancel(run.document_id)
    assert sim.page_row(run.id, 2).state == PageState.NATIVE


def test_a_deleted_document_is_not_shown_any_more(settings):
    document_id = sim.add_document()
    deletion.delete(document_id)
    assert document_queries.get_document(document_id, None) is None
    assert newest_run(document_id).state == RunState.CANCELLED
    for action in (deletion.delete, deletion.cancel):
        with pytest.raises(NotFound):
            action(document_id)


def test_removal_removes_rows_and_bytes_of_deleted_documents_only(store):
    kept, gone = sim.add_document(), sim.add_document()
    keys = [put(store, document_id) for document_id in (kept, gone)]
    deletion.delete(gone)
    assert deletion.remove_deleted(store) == 1
    assert [store.exists(key) for key in keys] == [True, False]
    assert [row.id for row in sim.rows("SELECT id FROM documents")] == [kept]
    assert deletion.remove_deleted(store) == 0


def test_bytes_that_cannot_be_removed_now_are_removed_later(store, monkeypatch):
    document_id = sim.add_document()
    key = put(store, document_id)
    deletion.delete(document_id)

    def unreachable(_):
        raise StorageUnavailable

    with monkeypatch.context() as outage:
        outage.setattr(store, "delete", unreachable)
        assert deletion.remove_deleted(store) == 0
    assert store.exists(key)
    assert deletion.remove_deleted(store) == 1
    assert not store.exists(key)


def test_a_decrypted_copy_that_no_row_names_is_removed_too(store):
    document_id = sim.add_document()
    key = put(store, document_id, working_key(document_id))
    deletion.delete(document_id)
    deletion.remove_deleted(store)
    assert not store.exists(key)


def test_removal_is_limited_per_call(store):
    for _ in range(5):
        deletion.delete(sim.add_document())
    assert [deletion.remove_deleted(store, limit=2) for _ in range(4)] == [2, 2, 1, 0]


def test_a_worker_of_a_removed_document_loses_its_lease(store):
    run = sim.ready_run()
    deletion.delete(run.document_id)
    deletion.remove_deleted(store)
    with pytest.raises(LeaseLost):
        sim.read(run, 1)


def ended(run):
    try:
        return runs.finish(run)
    except LeaseLost:
        return None


def test_concurrent_delete_removal_and_finish_never_deadlock(store):
    for _ in range(ROUNDS):
        document_id = sim.add_document()
        run = claim()
        sim.plan(run, PageState.NATIVE)
        outcomes = at_once(
            lambda run=run: ended(run),
            lambda document_id=document_id: deletion.delete(document_id),
            lambda: deletion.remove_deleted(store),
            lambda task=run: leases.release_worker("worker"),
        )
        assert not [one for one in outcomes if isinstance(one, Exception)]
        deletion.remove_deleted(store)
        assert sim.rows("SELECT 1 FROM documents") == []


def redo(document_id):
    try:
        return sim.add_run(document_id)
    except NotFound:
        return None


def test_no_run_stays_queued_after_a_concurrent_delete(settings):
    for _ in range(ROUNDS):
        document_id = sim.processed_document(PageState.NATIVE)
        outcomes = at_once(
            lambda document_id=document_id: redo(document_id),
            lambda document_id=document_id: deletion.delete(document_id),
        )
        assert not [one for one in outcomes if isinstance(one, Exception)]
        assert sim.rows("SELECT 1 FROM runs WHERE state = 'queued'") == []
