"""Deaths of forks in a row are counted until one ends a run in order."""

import pytest

from rag_service.jobs.leases import Blame
from workers import fork_deaths
from workers.fork_deaths import ForkDeaths, Report


@pytest.fixture
def deaths():
    fork_deaths.note_success()
    deaths = ForkDeaths()
    yield deaths
    fork_deaths.note_success()
    deaths.refresh()


def test_several_deaths_pause_the_worker_and_a_success_ends_that(deaths):
    assert [deaths.add("run", "no memory") for _ in range(4)] == [0, 0, 1, 2]
    assert 0 < fork_deaths.pause_left() <= 2
    assert deaths.trouble == "4 processes in a row ended without a result, the last: no memory"
    fork_deaths.note_success()
    deaths.refresh()
    assert (deaths.count, deaths.trouble, fork_deaths.pause_left()) == (0, None, 0)


def test_deaths_on_one_document_do_not_point_at_the_worker(deaths):
    for _ in range(5):
        deaths.add("run", "killed")
    assert not fork_deaths.is_worker_sick()
    for name in ("second", "third"):
        deaths.add(name, "killed")
    assert fork_deaths.is_worker_sick()


def test_the_pause_has_a_bound():
    assert fork_deaths.pause_after(10_000) == 60


def test_a_report_is_taken_once_and_cut_to_its_place():
    fork_deaths.leave_report(Report(Blame.TROUBLE, "ü" * 1000, "run"))
    report = fork_deaths.take_report()
    assert (report.blame, report.run) == (Blame.TROUBLE, "run")
    assert set(report.reason) == {"ü"}
    assert fork_deaths.take_report() is None
    fork_deaths.leave_report(Report(Blame.NONE, "no memory"))
    assert fork_deaths.take_report() == Report(Blame.NONE, "no memory", None)
