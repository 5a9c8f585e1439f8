"""Workers that die, stop or receive no message in the middle of documents lose nothing."""

import signal
import threading

import psutil
import pytest

from rag_service.database import engine
from rag_service.errors import DatabaseUnavailable
from rag_service.jobs import server_state, wake_ups
from rag_service.states import Stage
from tests.fakes import ocr_server as fake
from tests.fakes.scans import new_number, pdf, scan
from tests.processes import PATIENCE, is_alive, kill
from tests.service import Scan, open_service

# For a worker that must not wait long for its pages when it stops.
IMPATIENT = {"RAG_SERVICE_WORKER_SOFT_SHUTDOWN": "1"}


@pytest.fixture(scope="module")
def running(stack, tmp_path_factory):
    """The service with a prepare worker that restarts soon without messages."""
    with open_service(stack, tmp_path_factory.mktemp("crashes")) as service:
        service.programs.start_maintenance()
        prepare = service.programs.start_worker(
            "prepare", 2, RAG_SERVICE_WORKER_IDLE_RESTART_AFTER="3"
        )
        service.programs.wait_ready(prepare)
        service.prepare = prepare
        yield service


@pytest.fixture
def service(running):
    """The service with a healthy server."""
    running.ocr.reset()
    server_state.mark_answered(running.ocr.url)
    yield running
    assert running.ocr.doubled == []


@pytest.fixture(scope="module")
def ocr_worker(running):
    """A function that returns the ocr worker: the running one if its variables are these."""
    running_workers = []

    def get(**env):
        for worker, variables in list(running_workers):
            if worker.exit_code is None and variables == env:
                return worker
            stop(worker)
            running_workers.remove((worker, variables))
        worker = running.programs.start_worker("ocr", 4, **env)
        running.programs.wait_ready(worker)
        running_workers.append((worker, env))
        return worker

    return get


def stop(worker):
    if worker.exit_code is None:
        worker.signal(signal.SIGTERM)
        worker.wait()


def counts(service, one):
    run = service.run(one.id)
    return run.crashes, run.expiries


def wait_until_sent(service, one, page, times):
    """Return when the page was sent this number of times."""

    def sent():
        return len(one.requests(page)) == times

    service.programs.wait_until(sent, f"{one.mark(page)} is sent {times} times")


def test_the_run_of_a_killed_fork_is_released_at_once_and_its_crash_counted(service, ocr_worker):
    ocr_worker()
    gates = []
    three = Scan(service, 3, set_up=lambda s: gates.append(service.ocr.hold(s.mark(3))))
    assert gates[0].arrived.wait(PATIENCE)
    done = lambda: service.view(three.id).pages.done == 2  # noqa: E731
    service.programs.wait_until(done, "the other pages are stored")
    kill(service.programs.fork_at(three.requests(3)[0].client_port))
    wait_until_sent(service, three, 3, 2)
    assert counts(service, three) == (1, 0)
    gates[0].open()
    view = three.ended()
    assert (view.status, view.pages.ocr) == ("processed", 3)
    assert [len(three.requests(page)) for page in (1, 2, 3)] == [1, 1, 2]
    assert counts(service, three) == (0, 0)


def test_a_document_that_kills_its_worker_three_times_costs_no_other(service, ocr_worker):
    ocr_worker()
    killer = Scan(service, 3, set_up=lambda s: service.ocr.hold(s.mark(2)))
    others = [Scan(service, 2) for _ in range(4)]
    done = lambda: service.view(killer.id).pages.done == 2  # noqa: E731
    service.programs.wait_until(done, "its other pages are stored")
    for crash in (1, 2, 3):
        wait_until_sent(service, killer, 2, crash)
        kill(service.programs.fork_at(killer.requests(2)[-1].client_port))
    view = killer.ended()
    assert (view.status, view.error.code, view.pages.ocr) == ("failed", "worker_crashed", 2)
    assert "pages in progress: 2" in view.error.message
    for other in others:
        assert other.ended().status == "processed"
        assert [len(other.requests(page)) for page in (1, 2)] == [1, 1]
        assert counts(service, other) == (0, 0)


def test_a_document_that_kills_its_prepare_worker_fails(service):
    """What it did before each crash does not count as progress."""
    lines = b"\n".join(b"%d 0 m %d 700 l S" % (x % 600, x * 7 % 600) for x in range(400_000))
    slow = service.add(pdf([lines]))
    stop = threading.Event()

    def kill_the_preparer():
        claimed = (
            "SELECT id FROM runs WHERE document_id = :id AND state = 'preparing' AND epoch > :n"
        )
        seen = 0
        while not stop.wait(0.02):
            if service.rows(claimed, id=slow, n=seen):
                seen = service.run(slow).epoch
                kill(fork_that_claimed(service.prepare, service.run(slow)))

    killer = threading.Thread(target=kill_the_preparer)
    killer.start()
    try:
        view = service.wait_for(slow)
    finally:
        stop.set()
        killer.join()
    assert (view.status, view.error.code) == ("failed", "worker_crashed")
    assert "no page in progress" in view.error.message
    assert service.run(slow).epoch == 3


def fork_that_claimed(worker, run):
    """Return the pid of the fork that logged this claim."""
    end = f"run {run.id} of scan.pdf, claim {run.epoch}\n"
    while True:
        lines = [line for line in worker.text.splitlines(keepends=True) if line.endswith(end)]
        if lines:
            return int(lines[-1].partition("[")[2].partition("]")[0])


