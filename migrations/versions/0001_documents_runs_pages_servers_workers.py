"""Documents, runs, pages, servers, workers"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "documents",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("collection", sa.Text(), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("filename", sa.Text(), nullable=False),
        sa.Column("media_type", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("source_key", sa.Text(), nullable=False),
        sa.Column("current_run_id", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_documents")),
    )
    op.create_index("ix_documents_created", "documents", ["created_at", "id"], unique=False)
    op.create_index("ix_documents_sha256", "documents", ["sha256"], unique=False)
    op.create_index(
        "ix_documents_deleted",
        "documents",
        ["deleted_at"],
        unique=False,
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    )
    op.create_index(
        "uq_documents_content",
        "documents",
        ["collection", "sha256"],
        unique=True,
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.create_table(
        "maintenance_lease",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_maintenance_lease")),
    )
    op.create_table(
        "ocr_servers",
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("down_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_success_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("trial_run_id", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("url", name=op.f("pk_ocr_servers")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=False),
        sa.Column("forks", sa.Integer(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "started_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("document_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("parser", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("ocr", sa.Text(), nullable=False),
        sa.Column("dpi", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("reuse_pages", sa.Boolean(), nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("lease_worker", sa.Text(), nullable=True),
        sa.Column("lease_task", sa.Text(), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("held_since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("expiries", sa.Integer(), nullable=False),
        sa.Column("worked_seconds", sa.Double(), nullable=False),
        sa.Column("page_count", sa.Integer(), nullable=True),
        sa.Column("warnings", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("error_retryable", sa.Boolean(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["document_id"], ["documents.id"], name=op.f("fk_runs_document_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index(
        "ix_runs_claim",
        "runs",
        ["state", "priority", "created_at", "id"],
        unique=False,
        postgresql_where=sa.text("state NOT IN ('cancelled', 'failed', 'processed')"),
    )
    op.create_index("uq_runs_number", "runs", ["document_id", "number"], unique=True)
    op.create_index(
        "ix_runs_error",
        "runs",
        ["error_code"],
        unique=False,
        postgresql_where=sa.text("error_code IS NOT NULL"),
    )
    op.create_index(
        "uq_runs_active",
        "runs",
        ["document_id"],
        unique=True,
        postgresql_where=sa.text("state NOT IN ('cancelled', 'failed', 'processed')"),
    )
    op.create_table(
        "pages",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("plan_reason", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("width_pt", sa.Double(), nullable=False),
        sa.Column("height_pt", sa.Double(), nullable=False),
        sa.Column("markdown", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=True),
        sa.Column("completion_tokens", sa.Integer(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.Column("engine", sa.Text(), nullable=True),
        sa.Column("model", sa.Text(), nullable=True),
        sa.Column("parser", sa.Text(), nullable=True),
        sa.Column("parser_version", sa.Text(), nullable=True),
        sa.Column("dpi", sa.Double(), nullable=True),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("reused", sa.Boolean(), nullable=False),
        sa.Column("hand_epoch", sa.Integer(), nullable=True),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("retry_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("warnings", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.Column("error_retryable", sa.Boolean(), nullable=True),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_pages_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_pages")),
    )


def downgrade() -> None:
    op.drop_table("pages")
    op.drop_index(
        "uq_runs_active",
        table_name="runs",
        postgresql_where=sa.text("state NOT IN ('cancelled', 'failed', 'processed')"),
    )
    op.drop_index(
        "ix_runs_error", table_name="runs", postgresql_where=sa.text("error_code IS NOT NULL")
    )
    op.drop_index("uq_runs_number", table_name="runs")
    op.drop_index(
        "ix_runs_claim",
        table_name="runs",
        postgresql_where=sa.text("state NOT IN ('cancelled', 'failed', 'processed')"),
    )
    op.drop_table("runs")
    op.drop_table("workers")
    op.drop_table("ocr_servers")
    op.drop_table("maintenance_lease")
    op.drop_index(
        "uq_documents_content",
        table_name="documents",
        postgresql_where=sa.text("deleted_at IS NULL"),
    )
    op.drop_index(
        "ix_documents_deleted",
        table_name="documents",
        postgresql_where=sa.text("deleted_at IS NOT NULL"),
    )
    op.drop_index("ix_documents_sha256", table_name="documents")
    op.drop_index("ix_documents_created", table_name="documents")
    op.drop_table("documents")
