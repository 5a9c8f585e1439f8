"""What forks report of their open requests on the OCR servers, and of their limits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.dialects.postgresql import insert as upsert

from rag_service.database.engine import autocommit, begin
from rag_service.database.models import ForkLoad, OcrServer
from rag_service.states import ServerState

# A fork that missed three reports has no request open any more.
_LIVE_SECONDS = 15.0
_KEPT_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class TotalLoad:
    """The live forks of a server: their number, open requests and limits together.

    `limit` is None if no fork is at work.
    """

    forks: int
    in_flight: float
    limit: float | None


def report(fork: str, url: str, in_flight: float, limit: float) -> None:
    """Store a fork's mean number of open requests on the server, and its limit."""
    values = {
        "url": url,
        "in_flight": in_flight,
        "limit_now": limit,
        "seen_at": func.clock_timestamp(),
    }
    with autocommit() as connection:
        connection.execute(
            upsert(ForkLoad)
            .values(fork=fork, **values)
            .on_conflict_do_update(index_elements=["fork"], set_=values)
        )


def remove(fork: str) -> None:
    """Remove the report of a fork that has nothing left to send."""
    with autocommit() as connection:
        connection.execute(delete(ForkLoad).where(ForkLoad.fork == fork))


def remove_stale() -> None:
    """Remove the reports of forks that ended half an hour ago or earlier."""
    with autocommit() as connection:
        connection.execute(delete(ForkLoad).where(ForkLoad.seen_at < _ago(_KEPT_SECONDS)))


def in_flight(url: str) -> float:
    """Return the number of requests that live forks have open on the server."""
    return total(url).in_flight


def total(url: str) -> TotalLoad:
    """Return what live forks have open on the server, and the sum of their limits."""
    query = select(
        func.count(), func.coalesce(func.sum(ForkLoad.in_flight), 0.0), func.sum(ForkLoad.limit_now)
    ).where(ForkLoad.url == url, ForkLoad.seen_at > _ago(_LIVE_SECONDS))
    with begin() as connection:
        return TotalLoad(*connection.execute(query).one())


def good_in_flight(url: str) -> float | None:
    """Return the last good number in flight of all forks together, or None if none is known."""
    with begin() as connection:
        return connection.scalar(select(OcrServer.good_in_flight).where(OcrServer.url == url))


def store_good_in_flight(url: str, number: float) -> None:
    """Store the number in flight, of all forks together, that the search found best."""
    change = {"good_in_flight": number}
    with autocommit() as connection:
        connection.execute(
            upsert(OcrServer)
            .values(url=url, state=ServerState.UP, message="", **change)
            .on_conflict_do_update(index_elements=["url"], set_=change)
        )


def _ago(seconds: float) -> ColumnElement[object]:
    return func.clock_timestamp() - timedelta(seconds=seconds)
