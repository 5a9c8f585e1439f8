"""States, plans, priorities and other closed lists of words, as enums."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class RunState(StrEnum):
    """The state of a run."""

    QUEUED = "queued"
    PREPARING = "preparing"
    READY = "ready"
    OCR = "ocr"
    REMOTE = "remote"
    FINISHING = "finishing"
    PROCESSED = "processed"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL = frozenset({RunState.PROCESSED, RunState.FAILED, RunState.CANCELLED})
HELD = frozenset({RunState.PREPARING, RunState.OCR, RunState.FINISHING})


class Stage(StrEnum):
    """A stage of a run; the value is also the name of its Celery queue."""

    PREPARE = "prepare"
    OCR = "ocr"

    @property
    def waiting(self) -> RunState:
        """The state from which a run of this stage is claimed, and to which it is released."""
        return RunState.QUEUED if self is Stage.PREPARE else RunState.READY

    @property
    def working(self) -> RunState:
        """The state of a claimed run of this stage."""
        return RunState.PREPARING if self is Stage.PREPARE else RunState.OCR


class PageState(StrEnum):
    """The state of a page. A page is done when it is not pending."""

    PENDING = "pending"
    NATIVE = "native"
    OCR = "ocr"
    BLANK = "blank"
    NO_TEXT = "no_text"
    TRUNCATED = "truncated"
    FAILED = "failed"


class LayoutMode(StrEnum):
    """How pages are read: whole, by regions, or whole and then by regions if that fails."""

    PAGE = "page"
    REGIONS = "regions"
    AUTO = "auto"


GOOD = frozenset(PageState) - {PageState.PENDING, PageState.FAILED}


class WaitingFor(StrEnum):
    """The reason why a run waits for a worker."""

    WORKER = "worker"
    QUEUE = "queue"
    OCR_SERVER = "ocr_server"
    REMOTE_JOB = "remote_job"
    RETRY = "retry"
    MEMORY_GUARD = "memory_guard"
    STORAGE = "storage"


class JobState(StrEnum):
    """The state of a post to a remote service; each post has one row."""

    SUBMITTING = "submitting"
    LOST = "lost"
    LIVE = "live"
    ENDED = "ended"


class JobOutcome(StrEnum):
    """The result of a post."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    EXPIRED = "expired"
    MISSING = "missing"
    REFUSED = "refused"
    REPEATED = "repeated"


class PostReason(StrEnum):
    """The reason of a post."""

    FIRST = "first"
    LOST_ANSWER = "lost_answer"
    EXPIRED = "expired"
    REMAINING_PAGES = "remaining_pages"
    SECOND_TRY = "second_try"


class Priority(IntEnum):
    """The priority of a run; a lower value is claimed first."""

    INTERACTIVE = 0
    BULK = 1


class ReprocessState(StrEnum):
    """The state of a reprocess job."""

    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


class ServerState(StrEnum):
    """The last known state of an OCR server."""

    UP = "up"
    DOWN = "down"
    MISCONFIGURED = "misconfigured"
    TRIAL = "trial"


class OcrMode(StrEnum):
    """Which pages the OCR server reads: those that need it, all, none."""

    AUTO = "auto"
    FORCE = "force"
    OFF = "off"


class PagePlan(StrEnum):
    """How a page is to be processed."""

    NATIVE = "native"
    OCR = "ocr"
    BLANK = "blank"


# The region labels of PP-DocLayoutV3. The labels of other layout models are mapped to these.
LAYOUT_LABELS = (
    "abstract", "algorithm", "aside_text", "chart", "content", "display_formula", "doc_title",
    "figure_title", "footer", "footer_image", "footnote", "formula_number", "header",
    "header_image", "image", "inline_formula", "number", "paragraph_title", "reference",
    "reference_content", "seal", "table", "text", "vertical_text", "vision_footnote",
)  # fmt: skip
