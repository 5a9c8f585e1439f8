"""A summary of the work: what waits, how long that takes, and what failed by cause.

No query reads what has been stored: counts are kept as rows change, or end at a limit.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, select, true

from rag_service.config.options import Settings
from rag_service.database import totals
from rag_service.database.engine import reading
from rag_service.database.models import Document, Run
from rag_service.errors import Cancelled
from rag_service.jobs import held_stages, server_samples
from rag_service.knowledgebase import reprocess_jobs
from rag_service.knowledgebase.views import FailureView, HeldView, SummaryView
from rag_service.states import Stage

# Waiting runs that are counted at most; beyond it the numbers are lower bounds.
_COUNTED = 10_000
# Documents of a cause, the newest ones, that are asked whether a reprocess may help.
_SAMPLED = 100
_JOBS_SHOWN = 5


def summarise(settings: Settings) -> SummaryView:
    """Return the summary of this moment."""
    held = held_stages.held_stages(settings.worker.held_after, settings.page_server)
    queue = server_samples.page_queue()
    with reading() as connection:
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
        lower_bound=waiting >= _COUNTED,
        held=[HeldView(stage=one.stage, message=one.message) for one in held],
        reprocess_jobs=reprocess_jobs.list_jobs(_JOBS_SHOWN, only_running=True),
    )


def _waiting(connection: Connection, stage: Stage) -> int:
    runs = select(Run.id).where(Run.state == stage.waiting).limit(_COUNTED).subquery()
    return connection.scalar(select(func.count()).select_from(runs)) or 0


def _failures(connection: Connection) -> list[FailureView]:
    """Count the documents whose newest run failed, by its code, the most frequent first."""
    counts = totals.of_kind(totals.stored_totals(connection), "errors")
    counts.pop(Cancelled.code, None)
    found = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return [_failure(connection, code, number) for code, number in found]


def _failure(connection: Connection, code: str, documents: int) -> FailureView:
    """Return the cause with the message of the newest document that has it."""
    newest = (
        select(Document.id, Document.created_at)
        .where(Document.deleted_at.is_(None), Document.latest_error == code)
        .order_by(Document.created_at.desc(), Document.id.desc())
        .limit(_SAMPLED)
        .subquery()
    )
    failed = (
        select(Run.error_message, Run.error_retryable)
        .where(Run.document_id == newest.c.id)
        .order_by(Run.number.desc())
        .limit(1)
        .lateral()
    )
    query = (
        select(failed.c.error_message, failed.c.error_retryable)
        .select_from(newest)
        .join(failed, true())
        .order_by(newest.c.created_at.desc(), newest.c.id.desc())
    )
    rows = connection.execute(query).all()
    return FailureView(
        code=code,
        documents=documents,
        example=rows[0].error_message or "" if rows else "",
        retryable=any(row.error_retryable for row in rows),
    )
