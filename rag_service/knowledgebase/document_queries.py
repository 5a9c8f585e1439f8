"""Reads documents and pages for people: one, a page of a listing, progress. Used by the API."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, Select, and_, case, func, literal, or_, select, true, tuple_
from sqlalchemy.orm import Session, aliased, defer
from sqlalchemy.sql import ColumnElement

from rag_service.config.loader import get_settings
from rag_service.database.engine import get_engine
from rag_service.database.models import Document, Page, RemoteJob, Run, WorkerRow
from rag_service.jobs.claim_conditions import server_is_out
from rag_service.jobs.live_workers import is_alive
from rag_service.knowledgebase.views import (
    CostView,
    DocumentView,
    ErrorView,
    PageCounts,
    PageStatus,
    PageView,
    RegionView,
    RunView,
    WarningView,
    WholePageView,
)
from rag_service.states import (
    HELD,
    TERMINAL,
    JobState,
    PageState,
    RunState,
    Stage,
    WaitingFor,
)

# The run whose status and pages are shown, and the newest one.
_Shown = aliased(Run, name="shown")
# Looked up for each listed document, so that a listing stops at its limit.
_Latest = aliased(
    Run,
    select(Run)
    .where(Run.document_id == Document.id)
    .order_by(Run.number.desc())
    .limit(1)
    .lateral("latest"),
    name="latest",
)
# A document with thousands of bad pages shows the first ones.
_WARNED_PAGES_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Filter:
    """Which documents a listing shows; `after` is the last one of the listing's page before."""

    status: RunState | None = None
    collection: str | None = None
    error: str | None = None
    after: tuple[datetime, str] | None = None


def get_document(document_id: str, server: str | None) -> DocumentView | None:
    """One document, or None where it is unknown or deleted.

    `server` is the OCR server in use: an outage of it is a reason to wait.
    """
    with Session(get_engine()) as session:
        views = _views(session, _documents(server).where(Document.id == document_id))
        return views[0] if views else None


def list_documents(chosen: Filter, limit: int, server: str | None) -> list[DocumentView]:
    """A page of the listing, newest first."""
    query = _documents(server)
    status = func.coalesce(_Shown.state, _Latest.state)
    if chosen.status:
        query = query.where(status == chosen.status)
    if chosen.collection:
        query = query.where(Document.collection == chosen.collection)
    if chosen.error:
        query = query.where(_Latest.error_code == chosen.error)
    if chosen.after:
        place = tuple_(Document.created_at, Document.id)
        query = query.where(place < tuple_(*(literal(value) for value in chosen.after)))
    query = query.order_by(Document.created_at.desc(), Document.id.desc()).limit(limit)
    with Session(get_engine()) as session:
        return _views(session, query)


def _documents(server: str | None) -> Select[Any]:
    return (
        select(
            Document,
            _Shown,
            _Latest,
            _waiting_for(server).label("waiting_for"),
            func.clock_timestamp().label("now"),
        )
        .select_from(Document)
        .join(_Latest, true())
        .outerjoin(_Shown, _Shown.id == Document.current_run_id)
        .where(Document.deleted_at.is_(None))
    )


def _waiting_for(server: str | None) -> ColumnElement[str | None]:
    """Why the newest run waits; null where it has ended or a live worker reads its pages."""
    worker = select(WorkerRow.id).where(is_alive(), WorkerRow.stage == _stage()).correlate(_Latest)
    whens: list[tuple[ColumnElement[bool], Any]] = [
        (_Latest.state == RunState.REMOTE, WaitingFor.REMOTE_JOB.value),
        (_is_forsaken(), WaitingFor.WORKER.value),
        (_is_all_posted(), WaitingFor.REMOTE_JOB.value),
        (_Latest.state.not_in([Stage.PREPARE.waiting, Stage.OCR.waiting]), None),
    ]
    if server:
        out = and_(_Latest.state == Stage.OCR.waiting, server_is_out(server, _Latest.id))
        whens.append((out, WaitingFor.OCR_SERVER.value))
    whens += [
        (_Latest.retry_at > func.now(), WaitingFor.RETRY.value),
        (~worker.exists(), WaitingFor.WORKER.value),
        (~worker.where(~WorkerRow.low_memory).exists(), WaitingFor.MEMORY_GUARD.value),
    ]
    return case(*whens, else_=WaitingFor.QUEUE.value)


