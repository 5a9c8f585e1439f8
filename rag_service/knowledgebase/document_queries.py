"""Queries of documents: one, and a page of a listing, with status, progress and cost."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Row,
    Select,
    func,
    literal,
    select,
    true,
    tuple_,
    union,
)
from sqlalchemy.orm import Session, aliased

from rag_service.database.engine import reading
from rag_service.database.models import Document, Page, RemoteJob, Run
from rag_service.knowledgebase.page_queries import error_view
from rag_service.knowledgebase.selection import with_page_error
from rag_service.knowledgebase.views import (
    CostView,
    DocumentView,
    PageCounts,
    RunView,
    WarningView,
)
from rag_service.knowledgebase.waiting_reasons import server_message, waiting_reason
from rag_service.states import (
    TERMINAL,
    OcrMode,
    PageState,
    RunState,
    Stage,
    WaitingFor,
)

# The run whose status and pages are shown, and the newest one.
_Shown = aliased(Run, name="shown")
# A lateral join, so that a listing reads no further than its limit.
_Latest = aliased(
    Run,
    select(Run)
    .where(Run.document_id == Document.id)
    .order_by(Run.number.desc())
    .limit(1)
    .lateral("latest"),
    name="latest",
)
# Pages with warnings shown for a document.
_WARNED_PAGES_SHOWN = 200
# The length of the queue in which a document's place is counted.
_PLACES_COUNTED = 10_000


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions of a listing.

    `after`: the last document of the previous page of the listing; `id_prefix`: the first
    hexadecimal digits of the id.
    """

    status: RunState | None = None
    collection: str | None = None
    error: str | None = None
    after: tuple[datetime, str] | None = None
    id_prefix: str | None = None


def get_document(document_id: str, server: str | None) -> DocumentView | None:
    """Return a document, or None if it is unknown or deleted.

    `server` is the OCR server in use: an outage of it is a reason to wait.
    """
    return get_documents([document_id], server).get(document_id)


def get_documents(document_ids: Collection[str], server: str | None) -> dict[str, DocumentView]:
    """Return the documents by id, without those that are unknown or deleted."""
    with reading() as connection, Session(connection) as session:
        views = _views(session, _documents(server).where(Document.id.in_(document_ids)))
        return {view.id: view for view in views}


def list_documents(chosen: Filter, limit: int, server: str | None) -> list[DocumentView]:
    """Return up to `limit` documents, newest first."""
    query = _documents(server).where(*_conditions(chosen))
    if chosen.error:
        query = query.where(Document.id.in_(_newest_with_error(chosen, chosen.error, limit)))
    with reading() as connection, Session(connection) as session:
        return _views(session, _newest_first(query, limit))


