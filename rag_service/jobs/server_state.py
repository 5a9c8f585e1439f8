"""The state of an OCR server that all workers share: up, out, on trial.

An outage parks runs without counting an attempt. When a probe passes, one run tries the server
with one page; when a page is answered, all runs may be claimed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert as upsert
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import begin
from rag_service.database.models import OcrServer, Run
from rag_service.database.storable_text import clean
from rag_service.errors import RagServiceError
from rag_service.jobs.claim_conditions import is_due
from rag_service.jobs.endings import end_run
from rag_service.states import RunState, ServerState

# Name of the health fault for an outage, found by state or by an alarm.
FAULT = "ocr_server"
# Probes of a server that is out are more frequent than this.
_USUAL_GAP = timedelta(minutes=5)
_OUT = (ServerState.DOWN, ServerState.MISCONFIGURED)


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The stored state of one OCR server; `alarms`: further messages about it, by name."""

    url: str
    state: ServerState
    message: str
    down_since: datetime | None
    last_success_at: datetime | None
    alarms: Mapping[str, str]


def get(url: str) -> ServerRecord | None:
    """Return the record, or None if nothing was ever sent to this server."""
    query = select(OcrServer).where(OcrServer.url == url)
    with begin() as connection:
        row = connection.execute(query).one_or_none()
    if row is None:
        return None
    return ServerRecord(
        row.url,
        ServerState(row.state),
        row.message,
        row.down_since,
        row.last_success_at,
        _alarms(row.alarm),
    )


def mark_out(url: str, message: str, *, misconfigured: bool) -> bool:
    """Store an outage; it began with the first such call after the last answered page.

    Return False if the server was already in this state.
    """
    state = ServerState.MISCONFIGURED if misconfigured else ServerState.DOWN
    message = clean(message)
    now = func.clock_timestamp()
    change = {
        "state": state,
        "message": message,
        "down_since": func.coalesce(OcrServer.down_since + _unwatched_time(), now),
        "trial_run_id": None,
        "probed_at": now,
    }
    insert = upsert(OcrServer).values(
        url=url, state=state, message=message, down_since=now, probed_at=now
    )
    stored = select(OcrServer.state).where(OcrServer.url == url).with_for_update()
    with begin() as connection:
        before = connection.scalar(stored)
        connection.execute(insert.on_conflict_do_update(index_elements=["url"], set_=change))
    return before != state


def _unwatched_time() -> ColumnElement[timedelta]:
    """Return the time without any probe, which must not count as the server's outage."""
    gap = func.clock_timestamp() - func.coalesce(OcrServer.probed_at, func.clock_timestamp())
    return func.greatest(gap - _USUAL_GAP, timedelta(0))


def mark_answered(url: str) -> None:
    """Store that the server answered a page: it is up."""
    change = {
        "state": ServerState.UP,
        "message": "",
        "down_since": None,
        "trial_run_id": None,
        "last_success_at": func.clock_timestamp(),
    }
    with begin() as connection:
        connection.execute(
            upsert(OcrServer)
            .values(url=url, **change)
            .on_conflict_do_update(index_elements=["url"], set_=change)
        )


def set_alarms(url: str, alarms: Mapping[str, str]) -> None:
    """Replace the server's alarms: messages by name; none removes all."""
    lines = [f"{name}: {' '.join(clean(message).split())}" for name, message in alarms.items()]
    alarm = "\n".join(lines) or None
    with begin() as connection:
        connection.execute(
            upsert(OcrServer)
            .values(url=url, state=ServerState.UP, message="", alarm=alarm)
            .on_conflict_do_update(
                index_elements=["url"],
                set_={"alarm": alarm},
                where=OcrServer.alarm.is_distinct_from(alarm),
            )
        )


def _alarms(stored: str | None) -> dict[str, str]:
    named = (line.partition(": ") for line in (stored or "").splitlines())
    return {name: message for name, _, message in named}


def begin_trial(url: str) -> str | None:
    """Let one waiting run try the server with one page, after a probe passed.

    Return its id, or None. The run that was claimed least often goes first, so that a run whose
    page crashes the server does not block the others. If no run waits, the server counts as up;
    if all wait for a page's later try, it stays out. A server that is not out is not changed.
    """
    best = (
        select(Run.id, is_due())
        .where(Run.state == RunState.READY)
        .order_by(is_due().desc(), Run.epoch, Run.priority, Run.queued_at, Run.id)
        .limit(1)
    )
    with begin() as connection:
        run_id, due = connection.execute(best).one_or_none() or (None, True)
        if not due:
            return None
        values: dict[str, object] = {"state": ServerState.TRIAL, "trial_run_id": run_id}
        if run_id is None:
            values |= {"state": ServerState.UP, "down_since": None, "message": ""}
        begun = connection.execute(
            update(OcrServer).where(OcrServer.url == url, OcrServer.state.in_(_OUT)).values(values)
        )
    return run_id if begun.rowcount else None


def end_trial(url: str, run_id: str) -> None:
    """End the trial of a run that has nothing to send, so that another run may try."""
    with begin() as connection:
        connection.execute(
            update(OcrServer)
            .where(
                OcrServer.url == url,
                OcrServer.state == ServerState.TRIAL,
                OcrServer.trial_run_id == run_id,
            )
            .values(state=ServerState.DOWN, trial_run_id=None)
        )


def end_stale_trial(url: str) -> None:
    """End a trial if its run has ended or waits for a page's later try: probe again."""
    trying = select(Run.id).where(
        Run.state.in_([RunState.OCR, RunState.FINISHING])
        | ((Run.state == RunState.READY) & is_due())
    )
    with begin() as connection:
        connection.execute(
            update(OcrServer)
            .where(
                OcrServer.url == url,
                OcrServer.state == ServerState.TRIAL,
                OcrServer.trial_run_id.not_in(trying),
            )
            .values(state=ServerState.DOWN, trial_run_id=None)
        )


def fail_long_parked(url: str, limit_seconds: float, error: RagServiceError) -> int:
    """Fail the runs that waited for the server longer than the limit. Return their number."""
    moment = func.clock_timestamp() - timedelta(seconds=limit_seconds)
    parked = (
        select(Run.id)
        .join(OcrServer, OcrServer.url == url)
        .where(
            Run.state == RunState.READY,
            OcrServer.state != ServerState.UP,
            OcrServer.down_since < moment,
            Run.ready_at < moment,
        )
        # A locked run is being claimed to try the server.
        .with_for_update(of=Run, skip_locked=True)
    )
    with begin() as connection:
        run_ids = connection.scalars(parked).all()
        return sum(end_run(connection, run_id, RunState.FAILED, error) for run_id in run_ids)
