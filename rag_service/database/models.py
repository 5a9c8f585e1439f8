"""The tables. Rows are written only in the packages database, jobs and knowledgebase."""

from __future__ import annotations

import uuid
from datetime import datetime
from decimal import Decimal
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from rag_service.states import TERMINAL, PageState, RunState


def new_id() -> str:
    """Return a new identifier: 32 hexadecimal digits."""
    return uuid.uuid4().hex


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012
        str: Text,
        datetime: DateTime(timezone=True),
        dict[str, Any]: JSONB,
        list[dict[str, Any]]: JSONB,
        list[int]: ARRAY(Integer),
    }


_TERMINAL_SQL = "(" + ", ".join(f"'{state}'" for state in sorted(TERMINAL)) + ")"
_HAS_ERROR = "latest_error IS NOT NULL"
# A cancelled run has an error too.
_HAS_FAILED = "latest_error <> 'cancelled'"


def _listing(name: str, *columns: str, condition: str | None = None) -> Index:
    """Return an index of undeleted documents in the order of a listing, by these columns."""
    where = "deleted_at IS NULL" + (f" AND {condition}" if condition else "")
    return Index(name, *columns, "created_at", "id", postgresql_where=text(where))


class Document(Base):
    """A file with a sha256 in a collection; its row is the final record."""

    __tablename__ = "documents"
    __table_args__ = (
        Index(
            "uq_documents_content",
            "collection",
            "sha256",
            unique=True,
            postgresql_where=text("deleted_at IS NULL"),
        ),
        Index("ix_documents_created", "created_at", "id"),
        Index("ix_documents_sha256", "sha256"),
        # A listing with any of its filters reads one of these in order, as far as its limit.
        _listing("ix_documents_status", "status"),
        _listing("ix_documents_collection", "collection"),
        _listing("ix_documents_collection_status", "collection", "status"),
        _listing("ix_documents_error", "latest_error", condition=_HAS_ERROR),
        _listing("ix_documents_error_status", "latest_error", "status", condition=_HAS_ERROR),
        _listing(
            "ix_documents_collection_error", "collection", "latest_error", condition=_HAS_ERROR
        ),
        _listing(
            "ix_documents_collection_error_status",
            "collection",
            "latest_error",
            "status",
            condition=_HAS_ERROR,
        ),
        _listing("ix_documents_failed", condition=_HAS_FAILED),
        Index(
            "ix_documents_finished",
            "latest_finished_at",
            postgresql_where=text("deleted_at IS NULL"),
        ),
        Index(
            "ix_documents_deleted", "deleted_at", postgresql_where=text("deleted_at IS NOT NULL")
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    collection: Mapped[str]
    sha256: Mapped[str]
    filename: Mapped[str]
    media_type: Mapped[str]
    bytes: Mapped[int] = mapped_column(BigInteger)
    # Key in the document store: shared by sha256, or this document's own decrypted copy.
    source_key: Mapped[str]
    current_run_id: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    deleted_at: Mapped[datetime | None]
    # Copies that triggers keep (migration 0010): the state of the current run, else of the newest;
    # the pages of the current run; error and end of the newest run.
    status: Mapped[str] = mapped_column(server_default=RunState.QUEUED)
    page_count: Mapped[int | None]
    latest_error: Mapped[str | None]
    latest_finished_at: Mapped[datetime | None]


class Run(Base):
    """One parse of a document: options, lease and outcome."""

    __tablename__ = "runs"
    __table_args__ = (
        Index(
            "uq_runs_active",
            "document_id",
            unique=True,
            postgresql_where=text(f"state NOT IN {_TERMINAL_SQL}"),
        ),
        Index(
            "ix_runs_claim",
            "state",
            "priority",
            "queued_at",
            "id",
            postgresql_where=text(f"state NOT IN {_TERMINAL_SQL}"),
        ),
        Index("uq_runs_number", "document_id", "number", unique=True),
        Index("ix_runs_error", "error_code", postgresql_where=text("error_code IS NOT NULL")),
        Index("ix_runs_finished", "finished_at", postgresql_where=text("finished_at IS NOT NULL")),
        Index("ix_runs_parser", "parser"),
        Index(
            "ix_runs_reprocess_job",
            "reprocess_job_id",
            "state",
            postgresql_where=text("reprocess_job_id IS NOT NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"))
    number: Mapped[int]
    state: Mapped[str] = mapped_column(default=RunState.QUEUED)

    # The requested options; the fingerprint is their digest.
    parser: Mapped[str]
    model: Mapped[str]
    ocr: Mapped[str]
    dpi: Mapped[int]
    layout: Mapped[str]
    fingerprint: Mapped[str]
    priority: Mapped[int] = mapped_column(SmallInteger)
    reuse_pages: Mapped[bool] = mapped_column(default=True)
    # Pages to be read again although they are good; all other good pages are reused.
    redo_pages: Mapped[list[int]] = mapped_column(default=list)
    # The reprocess job that added the run.
    reprocess_job_id: Mapped[str | None]

    # Its place in the queue: when it was added, or later if it gave its fork to other runs.
    queued_at: Mapped[datetime] = mapped_column(server_default=func.now())
    # Not to be claimed before this time.
    retry_at: Mapped[datetime | None]

    # The lease. The epoch grows with every claim and fences late writers.
    epoch: Mapped[int] = mapped_column(default=0)
    lease_worker: Mapped[str | None]
    lease_task: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    held_since: Mapped[datetime | None]
    crashes: Mapped[int] = mapped_column(default=0)
    expiries: Mapped[int] = mapped_column(default=0)
    # Seconds that forks have held the run, for the document's time limit.
    worked_seconds: Mapped[float] = mapped_column(default=0.0)
    # Time that its pages took in the present stage, as in TimeSpent.
    page_seconds: Mapped[float] = mapped_column(server_default="0")
    late_pages: Mapped[int] = mapped_column(server_default="0")
    late_texts: Mapped[int] = mapped_column(server_default="0")
    # When a page of it was last done.
    progress_at: Mapped[datetime | None]

    page_count: Mapped[int | None]
    warnings: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    error_retryable: Mapped[bool | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    started_at: Mapped[datetime | None]
    ready_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class Page(Base):
    """A page of a run: the unit of storage, progress, resume and repair."""

    __tablename__ = "pages"
    __table_args__ = (
        Index(
            "ix_pages_remote_job",
            "remote_job_id",
            postgresql_where=text("remote_job_id IS NOT NULL"),
        ),
        Index("ix_pages_pending", "run_id", postgresql_where=text("state = 'pending'")),
        Index("ix_pages_truncated", "run_id", postgresql_where=text("state = 'truncated'")),
        Index("ix_pages_failed", "error_code", "run_id", postgresql_where=text("state = 'failed'")),
    )

    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    plan: Mapped[str]
    plan_reason: Mapped[str] = mapped_column(default="")
    state: Mapped[str] = mapped_column(default=PageState.PENDING)
    width_pt: Mapped[float]
    height_pt: Mapped[float]
    markdown: Mapped[str] = mapped_column(default="")
    # Blocks in reading order, as in the API: index, label, bbox_2d, content.
    regions: Mapped[list[dict[str, Any]]] = mapped_column(default=list)

    finish_reason: Mapped[str | None]
    prompt_tokens: Mapped[int | None]
    completion_tokens: Mapped[int | None]
    seconds: Mapped[float | None]
    engine: Mapped[str | None]
    model: Mapped[str | None]
    parser: Mapped[str | None]
    parser_version: Mapped[str | None]
    dpi: Mapped[float | None]
    fingerprint: Mapped[str]
    reused: Mapped[bool] = mapped_column(default=False)

    # Epoch of the claim that sent the page. The page is in progress if it equals the run's.
    hand_epoch: Mapped[int | None]
    # The live job that has the page, and the reason of its next post.
    remote_job_id: Mapped[str | None]
    repost_reason: Mapped[str | None]
    # Retry schedules that have failed for this page.
    tries: Mapped[int] = mapped_column(default=0)
    retry_at: Mapped[datetime | None]
    warnings: Mapped[list[dict[str, Any]]] = mapped_column(default=list)
    error_code: Mapped[str | None]
    error_message: Mapped[str | None]
    error_retryable: Mapped[bool | None]
    stored_at: Mapped[datetime | None]


class RemoteJob(Base):
    """One post to another service: its reason, state, outcome and cost."""

    __tablename__ = "remote_jobs"
    __table_args__ = (
        Index("ix_remote_jobs_run", "run_id"),
        Index("ix_remote_jobs_due", "next_poll_at", postgresql_where=text("state <> 'ended'")),
        Index("uq_remote_jobs_token", "token_sha256", unique=True),
        Index("ix_remote_jobs_ended", "ended_at", postgresql_where=text("ended_at IS NOT NULL")),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"))
    kind: Mapped[str] = mapped_column(default="runpod")
    # Stored with the job, because the settings may change.
    base_url: Mapped[str]
    endpoint_id: Mapped[str]
    remote_id: Mapped[str | None]
    # The id from a webhook after a lost answer, until the service confirms it.
    hinted_id: Mapped[str | None]
    token_sha256: Mapped[str]
    request_key: Mapped[str]
    pages: Mapped[list[int]]
    reason: Mapped[str]
    state: Mapped[str]
    outcome: Mapped[str | None]
    epoch: Mapped[int]
    cancel_wanted: Mapped[bool] = mapped_column(default=False)
    # Cancelled at its deadline, so its end is a time-out.
    deadline_passed: Mapped[bool] = mapped_column(default=False)
    submitted_at: Mapped[datetime] = mapped_column(server_default=func.now())
    lost_at: Mapped[datetime | None]
    expires_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    next_poll_at: Mapped[datetime]
    # Claim of a poller on the job, so that no two polls store its result.
    polled_until: Mapped[datetime | None]
    last_status: Mapped[str | None]
    polls: Mapped[int] = mapped_column(default=0)
    delay_ms: Mapped[int | None] = mapped_column(BigInteger)
    execution_ms: Mapped[int | None] = mapped_column(BigInteger)
    usd_per_second: Mapped[float]
    gauges: Mapped[dict[str, Any] | None]
    error_message: Mapped[str | None]


class ReprocessJob(Base):
    """A reprocess of many documents: what was asked, and what became of the documents so far."""

    __tablename__ = "reprocess_jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    request: Mapped[dict[str, Any]]
    priority: Mapped[int] = mapped_column(SmallInteger)
    total: Mapped[int]
    # The number of documents by action.
    counts: Mapped[dict[str, Any]]
    # Why it waits.
    message: Mapped[str | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class ReprocessItem(Base):
    """A document that a reprocess job has not come to yet."""

    __tablename__ = "reprocess_items"

    job_id: Mapped[str] = mapped_column(primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    document_id: Mapped[str]


class OcrServer(Base):
    """The state of an OCR server, shared by all workers."""

    __tablename__ = "ocr_servers"

    url: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[str]
    message: Mapped[str] = mapped_column(default="")
    down_since: Mapped[datetime | None]
    last_success_at: Mapped[datetime | None]
    # The run that may try the server with one page; all other runs wait.
    trial_run_id: Mapped[str | None]
    # When it was last found out. Time without probes does not count as its outage.
    probed_at: Mapped[datetime | None]
    # Messages about the server although it answers, one a line: `name: message`.
    alarm: Mapped[str | None]
    # The number in flight, of all forks together, that the search last found best.
    good_in_flight: Mapped[float | None]
    # The alarm that the server is idle while pages wait for it: its start and cause.
    starved_since: Mapped[datetime | None]
    starved_why: Mapped[str | None]
    # The start of the outage that was last reported to the alarm webhook, until its end is.
    outage_reported: Mapped[datetime | None]


class ForkLoad(Base):
    """A fork's number of open requests on an OCR server, and its limit."""

    __tablename__ = "fork_loads"

    fork: Mapped[str] = mapped_column(primary_key=True)
    url: Mapped[str]
    in_flight: Mapped[float]
    limit_now: Mapped[float]
    seen_at: Mapped[datetime]


class LimitChangeRow(Base):
    """How often forks changed their number in flight for one reason, and the last change."""

    __tablename__ = "limit_changes"

    url: Mapped[str] = mapped_column(primary_key=True)
    reason: Mapped[str] = mapped_column(primary_key=True)
    times: Mapped[int] = mapped_column(BigInteger)
    old_limit: Mapped[float]
    new_limit: Mapped[float]
    fork: Mapped[str]
    changed_at: Mapped[datetime]


class ServerSample(Base):
    """An OCR server's load at one moment, with its diagnosis."""

    __tablename__ = "server_samples"

    url: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(primary_key=True)
    # The server's gauges, null if it has none.
    running: Mapped[float | None]
    waiting: Mapped[float | None]
    slots: Mapped[int | None]
    cache_use: Mapped[float | None]
    in_flight: Mapped[float]
    in_flight_limit: Mapped[float | None]
    tokens_per_second: Mapped[float | None]
    pages_per_minute: Mapped[float]
    pages_waiting: Mapped[int]
    verdict: Mapped[str]
    sentence: Mapped[str]


class WorkerRow(Base):
    """A worker's main process: its last heartbeat and its number of forks."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    stage: Mapped[str]
    forks: Mapped[int]
    # Its machine has too little memory available: its forks claim nothing.
    low_memory: Mapped[bool]
    # Forks that died in a row, and what health says of them once they are several.
    fork_deaths: Mapped[int] = mapped_column(server_default="0")
    trouble: Mapped[str | None]
    # Why its forks cannot reach the document store, as one of them last reported.
    store_fault: Mapped[str | None]
    store_fault_at: Mapped[datetime | None]
    seen_at: Mapped[datetime]
    started_at: Mapped[datetime] = mapped_column(server_default=func.now())


class MaintenanceLease(Base):
    """A single row: the holder of maintenance, fenced by an epoch."""

    __tablename__ = "maintenance_lease"

    id: Mapped[int] = mapped_column(primary_key=True)
    holder: Mapped[str]
    epoch: Mapped[int]
    expires_at: Mapped[datetime]
    seen_at: Mapped[datetime]


class DocumentStoreRow(Base):
    """A single row: the ID in the marker of the document store."""

    __tablename__ = "document_store"

    id: Mapped[int] = mapped_column(primary_key=True)
    store_id: Mapped[str]
    # When a store with this marker was first seen.
    bound_at: Mapped[datetime | None]


class Total(Base):
    """A count over all rows of a table, as of the last changes that were added to it."""

    __tablename__ = "totals"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[Decimal]


class TotalChange(Base):
    """A change that is not added to its total yet: transactions append and wait for no row."""

    __tablename__ = "total_changes"

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    name: Mapped[str]
    change: Mapped[Decimal]
