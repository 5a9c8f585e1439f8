"""A lack of resources is found by trying, and in the causes of an error."""

import errno
import mmap
import os
import tempfile
import threading
from pathlib import Path

import httpx
import pytest
from psycopg import OperationalError as PostgresError
from sqlalchemy.exc import OperationalError

from rag_service.errors import ProcessInTrouble, StorageUnavailable
from rag_service.runtime import process_resources
from rag_service.runtime.process_resources import find_shortage, require_resources, shortage_in


def test_a_healthy_process_has_no_shortage_and_leaves_nothing_open():
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert find_shortage() is None
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    require_resources(StorageUnavailable())


def refuse(error):
    def call(*_, **__):
        raise error

    return call


@pytest.mark.parametrize(
    ("owner", "name", "error", "words"),
    [
        (os, "open", OSError(errno.EMFILE, "Too many open files"), "no free descriptors (Too many"),
        (threading.Thread, "start", RuntimeError("can't start new thread"), "no free threads"),
        (mmap, "mmap", OSError(errno.ENOMEM, "Cannot allocate memory"), "no free memory"),
        (tempfile, "TemporaryFile", OSError(errno.ENOSPC, "No space left"), "no space for"),
    ],
)
def test_each_resource_is_tried(monkeypatch, owner, name, error, words):
    monkeypatch.setattr(owner, name, refuse(error))
    assert find_shortage().startswith(words)
    with pytest.raises(ProcessInTrouble, match=words[:10]):
        require_resources(None)


def chained(error, *causes):
    for outer, inner in zip((error, *causes), causes, strict=False):
        outer.__cause__ = inner
    return error


FULL = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOSPC, "No space left on device"),
        chained(httpx.ConnectError("All connection attempts failed"), OSError("2"), FULL),
        chained(httpx.ConnectError("failed"), ExceptionGroup("two", [OSError(), FULL])),
        OperationalError("SELECT 1", {}, chained(PostgresError("connection failed"), FULL)),
    ],
)
def test_a_shortage_is_found_behind_an_error(error):
    assert shortage_in(error)
    with pytest.raises(ProcessInTrouble):
        require_resources(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        RuntimeError("Event loop is closed"),
        ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
        # A socket that is not ready yet.
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    ],
)
def test_other_errors_are_none(error):
    assert shortage_in(error) is None


def test_causes_that_refer_to_each_other_end():
    first, second = ValueError(), ValueError()
    first.__cause__, second.__context__ = second, first
    assert shortage_in(first) is None
    assert process_resources.shortage_in(second) is None
