"""Uploads: new, duplicate, rejected, and concurrent with others."""

import hashlib
import threading

import pytest

from rag_service.database import document_rows
from rag_service.database.engine import begin
from rag_service.documents import deletion, intake
from rag_service.documents.incoming_file import IncomingFile
from rag_service.documents.intake import accept, check_options, display_name
from rag_service.documents.storage import DocumentStore, source_key, working_key
from rag_service.errors import (
    BacklogFull,
    EmptyFile,
    EncryptedPdf,
    Internal,
    InvalidOptions,
    OptionsDiffer,
    UnsupportedType,
)
from rag_service.jobs import runs
from rag_service.jobs.wake_ups import queue_length
from rag_service.states import LayoutMode, PageState, Priority, RunState, Stage
from tests import simulation as sim
from tests.conftest import changed_settings
from tests.simulation import at_once, claim, document_row, newest_run

PDF = b"%PDF-1.7\n% a test file\n"
KEY = source_key(hashlib.sha256(PDF).hexdigest())


@pytest.fixture
def store(settings):
    return DocumentStore(settings)


@pytest.fixture
def upload(settings, store):
    def send(content=PDF, filename="a.pdf", decrypted=None, **choices):
        options = check_options(choices.pop("settings", settings), **choices)
        with IncomingFile(settings, store.incoming()) as file:
            file.write(content)
            return accept(settings, store, file, filename, options, decrypted=decrypted)

    return send


def end(how):
    run = claim()
    if how is RunState.PROCESSED:
        sim.plan(run, PageState.NATIVE)
        runs.finish(run)
    elif how is RunState.FAILED:
        runs.fail(run, EncryptedPdf())
    elif how is RunState.CANCELLED:
        deletion.cancel(run.document_id)
    return run


def stored(store, key=KEY):
    return store.exists(key)


def test_a_new_file_is_stored_recorded_and_notified(upload, store):
    accepted = upload(filename="C:\\folder\\a report.pdf", priority="interactive", ocr="force")
    assert (accepted.status, accepted.duplicate, accepted.queued) == ("queued", False, True)
    row, run = document_row(accepted.id), newest_run(accepted.id)
    assert (row.filename, row.collection, row.bytes) == ("a report.pdf", "default", len(PDF))
    assert (row.media_type, row.source_key) == ("application/pdf", KEY)
    assert (run.priority, run.ocr, run.state) == (Priority.INTERACTIVE, "force", "queued")
    with store.open_local(KEY) as path:
        assert path.read_bytes() == PDF
    assert queue_length(Stage.PREPARE) == 1


@pytest.mark.parametrize("state", [None, "held", *(s for s in RunState if s in runs.TERMINAL)])
@pytest.mark.parametrize("ocr", ["auto", "force"])
def test_the_same_bytes_are_uploaded_again(upload, state, ocr):
    first = upload()
    run = claim() if state == "held" else end(state) if state else None
    ended_badly = state in (RunState.FAILED, RunState.CANCELLED)
    if ocr == "force" and not ended_badly:
        with pytest.raises(OptionsDiffer, match=first.id):
            upload(ocr=ocr)
        assert newest_run(first.id).number == 1
        return
    again = upload(ocr=ocr)
    assert (again.id, again.duplicate, again.queued) == (first.id, True, ended_badly)
    newest = newest_run(first.id)
    assert newest.number == (2 if ended_badly else 1)
    assert again.status == newest.state
    assert not ended_badly or newest.ocr == ocr
    assert run is None or run.document_id == first.id
    assert len(sim.rows("SELECT 1 FROM documents")) == 1


def test_another_collection_is_another_document_with_the_same_bytes(upload):
    first, second = upload(), upload(collection="other")
    assert first.id != second.id
    assert document_row(first.id).source_key == document_row(second.id).source_key


def test_a_deleted_file_may_be_uploaded_again_at_once(upload, store):
    first = upload()
    deletion.delete(first.id)
    second = upload()
    assert (second.duplicate, second.id != first.id) == (False, True)
    assert deletion.remove_deleted(store) == 1
    assert stored(store), "the new document's bytes went with the old one"


def test_bytes_are_removed_with_their_last_reference(upload, store):
    first, second = upload(), upload(collection="other")
    deletion.delete(first.id)
    deletion.remove_deleted(store)
    assert stored(store)
    deletion.delete(second.id)
    deletion.remove_deleted(store)
    assert not stored(store)


@pytest.mark.parametrize(
    ("content", "error"), [(b"", EmptyFile), (b"plain words", UnsupportedType)]
)
def test_a_rejected_upload_leaves_nothing(upload, settings, content, error):
    with pytest.raises(error):
        upload(content)
    assert sim.rows("SELECT 1 FROM documents") == []
    assert list((settings.data_dir / "documents" / "incoming").iterdir()) == []


def test_a_full_backlog_rejects_uploads(upload, settings, store):
    upload()
    full = changed_settings(settings, limits={"max_backlog": 1})
    with IncomingFile(full, store.incoming()) as file:
        file.write(PDF + b"other")
        with pytest.raises(BacklogFull):
            accept(full, store, file, "b.pdf", check_options(full))
    assert len(sim.rows("SELECT 1 FROM documents")) == 1


def test_a_file_is_accepted_while_the_broker_is_unreachable(upload, environment):
    environment(REDIS_URL="redis://127.0.0.1:1/0")
    accepted = upload()
    assert accepted.queued
    assert claim().document_id == accepted.id


