"""A database filled with documents by the server's own SQL: an archive, and work in progress.

It has what a service in use has: processed documents, some of them read two or three times, failed
ones with several codes, cancelled ones, remote jobs, a long queue, and runs in every state.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

# Shares of the archive: up to these fractions of its documents.
_CODES = {
    0.012: "corrupt_pdf", 0.016: "encrypted_pdf", 0.026: "pages_failed", 0.028: "ocr_unavailable",
}  # fmt: skip
_CANCELLED_TO = 0.03
# Among processed documents: read again after a failure, read three times, and a last read failed.
_TWICE_TO, _THRICE_TO, _LAST_FAILED_TO = 0.08, 0.09, 0.091


@dataclass(frozen=True)
class Archive:
    """Numbers of documents: stored, and at work by the state of their run."""

    stored: int
    queued: int = 10_000
    ready: int = 200
    remote: int = 100
    ocr: int = 16
    preparing: int = 8

    @property
    def active(self) -> dict[str, int]:
        return {
            "queued": self.queued, "ready": self.ready, "remote": self.remote, "ocr": self.ocr,
            "preparing": self.preparing,
        }  # fmt: skip


def fill(connection: Connection, archive: Archive) -> None:
    """Insert the documents, newest first those at work, and analyse the tables."""
    connection.execute(text("SELECT setseed(0.5)"))
    connection.execute(text(_KINDS), {"stored": archive.stored})
    first = archive.stored
    for state, count in archive.active.items():
        values = {"state": state, "first": first, "count": count}
        connection.execute(text(_ACTIVE_KINDS), values)
        first += count
    for statement in (_DOCUMENTS, _RUNS, _CURRENT, _PAGES, _JOBS, _JOB_PAGES, _DELETED):
        connection.execute(text(statement))
    connection.execute(text("DROP TABLE kinds"))
    connection.execute(text("ANALYZE"))


# One row a run: which document, which of its runs, its state and its error.
_OUTCOME = (
    "CASE "
    + " ".join(f"WHEN chance < {share} THEN '{code}'" for share, code in _CODES.items())
    + f" WHEN chance < {_CANCELLED_TO} THEN 'cancelled' END"
)
_KINDS = f"""
CREATE TEMP TABLE kinds AS
WITH documents AS (
    SELECT n, random() AS chance, 1 + floor(random() ^ 2 * 10.5)::int AS pages,
           random() AS other FROM generate_series(1, :stored) n
), outcomes AS (
    SELECT *, {_OUTCOME} AS error,
        CASE WHEN chance < {_CANCELLED_TO} THEN 1 WHEN chance < {_TWICE_TO} THEN 2
             WHEN chance < {_THRICE_TO} THEN 3 WHEN chance < {_LAST_FAILED_TO} THEN 2
             ELSE 1 END AS runs
    FROM documents
)
SELECT n, number, runs, other,
    CASE WHEN chance < {_CANCELLED_TO} THEN error
         WHEN chance < {_THRICE_TO} AND number < runs THEN 'ocr_unavailable'
         WHEN chance BETWEEN {_THRICE_TO} AND {_LAST_FAILED_TO} AND number = 2
             THEN 'ocr_unavailable' END AS error,
    CASE WHEN error IN ('corrupt_pdf', 'encrypted_pdf') THEN 0 ELSE pages END AS pages,
    NULL::text AS state
FROM outcomes, generate_series(1, runs) number
"""
_ACTIVE_KINDS = """
INSERT INTO kinds SELECT :first + n, 1, 1, random(), NULL,
    CASE WHEN :state IN ('queued', 'preparing') THEN 0 ELSE 4 END, :state
FROM generate_series(1, :count) n
"""
_ID = "md5(n::text)"
_RUN_ID = "md5(n::text || ':' || number::text)"
# A document a second, the newest a minute ago: nothing was read in the last minute.
_ADDED = "(now() - interval '1 minute' - ((SELECT max(n) FROM kinds) - n) * interval '1 second')"
_DOCUMENTS = f"""
INSERT INTO documents (id, collection, sha256, filename, media_type, bytes, source_key, created_at)
SELECT {_ID}, CASE WHEN n % 10007 = 7 THEN 'rare' WHEN other < 0.8 THEN 'default'
    WHEN other < 0.95 THEN 'contracts' ELSE 'letters' END,
    {_ID} || {_ID}, 'agreement ' || n || '.pdf', 'application/pdf', 20000,
    'sha256/' || {_ID}, {_ADDED}
FROM kinds WHERE number = 1
"""
_RUNS = f"""
INSERT INTO runs (id, document_id, number, state, parser, model, ocr, dpi, layout, fingerprint,
    priority, reuse_pages, redo_pages, epoch, crashes, expiries, worked_seconds, warnings,
    page_count, error_code, error_message, error_retryable, created_at, started_at, ready_at,
    finished_at, lease_worker, lease_task, lease_expires_at, held_since)