def _is_forsaken() -> ColumnElement[bool]:
    """Held by an owner that has stopped work by its own clock: the lease is not yet over."""
    lease = get_settings().lease
    left = timedelta(seconds=lease.seconds - lease.give_up_after)
    return and_(_Latest.state.in_(HELD), _Latest.lease_expires_at < func.clock_timestamp() + left)


def _is_all_posted() -> ColumnElement[bool]:
    """Held by a fork that can but follow its jobs: they have all the pages that remain.

    Not EXISTS, for which a listing would read the whole table of pages.
    """
    remaining = (
        select(Page.number)
        .where(Page.run_id == _Latest.id, Page.state == PageState.PENDING)
        .correlate(_Latest)
        .limit(1)
    )
    here = remaining.outerjoin(RemoteJob, RemoteJob.id == Page.remote_job_id).where(
        or_(RemoteJob.id.is_(None), RemoteJob.state == JobState.SUBMITTING)
    )
    return and_(
        _Latest.state == RunState.OCR,
        remaining.scalar_subquery().is_not(None),
        here.scalar_subquery().is_(None),
    )


def _stage() -> ColumnElement[str]:
    return case(
        (_Latest.state == Stage.PREPARE.waiting, Stage.PREPARE.value), else_=Stage.OCR.value
    )


def _queue_positions(session: Session, run_ids: set[str]) -> dict[str, int]:
    """The places of those runs that wait in their stage's order, from 1.

    All waiting runs are numbered once, however many are asked for.
    """
    place = func.row_number().over(
        partition_by=Run.state, order_by=(Run.priority, Run.created_at, Run.id)
    )
    waits = Run.state.in_([stage.waiting for stage in Stage])
    queue = select(Run.id, place.label("place")).where(waits).subquery()
    query = select(queue.c.id, queue.c.place).where(queue.c.id.in_(run_ids))
    return {run_id: number for run_id, number in session.execute(query)}


