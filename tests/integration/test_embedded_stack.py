"""The embedded PostgreSQL and Valkey with real servers: start, crash, restart."""

import contextlib
import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import kombu
import psutil
import psycopg
import pytest
import redis
from sqlalchemy import create_engine, text

from rag_service.config.loader import load_settings
from rag_service.embedded import EmbeddedStack, account, postgres
from rag_service.errors import ConfigurationError, ServiceUnreachable
from tests.waiting import eventually


@dataclass(frozen=True)
class Running:
    folder: Path
    environment: dict[str, str]
    pids: dict[str, int]


OWNER = """
import json, sys
from pathlib import Path
from rag_service.embedded import EmbeddedStack
from rag_service.config.loader import load_settings
stack = EmbeddedStack(load_settings(), Path(sys.argv[1]), durable=True)
environment = stack.start_servers()
pids = {s.name: s.pid for s in stack.supervisor.status()}
print(json.dumps({"environment": environment, "pids": pids}), flush=True)
sys.stdin.read()
stack.stop()
"""


@pytest.fixture(autouse=True)
def _no_servers_configured(monkeypatch):
    for name in ("DATABASE_URL", "REDIS_URL", "DATABASE_URL_FILE", "REDIS_URL_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder():
    """A folder that every user may enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    yield path

    def removed():
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()

    # Servers of a killed owner may still be writing as they shut down.
    eventually(removed)


@pytest.fixture(scope="module")
def running():
    """One running stack for the tests that do not change it."""
    path = Path(tempfile.mkdtemp(dir="/tmp"))
    path.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("DATABASE_URL", raising=False)
        patch.delenv("REDIS_URL", raising=False)
        patch.setenv("RUNPOD_API_KEY", "a secret")
        with EmbeddedStack(load_settings(), path, durable=False) as stack:
            environment = stack.start_servers()
            yield Running(path, environment, pids(stack))
    shutil.rmtree(path)


@pytest.fixture
def start():
    with contextlib.ExitStack() as stacks:

        def begin(folder, *, durable=True):
            stack = stacks.enter_context(EmbeddedStack(load_settings(), folder, durable=durable))
            return stack, stack.start_servers()

        yield begin


@contextlib.contextmanager
def owner(folder, **options):
    """Run the stack in its own process; yield the process and the report that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options,
    )  # fmt: skip
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def query(url, sql):
    engine = create_engine(url)
    try:
        with engine.begin() as connection:
            return connection.execute(text(sql)).scalar()
    finally:
        engine.dispose()


def execute(url, sql):
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(sql))
    engine.dispose()


