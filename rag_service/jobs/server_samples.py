"""Gauge samples of the OCR servers over time, and the alarm for a server without enough work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import ColumnElement, Row, delete, func, literal, or_, select, true, update
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.dialects.postgresql import insert as upsert

from rag_service.database.engine import Connection, autocommit, begin, reading
from rag_service.database.models import OcrServer, Page, RemoteJob, Run, ServerSample
from rag_service.diagnosis.bottleneck import Diagnosis, LoadSample, Verdict
from rag_service.jobs.claim_conditions import is_due
from rag_service.states import JobState, PagePlan, PageState, RunState, ServerState

_RATE_SECONDS = 60.0
# RunPod's word for a job that no worker has begun.
_QUEUED = "IN_QUEUE"
# States of a run some pages of which may have been read in the last minute: it has not ended, and
# a fork or a job has had it.
_READ_IN = (
    RunState.PREPARING,
    RunState.READY,
    RunState.OCR,
    RunState.REMOTE,
    RunState.FINISHING,
)


@dataclass(frozen=True, slots=True)
class PageQueue:
    """The pages that wait to be sent to the OCR server, and the pages read a minute.

    `at`: now, by the database's clock, which all samples use.
    """

    at: datetime
    pages_waiting: int
    pages_per_minute: float


@dataclass(frozen=True, slots=True)
class EndpointGauges:
    """Means of the gauges in an endpoint's ended jobs, None if no job had any.

    `pages`: the number of pages in live jobs; `live`: these jobs; `queued`: those of them that no
    worker has begun; `most_pages`: pages of the largest.
    """

    running: float | None
    waiting: float | None
    slots: int | None
    pages: int
    live: int
    queued: int
    most_pages: int


@dataclass(frozen=True, slots=True)
class Starvation:
    """The alarm that pages wait although the server could take more: its start and cause."""

    since: datetime
    why: str


@dataclass(frozen=True, slots=True)
class DiagnosedSample:
    """A stored sample with the diagnosis made at its time."""

    sample: LoadSample
    diagnosis: Diagnosis


def page_queue() -> PageQueue:
    """Return the pages that wait now, and the rate of the last minute."""
    with reading() as connection:
        now = connection.scalars(select(func.clock_timestamp())).one()
        return PageQueue(now, _pages_waiting(connection), _pages_per_minute(connection))


def _pages_waiting(connection: Connection) -> int:
    """Count pages that no fork has sent, of runs that wait for a fork or for the server."""
    in_progress = (Page.hand_epoch == Run.epoch) & (Run.state == RunState.OCR)
    query = (
        select(func.count())
        .select_from(Page)
        .join(Run, Run.id == Page.run_id)
        .where(
            Run.state.in_([_text(RunState.READY), _text(RunState.OCR)]),
            is_due(),
            Page.state == _text(PageState.PENDING),
            Page.plan == PagePlan.OCR,
            Page.remote_job_id.is_(None),
            or_(Page.retry_at.is_(None), Page.retry_at <= func.now()),
            in_progress.is_not(True),
        )
    )
    return connection.scalar(query) or 0


def _text(word: StrEnum) -> ColumnElement[str]:
    """Return the word as a literal, so that a prepared plan may use a partial index too."""
    return literal(word.value, literal_execute=True)


def _pages_per_minute(connection: Connection) -> float:
    """Count, run by run, the pages of the runs that have ended lately or are being read.

    A join of whole tables would read every page.
    """
    since = _ago(_RATE_SECONDS)
    read = (
        select(func.count().label("pages"))
        .where(
            Page.run_id == Run.id,
            Page.plan == PagePlan.OCR,
            Page.reused.is_(False),
            Page.stored_at > since,
            Page.state != PageState.FAILED,
        )
        .lateral()
    )
    counts = [
        select(func.coalesce(func.sum(read.c.pages), 0)).select_from(Run).join(read, true())
        .where(condition)
        .scalar_subquery()
        for condition in (Run.finished_at > since, Run.state.in_([_text(s) for s in _READ_IN]))
    ]  # fmt: skip
    return float(connection.scalar(select(counts[0] + counts[1])) or 0) * 60 / _RATE_SECONDS


def endpoint_gauges(base_url: str, endpoint_id: str, seconds: float) -> EndpointGauges:
    """Return the gauges in the jobs of the endpoint that ended in the last `seconds`."""
    of_endpoint = (RemoteJob.base_url == base_url) & (RemoteJob.endpoint_id == endpoint_id)
    means = select(
        func.avg(RemoteJob.gauges["running_mean"].as_float()),
        func.avg(RemoteJob.gauges["waiting_mean"].as_float()),
        func.max(RemoteJob.gauges["slots"].as_integer()),
    ).where(of_endpoint, RemoteJob.ended_at > _ago(seconds))
    number = func.cardinality(RemoteJob.pages)
    is_queued = func.coalesce(RemoteJob.last_status, _QUEUED) == _QUEUED
    live = select(
        func.coalesce(func.sum(number), 0),
        func.count(),
        func.count().filter(is_queued),
        func.coalesce(func.max(number), 0),
    ).where(of_endpoint, RemoteJob.state == _text(JobState.LIVE))
    with reading() as connection:
        running, waiting, slots = connection.execute(means).one()
        return EndpointGauges(running, waiting, slots, *connection.execute(live).one())


def add_sample(sample: LoadSample, diagnosis: Diagnosis) -> None:
    """Store a sample with its diagnosis; a second sample of the same moment is ignored."""
    values = asdict(sample)
    values |= {"in_flight_limit": values.pop("limit"), "sentence": diagnosis.sentence}
    values["verdict"] = diagnosis.verdict
    with autocommit() as connection:
        connection.execute(upsert(ServerSample).values(values).on_conflict_do_nothing())


def samples(url: str, seconds: float) -> list[DiagnosedSample]:
    """Return the server's samples of the last `seconds`, oldest first."""
    query = (
        select(ServerSample)
        .where(ServerSample.url == url, ServerSample.at > _ago(seconds))
        .order_by(ServerSample.at)
    )
    with reading() as connection:
        return _diagnosed(connection.execute(query).all())


