"""Examples of the API's answers by schema, for its OpenAPI document."""

from __future__ import annotations

from typing import Any

Example = dict[str, Any]

_ID = "0b1f5e0c9a5d4c1f8b7e6d5c4b3a2918"
_RUN_ID = "5f2d8c1e7b6a4930a1b2c3d4e5f60718"
_ADDED, _STARTED, _ENDED = (f"2026-03-01T14:30:{second}Z" for second in ("00", "02", "09"))
_PAGES: Example = {
    "total": 3, "done": 3, "native": 2, "ocr": 1, "blank": 0, "no_text": 0, "truncated": 0,
    "failed": 0,
}  # fmt: skip
_DOCUMENT: Example = {
    "id": _ID,
    "filename": "agreement.pdf",
    "collection": "default",
    "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "bytes": 48213,
    "media_type": "application/pdf",
    "status": "processed",
    "incomplete": False,
    "latest_run": {"id": _RUN_ID, "status": "processed", "error": None, "pages": _PAGES},
    "waiting_for": None,
    "waiting_message": None,
    "queue_position": None,
    "parser": "glmocr",
    "ocr": "auto",
    "pages": _PAGES,
    "eta_seconds": None,
    "error": None,
    "warnings": [
        {"code": "page_truncated", "message": "The text stops at the token limit.", "page": 3}
    ],
    "cost": {"gpu_seconds": None, "usd": None, "lower_bound": True},
    "created_at": _ADDED,
    "started_at": _STARTED,
    "finished_at": _ENDED,
    "wait_seconds": 2.0,
    "run_seconds": 7.0,
}
_PAGE: Example = {
    "number": 3, "plan": "ocr", "plan_reason": "no text layer", "status": "ocr",
    "markdown": "## Annex\n\nDelivery within 30 days.", "width_pt": 595.0, "height_pt": 842.0,
    "parser": "glmocr", "parser_version": "1", "engine": "sglang", "model": "glm-ocr",
    "dpi": 150.0, "finish_reason": "stop", "prompt_tokens": 1402, "completion_tokens": 512,
    "seconds": 3.1, "reused": False, "error": None, "warnings": [],
}  # fmt: skip
_REGION: Example = {
    "index": 0, "label": "paragraph_title", "bbox_2d": [100, 80, 900, 120], "content": "## Annex"
}  # fmt: skip
_JOB: Example = {
    "remote_id": "c80ffee4-f315-4e25-a146-0f3d98cf024b-e1", "run_id": _RUN_ID,
    "endpoint_id": "abc123", "pages": [3, 7, 9], "reason": "first", "state": "ended",
    "last_status": "COMPLETED", "outcome": "completed", "submitted_at": _ADDED,
    "expires_at": "2026-03-02T14:30:00Z", "age_seconds": 41.5, "polls": 6, "delay_ms": 5200,
    "execution_ms": 33100, "usd": 0.0102, "error": None,
}  # fmt: skip
_SAMPLE: Example = {
    "at": _ENDED, "running": 58.0, "waiting": 3.0, "slots": 64, "cache_use": 0.41,
    "in_flight": 61.2, "in_flight_limit": 66.0, "tokens_per_second": 5570.0,
    "pages_per_minute": 168.0, "pages_waiting": 1204, "verdict": "saturated",
    "sentence": "58 of 64 slots are in use.",
}  # fmt: skip
_CHANGE: Example = {
    "reason": "more_gained", "count": 3, "old": 10.0, "new": 12.0, "fork": "ocr@host/1",
    "at": _ENDED,
}  # fmt: skip
_REDO: Example = {
    "id": _ID, "filename": "agreement.pdf", "action": "queued", "run_id": _RUN_ID,
    "pages_reused": 2, "pages_redone": 1,
}  # fmt: skip
_REPROCESS_JOB: Example = {
    "id": "7c3e9a1d5b2f4e60917c8d7e6f5a4b3c", "state": "running", "priority": "bulk",
    "total": 20001, "handled": 9100,
    "counts": {"queued": 9000, "skipped_active": 60, "nothing_to_redo": 40},
    "runs_active": 8999, "runs_failed": 0,
    "message": "Waits until fewer than 9000 bulk documents wait (90 % of limits.max_backlog).",
    "created_at": _ADDED, "ended_at": None,
}  # fmt: skip

EXAMPLES: dict[str, Example] = {
    "AcceptedView": {"id": _ID, "status": "queued", "duplicate": False},
    "DocumentView": _DOCUMENT,
    "DocumentList": {"documents": [_DOCUMENT], "next_cursor": None},
    "CancelView": {"id": _ID, "cancelled": True},
    "PageList": {"run_id": _RUN_ID, "pages": [_PAGE], "next_after": None},
    "WholePageView": _PAGE | {"regions": [_REGION]},
    "JobList": {"jobs": [_JOB]},
    "Redo": _REDO,
    "ReprocessList": {
        "documents": [_REDO],
        "selected": 1,
        "counts": {"queued": 1},
        "dry_run": False,
    },
    "ReprocessJobView": _REPROCESS_JOB,
    "ReprocessJobList": {"jobs": [_REPROCESS_JOB]},
    "ReprocessCancelView": {"id": _REPROCESS_JOB["id"], "cancelled": True},
    "ServerList": {
        "servers": [
            {
                "url": "http://127.0.0.1:30000",
                "starved_since": None,
                "latest": _SAMPLE,
                "samples": [],
                "limit_changes": [_CHANGE],
            }
        ]
    },
    "SummaryView": {
        "documents_waiting": 120,
        "documents_without_plan": 100,
        "pages_waiting": 1204,
        "pages_per_minute": 168.0,
        "eta_seconds": 430.0,
        "failures": [
            {
                "code": "encrypted_pdf",
                "documents": 3,
                "example": "The PDF needs a password.",
                "retryable": False,
            }
        ],
        "lower_bound": False,
        "held": [
            {
                "stage": "prepare",
                "message": "All forks are held by plan.pdf (0192f1c4) since 06:12:40 UTC, while 3 "
                "documents wait. Cancel these, or start another worker.",
            }
        ],
        "reprocess_jobs": [_REPROCESS_JOB],
    },
    "Health": {
        "status": "degraded",
        "failed": [],
        "degraded": [{"name": "ocr_worker", "message": "No ocr worker is running."}],
    },
    "LivenessView": {"status": "alive"},
    "WebhookReceipt": {"heard": True},
}
