"""Selection of documents, and of their pages, for a reprocess."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import (
    CompoundSelect,
    Connection,
    Select,
    and_,
    func,
    literal,
    null,
    or_,
    select,
    union,
)
from sqlalchemy.orm import aliased
from sqlalchemy.sql import ColumnElement

from rag_service.database.models import Document, Page, Run
from rag_service.errors import Cancelled
from rag_service.jobs.run_pages import reusable
from rag_service.states import TERMINAL, PageState, RunState

# The first and the last page, both included.
PageRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Selectors:
    """Conditions on documents, combined by AND.

    From `truncated` on they are conditions on pages: a document is selected if one page of its
    current run satisfies them all.
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

    `chosen`: its selected pages; None for the whole document.
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


# A document that crashes workers is selected by id only.
QUARANTINED = "worker_crashed"

_Newest = aliased(Run, name="newest")
# The run whose pages are shown and searched: the current one, else the newest.
_Shown = aliased(Run, name="answering")
_ORDER = (Document.created_at, Document.id)


def select_documents(
    connection: Connection,
    selectors: Selectors,
    numbers: Sequence[PageRange] = (),
    *,
    among: Sequence[str] | None = None,
    most: int | None = None,
) -> list[Candidate]:
    """Return the selected documents, oldest first; `numbers`: selected pages of each.

    With `among` only those of these ids are returned, and at most `most`.

    `failed`, `error`, `since` and `before` are checked on the newest run, the others on the
    current one. Quarantined documents are selected only if ids are given too.
    """
    query = _selected(
        selectors,
        Document.id,
        Document.filename,
        _Newest.state,
        _chosen(selectors, numbers),
        _Newest.error_code,
        _Newest.parser,
        _Newest.model,
        _Newest.ocr,
        _Newest.dpi,
        func.coalesce(_Newest.page_count, _Shown.page_count, 0),
    )
    if among is not None:
        query = query.where(Document.id.in_(among))
    return [
        Candidate(row[0], row[1], RunState(row[2]), _as_tuple(row[3]), *row[4:])
        for row in connection.execute(query.order_by(*_ORDER).limit(most))
    ]


def count_selected(connection: Connection, selectors: Selectors) -> int:
    """Return the number of selected documents."""
    return connection.scalar(_selected(selectors, func.count())) or 0


def numbered_ids(selectors: Selectors) -> Select[int, str]:
    """Return the query for places, oldest first, and ids of the selected documents."""
    place = func.row_number().over(order_by=_ORDER)
    return _selected(selectors, place, Document.id)


def _selected(selectors: Selectors, *columns: Any) -> Select[Any]:
    newest = (
        select(Run.id)
        .where(Run.document_id == Document.id)
        .order_by(Run.number.desc())
        .limit(1)
        .correlate(Document)
        .scalar_subquery()
    )
    return (
        select(*columns)
        .select_from(Document)
        .join(_Newest, and_(_Newest.document_id == Document.id, _Newest.id == newest))
        # By the document too: so the search may begin with pages that a condition selects.
        .join(
            _Shown,
            and_(
                _Shown.document_id == Document.id,
                _Shown.id == func.coalesce(Document.current_run_id, _Newest.id),
            ),
        )
        .where(Document.deleted_at.is_(None), *_conditions(selectors))
    )


def _as_tuple(numbers: list[int] | None) -> tuple[int, ...] | None:
    return None if numbers is None else tuple(numbers)


def unknown_ids(connection: Connection, ids: Collection[str]) -> list[str]:
    """Return the ids that no undeleted document has, sorted."""
    found = select(Document.id).where(Document.id.in_(ids), Document.deleted_at.is_(None))
    return sorted(set(ids) - set(connection.scalars(found)))


def reused_pages(
    connection: Connection, document_id: str, fingerprint: str, redo_pages: Sequence[int] = ()
) -> int:
    """Return the number of pages that a run with this fingerprint and `redo_pages` reuses."""
    runs = select(Run.id).where(Run.document_id == document_id)
    query = select(func.count(func.distinct(Page.number))).where(
        Page.run_id.in_(runs), reusable(document_id, fingerprint, redo_pages)
    )
    return connection.scalar(query) or 0


def _conditions(selectors: Selectors) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [
        Document.id.in_(selectors.ids)
        if selectors.ids
        else _Newest.error_code.is_distinct_from(QUARANTINED)
    ]
    if selectors.failed:
        # Of the runs with an error, those that are not cancelled have failed.
        cancelled = literal(Cancelled.code, literal_execute=True)
        conditions += [Document.latest_error != cancelled, _Newest.state == RunState.FAILED]
    if selectors.error:
        conditions.append(Document.id.in_(_with_error(selectors.error)))
    if selectors.collection:
        conditions.append(Document.collection == selectors.collection)
    if selectors.since:
        conditions.append(Document.latest_finished_at >= selectors.since)
    if selectors.before:
        conditions.append(Document.latest_finished_at < selectors.before)
    if selectors.parser_was:
        conditions.append(_Shown.parser == selectors.parser_was)
    if on_pages := _page_conditions(selectors):
        page = select(Page.run_id).where(Page.run_id == _Shown.id, *on_pages)
        conditions.append(page.correlate(_Shown).exists())
    return conditions


def _with_error(code: str) -> CompoundSelect[str]:
    """Return the query for documents whose newest run, or a failed page of it, has the code.

    Two queries, each with its own index; one with OR would read every page.
    """
    by_run = select(Document.id).where(Document.deleted_at.is_(None), Document.latest_error == code)
    return union(by_run.correlate(None), with_page_error(code))


def with_page_error(code: str) -> Select[str]:
    """Return the query for documents whose newest run has a failed page with the code."""
    newer = aliased(Run)
    superseded = select(newer.id).where(
        newer.document_id == Run.document_id, newer.number > Run.number
    )
    by_pages = (
        select(Run.document_id)
        .join(Page, Page.run_id == Run.id)
        .where(Page.error_code == code, _is_page_state(PageState.FAILED), ~superseded.exists())
    )
    return by_pages.correlate(None)


def _is_page_state(state: PageState) -> ColumnElement[bool]:
    # A literal, so that a prepared plan may use the partial index too.
    return Page.state == literal(state.value, literal_execute=True)


def _page_conditions(selectors: Selectors) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if selectors.truncated:
        conditions.append(_is_page_state(PageState.TRUNCATED))
    if selectors.model_was:
        conditions.append(Page.model == selectors.model_was)
    if selectors.engine_was:
        conditions.append(Page.engine == selectors.engine_was)
    if selectors.version_was:
        conditions.append(Page.parser_version == selectors.version_was)
    if selectors.dpi_was:
        # The pixel cap makes fractional values.
        conditions.append(func.round(Page.dpi) == selectors.dpi_was)
    return conditions


def _chosen(selectors: Selectors, numbers: Sequence[PageRange]) -> ColumnElement[Any]:
    """Return the selected page numbers as an array, or null without conditions on pages."""
    conditions = _page_conditions(selectors)
    if numbers:
        conditions.append(or_(*(Page.number.between(first, last) for first, last in numbers)))
    if not conditions:
        return null()
    pages = select(Page.number).where(Page.run_id == _Shown.id, *conditions)
    return func.array(pages.order_by(Page.number).correlate(_Shown).scalar_subquery())
