"""Which documents a bulk redo means: by id, failed, error code, collection. Used by reprocess."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, func, select
from sqlalchemy.sql import ColumnElement

from rag_service.knowledgebase.models import Document, Page, Run
from rag_service.states import GOOD, TERMINAL, PageState, RunState


@dataclass(frozen=True, slots=True)
class Selectors:
    """What was asked for; all that is given narrows the documents together."""

    ids: tuple[str, ...] = ()
    failed: bool = False
    error: str | None = None
    collection: str | None = None

    @property
    def empty(self) -> bool:
        return not (self.ids or self.failed or self.error or self.collection)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A selected document with the options and outcome of its newest run."""

    id: str
    filename: str
    state: RunState
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


def select_documents(connection: Connection, selectors: Selectors) -> list[Candidate]:
    """The documents that the selectors mean, oldest first.

    `failed` and `error` look at the newest run. Quarantined documents come only where ids are
    given too.
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
            Run.state,
            Run.error_code,
            Run.parser,
            Run.model,
            Run.ocr,
            Run.dpi,
            func.coalesce(Run.page_count, 0),
        )
        .join(Run, Run.id == newest)
        .where(Document.deleted_at.is_(None), *_conditions(selectors))
        .order_by(Document.created_at, Document.id)
    )
    return [
        Candidate(row[0], row[1], RunState(row[2]), *row[3:]) for row in connection.execute(query)
    ]


def unknown_ids(connection: Connection, ids: Collection[str]) -> list[str]:
    """Those of the ids that no undeleted document has, sorted."""
    known = select(Document.id).where(Document.id.in_(ids), Document.deleted_at.is_(None))
    return sorted(set(ids) - set(connection.scalars(known)))


def good_pages(connection: Connection, document_id: str, fingerprint: str) -> int:
    """Pages of the document that a run with this fingerprint would reuse."""
    siblings = select(Run.id).where(Run.document_id == document_id)
    query = select(func.count(func.distinct(Page.number))).where(
        Page.run_id.in_(siblings), Page.fingerprint == fingerprint, Page.state.in_(GOOD)
    )
    return connection.scalar(query) or 0


def _conditions(selectors: Selectors) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = [
        Document.id.in_(selectors.ids)
        if selectors.ids
        else Run.error_code.is_distinct_from(QUARANTINED)
    ]
    if selectors.failed:
        conditions.append(Run.state == RunState.FAILED)
    if selectors.error:
        conditions.append(_has_error(selectors.error))
    if selectors.collection:
        conditions.append(Document.collection == selectors.collection)
    return conditions


def _has_error(code: str) -> ColumnElement[bool]:
    """The run ended with the code, or a page of it did."""
    page = select(Page.run_id).where(
        Page.run_id == Run.id, Page.error_code == code, Page.state == PageState.FAILED
    )
    return (Run.error_code == code) | page.correlate(Run).exists()
