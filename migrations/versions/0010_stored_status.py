"""Status and totals kept by triggers, and indexes for what is asked often

With a million documents it takes some minutes and locks the tables: stop the service before.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_UNDELETED = "deleted_at IS NULL"
_HAS_ERROR = f"{_UNDELETED} AND latest_error IS NOT NULL"
_PLACE = ["created_at", "id"]
# Name, table, columns, condition.
_INDEXES: list[tuple[str, str, list[str], str | None]] = [
    ("ix_documents_status", "documents", ["status", *_PLACE], _UNDELETED),
    ("ix_documents_collection", "documents", ["collection", *_PLACE], _UNDELETED),
    ("ix_documents_collection_status", "documents", ["collection", "status", *_PLACE], _UNDELETED),
    ("ix_documents_error", "documents", ["latest_error", *_PLACE], _HAS_ERROR),
    ("ix_documents_error_status", "documents", ["latest_error", "status", *_PLACE], _HAS_ERROR),
    (
        "ix_documents_collection_error",
        "documents",
        ["collection", "latest_error", *_PLACE],
        _HAS_ERROR,
    ),
    (
        "ix_documents_collection_error_status",
        "documents",
        ["collection", "latest_error", "status", *_PLACE],
        _HAS_ERROR,
    ),
    ("ix_documents_failed", "documents", _PLACE, f"{_UNDELETED} AND latest_error <> 'cancelled'"),
    ("ix_documents_finished", "documents", ["latest_finished_at"], _UNDELETED),
    ("ix_runs_finished", "runs", ["finished_at"], "finished_at IS NOT NULL"),
    ("ix_runs_parser", "runs", ["parser"], None),
    ("ix_pages_pending", "pages", ["run_id"], "state = 'pending'"),
    ("ix_pages_truncated", "pages", ["run_id"], "state = 'truncated'"),
    ("ix_pages_failed", "pages", ["error_code", "run_id"], "state = 'failed'"),
    ("ix_remote_jobs_ended", "remote_jobs", ["ended_at"], "ended_at IS NOT NULL"),
]
_TERMINAL = "('cancelled', 'failed', 'processed')"

_FILL_DOCUMENTS = """
UPDATE documents SET
    status = coalesce(shown.state, newest.state),
    page_count = shown.page_count,
    latest_error = newest.error_code,
    latest_finished_at = newest.finished_at
FROM (SELECT DISTINCT ON (document_id) document_id, state, error_code, finished_at
      FROM runs ORDER BY document_id, number DESC) AS newest
JOIN documents AS same ON same.id = newest.document_id
LEFT JOIN runs AS shown ON shown.id = same.current_run_id
WHERE documents.id = newest.document_id
"""

_FILL_TOTALS = f"""
INSERT INTO totals (name, value)
SELECT 'runs:' || state, count(*) FROM runs WHERE state IN {_TERMINAL} GROUP BY 1
UNION ALL
SELECT 'documents:' || status, count(*) FROM documents
WHERE status IN {_TERMINAL} AND deleted_at IS NULL GROUP BY 1
UNION ALL
SELECT 'errors:' || latest_error, count(*) FROM documents
WHERE latest_error IS NOT NULL AND deleted_at IS NULL GROUP BY 1
UNION ALL
SELECT 'pages', coalesce(sum(page_count), 0) FROM documents WHERE deleted_at IS NULL
UNION ALL
SELECT 'jobs:' || outcome, count(*) FROM remote_jobs WHERE state = 'ended' GROUP BY 1
UNION ALL
SELECT 'gpu_seconds', coalesce(sum(execution_ms / 1000.0), 0) FROM remote_jobs
UNION ALL
SELECT 'usd', coalesce(sum(execution_ms / 1000.0 * usd_per_second::numeric), 0) FROM remote_jobs
"""

# Appended, not added to a total at once: two transactions never wait for each other's totals.
_APPEND = """
CREATE FUNCTION append_total_changes(names text[], changes numeric[]) RETURNS void
LANGUAGE sql AS $$
    INSERT INTO total_changes (name, change)
    SELECT name, sum(change) FROM unnest(names, changes) AS each (name, change)
    WHERE name IS NOT NULL AND change IS NOT NULL
    GROUP BY name HAVING sum(change) <> 0
