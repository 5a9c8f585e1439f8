"""Folder locks, runtime folders, ports and access checks of the embedded servers."""

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rag_service.embedded import account, folder, require_free_port
from rag_service.embedded.folder import FolderLock, RuntimeFolder
from rag_service.errors import ConfigurationError


def test_a_second_owner_is_refused_with_the_pid_of_the_first(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from rag_service.embedded.folder import FolderLock\n"
        "lock = FolderLock(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match=rf"process {owner.pid}\)") as caught:
            FolderLock(tmp_path)
        assert str(tmp_path) in caught.value.message
    finally:
        owner.kill()
        owner.communicate()
    FolderLock(tmp_path).release()


def test_a_released_folder_can_be_taken_again(tmp_path):
    first = FolderLock(tmp_path / "new" / "folder")
    first.release()
    first.release()
    second = FolderLock(tmp_path / "new" / "folder")
    with pytest.raises(ConfigurationError, match=f"process {os.getpid()}"):
        FolderLock(tmp_path / "new" / "folder")
    second.release()


def test_a_data_folder_that_is_a_file_is_a_configuration_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="data_dir"):
        FolderLock(tmp_path / "file")


def test_a_runtime_folder_is_private_and_can_be_removed(tmp_path):
    one = RuntimeFolder(tmp_path)
    (one.path / "some" / "thing").mkdir(parents=True)
    assert one.path.stat().st_mode & 0o777 == 0o700
    one.remove()
    assert list(tmp_path.iterdir()) == []


def test_abandoned_runtime_folders_are_removed_and_locked_ones_kept(tmp_path):
    locked = RuntimeFolder(tmp_path)
    abandoned = tmp_path / f"{folder.RUNTIME_PREFIX}abandoned"
    other = tmp_path / "other-program"
    for path in (abandoned, other):
        path.mkdir()
        (path / "file").touch()
    for path in (locked.path, abandoned, other):
        os.utime(path, (0, 0))
    next_one = RuntimeFolder(tmp_path)
    assert set(tmp_path.iterdir()) == {locked.path, other, next_one.path}
    next_one.remove()
    locked.remove()


def test_a_new_runtime_folder_that_is_not_locked_yet_is_kept(tmp_path):
    fresh = tmp_path / f"{folder.RUNTIME_PREFIX}fresh"
    fresh.mkdir()
    RuntimeFolder(tmp_path).remove()
    assert fresh.exists()


def test_a_runtime_folder_is_locked_as_a_folder_for_systemd_tmpfiles(tmp_path):
    one = RuntimeFolder(tmp_path)
    file = os.open(one.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(file)
    one.remove()


@pytest.mark.parametrize("name", ["x" * 90, "a b", "a,b"])
def test_a_temporary_folder_unfit_for_sockets_is_not_used(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / name))
    assert folder.short_parent("pg/.s.PGSQL.5432", None) == Path("/tmp")


def test_a_taken_port_names_its_setting():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"^api\.port: .*127\.0\.0\.1:{port}"):
            require_free_port("127.0.0.1", port, "api.port")
    require_free_port("127.0.0.1", port, "api.port")


def test_an_unknown_host_names_the_setting_too():
    with pytest.raises(ConfigurationError, match="flower"):
        require_free_port("203.0.113.1", 5555, "flower.port")


def test_access_is_checked_for_every_folder_on_the_path(tmp_path):
    inner = tmp_path / "closed" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "closed").chmod(0o700)
    stranger = 54321
    assert account.blocking_folder(inner, os.geteuid()) is None
    assert not account.can_enter(inner, stranger)
    assert account.can_enter(inner, None)


def test_for_root_the_account_is_the_datas_owner_and_other_users_keep_their_own(tmp_path):
    if os.geteuid() != 0:
        assert account.account_for(tmp_path) is None
        return
    import pwd

    uid = pwd.getpwnam("nobody").pw_uid
    (tmp_path / "data").mkdir()
    assert account.account_for(tmp_path / "data") not in (None, 0)
    os.chown(tmp_path / "data", uid, -1)
    assert account.account_for(tmp_path / "data") == uid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs an account")
def test_root_without_an_account_to_use_gets_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(account, "ACCOUNTS", ("no-such-account",))
    with pytest.raises(ConfigurationError, match="no-such-account"):
        account.account_for(tmp_path / "none")