SELECT {_RUN_ID}, {_ID}, number, outcome, 'glmocr', 'glm-ocr', 'auto', 150, 'auto',
    'fingerprint', CASE WHEN n % 50 = 0 THEN 0 ELSE 1 END, true, '{{}}',
    CASE WHEN state = 'queued' THEN 0 ELSE 1 END, 0, 0, 2.5, '[]', nullif(pages, 0), error,
    'a message of ' || error, error IN ('ocr_unavailable', 'pages_failed'),
    {_ADDED}, CASE WHEN state = 'queued' THEN NULL ELSE {_ADDED} END,
    CASE WHEN state = 'queued' THEN NULL ELSE {_ADDED} END,
    CASE WHEN state IS NULL THEN {_ADDED} + interval '20 seconds' END,
    CASE WHEN held THEN 'worker' END, CASE WHEN held THEN n::text END,
    CASE WHEN held THEN now() + interval '1 day' END, CASE WHEN held THEN now() END
FROM (SELECT *, coalesce(state IN ('preparing', 'ocr'), false) AS held,
      coalesce(state, CASE WHEN error = 'cancelled' THEN 'cancelled' WHEN error IS NULL
          THEN 'processed' ELSE 'failed' END) AS outcome FROM kinds) AS each
"""
_CURRENT = """
UPDATE documents SET current_run_id = (
    SELECT id FROM runs WHERE document_id = documents.id AND state IN ('processed', 'failed')
    ORDER BY state DESC, number DESC LIMIT 1)
WHERE EXISTS (SELECT 1 FROM runs WHERE document_id = documents.id
    AND state IN ('processed', 'failed'))
"""
_TEXT = "The parties agree on the delivery of the goods within thirty days. "
_PAGES = f"""
INSERT INTO pages (run_id, number, plan, plan_reason, state, width_pt, height_pt, markdown, regions,
    engine, model, parser, parser_version, dpi, fingerprint, reused, tries, warnings, error_code,
    error_message, error_retryable, stored_at)
SELECT {_RUN_ID}, page, plan, '', page_state, 595, 842,
    CASE WHEN page_state IN ('native', 'ocr', 'truncated') THEN repeat('{_TEXT}', 3) ELSE '' END,
    '[]', CASE WHEN plan = 'ocr' THEN 'glm-ocr' END, CASE WHEN plan = 'ocr' THEN 'glm-ocr' END,
    'glmocr', '1.0', 150, 'fingerprint', false, 0, '[]',
    CASE WHEN page_state = 'failed' THEN 'page_timeout' END,
    CASE WHEN page_state = 'failed' THEN 'a message' END,
    CASE WHEN page_state = 'failed' THEN false END,
    CASE WHEN page_state <> 'pending' THEN {_ADDED} + interval '10 seconds' END
FROM (
    SELECT *, CASE WHEN state IS NOT NULL AND page > 1 OR error = 'ocr_unavailable' THEN 'pending'
        WHEN error = 'pages_failed' AND page = 1 THEN 'failed'
        WHEN plan = 'native' THEN 'native' WHEN (n + page) % 1009 = 5 THEN 'truncated'
        ELSE 'ocr' END AS page_state
    FROM (SELECT *, CASE WHEN state IS NULL AND (n + page) % 5 < 2 THEN 'native' ELSE 'ocr' END
          AS plan FROM kinds, generate_series(1, pages) page) AS planned
) AS each
"""
_JOBS = f"""
INSERT INTO remote_jobs (id, run_id, kind, base_url, endpoint_id, remote_id, token_sha256,
    request_key, pages, reason, state, outcome, epoch, cancel_wanted, deadline_passed,
    submitted_at, expires_at, ended_at, next_poll_at, last_status, polls, execution_ms,
    usd_per_second, gauges)
SELECT {_RUN_ID}, {_RUN_ID}, 'runpod', 'https://api.runpod.ai/v2', 'endpoint', {_RUN_ID},
    {_RUN_ID}, 'key', ARRAY(SELECT generate_series(1, pages)), 'first',
    CASE WHEN state = 'remote' THEN 'live' ELSE 'ended' END,
    CASE WHEN state = 'remote' THEN NULL WHEN error IS NULL THEN 'completed' ELSE 'failed' END,
    1, false, false, {_ADDED}, now() + interval '1 day',
    CASE WHEN state = 'remote' THEN NULL ELSE {_ADDED} + interval '15 seconds' END,
    now() + interval '1 day', CASE WHEN state = 'remote' THEN 'IN_QUEUE' ELSE 'COMPLETED' END, 3,
    CASE WHEN state = 'remote' THEN NULL ELSE 4000 END, 0.0003,
    '{{"running_mean": 3.5, "waiting_mean": 0.5, "slots": 8}}'
FROM kinds WHERE pages > 0 AND (state = 'remote' OR state IS NULL AND n % 10 < 3)
"""
_JOB_PAGES = """
UPDATE pages SET remote_job_id = run_id
WHERE state = 'pending' AND run_id IN (SELECT run_id FROM remote_jobs WHERE state = 'live')
"""
_DELETED = "UPDATE documents SET deleted_at = now() WHERE id IN (SELECT md5(n::text) FROM kinds "
_DELETED += "WHERE state IS NULL ORDER BY n LIMIT 50)"
