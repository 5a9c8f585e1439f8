"""Writes down, inside the database, every claim, every end and every stored page, with its time.

Triggers do it, so nothing that a process does or fails to do can hide from it. Used by the chaos
tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import text

from rag_service.database.engine import begin

_TRIGGERS = """
CREATE TABLE seen_runs (
    run_id text, state text, epoch int, at timestamptz DEFAULT clock_timestamp());
CREATE TABLE seen_pages (
    run_id text, number int, kind text, at timestamptz DEFAULT clock_timestamp());
CREATE INDEX ON seen_runs (run_id);
CREATE INDEX ON seen_pages (run_id);

CREATE FUNCTION see_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO seen_runs VALUES (NEW.id, NEW.state, NEW.epoch);
    RETURN NULL;
END $$;
CREATE TRIGGER see_new_run AFTER INSERT ON runs FOR EACH ROW EXECUTE FUNCTION see_run();
CREATE TRIGGER see_run AFTER UPDATE ON runs FOR EACH ROW
    WHEN (OLD.state <> NEW.state OR OLD.epoch <> NEW.epoch) EXECUTE FUNCTION see_run();

CREATE FUNCTION see_page() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.state <> 'pending' THEN
        INSERT INTO seen_pages VALUES (NEW.run_id, NEW.number, 'changed');
    ELSIF NEW.state <> 'pending' THEN
        INSERT INTO seen_pages VALUES (NEW.run_id, NEW.number, 'stored');
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER see_page AFTER INSERT OR UPDATE ON pages FOR EACH ROW EXECUTE FUNCTION see_page();
"""
_HELD = "state IN ('preparing', 'ocr', 'finishing')"
_ENDED = "state IN ('processed', 'failed', 'cancelled')"


class Claim(NamedTuple):
    """A run under one of its claims, or waiting after it."""

    run_id: str
    epoch: int


class Holding(NamedTuple):
    """A run that is held now, and how far it is."""

    claim: Claim
    document_id: str
    state: str
    pending: int
    done: int
    blamed: int


def begin_watch() -> None:
    """Make the triggers; before any document comes in."""
    with begin() as connection:
        connection.execute(text(_TRIGGERS))


def now() -> datetime:
    """The database's clock, by which all that is written down is timed."""
    return _rows("SELECT clock_timestamp()")[0][0]


def held_by(pid: int) -> list[Holding]:
    """Runs that the worker with this main process holds."""
    return [holding for holding, worker in _holdings() if worker.split(":")[1] == str(pid)]


def held() -> list[Holding]:
    """Every run that is held."""
    return [holding for holding, _ in _holdings()]


def held_of(document_id: str) -> Holding | None:
    """The document's run, where it is held."""
    return next((h for h, _ in _holdings() if h.document_id == document_id), None)


def _holdings() -> list[tuple[Holding, str]]:
    query = f"""
        SELECT id, epoch, document_id, state, crashes + expiries AS blamed, lease_worker,
            (SELECT count(*) FROM pages WHERE run_id = id AND pages.state = 'pending') AS pending,
            (SELECT count(*) FROM pages WHERE run_id = id AND pages.state <> 'pending') AS done
        FROM runs WHERE {_HELD}"""
    return [
        (
            Holding(Claim(r.id, r.epoch), r.document_id, r.state, r.pending, r.done, r.blamed),
            r.lease_worker,
        )
        for r in _rows(query)
    ]


def unfinished() -> list[Claim]:
    """Every run that has not ended."""
    return [Claim(*row) for row in _rows(f"SELECT id, epoch FROM runs WHERE NOT {_ENDED}")]


def in_hand(claims: Iterable[Claim]) -> list[tuple[str, int]]:
    """Pages that were sent out under these claims and are not stored: (document id, number)."""
    query = """
        SELECT runs.document_id, pages.number FROM pages JOIN runs ON runs.id = pages.run_id
        WHERE run_id = :run AND hand_epoch = :epoch AND pages.state = 'pending'"""
    found: list[tuple[str, int]] = []
    for claim in claims:
        found += [(r[0], r[1]) for r in _rows(query, run=claim.run_id, epoch=claim.epoch)]
    return found


def pages_read_since(moment: datetime) -> int:
    """Pages that the OCR server read and that were stored after this moment."""
    query = """
        SELECT count(*) FROM seen_pages JOIN pages USING (run_id, number)
        WHERE kind = 'stored' AND at > :moment AND pages.state = 'ocr'"""
    return _rows(query, moment=moment)[0][0]


def seconds_until_claimed(claim: Claim, moment: datetime) -> float | None:
    """Seconds from the moment until the run was claimed anew or ended; None: not yet."""
    query = f"""
        SELECT extract(epoch FROM min(at) - :moment) FROM seen_runs
        WHERE run_id = :run AND at > :moment AND (epoch > :epoch OR {_ENDED})"""
    return _seconds(query, run=claim.run_id, epoch=claim.epoch, moment=moment)


def seconds_until_moved(claim: Claim, moment: datetime) -> float | None:
    """Seconds from the moment until anything became of the run, a stored page included.

    Zero where it ended in the transaction that the moment fell into.
    """
    query = f"""
        SELECT CASE WHEN min(at) IS NOT NULL THEN extract(epoch FROM min(at) - :moment)
            WHEN (SELECT {_ENDED} FROM runs WHERE id = :run) THEN 0 END
        FROM (SELECT run_id, at FROM seen_runs UNION ALL SELECT run_id, at FROM seen_pages) AS seen
        WHERE run_id = :run AND at > :moment"""
    return _seconds(query, run=claim.run_id, moment=moment)


def _seconds(query: str, **values: object) -> float | None:
    seconds = _rows(query, **values)[0][0]
    return None if seconds is None else float(seconds)


def ends() -> dict[str, list[str]]:
    """The terminal states of each run in the order in which they were written."""
    found: dict[str, list[str]] = {}
    for row in _rows(f"SELECT run_id, state FROM seen_runs WHERE {_ENDED} ORDER BY at"):
        found.setdefault(row.run_id, []).append(row.state)
    return found


def stores(run_id: str) -> list[tuple[int, str]]:
    """What was written of the run's pages: (number, stored or changed)."""
    query = "SELECT number, kind FROM seen_pages WHERE run_id = :run ORDER BY at"
    return [(r.number, r.kind) for r in _rows(query, run=run_id)]


def worker_is_back(pid: int) -> bool:
    """Whether the worker with this main process has reported."""
    return bool(_rows("SELECT 1 FROM workers WHERE id LIKE :name", name=f"%:{pid}:%"))


def maintenance_is_back(pid: int) -> bool:
    """Whether maintenance is held by this process."""
    query = "SELECT 1 FROM maintenance_lease WHERE holder LIKE :name"
    return bool(_rows(query, name=f"%:{pid}:%"))


def _rows(query: str, **values: object) -> Sequence[Any]:
    with begin() as connection:
        return connection.execute(text(query), values).all()
