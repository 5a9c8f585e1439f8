"""Views of documents, runs, pages, jobs and servers, as the API sends them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

from rag_service.diagnosis.bottleneck import Verdict
from rag_service.ocr.concurrency.changes import ChangeReason
from rag_service.states import (
    GOOD,
    JobOutcome,
    JobState,
    OcrMode,
    PagePlan,
    PostReason,
    ReprocessState,
    RunState,
    Stage,
    WaitingFor,
)


class View(BaseModel):
    """The base of all views: the docstring of a field is its description in the API."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class ErrorView(View):
    code: str
    """What went wrong, as a stable code. Codes may be added."""
    message: str
    """What went wrong, as a sentence; its wording may change."""
    retryable: bool
    """A reprocess may help."""


class WarningView(View):
    code: str
    """What the text lacks, as a stable code. Codes may be added."""
    message: str
    """The same as a sentence."""
    page: int | None = None
    """The number of the page, or null if it concerns the whole document."""


class PageCounts(View):
    total: int | None = None
    """Pages of the document; null while it has not been opened."""
    done: int = 0
    """Pages that are no longer pending."""
    native: int = 0
    """Pages whose text comes from the file."""
    ocr: int = 0
    """Pages that the OCR server read."""
    blank: int = 0
    """Pages proven blank by their pixels."""
    no_text: int = 0
    """Pages with ink but no writing."""
    truncated: int = 0
    """Pages whose text was cut at the token limit."""
    failed: int = 0
    """Pages that could not be read."""


class RunView(View):
    id: str
    """The run's id."""
    status: RunState
    """The run's state."""
    error: ErrorView | None
    """Why it failed, or null."""
    pages: PageCounts
    """Its pages by state."""


class CostView(View):
    gpu_seconds: float | None = None
    """Seconds that the document's jobs were executed on a GPU; null if it had none."""
    usd: float | None = None
    """Their price in US dollars; null if the document had no job."""
    lower_bound: bool = True
    """The real cost may be higher: waiting and starting are not included."""


class JobView(View):
    """A post of some pages to RunPod.

    `age_seconds`: from the post until its end or now; `usd`: cost of its execution, a lower bound;
    `error`: why the job or its last poll failed.
    """

    remote_id: str | None
    """RunPod's id of the job; null while it is not known."""
    run_id: str
    """The run that the pages belong to."""
    endpoint_id: str
    """The endpoint that it was posted to."""
    pages: list[int]
    """The numbers of its pages."""
    reason: PostReason
    """Why it was posted."""
    state: JobState
    """Its state."""
    last_status: str | None
    """RunPod's last status of it; null before the first poll."""
    outcome: JobOutcome | None
    """How it ended; null while it has not."""
    submitted_at: datetime
    """When it was posted."""
    expires_at: datetime
    """When RunPod drops it."""
    age_seconds: float
    """Seconds from the post until its end or now."""
    polls: int
    """How often it was polled."""
    delay_ms: int | None
    """Milliseconds that it queued at RunPod; null while not known."""
    execution_ms: int | None
    """Milliseconds that it was executed; null while not known."""
    usd: float | None
    """The cost of its execution in US dollars, a lower bound; null while not known."""
    error: str | None
    """Why the job or its last poll failed, or null."""


class DocumentView(View):
    """A document; times are in UTC, durations in seconds."""

    id: str
    """The document's id."""
    filename: str
    """The name of the file, without folders."""
    collection: str
    """The collection it belongs to."""
    sha256: str
    """The digest of its bytes."""
    bytes: int
    """Its size in bytes."""
    media_type: str
    """Its type, recognised by its bytes."""
    status: RunState
    """The state of the current run: the newest processed one, else the failed one with the most
    good pages, else the run at work.
    """
    incomplete: bool
    """The text lacks pages: the current run failed but has good pages."""
    latest_run: RunView
    """The newest run."""
    waiting_for: WaitingFor | None
    """Why the newest run waits; null if it does not."""
    waiting_message: str | None
    """What is wrong with the OCR server, and the way out, if the run waits for it; else null."""
    queue_position: int | None
    """Its place among the runs that wait for the same kind of worker, from 1; null if it does not
    wait.
    """
    parser: str
    """The parser of the current run."""
    ocr: OcrMode
    """Which pages the OCR server reads."""
    pages: PageCounts
    """The pages of the current run by state."""
    eta_seconds: float | None
    """Seconds until the newest run's end at its rate so far; null if not known."""
    error: ErrorView | None
    """Why the current run failed, or null."""
    warnings: list[WarningView]
    """What the text of the current run lacks."""
    cost: CostView
    """What all jobs of the document cost."""
    created_at: datetime
    """When it was added."""
    started_at: datetime | None
    """When the current run was first claimed, or null."""
    finished_at: datetime | None
    """When the current run ended, or null."""
    wait_seconds: float | None
    """Seconds that the current run waited before it was first claimed."""
    run_seconds: float | None
    """Seconds from its first claim until its end or now; null if it was not claimed."""


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


class PageView(View):
    """A page without its regions."""

    number: int
    """The page's number, from 1."""
    plan: PagePlan
    """How it was to be read."""
    plan_reason: str
    """Why, in words."""
    status: PageStatus
    """Its state."""
    markdown: str
    """Its text."""
    width_pt: float
    """Its width in points (1/72 inch)."""
    height_pt: float
    """Its height in points."""
    parser: str | None
    """The parser that read it, or null."""
    parser_version: str | None
    """That parser's version."""
    engine: str | None
    """The engine that read it; null for text from the file."""
    model: str | None
    """The model that read it; null for text from the file."""
    dpi: float | None
    """The resolution at which it was rendered for OCR."""
    finish_reason: str | None
    """How the model's answer ended: stop or length."""
    prompt_tokens: int | None
    """Tokens of the request."""
    completion_tokens: int | None
    """Tokens of the answer."""
    seconds: float | None
    """Seconds from the request to the answer."""
    reused: bool
    """The page was taken from an earlier run."""
    error: ErrorView | None
    """Why it failed, or null."""
    warnings: list[WarningView]
    """What its text lacks."""


