"""Queries of pages: listed, one with its regions, and the run whose pages are shown."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.orm import Session, defer

from rag_service.database.engine import reading
from rag_service.database.models import Document, Page, Run
from rag_service.knowledgebase.views import (
    ErrorView,
    PageStatus,
    PageView,
    RegionView,
    WarningView,
    WholePageView,
)
from rag_service.states import TERMINAL, PagePlan, PageState


def shown_run_id(document_id: str) -> str | None:
    """Return the id of the run whose pages are shown: the current run, else the newest."""
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
    with reading() as connection, Session(connection) as session:
        return session.scalar(query)


def list_pages(run_id: str, *, after: int = 0, limit: int = 500) -> list[PageView]:
    """Return up to `limit` pages of a run after page number `after`, in order, without regions."""
    query = (
        select(Page)
        .options(defer(Page.regions, raiseload=True))
        .where(Page.run_id == run_id, Page.number > after)
        .order_by(Page.number)
        .limit(limit)
    )
    with reading() as connection, Session(connection) as session:
        has_ended = _has_ended(session, run_id)
        return [_page_view(page, has_ended=has_ended) for page in session.scalars(query)]


def get_page(run_id: str, number: int) -> WholePageView | None:
    """Return a page of a run with its regions, or None if there is none."""
    with reading() as connection, Session(connection) as session:
        page = session.get(Page, (run_id, number))
        if page is None:
            return None
        regions = [RegionView.model_validate(region) for region in page.regions]
        view = _page_view(page, has_ended=_has_ended(session, run_id))
        return WholePageView(**dict(view), regions=regions)


def _has_ended(session: Session, run_id: str) -> bool:
    return session.scalar(select(Run.state).where(Run.id == run_id)) in TERMINAL


def _page_view(page: Page, *, has_ended: bool) -> PageView:
    """Return the page's view; `has_ended`: its run has ended, so a pending page was not read."""
    never_read = has_ended and page.state == PageState.PENDING
    return PageView(
        number=page.number,
        plan=PagePlan(page.plan),
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
        error=error_view(page),
        warnings=[WarningView.model_validate(w | {"page": page.number}) for w in page.warnings],
    )


def error_view(holder: Run | Page) -> ErrorView | None:
    """Return the error of a run or page, or None."""
    if holder.error_code is None:
        return None
    return ErrorView(
        code=holder.error_code,
        message=holder.error_message or "",
        retryable=bool(holder.error_retryable),
    )
