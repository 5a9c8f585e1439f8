"""The end of a run: its terminal state, its error, and the document's current run."""

from __future__ import annotations

from sqlalchemy import Connection, ScalarSelect, case, func, select, update

from rag_service.database.models import Document, Page, RemoteJob, Run
from rag_service.database.storable_text import clean
from rag_service.errors import RagServiceError
from rag_service.states import GOOD, HELD, TERMINAL, JobState, RunState

# Values of a run's lease columns when no fork holds it.
UNCLAIMED = {
    "lease_worker": None,
    "lease_task": None,
    "lease_expires_at": None,
    "held_since": None,
}
# Seconds that forks have held the run, up to now.
WORKED = Run.worked_seconds + func.coalesce(
    func.extract("epoch", func.clock_timestamp() - Run.held_since), 0.0
)


def end_run(
    connection: Connection,
    run_id: str,
    state: RunState,
    error: RagServiceError | None = None,
    *,
    epoch: int | None = None,
) -> bool:
    """Make the run terminal and set the document's current run. Return False if it had ended.

    With an epoch, only a valid lease of that epoch may end it. One statement decides: of a cancel
    and a finish, the first commit wins. Locks the run, then the document.
    """
    ending = (
        update(Run)
        .where(Run.id == run_id, Run.state.not_in(TERMINAL))
        .values(
            state=state,
            finished_at=func.clock_timestamp(),
            retry_at=None,
            worked_seconds=WORKED,
            **UNCLAIMED,
            error_code=error.code if error else None,
            error_message=clean(error.message) if error else None,
            error_retryable=error.retryable if error else None,
        )
        .returning(Run.document_id)
    )
    if epoch is not None:
        ending = ending.where(Run.epoch == epoch, Run.state.in_(HELD))
    document_id = connection.scalar(ending)
    if document_id is None:
        return False
    request_cancellation(connection, run_id)
    set_current_run(connection, document_id)
    return True


def request_cancellation(connection: Connection, run_id: str) -> None:
    """Request the cancellation of all jobs of a run, also of one whose id arrives later."""
    connection.execute(
        update(RemoteJob)
        .where(RemoteJob.run_id == run_id, RemoteJob.state != JobState.ENDED)
        .values(cancel_wanted=True, next_poll_at=func.clock_timestamp())
    )


def set_current_run(connection: Connection, document_id: str) -> None:
    """Set the current run: the newest processed one, else the failed one with most good pages.

    Of failed runs with equally many good pages, the newest is taken.
    """
    best = (
        select(Run.id)
        .where(
            Run.document_id == document_id,
            Run.state.in_([RunState.PROCESSED, RunState.FAILED]),
        )
        .order_by(
            case((Run.state == RunState.PROCESSED, 0), else_=1),
            case((Run.state == RunState.PROCESSED, 0), else_=_good_pages()).desc(),
            Run.number.desc(),
        )
        .limit(1)
    )
    connection.execute(
        update(Document)
        .where(Document.id == document_id)
        .values(current_run_id=best.scalar_subquery())
    )


def _good_pages() -> ScalarSelect[int]:
    return (
        select(func.count())
        .where(Page.run_id == Run.id, Page.state.in_(GOOD))
        .correlate(Run)
        .scalar_subquery()
    )
