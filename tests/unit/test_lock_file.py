"""A lock file is removed at release, and that lets in one new owner only."""

import os
import threading

import pytest

from rag_service.runtime.lock_file import LockFile, owner_of


def test_a_lock_names_its_owner_and_leaves_no_file(tmp_path):
    path = tmp_path / "one.lock"
    lock = LockFile(path)
    assert owner_of(path) == str(os.getpid())
    with pytest.raises(BlockingIOError):
        LockFile(path)
    assert path.exists()
    lock.release()
    lock.release()
    assert not path.exists()
    assert owner_of(path) == ""


def test_of_many_that_wait_one_at_a_time_has_it(tmp_path):
    """Each removes the file that the others may have open already."""
    path, inside, most = tmp_path / "one.lock", [], []

    def hold():
        lock = LockFile(path, wait=True)
        inside.append(1)
        most.append(len(inside))
        inside.pop()
        lock.release()

    threads = [threading.Thread(target=hold) for _ in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 30
    assert list(tmp_path.iterdir()) == []
