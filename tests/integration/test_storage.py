"""Document bytes in a real folder and in a real S3 server behind an unreliable proxy."""

import errno
import hashlib
import http.client
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from localbucket import S3Handler

from rag_service.config.loader import load_settings
from rag_service.documents.storage import DocumentStore, source_key, working_key
from rag_service.errors import (
    ConfigurationError,
    SourceMissing,
    StorageUnavailable,
    StoreUnreachable,
)

MIB = 1024 * 1024


class UnreliableProxy(ThreadingHTTPServer):
    """Forwards requests to the S3 server; the next `broken` ones fail as `fault` says."""

    def __init__(self, upstream_port):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream_port = upstream_port
        self.fault, self.broken, self.passed = "", 0, None
        self.requests = []
        self.lock = threading.Lock()

    def break_next(self, count, fault):
        self.broken, self.fault = count, fault
        self.passed = None
        self.requests.clear()

    def pass_then_break(self, method, count, fault):
        """Forward `count` requests of this method and break all later ones of it."""
        self.break_next(1000, fault)
        self.passed = (method, count)

    def fault_of_this_request(self, method):
        with self.lock:
            self.requests.append(method)
            if not self.broken or self._is_passed(method):
                return ""
            self.broken -= 1
            return self.fault

    def _is_passed(self, method):
        if self.passed is None:
            return False
        passed, count = self.passed
        return method != passed or self.requests.count(method) <= count


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _pass_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault_of_this_request(self.command)
        if fault.isdigit():
            self._answer(int(fault), {}, b"")
        elif fault == "hang up":
            self.close_connection = True
        else:
            self._answer(*self._upstream(body), truncated=fault == "truncate")

    def _upstream(self, body):
        with closing(http.client.HTTPConnection("127.0.0.1", self.server.upstream_port)) as link:
            link.request(self.command, self.path, body, dict(self.headers))
            answer = link.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def _answer(self, status, headers, body, truncated=False):
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"connection", "transfer-encoding", "content-length"}:
                self.send_header(name, value)
        length = headers.get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if truncated else body)
        self.close_connection = self.close_connection or truncated

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, *_):
        pass


@pytest.fixture
def s3_server(tmp_path, monkeypatch):
    """A real S3 server over a folder with one bucket: (port, folder of the bucket)."""
    bucket = tmp_path / "s3" / "bucket"
    bucket.mkdir(parents=True)
    monkeypatch.setattr(S3Handler, "data_root", bucket.parent, raising=False)
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), S3Handler)) as server:
        yield server.server_port, bucket


@contextmanager
def serving(server):
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def proxy(s3_server, monkeypatch):
    """A proxy in front of the S3 server, with AWS_* variables for it."""
    server = UnreliableProxy(s3_server[0])
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with serving(server):
        yield server


def open_store(monkeypatch, url, data_dir):
    """Open the store of the database, which is empty."""
    monkeypatch.setenv("RAG_SERVICE_DATA_DIR", str(data_dir))
    monkeypatch.setenv("RAG_SERVICE_STORAGE_URL", url)
    return DocumentStore(load_settings())


pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def s3(proxy, monkeypatch, tmp_path):
    store = open_store(monkeypatch, "s3://bucket/some/prefix", tmp_path)
    store.check()
    proxy.requests.clear()
    return store


@pytest.fixture
def local(monkeypatch, tmp_path):
    store = open_store(monkeypatch, "", tmp_path / "data dir ü")
    store.check()
    return store


@pytest.fixture(params=["folder", "s3"])
def store(request):
    return request.getfixturevalue({"folder": "local", "s3": "s3"}[request.param])


