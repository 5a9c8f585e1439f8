"""Logs every claim, every end and every stored page with its time, in the database.

Triggers write the log, so it is complete whatever the processes do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import text

from rag_service.database.engine import begin

_TRIGGERS = """
CREATE TABLE run_events (
    run_id text, state text, epoch int, at timestamptz DEFAULT clock_timestamp());
CREATE TABLE page_events (
    run_id text, number int, kind text, at timestamptz DEFAULT clock_timestamp());
CREATE INDEX ON run_events (run_id);
CREATE INDEX ON page_events (run_id);

CREATE FUNCTION log_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO run_events VALUES (NEW.id, NEW.state, NEW.epoch);
    RETURN NULL;
END $$;
CREATE TRIGGER log_new_run AFTER INSERT ON runs FOR EACH ROW EXECUTE FUNCTION log_run();
CREATE TRIGGER log_run AFTER UPDATE ON runs FOR EACH ROW
    WHEN (OLD.state <> NEW.state OR OLD.epoch <> NEW.epoch) EXECUTE FUNCTION log_run();

CREATE FUNCTION log_page() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.state <> 'pending' THEN
        INSERT INTO page_events VALUES (NEW.run_id, NEW.number, 'changed');
    ELSIF NEW.state <> 'pending' THEN
        INSERT INTO page_events VALUES (NEW.run_id, NEW.number, 'stored');
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER log_page AFTER INSERT OR UPDATE ON pages FOR EACH ROW EXECUTE FUNCTION log_page();
"""
_CLAIMED = "state IN ('preparing', 'ocr', 'finishing')"
_ENDED = "state IN ('processed', 'failed', 'cancelled')"


class Claim(NamedTuple):
    """A run and the epoch of its last claim."""

    run_id: str
    epoch: int


class ClaimedRun(NamedTuple):
    """A run that a worker has claimed, and its progress."""

    claim: Claim
    document_id: str
    state: str
    pending: int
    done: int
    blamed: int


def create_triggers() -> None:
    """Create the triggers. Call it before any document is added."""
    with begin() as connection:
        connection.execute(text(_TRIGGERS))


def now() -> datetime:
    """Return the time of the database's clock, which times every event."""
    return _rows("SELECT clock_timestamp()")[0][0]


def runs_of_worker(pid: int) -> list[ClaimedRun]:
    """Return the runs that the worker with this main process has claimed."""
    return [run for run, worker in _claimed_runs() if worker.split(":")[1] == str(pid)]


def claimed_runs() -> list[ClaimedRun]:
    """Return every claimed run."""
    return [run for run, _ in _claimed_runs()]


def claimed_run_of(document_id: str) -> ClaimedRun | None:
    """Return the document's run, or None if it is not claimed."""
    return next((run for run in claimed_runs() if run.document_id == document_id), None)


def _claimed_runs() -> list[tuple[ClaimedRun, str]]:
    query = f"""
        SELECT id, epoch, document_id, state, crashes + expiries AS blamed, lease_worker,
            (SELECT count(*) FROM pages WHERE run_id = id AND pages.state = 'pending') AS pending,
            (SELECT count(*) FROM pages WHERE run_id = id AND pages.state <> 'pending') AS done
        FROM runs WHERE {_CLAIMED}"""
    return [
        (
            ClaimedRun(Claim(r.id, r.epoch), r.document_id, r.state, r.pending, r.done, r.blamed),
            r.lease_worker,
        )
        for r in _rows(query)
    ]


def unfinished() -> list[Claim]:
    """Return every run that has not ended."""
    return [Claim(*row) for row in _rows(f"SELECT id, epoch FROM runs WHERE NOT {_ENDED}")]


def pages_in_progress(claims: Iterable[Claim]) -> list[tuple[str, int]]:
    """Return pages sent under these claims and not stored yet: (document ID, number)."""
    query = """
        SELECT runs.document_id, pages.number FROM pages JOIN runs ON runs.id = pages.run_id
        WHERE run_id = :run AND hand_epoch = :epoch AND pages.state = 'pending'"""
    found: list[tuple[str, int]] = []
    for claim in claims:
        found += [(r[0], r[1]) for r in _rows(query, run=claim.run_id, epoch=claim.epoch)]
    return found


def pages_read_since(moment: datetime) -> int:
    """Return how many pages that the OCR server read were stored after this moment."""
    query = """
        SELECT count(*) FROM page_events JOIN pages USING (run_id, number)
        WHERE kind = 'stored' AND at > :moment AND pages.state = 'ocr'"""
    return _rows(query, moment=moment)[0][0]


def seconds_until_claimed(claim: Claim, moment: datetime) -> float | None:
    """Return the seconds until the run was claimed again or ended; None if neither happened."""
    query = f"""
        SELECT extract(epoch FROM min(at) - :moment) FROM run_events
        WHERE run_id = :run AND at > :moment AND (epoch > :epoch OR {_ENDED})"""
    return _seconds(query, run=claim.run_id, epoch=claim.epoch, moment=moment)


def seconds_until_moved(claim: Claim, moment: datetime) -> float | None:
    """Return the seconds until any event of the run, a stored page included; None without one.

    Zero if it ended in the transaction in which the moment was taken.
    """
    query = f"""
        SELECT CASE WHEN min(at) IS NOT NULL THEN extract(epoch FROM min(at) - :moment)
            WHEN (SELECT {_ENDED} FROM runs WHERE id = :run) THEN 0 END
        FROM (
            SELECT run_id, at FROM run_events UNION ALL SELECT run_id, at FROM page_events
        ) AS events
        WHERE run_id = :run AND at > :moment"""
    return _seconds(query, run=claim.run_id, moment=moment)


def _seconds(query: str, **values: object) -> float | None:
    seconds = _rows(query, **values)[0][0]
    return None if seconds is None else float(seconds)


def ends() -> dict[str, list[str]]:
    """Return the terminal states of each run, in the order in which they were written."""
    found: dict[str, list[str]] = {}
    for row in _rows(f"SELECT run_id, state FROM run_events WHERE {_ENDED} ORDER BY at"):
        found.setdefault(row.run_id, []).append(row.state)
    return found


def stores(run_id: str) -> list[tuple[int, str]]:
    """Return the writes of the run's pages: (number, stored or changed)."""
    query = "SELECT number, kind FROM page_events WHERE run_id = :run ORDER BY at"
    return [(r.number, r.kind) for r in _rows(query, run=run_id)]


def worker_is_back(pid: int) -> bool:
    """Return whether the worker with this main process has sent a heartbeat."""
    return bool(_rows("SELECT 1 FROM workers WHERE id LIKE :name", name=f"%:{pid}:%"))


def maintenance_is_back(pid: int) -> bool:
    """Return whether this process holds maintenance."""
    query = "SELECT 1 FROM maintenance_lease WHERE holder LIKE :name"
    return bool(_rows(query, name=f"%:{pid}:%"))


def _rows(query: str, **values: object) -> Sequence[Any]:
    with begin() as connection:
        return connection.execute(text(query), values).all()