def latest(seconds: float, url: str | None = None) -> list[DiagnosedSample]:
    """Return the newest sample of each server, no older than `seconds`.

    If `url` has one, return it alone: samples of a server used before say nothing of now.
    """
    query = (
        select(ServerSample)
        .where(ServerSample.at > _ago(seconds))
        .order_by(ServerSample.url, ServerSample.at.desc())
        .ext(distinct_on(ServerSample.url))
    )
    with reading() as connection:
        newest = _diagnosed(connection.execute(query).all())
    return [one for one in newest if one.sample.url == url] or newest


def most_running(url: str) -> float | None:
    """Return the most requests that ran while others waited: the slots if none are reported."""
    full = (ServerSample.url == url) & (ServerSample.waiting > 0)
    with begin() as connection:
        return connection.scalar(select(func.max(ServerSample.running)).where(full))


def raise_starved(url: str, alarm: Starvation) -> bool:
    """Raise the alarm for the server. Return False if it was raised; it keeps its start."""
    change = {"starved_since": alarm.since, "starved_why": alarm.why}
    with begin() as connection:
        connection.execute(
            update(OcrServer)
            .where(OcrServer.url == url, OcrServer.starved_since.is_not(None))
            .values(starved_why=alarm.why)
        )
        raised = connection.scalar(
            upsert(OcrServer)
            .values(url=url, state=ServerState.UP, message="", **change)
            .on_conflict_do_update(
                index_elements=["url"], set_=change, where=OcrServer.starved_since.is_(None)
            )
            .returning(OcrServer.url)
        )
    return raised is not None


def end_starved(url: str) -> Starvation | None:
    """End the alarm. Return the alarm that was raised, or None."""
    with begin() as connection:
        alarm = _starvation(connection, url)
        if alarm is not None:
            change = {"starved_since": None, "starved_why": None}
            connection.execute(update(OcrServer).where(OcrServer.url == url).values(change))
    return alarm


def starvation(url: str) -> Starvation | None:
    """Return the alarm that is raised for the server, or None."""
    with reading() as connection:
        return _starvation(connection, url)


def _starvation(connection: Connection, url: str) -> Starvation | None:
    query = select(OcrServer.starved_since, OcrServer.starved_why).where(
        OcrServer.url == url, OcrServer.starved_since.is_not(None)
    )
    row = connection.execute(query).one_or_none()
    return None if row is None else Starvation(row.starved_since, row.starved_why)


def remove_older(seconds: float) -> int:
    """Remove samples older than `seconds`. Return how many."""
    with begin() as connection:
        removed = connection.execute(delete(ServerSample).where(ServerSample.at < _ago(seconds)))
    return removed.rowcount


def _ago(seconds: float) -> ColumnElement[object]:
    # Not clock_timestamp(), which an index cannot be searched by: it differs from row to row.
    return func.statement_timestamp() - timedelta(seconds=seconds)


def _diagnosed(rows: Sequence[Row[ServerSample]]) -> list[DiagnosedSample]:
    return [
        DiagnosedSample(
            LoadSample(
                url=row.url,
                at=row.at,
                running=row.running,
                waiting=row.waiting,
                slots=row.slots,
                cache_use=row.cache_use,
                in_flight=row.in_flight,
                limit=row.in_flight_limit,
                tokens_per_second=row.tokens_per_second,
                pages_per_minute=row.pages_per_minute,
                pages_waiting=row.pages_waiting,
            ),
            Diagnosis(Verdict(row.verdict), row.sentence),
        )
        for row in rows
    ]
