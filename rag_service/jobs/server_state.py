"""What all workers together know of an OCR server: up, out, on trial. Used by workers, maintenance.

An outage parks runs without blame. When a probe passes, one run tries the server with one page;
its first answered page opens the door for all others.
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
from rag_service.jobs.endings import end_run
from rag_service.jobs.leases import is_due
from rag_service.states import RunState, ServerState

# What its outage is called, by its state or by an alarm.
FAULT = "ocr_server"
# Probes of a server that is out come more often than this.
_USUAL_GAP = timedelta(minutes=5)
_OUT = (ServerState.DOWN, ServerState.MISCONFIGURED)


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """The stored state of one OCR server; `alarms`: what else people should know of it, by name."""

    url: str
    state: ServerState
    message: str
    down_since: datetime | None
    last_success_at: datetime | None
    alarms: Mapping[str, str]


def get(url: str) -> ServerRecord | None:
    """The record, or None where nothing was ever sent to this server."""
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
    """Note an outage; it lasts since the first such note after the last answered page.

    False where it was out in this way before.
    """
    state = ServerState.MISCONFIGURED if misconfigured else ServerState.DOWN
    message = clean(message)
    now = func.clock_timestamp()
    change = {
        "state": state,
        "message": message,
        "down_since": func.coalesce(OcrServer.down_since + _silence(), now),
        "trial_run_id": None,
        "probed_at": now,
    }
    insert = upsert(OcrServer).values(
        url=url, state=state, message=message, down_since=now, probed_at=now
    )
    known = select(OcrServer.state).where(OcrServer.url == url).with_for_update()
    with begin() as connection:
        before = connection.scalar(known)
        connection.execute(insert.on_conflict_do_update(index_elements=["url"], set_=change))
    return before != state


def _silence() -> ColumnElement[timedelta]:
    """How long nobody looked: our own absence must not count as the server's outage."""
    gap = func.clock_timestamp() - func.coalesce(OcrServer.probed_at, func.clock_timestamp())
    return func.greatest(gap - _USUAL_GAP, timedelta(0))


def mark_answered(url: str) -> None:
    """A page was answered: the server is up."""
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
    """Note what people should know of a server beside its state, by name, or that it is nothing."""
    lines = [f"{name}: {' '.join(clean(message).split())}" for name, message in alarms.items()]
    alarm = "\n".join(lines) or None
    with begin() as connection:
        connection.execute(
            update(OcrServer)
            .where(OcrServer.url == url, OcrServer.alarm.is_distinct_from(alarm))
            .values(alarm=alarm)
        )


def _alarms(stored: str | None) -> dict[str, str]:
    named = (line.partition(": ") for line in (stored or "").splitlines())
    return {name: message for name, _, message in named}


def begin_trial(url: str) -> str | None:
    """The probe passed: let one waiting run try one page. Returns its id, or None.

    The run that was claimed least often goes first, so that none whose own page brings the
    server down keeps the others waiting. Where no run waits the server counts as up; where all
    wait for a page's later try it stays out. A server that is not out is left as it is.
    """
    best = (
        select(Run.id, is_due())
        .where(Run.state == RunState.READY)
        .order_by(is_due().desc(), Run.epoch, Run.priority, Run.created_at, Run.id)
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


def pass_trial(url: str, run_id: str) -> None:
    """The run that was to try the server has nothing to send: let another one try."""
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
    """A trial whose run ended, or waits for a page's later try, is over: probe again."""
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
    """Fail the runs that waited for the server longer than the outage limit; how many."""
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
        # A run that is claimed at this moment tries the server: leave it alone.
        .with_for_update(of=Run, skip_locked=True)
    )
    with begin() as connection:
        run_ids = connection.scalars(parked).all()
        return sum(end_run(connection, run_id, RunState.FAILED, error) for run_id in run_ids)
