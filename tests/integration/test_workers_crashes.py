"""Workers that die, stop or go deaf in the middle of documents: nothing is lost, nothing doubled."""

import signal
import threading

import psutil
import pytest

from rag_service import broker
from rag_service.knowledgebase import servers
from rag_service.states import Stage
from tests.fakes import ocr_server as fake
from tests.fakes.scans import new_number, pdf, scan
from tests.processes import is_alive, kill
from tests.service import Scan, open_service


@pytest.fixture(scope="module")
def running(stack, tmp_path_factory):
    """The prepare worker calls itself deaf soon; `ocr` workers are each test's own or shared."""
    with open_service(stack, tmp_path_factory.mktemp("crashes")) as service:
        service.programs.start_maintenance()
        prepare = service.programs.start_worker("prepare", 2, RAG_SERVICE_WORKER_DEAF_AFTER="3")
        service.programs.wait_ready(prepare)
        service.prepare = prepare
        yield service


@pytest.fixture
def service(running):
    """The service with a healthy server."""
    running.ocr.reset()
    servers.mark_answered(running.ocr.url)
    yield running
    assert running.ocr.doubled == []


@pytest.fixture
def start_ocr(service):
    """Starts ocr workers that end with the test."""
    started = []

    def start(forks, **env):
        worker = service.programs.start_worker("ocr", forks, **env)
        started.append(worker)
        service.programs.wait_ready(worker)
        return worker

    yield start
    for worker in started:
        if worker.exit_code is None:
            worker.kill()


def counts(service, one):
    run = service.run(one.id)
    return run.crashes, run.expiries


def test_a_killed_forks_run_goes_back_at_once_and_its_crash_is_counted(service, start_ocr):
    start_ocr(3)
    gates = []
    three = Scan(service, 3, set_up=lambda s: gates.append(service.ocr.hold(s.mark(3))))
    assert gates[0].arrived.wait(30)
    done = lambda: service.view(three.id).pages.done == 2  # noqa: E731
    service.programs.wait_until(done, "the other pages are stored")
    kill(service.programs.fork_at(three.requests(3)[0].client_port))
    again = lambda: len(three.requests(3)) == 2  # noqa: E731
    service.programs.wait_until(again, "the page is sent again")
    assert counts(service, three) == (1, 0)
    gates[0].open()
    view = three.ended()
    assert (view.status, view.pages.ocr) == ("processed", 3)
    assert [len(three.requests(page)) for page in (1, 2, 3)] == [1, 1, 2]
    assert counts(service, three) == (0, 0)


def test_a_document_that_kills_its_worker_three_times_costs_no_other_anything(service, start_ocr):
    start_ocr(4)
    killer = Scan(service, 3, set_up=lambda s: service.ocr.hold(s.mark(2)))
    others = [Scan(service, 2) for _ in range(4)]
    done = lambda: service.view(killer.id).pages.done == 2  # noqa: E731
    service.programs.wait_until(done, "its other pages are stored")
    for crash in (1, 2, 3):
        sent = lambda crash=crash: len(killer.requests(2)) == crash
        service.programs.wait_until(sent, f"its page is sent, time {crash}")
        kill(service.programs.fork_at(killer.requests(2)[-1].client_port))
    view = killer.ended()
    assert (view.status, view.error.code, view.pages.ocr) == ("failed", "worker_crashed", 2)
    assert "pages in hand: 2" in view.error.message
    for other in others:
        assert other.ended().status == "processed"
        assert [len(other.requests(page)) for page in (1, 2)] == [1, 1]
        assert counts(service, other) == (0, 0)


def test_a_document_that_kills_its_prepare_worker_ends_as_well(service):
    """Nothing it had done before each crash may pass for progress."""
    lines = b"\n".join(b"%d 0 m %d 700 l S" % (x % 600, x * 7 % 600) for x in range(400_000))
    slow = service.add(pdf([lines]))
    stop = threading.Event()

    def kill_the_preparer():
        held = "SELECT id FROM runs WHERE document_id = :id AND state = 'preparing' AND epoch > :n"
        seen = 0
        while not stop.wait(0.02):
            if service.rows(held, id=slow, n=seen):
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
    assert "no page was in hand" in view.error.message
    assert service.run(slow).epoch == 3


def fork_that_claimed(worker, run):
    """The fork that logged this claim."""
    end = f"run {run.id} of scan.pdf, claim {run.epoch}\n"
    while True:
        lines = [line for line in worker.text.splitlines(keepends=True) if line.endswith(end)]
        if lines:
            return int(lines[-1].partition("[")[2].partition("]")[0])