def _views(session: Session, query: Select[Any]) -> list[DocumentView]:
    rows = session.execute(query).all()
    run_ids = {run.id for row in rows for run in (_shown(row), row.latest)}
    waiting = {row.latest.id for row in rows if row.waiting_for is not None}
    found = _Found(
        counts=_page_counts(session, run_ids),
        warnings=_page_warnings(session, {_shown(row).id for row in rows}),
        positions=_queue_positions(session, waiting) if waiting else {},
        costs=_costs(session, [row.Document.id for row in rows]),
    )
    return [_view(row, found) for row in rows]


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known of the listed runs beside their rows, by run id."""

    counts: dict[str, Counter[str]]
    warnings: dict[str, list[WarningView]]
    positions: dict[str, int]
    costs: dict[str, CostView]


def _costs(session: Session, document_ids: Sequence[str]) -> dict[str, CostView]:
    """What all jobs of each document have cost at least: their execution, at their own price."""
    seconds = RemoteJob.execution_ms / 1000.0
    query = (
        select(Run.document_id, func.sum(seconds), func.sum(seconds * RemoteJob.usd_per_second))
        .join(Run, Run.id == RemoteJob.run_id)
        .where(Run.document_id.in_(document_ids), RemoteJob.execution_ms.is_not(None))
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


def _view(row: Row[Any], found: _Found) -> DocumentView:
    document, run, latest = row.Document, _shown(row), row.latest
    latest_pages = _counts(found.counts[latest.id], latest.page_count)
    pages = _counts(found.counts[run.id], run.page_count)
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
            error=_error(latest),
            pages=latest_pages,
        ),
        waiting_for=row.waiting_for,
        queue_position=found.positions.get(latest.id),
        parser=run.parser,
        ocr=run.ocr,
        pages=pages,
        eta_seconds=_eta(latest, latest_pages, row.now),
        error=_error(run),
        warnings=[WarningView.model_validate(w) for w in run.warnings] + found.warnings[run.id],
        cost=found.costs.get(document.id, CostView()),
        created_at=document.created_at,
        started_at=run.started_at,
        finished_at=run.finished_at,
        wait_seconds=_seconds(run.created_at, run.started_at or row.now),
        run_seconds=_seconds(run.started_at, run.finished_at or row.now),
    )


def _is_incomplete(document: Document, run: Run, pages: PageCounts) -> bool:
    """Whether a failed run answers for the document with at least one good page."""
    failed = run.state == RunState.FAILED and document.current_run_id == run.id
    return failed and pages.done > pages.failed


def _error(holder: Run | Page) -> ErrorView | None:
    if holder.error_code is None:
        return None
    return ErrorView(
        code=holder.error_code,
        message=holder.error_message or "",
        retryable=bool(holder.error_retryable),
    )


def _counts(counts: Counter[str], total: int | None) -> PageCounts:
    done = {state: n for state, n in counts.items() if state != PageState.PENDING}
    return PageCounts(total=total, done=sum(done.values()), **done)


def _seconds(start: datetime | None, end: datetime) -> float | None:
    return round((end - start).total_seconds(), 3) if start else None


def _eta(run: Run, pages: PageCounts, now: datetime) -> float | None:
    """Seconds until the run ends at the rate of its pages so far; None where nothing tells."""
    if run.state in TERMINAL or not pages.total or not pages.done:
        return None
    worked = run.worked_seconds
    if run.held_since is not None:
        worked += (now - run.held_since).total_seconds()
    return round(worked / pages.done * (pages.total - pages.done), 1)


def shown_run_id(document_id: str) -> str | None:
    """The run whose pages answer for the document: the current one, else the newest."""
    newest = (
        select(Run.id)
        .where(Run.document_id == Document.id)
        .order_by(Run.number.desc())
        .limit(1)
        .correlate(Document)
        .scalar_subquery()
    )
    query = select(func.coalesce(Document.current_run_id, newest)).where(
        Document.id == document_id, Document.deleted_at.is_(None)
    )
    with Session(get_engine()) as session:
        return session.scalar(query)


def list_pages(run_id: str, *, after: int = 0, limit: int = 500) -> list[PageView]:
    """Pages of a run in order, from the one after `after`; their regions are left out."""
    query = (
        select(Page)
        .options(defer(Page.regions, raiseload=True))
        .where(Page.run_id == run_id, Page.number > after)
        .order_by(Page.number)
        .limit(limit)
    )
    with Session(get_engine()) as session:
        over = _is_over(session, run_id)
        return [_page_view(page, over=over) for page in session.scalars(query)]


def get_page(run_id: str, number: int) -> WholePageView | None:
    """One page of a run."""
    with Session(get_engine()) as session:
        page = session.get(Page, (run_id, number))
        if page is None:
            return None
        regions = [RegionView.model_validate(region) for region in page.regions]
        view = _page_view(page, over=_is_over(session, run_id))
        return WholePageView(**dict(view), regions=regions)


def _is_over(session: Session, run_id: str) -> bool:
    return session.scalar(select(Run.state).where(Run.id == run_id)) in TERMINAL


def _page_view(page: Page, *, over: bool) -> PageView:
    """The page; `over`: its run has ended, so that nothing is pending any more."""
    never_read = over and page.state == PageState.PENDING
    return PageView(
        number=page.number,
        plan=page.plan,
        plan_reason=page.plan_reason,
        status=PageStatus.NOT_READ if never_read else PageStatus(page.state),
        markdown=page.markdown,
        width_pt=page.width_pt,
        height_pt=page.height_pt,
        parser=page.parser,
        parser_version=page.parser_version,
        engine=page.engine,
        model=page.model,
        dpi=page.dpi,
        finish_reason=page.finish_reason,
        prompt_tokens=page.prompt_tokens,
        completion_tokens=page.completion_tokens,
        seconds=page.seconds,
        reused=page.reused,
        error=_error(page),
        warnings=[WarningView.model_validate(w | {"page": page.number}) for w in page.warnings],
    )


@dataclass(frozen=True, slots=True)
class StoredSource:
    """Where a document's bytes are."""

    key: str
    media_type: str
    filename: str


def get_source(document_id: str) -> StoredSource | None:
    """The stored bytes of an undeleted document."""
    query = select(Document.source_key, Document.media_type, Document.filename).where(
        Document.id == document_id, Document.deleted_at.is_(None)
    )
    with Session(get_engine()) as session:
        row = session.execute(query).one_or_none()
    return StoredSource(*row) if row else None