$$
"""

_RUNS_FOLLOW = f"""
CREATE FUNCTION follow_run() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    own text;
    names text[] := '{{}}';
    changes numeric[] := '{{}}';
BEGIN
    IF TG_OP <> 'INSERT' AND OLD.state IN {_TERMINAL} THEN
        names := ARRAY['runs:' || OLD.state];
        changes := ARRAY[-1];
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.state IN {_TERMINAL} THEN
        names := names || ('runs:' || NEW.state);
        changes := changes || 1::numeric;
    END IF;
    IF names <> '{{}}' THEN
        PERFORM append_total_changes(names, changes);
    END IF;
    own := CASE WHEN TG_OP = 'DELETE' THEN OLD.document_id ELSE NEW.document_id END;
    -- The next statement sees what others have committed, as it begins after this wait.
    PERFORM 1 FROM documents WHERE id = own FOR NO KEY UPDATE;
    UPDATE documents SET
        status = now_is.state,
        latest_error = now_is.error_code,
        latest_finished_at = now_is.finished_at
    FROM (SELECT coalesce(shown.state, newest.state) AS state,
                 newest.error_code, newest.finished_at
          FROM runs AS newest
          JOIN documents AS same ON same.id = newest.document_id
          LEFT JOIN runs AS shown ON shown.id = same.current_run_id
          WHERE newest.document_id = own ORDER BY newest.number DESC LIMIT 1) AS now_is
    WHERE documents.id = own
        AND (documents.status, documents.latest_error, documents.latest_finished_at)
        IS DISTINCT FROM (now_is.state, now_is.error_code, now_is.finished_at);
    RETURN NULL;
END $$
"""

_CURRENT_RUN = """
CREATE FUNCTION follow_current_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    SELECT state, page_count INTO NEW.status, NEW.page_count
    FROM runs WHERE id = NEW.current_run_id;
    IF NOT FOUND THEN
        SELECT state INTO NEW.status
        FROM runs WHERE document_id = NEW.id ORDER BY number DESC LIMIT 1;
    END IF;
    NEW.status := coalesce(NEW.status, OLD.status);
    RETURN NEW;
END $$
"""

_DOCUMENTS_COUNT = f"""
CREATE FUNCTION count_document() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    names text[] := '{{}}';
    changes numeric[] := '{{}}';
BEGIN
    IF TG_OP <> 'INSERT' AND OLD.deleted_at IS NULL THEN
        names := ARRAY['pages', 'errors:' || OLD.latest_error,
            CASE WHEN OLD.status IN {_TERMINAL} THEN 'documents:' || OLD.status END];
        changes := ARRAY[-OLD.page_count, -1, -1];
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.deleted_at IS NULL THEN
        names := names || ARRAY['pages', 'errors:' || NEW.latest_error,
            CASE WHEN NEW.status IN {_TERMINAL} THEN 'documents:' || NEW.status END];
        changes := changes || ARRAY[NEW.page_count, 1, 1]::numeric[];
    END IF;
    PERFORM append_total_changes(names, changes);
    RETURN NULL;
END $$
"""

_JOBS_COUNT = """
CREATE FUNCTION count_remote_job() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    names text[] := '{}';
    changes numeric[] := '{}';
    ran numeric;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        ran := OLD.execution_ms / 1000.0;
        names := ARRAY['gpu_seconds', 'usd',
            CASE WHEN OLD.state = 'ended' THEN 'jobs:' || OLD.outcome END];
        changes := ARRAY[-ran, -ran * OLD.usd_per_second::numeric, -1];
    END IF;
    IF TG_OP <> 'DELETE' THEN
        ran := NEW.execution_ms / 1000.0;
        names := names || ARRAY['gpu_seconds', 'usd',
            CASE WHEN NEW.state = 'ended' THEN 'jobs:' || NEW.outcome END];
        changes := changes || ARRAY[ran, ran * NEW.usd_per_second::numeric, 1];
    END IF;
    PERFORM append_total_changes(names, changes);
    RETURN NULL;