@pytest.mark.parametrize(
    "choices",
    [{"collection": "../x"}, {"collection": "a" * 129}, {"collection": "\x00"},
     {"ocr": "maybe"}, {"priority": "highest"}, {"parser": "none"}],
)  # fmt: skip
def test_invalid_options_are_named(settings, choices):
    with pytest.raises(InvalidOptions, match=next(iter(choices))):
        check_options(settings, **choices)


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("a.pdf", "a.pdf"),
        ("/etc/passwd", "passwd"),
        ("C:\\x\\y.pdf", "y.pdf"),
        ("../../up.pdf", "up.pdf"),
        (" Größe 漢字.pdf ", "Größe 漢字.pdf"),
        ("a\nb\tc\x00d\x1b.pdf", "a b c d.pdf"),
        ("annual\u202efdp.exe", "annualfdp.exe"),
        ("\u2066\u200fa\u2069\ufeff\u061c\u00ad.pdf", "a.pdf"),
        ("می\u200cخواهم.pdf", "می\u200cخواهم.pdf"),
        ("\u202e\u200e", "unnamed"),
        ("\ud800", "unnamed"),
        ("\x00", "unnamed"),
        ("", "unnamed"),
        (None, "unnamed"),
        ("x" * 300, "x" * 255),
    ],
)
def test_display_names(sent, shown):
    assert display_name(sent) == shown


def test_a_decrypted_copy_belongs_to_one_document(upload, store, tmp_path):
    copy = tmp_path / "copy"
    copy.write_bytes(b"%PDF-readable")
    accepted = upload(decrypted=copy)
    key = working_key(accepted.id)
    assert document_row(accepted.id).source_key == key
    assert not stored(store)
    deletion.delete(accepted.id)
    deletion.remove_deleted(store)
    assert not stored(store, key)


def test_a_later_upload_with_a_password_replaces_the_encrypted_bytes(upload, store, tmp_path):
    first = upload()
    end(RunState.FAILED)
    copy = tmp_path / "copy"
    for text in (b"%PDF-readable", b"%PDF-readable again"):
        copy.write_bytes(text)
        again = upload(decrypted=copy)
        assert (again.id, again.queued) == (first.id, True)
        assert not stored(store)
        with store.open_local(document_row(first.id).source_key) as path:
            assert path.read_bytes() == text
        end(RunState.FAILED)


def test_concurrent_uploads_of_one_file_make_one_document(upload, store):
    for number in range(20):
        content = PDF + str(number).encode()
        outcomes = at_once(*[lambda content=content: upload(content)] * 4)
        assert len({one.id for one in outcomes}) == 1
        assert sorted(one.duplicate for one in outcomes) == [False, True, True, True]
        assert sum(one.queued for one in outcomes) == 1
    assert len(sim.rows("SELECT 1 FROM runs")) == 20


def test_concurrent_uploads_of_a_failed_file_make_one_new_run(upload):
    first = upload()
    for number in range(2, 12):
        end(RunState.FAILED)
        outcomes = at_once(*[upload] * 4)
        assert {one.id for one in outcomes} == {first.id}
        assert sum(one.queued for one in outcomes) == 1
        assert newest_run(first.id).number == number


def test_an_upload_concurrent_with_a_delete_is_never_lost(upload, store):
    """In any order, the document that the upload returns exists and has its bytes."""
    for _ in range(20):
        old = upload()
        end(RunState.FAILED)
        accepted, *_ = at_once(
            upload, lambda old=old: deletion.delete(old.id), lambda: deletion.remove_deleted(store)
        )
        row = sim.rows("SELECT deleted_at FROM documents WHERE id = :id", id=accepted.id)
        if accepted.id != old.id:
            assert row[0].deleted_at is None
            assert newest_run(accepted.id).state == RunState.QUEUED
            assert stored(store)
            deletion.delete(accepted.id)
        while deletion.remove_deleted(store):
            pass
        assert not stored(store)
        assert sim.rows("SELECT 1 FROM runs") == []


def test_an_upload_whose_document_is_deleted_meanwhile_becomes_a_new_one(
    upload, store, monkeypatch
):
    """The delete comes after the upload has found the failed document."""
    old = upload()
    end(RunState.FAILED)
    add_run, deletes = runs.add_run, [old.id]

    def slow(connection, document_id, *args, **choices):
        if deletes:
            thread = threading.Thread(target=deletion.delete, args=(deletes.pop(),))
            thread.start()
            thread.join()
        return add_run(connection, document_id, *args, **choices)

    monkeypatch.setattr(intake.runs, "add_run", slow)
    accepted = upload()
    assert (accepted.id != old.id, accepted.duplicate) == (True, False)
    assert document_row(accepted.id).deleted_at is None


def test_a_concurrent_reprocess_makes_the_upload_a_duplicate(upload, monkeypatch):
    first = upload()
    end(RunState.FAILED)
    find, redo = document_rows.find_by_content, [first.id]

    def stale(connection, *args):
        known = find(connection, *args)
        if redo:
            sim.add_run(redo.pop(), newest_options(first.id))
        return known

    monkeypatch.setattr(intake.document_rows, "find_by_content", stale)
    again = upload()
    assert (again.id, again.duplicate, again.queued) == (first.id, True, False)
    assert newest_run(first.id).number == 2


def newest_options(document_id):
    row = newest_run(document_id)
    return runs.RunOptions(row.parser, row.model, row.ocr, row.dpi, LayoutMode(row.layout))


def test_no_message_is_sent_for_an_uncommitted_run(upload, monkeypatch):
    def broken(*_, **__):
        raise Internal("no run")

    monkeypatch.setattr(intake.runs, "add_run", broken)
    with pytest.raises(Internal):
        upload()
    assert queue_length(Stage.PREPARE) == 0
    assert sim.rows("SELECT 1 FROM documents") == []
    with begin() as connection:
        assert runs.backlog(connection, 9, Priority.BULK) == 0