class RegionView(View):
    """A block of a page; `bbox_2d` is x1, y1, x2, y2 in thousandths of the page's size."""

    index: int
    """Its place in the reading order, from 0."""
    label: str
    """What it is."""
    bbox_2d: tuple[int, int, int, int]
    """x1, y1, x2, y2 in thousandths of the page's width and height, from the top left."""
    content: str
    """Its text."""


class WholePageView(PageView):
    """A page with its regions in reading order; empty if it was not read by regions."""

    regions: list[RegionView]
    """The page's blocks in reading order; empty if it was not read block by block."""


class Action(StrEnum):
    """What a reprocess does with a selected document."""

    QUEUED = "queued"
    WOULD_QUEUE = "would_queue"
    SKIPPED_ACTIVE = "skipped_active"
    NOTHING_TO_REDO = "nothing_to_redo"
    NO_SUCH_PAGE = "no_such_page"


class Redo(View):
    """A selected document: the numbers of pages reused and read again, and the new run."""

    id: str
    """The document's id."""
    filename: str
    """The name of its file."""
    action: Action
    """What was done, or would be done."""
    run_id: str | None
    """The new run; null if none was added."""
    pages_reused: int
    """Good pages that the new run takes over."""
    pages_redone: int | None
    """Pages that it reads again; null if the document's pages are not known yet."""


class ReprocessJobView(View):
    """A reprocess of many documents, which maintenance carries out in batches."""

    id: str
    """The job's id."""
    state: ReprocessState
    """running, done (every document was handled) or cancelled."""
    priority: Literal["interactive", "bulk"]
    """The priority of the runs that it adds."""
    total: int
    """Documents that were selected."""
    handled: int
    """Those of them that it has handled so far."""
    counts: dict[Action, int]
    """The handled documents by action."""
    runs_active: int
    """Runs that it added and that have not ended."""
    runs_failed: int
    """Runs that it added and that failed or were cancelled."""
    message: str | None
    """Why it waits; null if it does not."""
    created_at: datetime
    """When it was added."""
    ended_at: datetime | None
    """When it was done or cancelled."""


class SampleView(View):
    """An OCR server's load at one moment; None for a gauge that it does not have."""

    at: datetime
    """When the sample was taken."""
    running: float | None
    """Requests that ran on the server."""
    waiting: float | None
    """Requests that waited on the server."""
    slots: int | None
    """Requests that the server can batch."""
    cache_use: float | None
    """The used part of the KV cache, 0 to 1."""
    in_flight: float
    """Requests that this service had open; a mean of 5 seconds."""
    in_flight_limit: float | None
    """The most requests that this service would have opened."""
    tokens_per_second: float | None
    """Tokens that the server generated in a second."""
    pages_per_minute: float
    """Pages that were read in the last minute."""
    pages_waiting: int
    """Pages that waited to be sent."""
    verdict: Verdict
    """The bottleneck."""
    sentence: str
    """The same as a sentence, with what to do."""


class LimitChangeView(View):
    """Why forks changed their number of requests in flight: one reason and its last change."""

    reason: ChangeReason
    """Why forks changed their number in flight."""
    count: int
    """How often they did."""
    old: float
    """The number before the last change."""
    new: float
    """The number after it."""
    fork: str
    """The fork that made it."""
    at: datetime
    """When it was made."""


class ServerView(View):
    """An OCR server as it was last seen; `samples`, if requested, oldest first."""

    url: str
    """The server's address."""
    starved_since: datetime | None
    """Since when pages wait although the server could take more; null if they do not."""
    latest: SampleView
    """The newest sample."""
    samples: list[SampleView]
    """The samples of the requested time, oldest first."""
    limit_changes: list[LimitChangeView] = []
    """Changes of the number in flight by reason, the newest first."""


class FailureView(View):
    """The documents whose newest run failed for one cause.

    `example`: the message of one of them; `retryable`: a reprocess may help at least one.
    """

    code: str
    """The cause."""
    documents: int
    """Documents whose newest run failed for it."""
    example: str
    """The message of one of them."""
    retryable: bool
    """A reprocess may help at least one of them."""


class HeldView(View):
    """A stage whose forks are all held for long by the same documents while others wait."""

    stage: Stage
    """The stage: prepare or ocr."""
    message: str
    """The documents, since when they hold its forks, and what to do."""


class SummaryView(View):
    """What waits, how long the known pages take at the rate of the last minute, what failed.

    `documents_without_plan` wait to be opened, so their pages are not in `pages_waiting`.
    `eta_seconds` is null while no page was read in the last minute. `lower_bound`: there are more
    documents than were counted.
    """

    documents_waiting: int
    """Documents that wait for a worker."""
    documents_without_plan: int
    """Those of them that have not been opened, so that their pages are not known."""
    pages_waiting: int
    """Known pages that wait to be sent to the OCR server."""
    pages_per_minute: float
    """Pages that it read in the last minute."""
    eta_seconds: float | None
    """Seconds for the known pages at that rate; null if none was read."""
    failures: list[FailureView]
    """Failed documents by cause, the most frequent first."""
    lower_bound: bool
    """There are more documents than were counted."""
    held: list[HeldView] = []
    """Stages that do nothing for waiting documents, and by what they are held."""
    reprocess_jobs: list[ReprocessJobView]
    """The newest running reprocess jobs."""