def test_a_stopped_worker_stores_what_is_in_flight_and_gives_the_rest_back(service, start_ocr):
    worker = start_ocr(2, GLMOCR_PIPELINE_MAX_WORKERS="2")
    gate = fake.Gate()
    service.ocr.default = fake.Reply(gate=gate)
    six = Scan(service, 6)
    service.programs.wait_until(lambda: service.ocr.alive() == 2, "two pages are in flight")
    family = worker.family()
    worker.signal(signal.SIGTERM)
    stopping = lambda: "Warm shutdown" in worker.text  # noqa: E731
    service.programs.wait_until(stopping, "the worker begins to stop")
    gate.open()
    assert worker.wait() == 0
    run = service.run(six.id)
    assert (run.state, run.lease_worker, counts(service, six)) == ("ready", None, (0, 0))
    view = service.view(six.id)
    assert (view.pages.ocr, view.waiting_for) == (2, "worker")
    assert not [pid for pid in family if is_alive(pid)]
    start_ocr(2)
    assert six.ended().status == "processed"
    assert [len(six.requests(page)) for page in range(1, 7)] == [1] * 6


def test_a_page_that_outlasts_the_soft_shutdown_is_let_go(service, start_ocr):
    worker = start_ocr(2, RAG_SERVICE_WORKER_SOFT_SHUTDOWN="1")
    gates = []
    one = Scan(service, 1, set_up=lambda s: gates.append(service.ocr.hold(s.mark())))
    assert gates[0].arrived.wait(30)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    closed = lambda: one.requests()[0].outcome == "disconnected"  # noqa: E731
    service.programs.wait_until(closed, "its request is closed")
    assert (service.run(one.id).state, counts(service, one)) == ("ready", (0, 0))
    gates[0].open()
    start_ocr(2)
    assert one.ended().status == "processed"


def test_a_message_that_comes_again_while_its_run_is_worked_on_does_nothing(service, start_ocr):
    """The document takes longer than the broker's visibility timeout, twice over."""
    workers = start_ocr(2), start_ocr(2)
    gates = []
    one = Scan(service, 1, set_up=lambda s: gates.append(service.ocr.hold(s.mark())))
    assert gates[0].arrived.wait(30)
    task = service.run(one.id).lease_task

    def delivered():
        return sum(worker.text.count(f"[{task}] received") for worker in workers)

    service.programs.wait_until(lambda: delivered() > 1, "the message comes again", seconds=60)
    gates[0].open()
    assert one.ended().status == "processed"
    assert len(one.requests()) == 1
    # Once for each stage.
    assert service.run(one.id).epoch == 2


def test_postgres_may_restart_in_the_middle_of_a_document(service, start_ocr):
    start_ocr(2)
    gates = []
    three = Scan(service, 3, set_up=lambda s: gates.append(service.ocr.hold(s.mark(2))))
    assert gates[0].arrived.wait(30)
    [postgres] = [p for p in psutil.Process().children() if p.name() == "postgres"]
    postgres.send_signal(signal.SIGINT)
    postgres.wait(30)
    gates[0].open()
    view = three.ended()
    assert (view.status, view.pages.ocr) == ("processed", 3)
    assert [len(three.requests(page)) for page in (1, 2, 3)] == [1, 1, 1]
    assert service.run(three.id).epoch == 2


def test_a_deaf_worker_begins_anew_and_hears_again(service):
    """It lives, it beats, and the broker's messages do not reach it."""
    from workers.celery_app import app

    before = service.prepare.text.count(" ready.")
    with app.connection_for_write() as connection:
        app.control.cancel_consumer("prepare", connection=connection)
    one = service.add(scan(new_number(), 1), ocr="off")
    view = service.wait_for(one, seconds=90)
    assert view.status == "processed"
    assert "Deaf" in service.prepare.text
    assert service.prepare.text.count(" ready.") == before + 1
    assert service.prepare.exit_code is None


def test_forks_made_after_the_parent_used_the_database_share_nothing_with_it(service):
    """Each fork that is replaced is born from a process with live connections."""
    old = set(service.prepare.forks())
    for pid in old:
        kill(pid)

    def replaced():
        now = set(service.prepare.forks())
        return len(now) == len(old) and not now & old

    service.programs.wait_until(replaced, "the forks are replaced")
    beginning = len(service.prepare.text)
    for _ in range(200):
        assert broker.ring(Stage.PREPARE, "0" * 32, "spare")
    scans = [service.add(scan(new_number(), 1), ocr="off") for _ in range(20)]
    assert [service.wait_for(one).status for one in scans] == ["processed"] * 20
    quiet = lambda: broker.queue_length(Stage.PREPARE) == 0  # noqa: E731
    service.programs.wait_until(quiet, "all doorbells are answered")
    assert "PostgreSQL is away" not in service.prepare.text[beginning:]
    assert "Traceback" not in service.prepare.text[beginning:]