def has_ended(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def pids(stack):
    return {status.name: status.pid for status in stack.supervisor.status()}


def test_both_servers_work_and_leave_nothing_when_they_stop(folder, start):
    stack, environment = start(folder)
    running = pids(stack)
    assert query(environment["DATABASE_URL"], "select 6 * 7") == 42
    client = redis.Redis.from_url(environment["REDIS_URL"])
    assert client.ping()
    client.close()
    runtime = Path(environment["DATABASE_URL"].partition("host=")[2])
    assert runtime.is_dir()
    stack.stop()
    assert all(has_ended(pid) for pid in running.values())
    assert not runtime.parent.exists()


def test_kombu_sends_and_receives_over_the_url(running):
    with kombu.Connection(running.environment["REDIS_URL"]) as connection:
        queue = connection.SimpleQueue("ocr")
        queue.put("wake up")
        assert queue.get(timeout=120).payload == "wake up"
        queue.close()


def test_data_survives_a_restart(folder, start):
    stack, environment = start(folder)
    execute(environment["DATABASE_URL"], "create table kept as select 'row' as what")
    redis.Redis.from_url(environment["REDIS_URL"]).set("kept", "key")
    stack.stop()
    _, environment = start(folder)
    assert query(environment["DATABASE_URL"], "select what from kept") == "row"
    assert redis.Redis.from_url(environment["REDIS_URL"]).get("kept") == b"key"


@pytest.mark.skipif(sys.platform != "linux", reason="death signals are Linux's")
def test_a_killed_owner_leaves_no_process_and_the_next_start_has_its_data(folder, start):
    with owner(folder) as (process, report):
        tree = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
        assert set(report["pids"].values()) <= set(tree)
        assert len(tree) > 2
        execute(report["environment"]["DATABASE_URL"], "create table kept as select 'row' as what")
        client = redis.Redis.from_url(report["environment"]["REDIS_URL"])
        client.rpush("ocr", "message")
    # At once: the old servers may still be shutting down.
    _, environment = start(folder)
    assert query(environment["DATABASE_URL"], "select what from kept") == "row"
    assert redis.Redis.from_url(environment["REDIS_URL"]).lrange("ocr", 0, -1) == [b"message"]
    eventually(lambda: all(has_ended(pid) for pid in tree))


def test_servers_that_outlive_their_owner_are_ended_by_the_next_start(folder, start):
    """As on systems without a death signal: suspended servers cannot act on it."""
    with owner(folder) as (_, report):
        execute(report["environment"]["DATABASE_URL"], "create table kept as select 'row' as what")
        old = report["pids"]
        for pid in old.values():
            os.kill(pid, signal.SIGSTOP)
    assert not any(has_ended(pid) for pid in old.values())
    wake = f"sleep 0.5; kill -CONT {old['postgres']} {old['valkey']}"
    waking = subprocess.Popen(["/bin/sh", "-c", wake])
    _, environment = start(folder)
    waking.wait()
    assert all(has_ended(pid) for pid in old.values())
    assert query(environment["DATABASE_URL"], "select what from kept") == "row"


def test_a_stale_postmaster_pid_of_another_running_program_is_removed(folder, start):
    stack, _ = start(folder)
    stack.stop()
    data = folder / "postgres"
    other = subprocess.Popen(
        ["/bin/cat"], stdin=subprocess.PIPE,
        user=data.stat().st_uid if os.geteuid() == 0 else None,
    )  # fmt: skip
    try:
        (data / "postmaster.pid").write_text(f"{other.pid}\n{data}\n0\n5432\n\n\n0 0\nready   \n")
        _, environment = start(folder)
        assert query(environment["DATABASE_URL"], "select 1") == 1
        assert other.poll() is None
    finally:
        other.communicate()


def test_a_folder_in_use_is_refused_with_its_owners_pid(folder, start):
    with owner(folder) as (process, report):
        with pytest.raises(ConfigurationError, match=rf"process {process.pid}\)"):
            start(folder)
        assert query(report["environment"]["DATABASE_URL"], "select 1") == 1


def test_an_owner_that_stops_frees_the_folder(folder, start):
    with owner(folder) as (process, report):
        process.communicate()
        assert process.returncode == 0
        assert all(has_ended(pid) for pid in report["pids"].values())
    start(folder)


@pytest.mark.parametrize("name", ["with a space", "quote\"s 'and' \\ größe", "long/" + "x" * 200])
def test_awkward_paths_work(folder, start, name):
    path = folder / name
    stack, environment = start(path)
    redis.Redis.from_url(environment["REDIS_URL"]).set("kept", "1")
    assert query(environment["DATABASE_URL"], "select 1") == 1
    stack.stop()
    _, environment = start(path)
    assert redis.Redis.from_url(environment["REDIS_URL"]).get("kept") == b"1"
    assert (path / "postgres" / "PG_VERSION").exists()


@pytest.mark.parametrize("name", ["postgres", "valkey"])
def test_a_server_that_dies_is_restarted_at_the_same_address_with_its_data(folder, start, name):
    stack, environment = start(folder)
    execute(environment["DATABASE_URL"], "create table kept as select 'row' as what")
    redis.Redis.from_url(environment["REDIS_URL"]).set("kept", "key")
    os.kill(pids(stack)[name], signal.SIGKILL)

    def serves():
        try:
            return (
                query(environment["DATABASE_URL"], "select what from kept") == "row"
                and redis.Redis.from_url(environment["REDIS_URL"]).get("kept") == b"key"
            )
        except Exception:
            return False

    eventually(lambda: {s.name: s.restarts for s in stack.supervisor.status()}[name] >= 1)
    eventually(serves)


def test_only_servers_that_are_not_configured_are_started(folder, start, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg://elsewhere.example/db")
    stack, environment = start(folder)
    assert set(environment) == {"REDIS_URL"}
    assert list(pids(stack)) == ["valkey"]
    stack.stop()
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere.example/0")
    stack, environment = start(folder)
    assert environment == {}
    assert pids(stack) == {}


def test_data_of_another_major_version_is_refused_by_name(folder, start):
    stack, _ = start(folder)
    stack.stop()
    (folder / "postgres" / "PG_VERSION").write_text("16\n")
    with pytest.raises(ConfigurationError, match="created by PostgreSQL 16; this is PostgreSQL 18"):
        start(folder)
    (folder / "postgres" / "PG_VERSION").write_text("18\n")
    start(folder)


def test_an_incomplete_data_folder_is_created_again(folder, start):
    (folder / "postgres.new" / "base").mkdir(parents=True)
    (folder / "postgres.new" / "PG_VERSION").write_text("18\n")
    _, environment = start(folder)
    assert query(environment["DATABASE_URL"], "select 1") == 1
    assert not (folder / "postgres.new").exists()


def test_a_server_that_cannot_start_reports_why_and_is_not_running(folder, start):
    stack, _ = start(folder)
    stack.stop()
    hba = folder / "postgres" / "pg_hba.conf"
    good = hba.read_text()
    hba.write_text("nonsense\n")
    with pytest.raises(ServiceUnreachable, match=r"pg_hba\.conf"):
        start(folder)
    hba.write_text(good)
    start(folder)


def test_text_search_sees_words_beyond_ascii(running):
    url = running.environment["DATABASE_URL"]
    words = query(
        url,
        "select tsvector_to_array(to_tsvector('simple', '„Größe“—ÄRGER, 東京。'))",
    )
    assert sorted(words) == sorted(["größe", "ärger", "東京"])
    assert query(url, "show server_encoding") == "UTF8"


def test_durability_is_as_asked(folder, start):
    seen = {}
    for durable in (True, False):
        stack, environment = start(folder / str(durable), durable=durable)
        client = redis.Redis.from_url(environment["REDIS_URL"])
        seen[durable] = (
            query(environment["DATABASE_URL"], "show fsync"),
            query(environment["DATABASE_URL"], "show synchronous_commit"),
            client.config_get("appendonly")["appendonly"],
        )
        stack.stop()
    assert seen == {True: ("on", "on", "yes"), False: ("off", "off", "no")}


def test_the_servers_accept_only_this_user(running):
    url = running.environment["REDIS_URL"]
    password = url.partition("//:")[2].partition("@")[0]
    with pytest.raises(redis.AuthenticationError):
        redis.Redis.from_url(url.replace(f":{password}@", "")).ping()
    sockets = Path(running.environment["DATABASE_URL"].partition("host=")[2])
    assert sockets.stat().st_mode & 0o777 == 0o700
    assert (running.folder / "postgres").stat().st_mode & 0o077 == 0
    for pid in running.pids.values():
        process = psutil.Process(pid)
        assert password not in " ".join(process.cmdline())
        listening = [c for c in process.net_connections("inet") if c.status == "LISTEN"]
        assert all(c.laddr.ip == "127.0.0.1" for c in listening)
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(host="127.0.0.1", port=5432, user="rag_service", dbname="postgres")


def test_the_servers_do_not_inherit_secrets(running):
    for pid in running.pids.values():
        assert "RUNPOD_API_KEY" not in psutil.Process(pid).environ()


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_root
def test_root_starts_postgres_as_another_account(folder, start):
    stack, _ = start(folder)
    assert psutil.Process(pids(stack)["postgres"]).uids().effective != 0
    assert (folder / "postgres").stat().st_uid == psutil.Process(
        pids(stack)["postgres"]
    ).uids().real


@needs_root
def test_root_keeps_data_elsewhere_when_the_account_may_not_enter(
    folder, tmp_path, start, monkeypatch, caplog
):
    monkeypatch.setattr(account, "SYSTEM_FOLDER", folder / "system")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    stack, environment = start(closed)
    execute(environment["DATABASE_URL"], "create table kept as select 'row' as what")
    stack.stop()
    assert closed.stat().st_mode & 0o777 == 0o700
    assert f"data is kept in {folder}/system/" in caplog.text
    assert f"To keep it in {closed}" in caplog.text
    assert (closed / "postgres").resolve().parent == folder / "system"
    stack, environment = start(closed)
    assert query(environment["DATABASE_URL"], "select what from kept") == "row"
    stack.stop()

    link, target = closed / "postgres", (closed / "postgres").resolve()
    link.unlink()
    with pytest.raises(ConfigurationError, match="the link to it is missing"):
        start(closed)
    link.symlink_to(target)
    target.rename(target.with_name("moved"))
    with pytest.raises(ConfigurationError, match="which does not exist"):
        start(closed)


@needs_root
def test_a_throwaway_database_in_a_closed_folder_leaves_nothing_behind(
    folder, tmp_path, start, monkeypatch
):
    monkeypatch.setattr(account, "SYSTEM_FOLDER", folder / "system")
    stack, environment = start(tmp_path / "run", durable=False)
    assert query(environment["DATABASE_URL"], "select 1") == 1
    stack.stop()
    assert list(folder.iterdir()) == []
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["logs", "valkey"]


@needs_root
def test_binaries_that_the_account_may_not_read_are_copied(folder, tmp_path, start, monkeypatch):
    installed = Path(find_spec(postgres.PACKAGE).submodule_search_locations[0])
    closed = tmp_path / "closed"
    shutil.copytree(
        installed / postgres.INSTALLATION, closed / installed.name / postgres.INSTALLATION
    )
    shutil.copytree(f"{installed}.libs", closed / f"{installed.name}.libs")
    (closed / installed.name / "__init__.py").touch()
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
    monkeypatch.syspath_prepend(closed)
    monkeypatch.setattr(account, "SYSTEM_FOLDER", folder / "system")
    stack, environment = start(folder / "data")
    assert query(environment["DATABASE_URL"], "select 1") == 1
    assert "system" in psutil.Process(pids(stack)["postgres"]).exe()


@needs_root
def test_another_user_can_be_the_owner(folder):
    user = pwd.getpwnam("nobody")
    if not account.can_enter(Path(sys.executable).resolve().parent, user.pw_uid):
        pytest.skip("the interpreter is closed to other users")
    os.chown(folder, user.pw_uid, user.pw_gid)
    identity = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    for _ in range(2):
        with owner(folder, cwd="/", **identity) as (process, report):
            names = {psutil.Process(pid).username() for pid in report["pids"].values()}
            assert names == {"nobody"}
            assert (
                query(report["environment"]["DATABASE_URL"], "select current_user") == "rag_service"
            )
            process.communicate()
            assert process.returncode == 0