def file_of(folder, data):
    path = folder / "upload"
    path.write_bytes(data)
    return path, source_key(hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize("size", [0, 1, MIB, 20 * MIB + 1])
def test_bytes_are_returned_unchanged(store, tmp_path, size):
    path, key = file_of(tmp_path, os.urandom(size))
    assert not store.exists(key)
    store.put_file(key, path)
    assert store.exists(key)
    with store.open_local(key) as copy:
        assert copy.read_bytes() == path.read_bytes()


def test_a_second_put_replaces_the_first(store, tmp_path):
    key = working_key("7b2f")
    for data in (b"old, and longer", b"new"):
        store.put_file(key, file_of(tmp_path, data)[0])
    with store.open_local(key) as copy:
        assert copy.read_bytes() == b"new"


def test_a_deleted_key_is_missing_and_may_be_deleted_again(store, tmp_path):
    path, key = file_of(tmp_path, os.urandom(10))
    store.put_file(key, path)
    store.delete(key)
    store.delete(key)
    assert not store.exists(key)
    with pytest.raises(SourceMissing), store.open_local(key):
        pass


def test_an_invalid_key_is_rejected(store, tmp_path):
    for key in ("../../etc/passwd", "agreement.pdf", "/abs", "sha256/ab/../x", "working/a/b.pdf"):
        with pytest.raises(ValueError, match="not a storage key"):
            store.exists(key)
        with pytest.raises(ValueError, match="not a storage key"):
            store.put_file(key, file_of(tmp_path, b"x")[0])


def test_an_unreadable_upload_is_no_storage_error(store, tmp_path):
    with pytest.raises(FileNotFoundError):
        store.put_file(working_key("1"), tmp_path / "absent")


def test_a_healthy_store_passes_its_check(store):
    store.check()


def test_a_bucket_used_after_a_fork_raises_instead_of_hanging(s3, tmp_path):
    path, key = file_of(tmp_path, b"x")
    s3.put_file(key, path)
    child = os.fork()
    if child == 0:
        try:
            s3.exists(key)
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_open_local_yields_the_file_in_the_folder(local, tmp_path):
    path, key = file_of(tmp_path, b"the bytes")
    local.put_file(key, path)
    with local.open_local(key) as first, local.open_local(key) as second:
        assert first == second == tmp_path / "data dir ü" / "documents" / key
    assert first.read_bytes() == b"the bytes"


def test_a_file_url_sets_the_folder(monkeypatch, tmp_path):
    store = open_store(monkeypatch, (tmp_path / "my files").as_uri(), tmp_path)
    path, key = file_of(tmp_path, b"x")
    store.put_file(key, path)
    assert (tmp_path / "my files" / key).read_bytes() == b"x"


@contextmanager
def full_disk(free_bytes):
    """Let no file of this process grow beyond `free_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing_under_the_key(local, tmp_path, monkeypatch):
    path, key = file_of(tmp_path, os.urandom(20 * MIB))
    before = files_in(tmp_path / "data dir ü")
    no_links(monkeypatch)
    with full_disk(5 * MIB), pytest.raises(StorageUnavailable, match="File too large"):
        local.put_file(key, path)
    assert not local.exists(key)
    assert files_in(tmp_path / "data dir ü") == before
    local.put_file(key, path)
    assert local.exists(key)


def files_in(folder):
    return {path for path in folder.rglob("*") if path.is_file()}


def no_links(monkeypatch):
    """Let the store be on another file system than the uploads."""

    def link(*_, **__):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)


def test_a_file_on_the_same_file_system_takes_the_disk_once(local, tmp_path):
    incoming = local.incoming() / "upload-1"
    incoming.write_bytes(b"the bytes")
    key = source_key(hashlib.sha256(b"the bytes").hexdigest())
    local.put_file(key, incoming)
    with local.open_local(key) as stored:
        assert stored.stat().st_ino == incoming.stat().st_ino
    local.put_file(key, incoming)
    incoming.unlink()
    with local.open_local(key) as stored:
        assert (stored.read_bytes(), stored.stat().st_nlink) == (b"the bytes", 1)


def test_a_file_of_another_file_system_is_copied(local, tmp_path, monkeypatch):
    path, key = file_of(tmp_path, os.urandom(3 * MIB))
    no_links(monkeypatch)
    local.put_file(key, path)
    with local.open_local(key) as stored:
        assert stored.read_bytes() == path.read_bytes()
        assert stored.stat().st_mode & 0o077 == 0
    assert list(local.incoming().iterdir()) == []


KILLED_WHILE_STORING = """
import os, signal, sys, obstore.store
def parts():
    yield bytes(20 * 2**20)
    os.kill(os.getpid(), signal.SIGKILL)
obstore.put(obstore.store.LocalStore(sys.argv[1]), sys.argv[2], parts())
"""


def test_deleting_removes_what_a_killed_upload_of_an_earlier_version_left(local, tmp_path):
    path, key = file_of(tmp_path, os.urandom(20 * MIB))
    folder = tmp_path / "data dir ü" / "documents"
    dead = subprocess.run([sys.executable, "-c", KILLED_WHILE_STORING, str(folder), key])
    assert dead.returncode == -signal.SIGKILL
    assert len(files_in(folder / "sha256")) == 1
    assert not local.exists(key)
    local.put_file(key, path)
    local.delete(key)
    assert files_in(folder / "sha256") == set()


def test_the_folder_is_private(local, tmp_path):
    assert (tmp_path / "data dir ü" / "documents").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o2775])
def test_a_folder_that_existed_becomes_private_and_stays_usable(local, tmp_path, mode):
    folder = tmp_path / "data dir ü" / "documents"
    path, key = file_of(tmp_path, b"the bytes")
    local.put_file(key, path)
    folder.chmod(mode)
    with local.open_local(key) as stored:
        assert stored.read_bytes() == b"the bytes"
    assert folder.stat().st_mode & 0o077 == 0


def test_a_folder_that_stays_open_to_others_is_named_once(local, tmp_path, monkeypatch, caplog):
    folder = tmp_path / "data dir ü" / "documents"
    folder.chmod(0o755)

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    for _ in range(2):
        local.check()
    assert caplog.text.count(f"Other users of this machine can read the folder {folder}") == 1


def test_readers_never_see_a_half_written_file(local, tmp_path):
    path, key = file_of(tmp_path, os.urandom(9 * MIB))
    local.put_file(key, path)

    def read(_):
        with local.open_local(key) as copy:
            return hashlib.sha256(copy.read_bytes()).hexdigest()

    with ThreadPoolExecutor(6) as pool:
        writers = [pool.submit(local.put_file, key, path) for _ in range(8)]
        assert set(pool.map(read, range(20))) == {key.rpartition("/")[2]}
        for writer in writers:
            writer.result()


def test_a_folder_that_cannot_be_made_is_an_outage(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    store = open_store(monkeypatch, "", blocked)
    for use in (store.check, store.check_place):
        with pytest.raises(StorageUnavailable, match="file/documents"):
            use()


@pytest.mark.parametrize("url", ["ftp://host/x", "documents", "s3://", "file://host/x", "gs://b"])
def test_an_invalid_url_is_a_configuration_error_that_names_the_key(monkeypatch, tmp_path, url):
    with pytest.raises(ConfigurationError, match=r"storage\.url"):
        open_store(monkeypatch, url, tmp_path)


def test_s3_leaves_no_local_copy_behind(s3, tmp_path):
    path, key = file_of(tmp_path, b"x")
    s3.put_file(key, path)
    with s3.open_local(key) as copy:
        assert copy.exists()
    assert not copy.exists()


def test_s3_keeps_everything_under_the_prefix(s3, s3_server, tmp_path):
    path, key = file_of(tmp_path, b"under a prefix")
    s3.put_file(key, path)
    assert (s3_server[1] / "some" / "prefix" / key).read_bytes() == b"under a prefix"


def test_large_files_are_uploaded_in_parts(s3, proxy, tmp_path):
    path, key = file_of(tmp_path, os.urandom(20 * MIB))
    s3.put_file(key, path)
    assert proxy.requests.count("PUT") == 3
    assert proxy.requests.count("POST") == 2


@pytest.mark.parametrize("fault", ["500", "503", "hang up", "truncate"])
def test_temporary_failures_are_retried(s3, proxy, tmp_path, fault):
    path, key = file_of(tmp_path, os.urandom(3 * MIB))
    proxy.break_next(2, fault if fault != "truncate" else "503")
    s3.put_file(key, path)
    proxy.break_next(2, fault)
    with s3.open_local(key) as copy:
        assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("fault", ["403", "500", "hang up", "truncate"])
def test_lasting_failures_are_an_outage(s3, proxy, tmp_path, fault):
    path, key = file_of(tmp_path, os.urandom(3 * MIB))
    s3.put_file(key, path)
    proxy.break_next(1000, fault)
    with pytest.raises(StorageUnavailable), s3.open_local(key):
        pass
    assert len(proxy.requests) < 40


def test_an_interrupted_upload_leaves_nothing_under_the_key(s3, proxy, tmp_path):
    path, key = file_of(tmp_path, os.urandom(20 * MIB))
    proxy.pass_then_break("PUT", 2, "403")
    with pytest.raises(StorageUnavailable):
        s3.put_file(key, path)
    assert proxy.requests.count("PUT") >= 3
    proxy.break_next(0, "")
    assert not s3.exists(key)


def test_a_missing_bucket_is_an_outage_not_a_missing_document(proxy, monkeypatch, tmp_path):
    store = open_store(monkeypatch, "s3://absent/prefix", tmp_path)
    path, key = file_of(tmp_path, b"x")
    uses = (lambda: store.exists(key), lambda: store.put_file(key, path), store.check)
    for use in (*uses, store.check_place):
        with pytest.raises(StorageUnavailable):
            use()


def test_an_emptied_prefix_is_an_outage_and_nothing_is_written_to_it(s3, s3_server, tmp_path):
    path, key = file_of(tmp_path, b"x")
    s3.put_file(key, path)
    prefix = s3_server[1] / "some" / "prefix"
    shutil.move(prefix, tmp_path / "elsewhere")
    for use in (s3.check, lambda: s3.exists(key)):
        with pytest.raises(StoreUnreachable, match="rag_service-store is missing"):
            use()
    assert not prefix.exists() or files_in(prefix) == set()
    shutil.rmtree(prefix, ignore_errors=True)
    shutil.move(tmp_path / "elsewhere", prefix)
    assert s3.exists(key)
    s3.check()


def test_the_check_fails_soon_when_s3_is_unreachable(s3, proxy):
    proxy.break_next(1000, "500")
    with pytest.raises(StorageUnavailable):
        s3.check()
    assert len(proxy.requests) == 1


def test_bytes_that_changed_in_the_store_are_rejected(s3, s3_server, tmp_path):
    path, key = file_of(tmp_path, b"what was signed")
    s3.put_file(key, path)
    (s3_server[1] / "some" / "prefix" / key).write_bytes(b"something else!")
    with pytest.raises(SourceMissing, match="changed"), s3.open_local(key):
        pass
