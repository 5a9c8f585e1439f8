"""A document store that is not there: never replaced by a new one, never taken for lost files."""

import errno
import hashlib
import io
import os
import signal
import threading

import pytest

from rag_service.config.loader import get_settings
from rag_service.documents import deletion, intake
from rag_service.documents.byte_store import MARKER
from rag_service.documents.incoming_file import IncomingFile
from rag_service.documents.storage import DocumentStore, source_key
from rag_service.errors import SourceMissing, StorageUnavailable, StoreUnreachable
from rag_service.jobs import live_workers
from rag_service.monitoring import store_check
from rag_service.states import Stage
from tests import simulation as sim
from tests.processes import PATIENCE
from tests.service import Scan, open_service

PDF = b"%PDF-1.7\n% a test file\n"


@pytest.fixture
def folder(settings):
    return settings.data_dir / "documents"


def put(store, content=PDF):
    """Store the content as a document's; return its key."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = store.incoming() / "given"
    path.write_bytes(content)
    store.put_file(source_key(sha256), path)
    sim.add_document(sha256=sha256)
    return source_key(sha256)


def uses(store, key, path):
    def read():
        with store.open_local(key):
            pass

    return (
        read, store.check, store.incoming, store.require_reachable,
        lambda: store.exists(key), lambda: store.delete(key), lambda: store.put_file(key, path),
    )  # fmt: skip


def test_a_new_store_is_marked_with_the_id_in_the_database(settings, folder):
    DocumentStore(settings).check()
    [row] = sim.rows("SELECT store_id, bound_at FROM document_store")
    assert (folder / MARKER).read_text().splitlines()[0] == row.store_id
    assert row.bound_at is not None


@pytest.mark.parametrize("is_open", [True, False])
def test_an_unmounted_folder_is_unreachable_for_every_use_and_stays_empty(
    settings, folder, tmp_path, is_open
):
    """The mount point is there and empty, or missing; the process saw the store before or not."""
    store = DocumentStore(settings)
    key = put(store)
    path = tmp_path / "given"
    path.write_bytes(PDF)
    folder.rename(tmp_path / "mounted")
    if not is_open:
        store = DocumentStore(settings)
    for use in uses(store, key, path):
        with pytest.raises(StoreUnreachable, match="not mounted"):
            use()
    assert not folder.exists()
    folder.mkdir()
    for use in uses(store, key, path):
        with pytest.raises(StoreUnreachable, match=str(folder / MARKER)):
            use()
    assert list(folder.iterdir()) == []
    folder.rmdir()
    (tmp_path / "mounted").rename(folder)
    with store.open_local(key) as stored:
        assert stored.read_bytes() == PDF
    store.check()


def test_the_store_of_another_database_is_named_and_not_touched(settings, folder):
    put(DocumentStore(settings))
    (folder / MARKER).write_text("of another database\n")
    with pytest.raises(StoreUnreachable, match=r"of another database.*storage\.url"):
        DocumentStore(settings).check()


def test_a_store_of_an_earlier_version_is_marked_if_it_holds_the_documents(settings, folder):
    put(DocumentStore(settings))
    (folder / MARKER).unlink()
    sim.execute("DELETE FROM document_store")
    DocumentStore(settings).check()
    assert (folder / MARKER).exists()


def test_an_earlier_versions_store_that_is_not_mounted_is_not_replaced(settings, folder, tmp_path):
    put(DocumentStore(settings))
    (folder / MARKER).unlink()
    sim.execute("DELETE FROM document_store")
    folder.rename(tmp_path / "mounted")
    folder.mkdir()
    with pytest.raises(StoreUnreachable, match="not mounted"):
        DocumentStore(settings).check()
    assert list(folder.iterdir()) == []


def test_the_message_has_the_way_out_when_the_files_are_lost(settings, folder, tmp_path):
    store = DocumentStore(settings)
    key = put(store)
    folder.rename(tmp_path / "lost")
    folder.mkdir()
    with pytest.raises(StoreUnreachable) as refused:
        store.check()
    store_id = sim.rows("SELECT store_id FROM document_store")[0].store_id
    assert f"write {store_id} into {folder / MARKER}" in str(refused.value)
    (folder / MARKER).write_text(store_id)
    store.check()
    with pytest.raises(SourceMissing), store.open_local(key):
        pass


def test_processes_that_start_at_once_agree_on_the_marker(settings, folder):
    threads = [threading.Thread(target=DocumentStore(settings).check) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    DocumentStore(settings).check()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTCONN])
def test_a_folder_that_cannot_be_opened_is_unreachable(settings, folder, monkeypatch, number):
    store = DocumentStore(settings)
    key = put(store)
    real = os.open

    def fail(path, *arguments, **more):
        if path in (folder, MARKER):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StoreUnreachable, match=os.strerror(number)), store.open_local(key):
        pass


def test_a_link_to_a_folder_that_is_gone_is_unreachable(settings, folder, tmp_path):
    store = DocumentStore(settings)
    key = put(store)
    folder.rename(tmp_path / "mounted")
    folder.symlink_to(tmp_path / "mounted")
    assert store.exists(key)
    (tmp_path / "mounted").rename(tmp_path / "gone")
    with pytest.raises(StoreUnreachable):
        store.exists(key)


@pytest.mark.parametrize("content", [PDF[:-3], PDF[:-1] + b"?", b""])
def test_a_stored_file_that_was_changed_or_cut_off_is_missing(settings, folder, content):
    store = DocumentStore(settings)
    key = put(store)
    (folder / key).write_bytes(content)
    with pytest.raises(SourceMissing, match="changed or cut off"), store.open_local(key):
        pass


@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_file_that_is_sent_again_replaces_one_that_is_missing(settings, folder, work_off, damage):
    store = DocumentStore(settings)

    def send():
        with IncomingFile(settings, store.incoming()) as file:
            file.copy_from(io.BytesIO(PDF))
            return intake.accept(settings, store, file, "a.pdf", intake.check_options(settings))

    document_id = send().id
    key = source_key(hashlib.sha256(PDF).hexdigest())
    if damage == "removed":
        (folder / key).unlink()
    else:
        (folder / key).write_bytes(PDF[::-1])
    work_off(error=SourceMissing())
    again = send()
    assert (again.id, again.queued) == (document_id, True)
    with store.open_local(key) as stored:
        assert stored.read_bytes() == PDF


def test_nothing_is_removed_while_the_store_is_not_there(settings, folder, tmp_path):
    store = DocumentStore(settings)
    put(store)
    sim.execute("UPDATE documents SET deleted_at = now()")
    sim.execute("UPDATE runs SET state = 'cancelled'")
    folder.rename(tmp_path / "mounted")
    assert deletion.remove_deleted(store) == 0
    (tmp_path / "mounted").rename(folder)
    assert deletion.remove_deleted(store) == 1


def refused(answer):
    assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert "not mounted" in answer.json()["detail"]


def test_health_and_uploads_say_it_and_make_no_folder(api, make_pdf, folder, tmp_path):
    document_id = api.add(make_pdf("a"))
    folder.rename(tmp_path / "mounted")
    for _ in range(2):
        health = api.client.get("/health/ready")
        assert health.status_code == 503
        assert [fault["name"] for fault in health.json()["failed"]] == ["storage"]
        refused(api.upload(make_pdf("b")))
        refused(api.client.get(f"/documents/{document_id}/pages/1/image"))
        assert not folder.exists()
    assert api.get(document_id)["status"] == "queued"
    (tmp_path / "mounted").rename(folder)
    assert api.client.get("/health/ready").status_code == 200
    api.add(make_pdf("b"))
    assert api.client.get(f"/documents/{document_id}/pages/1/image").is_success


def test_a_store_that_hangs_does_not_hang_health_or_uploads(api, make_pdf, folder, monkeypatch):
    api.add(make_pdf("a"))
    monkeypatch.setattr(store_check, "_LONGEST_SECONDS", 0.2)
    monkeypatch.setattr(store_check, "_FRESH_SECONDS", 0.0)
    released = threading.Event()
    monkeypatch.setattr(DocumentStore, "check", lambda _: released.wait(PATIENCE))
    for _ in range(2):
        assert api.client.get("/health/ready").status_code == 503
        answer = api.upload(make_pdf("b"))
        assert (answer.status_code, answer.json()["code"]) == (503, "storage_unavailable")
        assert "has not answered" in answer.json()["detail"]
    assert sum(thread.name == "store check" for thread in threading.enumerate()) == 1
    released.set()


def test_a_store_that_only_a_worker_cannot_reach_is_degraded(api):
    live_workers.heartbeat("prepare@other:1:x", Stage.PREPARE, 2)
    live_workers.report_store_fault("prepare@other:1:x", "/mnt is not mounted")
    body = api.client.get("/health/ready").json()
    [fault] = [one for one in body["degraded"] if one["name"] == "worker_storage"]
    assert fault["message"] == "prepare@other:1:x: /mnt is not mounted"
    live_workers.report_store_fault("prepare@other:1:x", None)
    body = api.client.get("/health/ready").json()
    assert "worker_storage" not in [one["name"] for one in body["degraded"]]


def test_documents_wait_uncharged_for_a_store_and_go_on_when_it_is_back(stack, tmp_path):
    with open_service(stack, tmp_path) as service:
        folder, programs = get_settings().data_dir / "documents", service.programs
        programs.start_maintenance()
        programs.wait_ready(programs.start_worker("prepare", 1), programs.start_worker("ocr", 2))
        gates = []
        held = Scan(service, 2, set_up=lambda s: gates.append(service.ocr.hold(s.mark(1))))
        assert gates[0].arrived.wait(PATIENCE)
        folder.rename(tmp_path / "mounted")
        # Added by a program that had received them before.
        waiting = [hidden_scan(service, folder, tmp_path / "mounted") for _ in range(3)]
        for one in waiting:
            waits = lambda one=one: service.view(one.id).waiting_for == "storage"  # noqa: E731
            programs.wait_until(waits, f"{one.id} waits for the store")
        with pytest.raises(StorageUnavailable):
            Scan(service, 1)
        assert not folder.exists()
        gates[0].open()
        (tmp_path / "mounted").rename(folder)
        for one in (held, *waiting):
            assert one.ended().status == "processed"
            assert one.charges() == (0, 0, 0)


def hidden_scan(service, folder, mounted):
    """Add a document while the store is there and no prepare fork looks."""
    prepare = service.programs.all[1]
    for pid in (prepare.pid, *prepare.forks()):
        os.kill(pid, signal.SIGSTOP)
    mounted.rename(folder)
    try:
        return Scan(service, 1)
    finally:
        folder.rename(mounted)
        for pid in (prepare.pid, *prepare.forks()):
            os.kill(pid, signal.SIGCONT)