END $$
"""

_TRIGGERS = [
    "CREATE TRIGGER added_run AFTER INSERT OR DELETE ON runs "
    "FOR EACH ROW EXECUTE FUNCTION follow_run()",
    "CREATE TRIGGER changed_run AFTER UPDATE OF state, error_code, finished_at ON runs "
    "FOR EACH ROW WHEN ((OLD.state, OLD.error_code, OLD.finished_at) IS DISTINCT FROM "
    "(NEW.state, NEW.error_code, NEW.finished_at)) EXECUTE FUNCTION follow_run()",
    "CREATE TRIGGER changed_current_run BEFORE UPDATE OF current_run_id ON documents "
    "FOR EACH ROW WHEN (OLD.current_run_id IS DISTINCT FROM NEW.current_run_id) "
    "EXECUTE FUNCTION follow_current_run()",
    "CREATE TRIGGER added_document AFTER INSERT OR DELETE ON documents "
    "FOR EACH ROW EXECUTE FUNCTION count_document()",
    "CREATE TRIGGER changed_document AFTER UPDATE ON documents FOR EACH ROW WHEN "
    "((OLD.status, OLD.page_count, OLD.latest_error, OLD.deleted_at) IS DISTINCT FROM "
    "(NEW.status, NEW.page_count, NEW.latest_error, NEW.deleted_at)) "
    "EXECUTE FUNCTION count_document()",
    "CREATE TRIGGER added_remote_job AFTER INSERT OR DELETE ON remote_jobs "
    "FOR EACH ROW EXECUTE FUNCTION count_remote_job()",
    "CREATE TRIGGER changed_remote_job AFTER UPDATE ON remote_jobs FOR EACH ROW WHEN "
    "((OLD.state, OLD.outcome, OLD.execution_ms, OLD.usd_per_second) IS DISTINCT FROM "
    "(NEW.state, NEW.outcome, NEW.execution_ms, NEW.usd_per_second)) "
    "EXECUTE FUNCTION count_remote_job()",
]
_FUNCTIONS = [
    "count_remote_job()", "count_document()", "follow_current_run()", "follow_run()",
    "append_total_changes(text[], numeric[])",
]  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "totals",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Numeric(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_totals"),
    )
    op.create_table(
        "total_changes",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("change", sa.Numeric(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_total_changes"),
    )
    op.add_column(
        "documents", sa.Column("status", sa.Text(), server_default="queued", nullable=False)
    )
    op.add_column("documents", sa.Column("page_count", sa.Integer()))
    op.add_column("documents", sa.Column("latest_error", sa.Text()))
    op.add_column("documents", sa.Column("latest_finished_at", sa.DateTime(timezone=True)))
    op.execute(_FILL_DOCUMENTS)
    op.execute(_FILL_TOTALS)
    for statement in (_APPEND, _RUNS_FOLLOW, _CURRENT_RUN, _DOCUMENTS_COUNT, _JOBS_COUNT):
        op.execute(statement)
    for statement in _TRIGGERS:
        op.execute(statement)
    for name, table, columns, condition in _INDEXES:
        where = None if condition is None else sa.text(condition)
        op.create_index(name, table, columns, postgresql_where=where)
    # The planner knows nothing about new columns until they are analysed.
    op.execute("ANALYZE documents, runs, pages, remote_jobs")


def downgrade() -> None:
    for name, table, _, _ in _INDEXES:
        op.drop_index(name, table)
    for function in _FUNCTIONS:
        op.execute(f"DROP FUNCTION {function} CASCADE")
    for column in ("latest_finished_at", "latest_error", "page_count", "status"):
        op.drop_column("documents", column)
    op.drop_table("total_changes")
    op.drop_table("totals")
