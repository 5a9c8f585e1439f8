"""PostgreSQL is read-only, full, locked or closed to us: nothing is lost and all go on soon."""

import threading
from contextlib import contextmanager

import pytest
from sqlalchemy import make_url

from rag_service.states import RunState, Stage
from tests import simulation as sim
from tests.postgres_modes import administrator, read_only
from tests.processes import PATIENCE
from tests.service import Scan, open_service
from workers import run_loop

READ_ONLY_SECONDS = 3


def wait_until(condition):
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.05)):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("not in time")


def is_ready(api):
    return api.client.get("/health/ready").status_code == 200


def refused(answer, *words):
    assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable"), answer.text
    assert answer.json()["retryable"]
    assert int(answer.headers["retry-after"]) > 0
    for word in words:
        assert word in answer.json()["detail"]


def test_a_read_only_server_refuses_writes_answers_reads_and_is_not_ready(api, make_pdf, database):
    document_id = api.add(make_pdf("a"))
    with read_only(database):
        wait_until(lambda: not is_ready(api))
        body = api.client.get("/health/ready").json()
        assert [fault["name"] for fault in body["failed"]] == ["database"]
        assert "read-only" in body["failed"][0]["message"]
        refused(api.upload(make_pdf("b")), "read-only")
        refused(api.client.delete(f"/documents/{document_id}"), "read-only")
        assert api.get(document_id)["status"] == "queued"
    wait_until(lambda: is_ready(api))
    api.add(make_pdf("b"))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("08006", "cannot be reached"),
        ("0A000", "refuses the statement"),
        ("25006", "read-only"),
        ("40001", "concurrent"),
        ("42P01", "rag-service migrate"),
        ("42501", "permission"),
        ("53300", "All connections that PostgreSQL"),
        ("53200", "limit of its server"),
        ("55P03", "lock"),
        ("57014", "ended"),
        ("57P01", "ended"),
        ("58030", "disk"),
        ("XX001", "disk"),
    ],
)
def test_each_class_of_outage_is_answered_with_its_cause(api, make_pdf, state, words):
    document_id = api.add(make_pdf("a"))
    with refusing_updates(state):
        refused(api.client.post(f"/documents/{document_id}/cancel"), words)
    assert api.client.post(f"/documents/{document_id}/cancel").json()["cancelled"]


def test_a_defect_is_not_called_an_outage(api, make_pdf):
    document_id = api.add(make_pdf("a"))
    with refusing_updates("22003"):
        answer = api.client.post(f"/documents/{document_id}/cancel")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")


@contextmanager
def refusing_updates(state):
    sim.execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" RAISE EXCEPTION 'the reason' USING ERRCODE = '{state}'; END $$"
    )
    sim.execute(
        "CREATE TRIGGER refuses BEFORE UPDATE ON runs FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    try:
        yield
    finally:
        sim.execute("DROP FUNCTION refuse CASCADE")


@pytest.mark.parametrize(
    ("role", "words"),
    [
        ("NOLOGIN", "refuses the login"),
        ("LOGIN CONNECTION LIMIT 0", "too many connections"),
        ("LOGIN", "permission"),
    ],
)
def test_a_refused_login_is_explained_and_passes(
    environment, start_api, make_pdf, database, role, words
):
    with administrator(database) as execute:
        execute(f"CREATE ROLE guest {role}")
        try:
            guest = make_url(database).set(username="guest").render_as_string(False)
            environment(DATABASE_URL=guest)
            api = start_api()
            refused(api.upload(make_pdf("a")), words)
            failed = api.client.get("/health/ready").json()["failed"]
            assert words in failed[0]["message"]
            execute("ALTER ROLE guest LOGIN SUPERUSER CONNECTION LIMIT -1")
            api.add(make_pdf("a"))
        finally:
            environment(DATABASE_URL=database)
            execute("DROP ROLE guest")


def test_a_missing_database_is_explained(environment, start_api, make_pdf, database):
    environment(DATABASE_URL=make_url(database).set(database="absent").render_as_string(False))
    refused(start_api().upload(make_pdf("a")), "does not exist", "DATABASE_URL")


def test_a_connection_ended_in_the_middle_is_an_outage_and_the_next_request_works(
    api, make_pdf, database
):
    document_id = api.add(make_pdf("a"))
    with administrator(database) as execute:
        execute("BEGIN")
        execute("SELECT * FROM runs FOR UPDATE")
        answers = []
        cancel = threading.Thread(
            target=lambda: answers.append(api.client.post(f"/documents/{document_id}/cancel"))
        )
        cancel.start()
        waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: execute(waiting).all())
        execute(f"SELECT pg_terminate_backend(pid) FROM ({waiting}) AS waiting")
        cancel.join()
        execute("ROLLBACK")
    refused(answers[0], "ended the connection")
    assert api.client.post(f"/documents/{document_id}/cancel").json()["cancelled"]


def test_a_run_whose_lease_was_lost_in_an_outage_is_released_when_that_ends(settings, database):
    """Otherwise it is silent until its lease expires, and that is charged to the document."""
    sim.add_document()
    run = sim.claim()
    with read_only(database):
        wait_until(is_read_only)
        ending = threading.Thread(
            target=run_loop._handle_error,
            args=(run, Stage.PREPARE, run_loop.LeaseLost()),
            daemon=True,
        )
        ending.start()
        ending.join(1.5)
        assert ending.is_alive()
    ending.join(PATIENCE)
    row = sim.run_row(run.id)
    assert (row.state, row.expiries, row.crashes) == (RunState.QUEUED, 0, 0)


def is_read_only():
    return sim.rows("SELECT current_setting('transaction_read_only') AS value")[0].value == "on"


def test_workers_go_on_at_once_after_a_read_only_server(stack, tmp_path):
    with open_service(stack, tmp_path) as service:
        programs = service.programs
        programs.start_maintenance()
        programs.wait_ready(programs.start_worker("prepare", 1), programs.start_worker("ocr", 2))
        gates = []
        held = Scan(service, 3, set_up=lambda s: gates.append(service.ocr.hold(s.mark(2))))
        assert gates[0].arrived.wait(PATIENCE)
        waiting = Scan(service, 2)
        with read_only(stack["DATABASE_URL"]):
            wait_until(is_read_only)
            gates[0].open()
            threading.Event().wait(READ_ONLY_SECONDS)
        for one in (held, waiting):
            assert one.ended().status == "processed"
            assert one.charges() == (0, 0, 0)
            # One claim for each stage: no lease was lost, nothing waited until one expired.
            assert service.run(one.id).epoch == 2
        assert [len(held.requests(page)) for page in (1, 2, 3)] == [1, 1, 1]
