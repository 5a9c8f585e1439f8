"""Flower shows what became of each document, and names every task."""

import httpx
import pytest

from rag_service.jobs import wake_ups
from rag_service.states import Stage
from tests.fakes import ocr_server as fake
from tests.net import free_port
from tests.processes import command
from tests.service import Scan, open_service

_QUERY = {
    "draw": 1, "start": 0, "length": 1000,
    "order[0][column]": 0, "columns[0][data]": "received",
}  # fmt: skip


class Flower:
    """A Flower process, and its tasks as its page shows them."""

    def __init__(self, service):
        self._programs, self._port = service.programs, free_port()
        port = {"RAG_SERVICE_FLOWER_PORT": str(self._port)}
        program = self._programs.start("flower", command("flower"), **port)
        self._programs.wait_until(lambda: "Visit me at" in program.text, "Flower listens")
        # Its receiver of events reads all workers' from then on.
        self._programs.wait_until(self._receives_events, "Flower receives events")

    def tasks(self):
        """Return its rows."""
        url = f"http://127.0.0.1:{self._port}/tasks/datatable"
        return httpx.get(url, params=_QUERY, trust_env=False).json()["data"]

    def status_for(self, host):
        """Return the status of its page under this name."""
        url = f"http://127.0.0.1:{self._port}/tasks"
        return httpx.get(url, headers={"Host": host}, trust_env=False).status_code

    def ended(self, text):
        """Return the rows that show this text as a result or an exception, once there are any."""

        def found():
            return [task for task in self.tasks() if text in self._shown(task)]

        return self._programs.wait_until(found, f"Flower shows {text!r}")

    def _receives_events(self):
        with wake_ups._sender().connection_for_read() as connection:
            key = "_kombu.binding.celeryev"
            return connection.default_channel.client.scard(key) > 0

    @staticmethod
    def _shown(task):
        return f"{task['result']} {task['exception']}"


@pytest.fixture(scope="module")
def service(stack, tmp_path_factory):
    with open_service(stack, tmp_path_factory.mktemp("flower")) as service:
        service.programs.start_maintenance()
        service.workers = {
            stage: service.programs.start_worker(stage, 3) for stage in ("prepare", "ocr")
        }
        service.programs.wait_ready(*service.workers.values())
        yield service


def held_scan(service, **options):
    """Return a scan whose page is held at the OCR server, and the page's gate."""
    gates = []
    set_up = lambda scan: gates.append(service.ocr.hold(scan.mark()))  # noqa: E731
    one = Scan(service, 1, set_up=set_up, **options)
    gates[0].arrived.wait()
    return one, gates[0]


def test_flower_shows_what_became_of_each_document(service):
    """Flower starts while a page is read: it hears only of the end of that task."""
    late, late_page = held_scan(service)
    flower = Flower(service)
    again, again_page = held_scan(service, priority="interactive")
    # The broker's visibility timeout has passed: the task's message was delivered again.
    task, worker = service.run(again.id).lease_task, service.workers["ocr"]
    second = lambda: f"[{task}] ignored" in worker.text  # noqa: E731
    service.programs.wait_until(second, "a second delivery ends")
    shown = lambda: [one["state"] for one in flower.tasks() if one["uuid"] == task]  # noqa: E731
    service.programs.wait_until(shown, "Flower shows the task")
    assert shown() == ["STARTED"]
    broken = service.add(b"%PDF-1.7 no more", "broken.pdf")
    refused = Scan(service, 1, set_up=lambda s: service.ocr.always(s.mark(), fake.refusal(422)))
    late_page.open()
    again_page.open()
    assert late.ended().status == again.ended().status == "processed"
    assert service.wait_for(broken).status == refused.ended().status == "failed"

    [end] = flower.ended(late.id)
    assert (end["name"], end["state"]) == ("read pages", "SUCCESS")
    assert "processed" in end["result"]
    [failed] = flower.ended(broken)
    assert (failed["name"], failed["state"]) == ("prepare document", "FAILURE")
    assert f"broken.pdf (document {broken}): failed: corrupt_pdf" in failed["exception"]
    planned, read = sorted(flower.ended(refused.id), key=lambda task: task["name"])
    assert (planned["state"], read["state"]) == ("SUCCESS", "FAILURE")
    assert "waits for OCR" in planned["result"]
    assert "failed: pages_failed" in read["exception"]

    wake_ups.notify(Stage.PREPARE, "0" * 32, "nothing.pdf")
    service.ocr.default = fake.refusal(401)
    parked = Scan(service, 1)
    parked.parked()
    idle = [task for task in flower.ended("no run claimed") if "nothing.pdf" in task["kwargs"]]
    assert [task["state"] for task in idle] == ["IGNORED"]
    given_back = flower.ended("waits for the OCR server")
    assert {task["state"] for task in given_back} == {"RETRY"}
    assert all(parked.id in task["exception"] for task in given_back)
    assert all(task["name"] for task in flower.tasks())


def test_without_credentials_only_names_of_this_machine_are_answered(service):
    flower = Flower(service)
    for host in ("127.0.0.1:5555", "localhost", "[::1]:5555"):
        assert flower.status_for(host) == 200
    for host in ("attacker.example", "127.0.0.1.attacker.example:5555", "10.0.0.7:5555"):
        assert flower.status_for(host) == 403
