"""What the triggers keep, computed again from the rows that it is derived from."""

from __future__ import annotations

from rag_service.database.engine import begin
from rag_service.database.totals import stored_totals
from tests import simulation as sim

_DOCUMENTS_THAT_DIFFER = """
SELECT d.id, d.status, d.page_count, d.latest_error, d.latest_finished_at,
       coalesce(shown.state, newest.state) AS state, shown.page_count AS pages,
       newest.error_code, newest.finished_at
FROM documents d
JOIN LATERAL (SELECT * FROM runs WHERE document_id = d.id ORDER BY number DESC LIMIT 1) newest
    ON true
LEFT JOIN runs shown ON shown.id = d.current_run_id
WHERE (d.status, d.page_count, d.latest_error, d.latest_finished_at) IS DISTINCT FROM
    (coalesce(shown.state, newest.state), shown.page_count, newest.error_code, newest.finished_at)
"""
_COUNTED = """
SELECT 'runs:' || state AS name, count(*)::numeric AS value FROM runs
WHERE state IN ('processed', 'failed', 'cancelled') GROUP BY 1
UNION ALL
SELECT 'documents:' || coalesce(shown.state, newest.state), count(*) FROM documents d
JOIN LATERAL (SELECT * FROM runs WHERE document_id = d.id ORDER BY number DESC LIMIT 1) newest
    ON true
LEFT JOIN runs shown ON shown.id = d.current_run_id
WHERE deleted_at IS NULL
    AND coalesce(shown.state, newest.state) IN ('processed', 'failed', 'cancelled') GROUP BY 1
UNION ALL
SELECT 'errors:' || newest.error_code, count(*) FROM documents d
JOIN LATERAL (SELECT * FROM runs WHERE document_id = d.id ORDER BY number DESC LIMIT 1) newest
    ON true
WHERE deleted_at IS NULL AND newest.error_code IS NOT NULL GROUP BY 1
UNION ALL
SELECT 'pages', sum(r.page_count) FROM documents d JOIN runs r ON r.id = d.current_run_id
WHERE deleted_at IS NULL
UNION ALL
SELECT 'jobs:' || outcome, count(*) FROM remote_jobs WHERE state = 'ended' GROUP BY 1
UNION ALL
SELECT 'gpu_seconds', sum(execution_ms / 1000.0) FROM remote_jobs
UNION ALL
SELECT 'usd', sum(execution_ms / 1000.0 * usd_per_second::numeric) FROM remote_jobs
"""


def assert_stored_agrees_with_derived() -> None:
    """Fail if a document's stored status or a total is not what the rows say."""
    assert sim.rows(_DOCUMENTS_THAT_DIFFER) == []
    with begin() as connection:
        kept = {name: value for name, value in stored_totals(connection).items() if value}
    assert kept == {row.name: row.value for row in sim.rows(_COUNTED) if row.value}