def _conditions(chosen: Filter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if chosen.status:
        conditions.append(Document.status == chosen.status)
    if chosen.collection:
        conditions.append(Document.collection == chosen.collection)
    if chosen.id_prefix:
        # Every collation sorts "g" after the hexadecimal digits, so the primary key serves this.
        conditions.append(Document.id.between(chosen.id_prefix, chosen.id_prefix + "g"))
    if chosen.after:
        place = tuple_(Document.created_at, Document.id)
        conditions.append(place < tuple_(*(literal(value) for value in chosen.after)))
    return conditions


def _newest_with_error(chosen: Filter, code: str, limit: int) -> CompoundSelect[str]:
    """Return the query for the documents of one page of a listing by error.

    Each kind of error has an index of its own; a condition with OR would read every document.
    """
    undeleted = select(Document.id).where(Document.deleted_at.is_(None), *_conditions(chosen))
    kinds = (Document.latest_error == code, Document.id.in_(with_page_error(code)))
    return union(
        *(
            select(_newest_first(undeleted.where(kind), limit).subquery().c.id)
            for kind in kinds
        )
    )  # fmt: skip


def _newest_first(query: Select[Any], limit: int) -> Select[Any]:
    return query.order_by(Document.created_at.desc(), Document.id.desc()).limit(limit)


def _documents(server: str | None) -> Select[Any]:
    return (
        select(
            Document,
            _Shown,
            _Latest,
            waiting_reason(_Latest, server).label("waiting_for"),
            server_message(server).label("server_message"),
            func.clock_timestamp().label("now"),
        )
        .select_from(Document)
        .join(_Latest, true())
        .outerjoin(_Shown, _Shown.id == Document.current_run_id)
        .where(Document.deleted_at.is_(None))
    )


def _queue_positions(session: Session, waiting: Sequence[Run]) -> dict[str, int]:
    """Return the places of waiting runs in the queue of their stage, from 1, by run id.

    One query a stage numbers the runs up to the last of these. A run that is not among the first
    _PLACES_COUNTED has no number.
    """
    positions: dict[str, int] = {}
    for stage in Stage:
        own = [run for run in waiting if run.state == stage.waiting]
        if own:
            last = max((run.priority, run.queued_at, run.id) for run in own)
            positions |= _places(session, stage, last, [run.id for run in own])
    return positions


def _places(
    session: Session, stage: Stage, last: tuple[int, datetime, str], run_ids: Sequence[str]
) -> dict[str, int]:
    order = (Run.priority, Run.queued_at, Run.id)
    queue = (
        select(Run.id, func.row_number().over(order_by=order).label("place"))
        .where(Run.state == literal(stage.waiting.value, literal_execute=True))
        .where(tuple_(*order) <= tuple_(*(literal(value) for value in last)))
        .order_by(*order)
        .limit(_PLACES_COUNTED)
        .subquery()
    )
    query = select(queue.c.id, queue.c.place).where(queue.c.id.in_(run_ids))
    return {run_id: place for run_id, place in session.execute(query)}


def _views(session: Session, query: Select[Any]) -> list[DocumentView]:
    rows = session.execute(query).all()
    if not rows:
        return []
    run_ids = {run.id for row in rows for run in (_shown(row), row.latest)}
    waiting = [row.latest for row in rows if row.waiting_for is not None]
    data = _RunData(
        counts=_page_counts(session, run_ids),
        warnings=_page_warnings(session, {_shown(row).id for row in rows}),
        positions=_queue_positions(session, waiting),
        costs=_costs(session, [row.Document.id for row in rows]),
    )
    return [_view(row, data) for row in rows]


@dataclass(frozen=True, slots=True)
class _RunData:
    """Data of the listed runs beside their rows, by run id; `costs` by document id."""

    counts: dict[str, Counter[str]]
    warnings: dict[str, list[WarningView]]
    positions: dict[str, int]
    costs: dict[str, CostView]


def _costs(session: Session, document_ids: Sequence[str]) -> dict[str, CostView]:
    """Return the cost of all jobs of each document, a lower bound: execution time at its price."""
    seconds = RemoteJob.execution_ms / 1000.0
    # Run by run: a join of whole tables would read every job.
    of_run = (
        select(
            func.sum(seconds).label("gpu"),
            func.sum(seconds * RemoteJob.usd_per_second).label("usd"),
        )
        .where(RemoteJob.run_id == Run.id)
        .lateral()
    )
    query = (
        select(Run.document_id, func.sum(of_run.c.gpu), func.sum(of_run.c.usd))
        .join(of_run, of_run.c.gpu.is_not(None))
        .where(Run.document_id.in_(document_ids))
        .group_by(Run.document_id)
    )
    return {
        document_id: CostView(gpu_seconds=round(float(gpu or 0), 3), usd=round(float(usd or 0), 6))
        for document_id, gpu, usd in session.execute(query)
    }


def _shown(row: Row[Any]) -> Run:
    run: Run = row.shown or row.latest
    return run


def _page_counts(session: Session, run_ids: set[str]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    query = (
        select(Page.run_id, Page.state, func.count())
        .where(Page.run_id.in_(run_ids))
        .group_by(Page.run_id, Page.state)
    )
    for run_id, state, count in session.execute(query):
        counts[run_id][state] = count
    return counts


def _page_warnings(session: Session, run_ids: set[str]) -> dict[str, list[WarningView]]:
    warnings: dict[str, list[WarningView]] = defaultdict(list)
    place = func.row_number().over(partition_by=Page.run_id, order_by=Page.number)
    warned = (
        select(Page.run_id, Page.number, Page.warnings, place.label("place"))
        .where(Page.run_id.in_(run_ids), func.jsonb_array_length(Page.warnings) > 0)
        .subquery()
    )
    query = (
        select(warned.c.run_id, warned.c.number, warned.c.warnings)
        .where(warned.c.place <= _WARNED_PAGES_SHOWN)
        .order_by(warned.c.run_id, warned.c.number)
    )
    for run_id, number, found in session.execute(query):
        warnings[run_id] += [WarningView.model_validate(w | {"page": number}) for w in found]
    return warnings


def _view(row: Row[Any], data: _RunData) -> DocumentView:
    document, run, latest = row.Document, _shown(row), row.latest
    latest_pages = _counts(data.counts[latest.id], latest.page_count)
    pages = _counts(data.counts[run.id], run.page_count)
    return DocumentView(
        id=document.id,
        filename=document.filename,
        collection=document.collection,
        sha256=document.sha256,
        bytes=document.bytes,
        media_type=document.media_type,
        status=RunState(run.state),
        incomplete=_is_incomplete(document, run, pages),
        latest_run=RunView(
            id=latest.id,
            status=RunState(latest.state),
            error=error_view(latest),
            pages=latest_pages,
        ),
        waiting_for=row.waiting_for,
        waiting_message=(
            row.server_message or None if row.waiting_for == WaitingFor.OCR_SERVER else None
        ),
        queue_position=data.positions.get(latest.id),
        parser=run.parser,
        ocr=OcrMode(run.ocr),
        pages=pages,
        eta_seconds=_eta(latest, latest_pages, row.now),
        error=error_view(run),
        warnings=[WarningView.model_validate(w) for w in run.warnings] + data.warnings[run.id],
        cost=data.costs.get(document.id, CostView()),
        created_at=document.created_at,
        started_at=run.started_at,
        finished_at=run.finished_at,
        wait_seconds=_seconds(run.created_at, run.started_at or row.now),
        run_seconds=_seconds(run.started_at, run.finished_at or row.now),
    )


def _is_incomplete(document: Document, run: Run, pages: PageCounts) -> bool:
    """Return whether the current run is a failed one with at least one good page."""
    failed = run.state == RunState.FAILED and document.current_run_id == run.id
    return failed and pages.done > pages.failed


def _counts(counts: Counter[str], total: int | None) -> PageCounts:
    done = {state: n for state, n in counts.items() if state != PageState.PENDING}
    return PageCounts(total=total, done=sum(done.values()), **done)


def _seconds(start: datetime | None, end: datetime) -> float | None:
    return round((end - start).total_seconds(), 3) if start else None


def _eta(run: Run, pages: PageCounts, now: datetime) -> float | None:
    """Return the seconds until the run's end at its rate so far, or None if no page is done."""
    if run.state in TERMINAL or not pages.total or not pages.done:
        return None
    worked = run.worked_seconds
    if run.held_since is not None:
        worked += (now - run.held_since).total_seconds()
    return round(worked / pages.done * (pages.total - pages.done), 1)


@dataclass(frozen=True, slots=True)
class StoredSource:
    """The storage key, media type and filename of a document's bytes."""

    key: str
    media_type: str
    filename: str


def get_source(document_id: str) -> StoredSource | None:
    """Return the source of an undeleted document, or None."""
    query = select(Document.source_key, Document.media_type, Document.filename).where(
        Document.id == document_id, Document.deleted_at.is_(None)
    )
    with reading() as connection, Session(connection) as session:
        row = session.execute(query).one_or_none()
    return StoredSource(*row) if row else None
