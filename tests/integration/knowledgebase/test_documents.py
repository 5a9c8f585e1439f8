"""Document rows: one undeleted row per content and collection, its lock, its removal."""

import threading

import pytest
from sqlalchemy.exc import IntegrityError

from rag_service.database import document_rows
from rag_service.database.document_rows import NewDocument
from rag_service.database.engine import begin
from rag_service.states import PageState, RunState
from tests import simulation as sim
from tests.simulation import document_row

pytestmark = pytest.mark.usefixtures("settings")
SHA = "ab" * 32


def find_by_content(collection="default", sha256=SHA):
    with begin() as connection:
        return document_rows.find_by_content(connection, collection, sha256)


def mark_deleted(document_id):
    with begin() as connection:
        return document_rows.mark_deleted(connection, document_id)


def remove(document_id):
    with begin() as connection:
        document_rows.remove(connection, document_id)


def is_needed(document_id, key="sha256/ab/" + SHA):
    with begin() as connection:
        return document_rows.is_needed(connection, SHA, key, besides=document_id)


def test_content_is_found_in_its_own_collection_only():
    document_id = sim.add_document(sha256=SHA)
    found = find_by_content()
    assert (found.id, found.state, found.active) == (document_id, RunState.QUEUED, True)
    assert found.fingerprint == sim.OPTIONS.fingerprint
    assert find_by_content("other") is None
    assert find_by_content(sha256="cd" * 32) is None


def test_a_found_document_has_the_state_of_its_newest_run():
    document_id = sim.processed_document(PageState.FAILED)
    sim.add_run(document_id, sim.OTHER_OPTIONS)
    with begin() as connection:
        found = document_rows.find(connection, document_id)
    assert (found.state, found.fingerprint) == (RunState.QUEUED, sim.OTHER_OPTIONS.fingerprint)


def test_the_same_content_is_rejected_in_the_same_collection():
    sim.add_document(sha256=SHA)
    sim.add_document(sha256=SHA, collection="other")
    with pytest.raises(IntegrityError):
        sim.add_document(sha256=SHA)


def test_the_content_of_a_deleted_document_may_be_added_again():
    old = sim.add_document(sha256=SHA)
    assert mark_deleted(old)
    assert not mark_deleted(old)
    assert not mark_deleted("unknown")
    assert find_by_content() is None
    new = sim.add_document(sha256=SHA)
    assert find_by_content().id == new
    assert [one.id for one in document_rows.removable_documents(9)] == [old]


def test_removing_a_document_removes_its_runs_and_pages():
    document_id = sim.processed_document(PageState.NATIVE)
    other = sim.processed_document(PageState.NATIVE)
    remove(document_id)
    assert {row.document_id for row in sim.rows("SELECT document_id FROM runs")} == {other}
    assert len(sim.rows("SELECT 1 FROM pages")) == 1


def test_bytes_are_needed_while_another_document_has_them():
    first = sim.add_document(sha256=SHA)
    assert not is_needed(first)
    second = sim.add_document(sha256=SHA, collection="other")
    assert is_needed(first)
    mark_deleted(second)
    assert is_needed(first), "a deleted document is still to be removed"
    with begin() as connection:
        document_rows.set_source(connection, second, "working/own.pdf")
    assert not is_needed(first)


def test_a_file_name_is_cleaned_for_the_database():
    new = NewDocument("default", SHA, "a\x00b\udc80.pdf", "application/pdf", 1)
    with begin() as connection:
        document_id = document_rows.insert_document(connection, new, "sha256/ab/" + SHA)
    assert document_row(document_id).filename == "a b.pdf"


def test_the_content_lock_has_one_holder_at_a_time():
    inside, most = [], []

    def work():
        with document_rows.content_lock(SHA):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.002)
            inside.pop()

    for _ in range(5):
        assert sim.at_once(*[work] * 4) == [None] * 4
    assert set(most) == {1}
    assert len(most) == 20


def test_the_content_lock_is_per_content_and_released_after_an_error():
    def broken():
        with document_rows.content_lock(SHA):
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    with document_rows.content_lock("cd" * 32), document_rows.content_lock(SHA):
        assert len(sim.rows("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'")) == 2
    assert sim.rows("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'") == []


def test_the_content_lock_has_no_snapshot_that_would_hold_up_a_vacuum():
    with document_rows.content_lock(SHA):
        idle = "SELECT backend_xmin FROM pg_stat_activity WHERE state = 'idle in transaction'"
        assert [row.backend_xmin for row in sim.rows(idle)] == [None]
