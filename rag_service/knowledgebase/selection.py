"""Which documents a bulk redo means, and which of their pages. Used by reprocess."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, func, null, or_, select
from sqlalchemy.orm import aliased
from sqlalchemy.sql import ColumnElement

from rag_service.database.models import Document, Page, Run
from rag_service.jobs.run_pages import reusable
from rag_service.states import TERMINAL, PageState, RunState

# The first and the last page, both meant.
PageRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Selectors:
    """What was asked for; all that is given narrows the documents together.

    From `truncated` on they are about pages: a document is meant where one page of the text that
    answers now fits them all.
    """

    ids: tuple[str, ...] = ()
    failed: bool = False
    error: str | None = None
    collection: str | None = None
    since: datetime | None = None
    before: datetime | None = None
    parser_was: str | None = None
    truncated: bool = False
    model_was: str | None = None
    engine_was: str | None = None
    version_was: str | None = None
    dpi_was: int | None = None

    @property
    def empty(self) -> bool:
        return not any(astuple(self))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A selected document with the options and outcome of its newest run.

    `chosen`: its pages that are meant; None where the whole document is.
    """

    id: str
    filename: str
    state: RunState
    chosen: tuple[int, ...] | None
    error_code: str | None
    parser: str
    model: str
    ocr: str
    dpi: int
    pages: int

    @property
    def active(self) -> bool:
        return self.state not in TERMINAL


# A document that kills workers is redone only where somebody names it.
QUARANTINED = "worker_crashed"

_Newest = aliased(Run, name="newest")
# The run whose pages answer for the document now.
_Answering = aliased(Run, name="answering")


def select_documents(
    connection: Connection, selectors: Selectors, numbers: Sequence[PageRange] = ()
) -> list[Candidate]:
    """The documents that the selectors mean, oldest first; `numbers` are pages chosen of each.

    `failed`, `error`, `since` and `before` look at the newest run, the others at the one that
    answers now. Quarantined documents come only where ids are given too.
    """
    newest = (
        select(Run.id)
        .where(Run.document_id == Document.id)
        .order_by(Run.number.desc())
        .limit(1)
        .correlate(Document)
        .scalar_subquery()
    )
    query = (
        select(
            Document.id,
            Document.filename,
            _Newest.state,
            _chosen(selectors, numbers),
            _Newest.error_code,
            _Newest.parser,
            _Newest.model,
            _Newest.ocr,
            _Newest.dpi,
            func.coalesce(_Newest.page_count, _Answering.page_count, 0),
        )
        .join(_Newest, _Newest.id == newest)
        .join(_Answering, _Answering.id == func.coalesce(Document.current_run_id, _Newest.id))
        .where(Document.deleted_at.is_(None), *_conditions(selectors))
        .order_by(Document.created_at, Document.id)
    )
    return [
        Candidate(row[0], row[1], RunState(row[2]), _tuple(row[3]), *row[4:])
        for row in connection.execute(query)
    ]


def _tuple(numbers: list[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers)


def unknown_ids(connection: Connection, ids: Collection[str]) -> list[str]:
    """Those of the ids that no undeleted document has, sorted."""
    known = select(Document.id).where(Document.id.in_(ids), Document.deleted_at.is_(None))
    return sorted(set(ids) - set(connection.scalars(known)))


def reused_pages(
    connection: Connection, document_id: str, fingerprint: str, redo_pages: Sequence[int] = ()
) -> int:
    """Pages of the document that a run with this fingerprint and these pages to redo reuses."""
    siblings = select(Run.id).where(Run.document_id == document_id)
    query = select(func.count(func.distinct(Page.number))).where(
        Page.run_id.in_(siblings), reusable(document_id, fingerprint, redo_pages)
    )
    return connection.scalar(query) or 0


def _conditions(selectors: Selectors) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [
        Document.id.in_(selectors.ids)
        if selectors.ids
        else _Newest.error_code.is_distinct_from(QUARANTINED)
    ]
    if selectors.failed:
        conditions.append(_Newest.state == RunState.FAILED)
    if selectors.error:
        conditions.append(_has_error(selectors.error))
    if selectors.collection:
        conditions.append(Document.collection == selectors.collection)
    if selectors.since:
        conditions.append(_Newest.finished_at >= selectors.since)
    if selectors.before:
        conditions.append(_Newest.finished_at < selectors.before)
    if selectors.parser_was:
        conditions.append(_Answering.parser == selectors.parser_was)
    if fitting := _page_conditions(selectors):
        page = select(Page.run_id).where(Page.run_id == _Answering.id, *fitting)
        conditions.append(page.correlate(_Answering).exists())
    return conditions


def _has_error(code: str) -> ColumnElement[bool]:
    """The run ended with the code, or a page of it did."""
    page = select(Page.run_id).where(
        Page.run_id == _Newest.id, Page.error_code == code, Page.state == PageState.FAILED
    )
    return (_Newest.error_code == code) | page.correlate(_Newest).exists()


def _page_conditions(selectors: Selectors) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if selectors.truncated:
        conditions.append(Page.state == PageState.TRUNCATED)
    if selectors.model_was:
        conditions.append(Page.model == selectors.model_was)
    if selectors.engine_was:
        conditions.append(Page.engine == selectors.engine_was)
    if selectors.version_was:
        conditions.append(Page.parser_version == selectors.version_was)
    if selectors.dpi_was:
        # A page that the pixel cap held back has a broken number.
        conditions.append(func.round(Page.dpi) == selectors.dpi_was)
    return conditions


def _chosen(selectors: Selectors, numbers: Sequence[PageRange]) -> ColumnElement[Any]:
    """The numbers of the pages that are meant, as an array; null where nothing is said of pages."""
    conditions = _page_conditions(selectors)
    if numbers:
        conditions.append(or_(*(Page.number.between(first, last) for first, last in numbers)))
    if not conditions:
        return null()
    pages = select(Page.number).where(Page.run_id == _Answering.id, *conditions)
    return func.array(pages.order_by(Page.number).correlate(_Answering).scalar_subquery())
