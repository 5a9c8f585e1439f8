"""The words of the design as enums: run and page states, plans, priorities. Used everywhere."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class RunState(StrEnum):
    """Where a run is on its way."""

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
    """A kind of work; also the name of its Celery queue."""

    PREPARE = "prepare"
    OCR = "ocr"

    @property
    def waiting(self) -> RunState:
        """The state a run of this stage is claimed from and released to."""
        return RunState.QUEUED if self is Stage.PREPARE else RunState.READY

    @property
    def working(self) -> RunState:
        """The state a claimed run of this stage is in."""
        return RunState.PREPARING if self is Stage.PREPARE else RunState.OCR


class PageState(StrEnum):
    """What came of a page; anything but pending is done."""

    PENDING = "pending"
    NATIVE = "native"
    OCR = "ocr"
    BLANK = "blank"
    NO_TEXT = "no_text"
    TRUNCATED = "truncated"
    FAILED = "failed"


class LayoutMode(StrEnum):
    """How pages are read: whole, block by block, or whole and by blocks where that fails."""

    PAGE = "page"
    REGIONS = "regions"
    AUTO = "auto"


GOOD = frozenset(PageState) - {PageState.PENDING, PageState.FAILED}


class WaitingFor(StrEnum):
    """Why a run that nobody works on waits."""

    WORKER = "worker"
    QUEUE = "queue"
    OCR_SERVER = "ocr_server"
    REMOTE_JOB = "remote_job"
    RETRY = "retry"
    MEMORY_GUARD = "memory_guard"


class JobState(StrEnum):
    """Where a post to a remote service is: one row a post."""

    SUBMITTING = "submitting"
    LOST = "lost"
    LIVE = "live"
    ENDED = "ended"


class JobOutcome(StrEnum):
    """How a post ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    EXPIRED = "expired"
    MISSING = "missing"
    REFUSED = "refused"
    REPEATED = "repeated"


class PostReason(StrEnum):
    """Why a job was posted; anything but the first post of a page has a cause."""

    FIRST = "first"
    LOST_ANSWER = "lost_answer"
    EXPIRED = "expired"
    REMAINING_PAGES = "remaining_pages"
    SECOND_TRY = "second_try"


class Priority(IntEnum):
    """Lower is claimed first."""

    INTERACTIVE = 0
    BULK = 1


class ServerState(StrEnum):
    """What is known of an OCR server."""

    UP = "up"
    DOWN = "down"
    MISCONFIGURED = "misconfigured"
    TRIAL = "trial"


class OcrMode(StrEnum):
    """Which pages go to the OCR server: those that need it, all, none."""

    AUTO = "auto"
    FORCE = "force"
    OFF = "off"


class PagePlan(StrEnum):
    """What is to be done with a page."""

    NATIVE = "native"
    OCR = "ocr"
    BLANK = "blank"


# What PP-DocLayoutV3 calls the blocks of a page; every layout model's own names become these.
LAYOUT_LABELS = (
    "abstract", "algorithm", "aside_text", "chart", "content", "display_formula", "doc_title",
    "figure_title", "footer", "footer_image", "footnote", "formula_number", "header",
    "header_image", "image", "inline_formula", "number", "paragraph_title", "reference",
    "reference_content", "seal", "table", "text", "vertical_text", "vision_footnote",
)  # fmt: skip