def test_a_message_delivered_twice_while_its_run_is_in_progress_does_nothing(service, ocr_worker):
    """The document takes longer than the broker's visibility timeout, twice over."""
    worker = ocr_worker()
    gates = []
    one = Scan(service, 1, set_up=lambda s: gates.append(service.ocr.hold(s.mark())))
    assert gates[0].arrived.wait(PATIENCE)
    task = service.run(one.id).lease_task

    def delivered():
        return worker.text.count(f"[{task}] received")

    service.programs.wait_until(lambda: delivered() > 1, "the message is delivered again")
    gates[0].open()
    assert one.ended().status == "processed"
    assert len(one.requests()) == 1
    # Once for each stage.
    assert service.run(one.id).epoch == 2


def is_back():
    try:
        engine.ping()
    except DatabaseUnavailable:
        return False
    return True


def test_a_restart_of_postgres_in_the_middle_of_a_document_costs_nothing(service, ocr_worker):
    ocr_worker()
    gates = []
    three = Scan(service, 3, set_up=lambda s: gates.append(service.ocr.hold(s.mark(2))))
    assert gates[0].arrived.wait(PATIENCE)
    [postgres] = [p for p in psutil.Process().children() if p.name() == "postgres"]
    postgres.send_signal(signal.SIGINT)
    postgres.wait(PATIENCE)
    gates[0].open()
    service.programs.wait_until(is_back, "PostgreSQL is back")
    view = three.ended()
    assert (view.status, view.pages.ocr) == ("processed", 3)
    assert [len(three.requests(page)) for page in (1, 2, 3)] == [1, 1, 1]
    assert service.run(three.id).epoch == 2


def test_a_stopped_worker_stores_pages_in_flight_and_releases_the_run(service, ocr_worker):
    worker = ocr_worker()
    gate = fake.Gate()
    service.ocr.default = fake.Reply(gate=gate)
    # Four are in flight and two are rendered ahead; two have not begun.
    eight = Scan(service, 8)
    service.programs.wait_until(lambda: service.ocr.alive() == 4, "four pages are in flight")
    begun = "SELECT number FROM pages WHERE run_id = :id AND hand_epoch IS NOT NULL"
    run_id = service.run(eight.id).id
    six_begun = lambda: len(service.rows(begun, id=run_id)) == 6  # noqa: E731
    service.programs.wait_until(six_begun, "two more pages are rendered ahead")
    family = worker.family()
    worker.signal(signal.SIGTERM)
    stopping = lambda: "Warm shutdown" in worker.text  # noqa: E731
    service.programs.wait_until(stopping, "the worker begins to stop")
    gate.open()
    assert worker.wait() == 0
    run = service.run(eight.id)
    assert (run.state, run.lease_worker, counts(service, eight)) == ("ready", None, (0, 0))
    view = service.view(eight.id)
    assert (view.pages.ocr, view.waiting_for) == (6, "worker")
    assert not [pid for pid in family if is_alive(pid)]
    ocr_worker(**IMPATIENT)
    assert eight.ended().status == "processed"
    assert [len(eight.requests(page)) for page in range(1, 9)] == [1] * 8


def test_a_page_that_outlasts_the_soft_shutdown_is_released(service, ocr_worker):
    worker = ocr_worker(**IMPATIENT)
    gates = []
    one = Scan(service, 1, set_up=lambda s: gates.append(service.ocr.hold(s.mark())))
    assert gates[0].arrived.wait(PATIENCE)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    closed = lambda: one.requests()[0].outcome == "disconnected"  # noqa: E731
    service.programs.wait_until(closed, "its request is closed")
    assert (service.run(one.id).state, counts(service, one)) == ("ready", (0, 0))
    gates[0].open()
    ocr_worker()
    assert one.ended().status == "processed"


def test_a_worker_that_receives_no_message_restarts_itself(service):
    """It runs and sends heartbeats, but the broker's messages do not reach it."""
    from workers.celery_app import app

    before = service.prepare.text.count(" ready.")
    with app.connection_for_write() as connection:
        app.control.cancel_consumer("prepare", connection=connection)
    one = service.add(scan(new_number(), 1), ocr="off")
    view = service.wait_for(one)
    assert view.status == "processed"
    assert "No task message for 3 s although runs are waiting" in service.prepare.text
    assert service.prepare.text.count(" ready.") == before + 1
    assert service.prepare.exit_code is None


def test_forks_share_no_connection_with_a_parent_that_used_the_database(service):
    """The replacement of a fork is forked from a process with open connections."""
    old = set(service.prepare.forks())
    for pid in old:
        kill(pid)

    def replaced():
        now = set(service.prepare.forks())
        return len(now) == len(old) and not now & old

    service.programs.wait_until(replaced, "the forks are replaced")
    beginning = len(service.prepare.text)
    for _ in range(200):
        assert wake_ups.notify(Stage.PREPARE, "0" * 32, "spare")
    scans = [service.add(scan(new_number(), 1), ocr="off") for _ in range(20)]
    assert [service.wait_for(one).status for one in scans] == ["processed"] * 20
    queue_empty = lambda: wake_ups.queue_length(Stage.PREPARE) == 0  # noqa: E731
    service.programs.wait_until(queue_empty, "all messages are received")
    assert "PostgreSQL error" not in service.prepare.text[beginning:]
    assert "Traceback" not in service.prepare.text[beginning:]
