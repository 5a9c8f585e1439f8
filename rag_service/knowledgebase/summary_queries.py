"""A summary of the work: what waits, how long that takes, and what failed by cause.

No query reads what has been stored: counts end at a limit.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import aliased

from rag_service.database.engine import begin
from rag_service.database.models import Document, Run
from rag_service.jobs import server_samples
from rag_service.knowledgebase.views import FailureView, SummaryView
from rag_service.states import RunState, Stage

# Runs that are counted at most; beyond it the numbers are lower bounds.
_COUNTED = 10_000


def summarise() -> SummaryView:
    """Return the summary of this moment."""
    queue = server_samples.page_queue()
    with begin() as connection:
        unplanned = _waiting(connection, Stage.PREPARE)
        waiting = unplanned + _waiting(connection, Stage.OCR)
        failures = _failures(connection)
    rate = queue.pages_per_minute
    return SummaryView(
        documents_waiting=waiting,
        documents_without_plan=unplanned,
        pages_waiting=queue.pages_waiting,
        pages_per_minute=rate,
        eta_seconds=round(queue.pages_waiting * 60 / rate, 1) if rate else None,
        failures=failures,
        lower_bound=max(waiting, sum(one.documents for one in failures)) >= _COUNTED,
    )


def _waiting(connection: Connection, stage: Stage) -> int:
    runs = select(Run.id).where(Run.state == stage.waiting).limit(_COUNTED).subquery()
    return connection.scalar(select(func.count()).select_from(runs)) or 0


def _failures(connection: Connection) -> list[FailureView]:
    """Count the documents whose newest run failed, by its code, the most frequent first."""
    newer = aliased(Run)
    superseded = select(newer.id).where(
        newer.document_id == Run.document_id, newer.number > Run.number
    )
    failed = (
        select(Run.error_code, Run.error_message, Run.error_retryable)
        .join(Document, Document.id == Run.document_id)
        .where(
            Run.error_code.is_not(None),
            Run.state == RunState.FAILED,
            Document.deleted_at.is_(None),
            ~superseded.exists(),
        )
        .limit(_COUNTED)
        .subquery()
    )
    code = failed.c.error_code
    query = (
        select(
            code,
            func.count().label("documents"),
            func.min(failed.c.error_message).label("example"),
            func.coalesce(func.bool_or(failed.c.error_retryable), False).label("retryable"),
        )
        .group_by(code)
        .order_by(func.count().desc(), code)
    )
    return [
        FailureView(
            code=row.error_code, documents=row.documents, example=row.example or "",
            retryable=row.retryable,
        )
        for row in connection.execute(query)
    ]  # fmt: skip
