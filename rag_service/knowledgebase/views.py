"""Views of documents, runs, pages, jobs and servers, as the API sends them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import BaseModel

from rag_service.diagnosis.bottleneck import Verdict
from rag_service.ocr.concurrency.changes import ChangeReason
from rag_service.states import GOOD, JobOutcome, JobState, PostReason, RunState, WaitingFor


class ErrorView(BaseModel):
    code: str
    message: str
    retryable: bool


class WarningView(BaseModel):
    code: str
    message: str
    page: int | None = None


class PageCounts(BaseModel):
    total: int | None = None
    done: int = 0
    native: int = 0
    ocr: int = 0
    blank: int = 0
    no_text: int = 0
    truncated: int = 0
    failed: int = 0


class RunView(BaseModel):
    id: str
    status: RunState
    error: ErrorView | None
    pages: PageCounts


class CostView(BaseModel):
    gpu_seconds: float | None = None
    usd: float | None = None
    lower_bound: bool = True


class JobView(BaseModel):
    """A post of some pages to RunPod.

    `age_seconds`: from the post until its end or now; `usd`: cost of its execution, a lower bound;
    `error`: why the job or its last poll failed.
    """

    remote_id: str | None
    run_id: str
    endpoint_id: str
    pages: list[int]
    reason: PostReason
    state: JobState
    last_status: str | None
    outcome: JobOutcome | None
    submitted_at: datetime
    expires_at: datetime
    age_seconds: float
    polls: int
    delay_ms: int | None
    execution_ms: int | None
    usd: float | None
    error: str | None


class DocumentView(BaseModel):
    """A document; times are in UTC, durations in seconds."""

    id: str
    filename: str
    collection: str
    sha256: str
    bytes: int
    media_type: str
    status: RunState
    incomplete: bool
    latest_run: RunView
    waiting_for: WaitingFor | None
    queue_position: int | None
    parser: str
    ocr: str
    pages: PageCounts
    eta_seconds: float | None
    error: ErrorView | None
    warnings: list[WarningView]
    cost: CostView
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    wait_seconds: float | None
    run_seconds: float | None


class PageStatus(StrEnum):
    """A page's state; a page still pending when its run ended is `not_read`."""

    PENDING = "pending"
    NOT_READ = "not_read"
    NATIVE = "native"
    OCR = "ocr"
    BLANK = "blank"
    NO_TEXT = "no_text"
    TRUNCATED = "truncated"
    FAILED = "failed"

    @property
    def is_good(self) -> bool:
        return self.value in GOOD


class PageView(BaseModel):
    """A page without its regions."""

    number: int
    plan: str
    plan_reason: str
    status: PageStatus
    markdown: str
    width_pt: float
    height_pt: float
    parser: str | None
    parser_version: str | None
    engine: str | None
    model: str | None
    dpi: float | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    seconds: float | None
    reused: bool
    error: ErrorView | None
    warnings: list[WarningView]


class RegionView(BaseModel):
    """A block of a page; `bbox_2d` is x1, y1, x2, y2 in thousandths of the page's size."""

    index: int
    label: str
    bbox_2d: tuple[int, int, int, int]
    content: str


class WholePageView(PageView):
    """A page with its regions in reading order; empty if it was not read by regions."""

    regions: list[RegionView]


class Action(StrEnum):
    """What a reprocess does with a selected document."""

    QUEUED = "queued"
    WOULD_QUEUE = "would_queue"
    SKIPPED_ACTIVE = "skipped_active"
    NOTHING_TO_REDO = "nothing_to_redo"
    NO_SUCH_PAGE = "no_such_page"


class Redo(BaseModel):
    """A selected document: the numbers of pages reused and read again, and the new run."""

    id: str
    filename: str
    action: Action
    run_id: str | None
    pages_reused: int
    pages_redone: int | None


class SampleView(BaseModel):
    """An OCR server's load at one moment; None for a gauge that it does not have."""

    at: datetime
    running: float | None
    waiting: float | None
    slots: int | None
    cache_use: float | None
    in_flight: float
    in_flight_limit: float | None
    tokens_per_second: float | None
    pages_per_minute: float
    pages_waiting: int
    verdict: Verdict
    sentence: str


class LimitChangeView(BaseModel):
    """Why forks changed their number of requests in flight: one reason and its last change."""

    reason: ChangeReason
    count: int
    old: float
    new: float
    fork: str
    at: datetime


class ServerView(BaseModel):
    """An OCR server as it was last seen; `samples`, if requested, oldest first."""

    url: str
    starved_since: datetime | None
    latest: SampleView
    samples: list[SampleView]
    # Newest first.
    limit_changes: list[LimitChangeView] = []


class FailureView(BaseModel):
    """The documents whose newest run failed for one cause.

    `example`: the message of one of them; `retryable`: a reprocess may help at least one.
    """

    code: str
    documents: int
    example: str
    retryable: bool


class SummaryView(BaseModel):
    """What waits, how long the known pages take at the rate of the last minute, what failed.

    `documents_without_plan` wait to be opened, so their pages are not in `pages_waiting`.
    `eta_seconds` is null while no page was read in the last minute. `lower_bound`: there are more
    documents than were counted.
    """

    documents_waiting: int
    documents_without_plan: int
    pages_waiting: int
    pages_per_minute: float
    eta_seconds: float | None
    failures: list[FailureView]
    lower_bound: bool
