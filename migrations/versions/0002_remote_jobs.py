"""Remote jobs"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "remote_jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("base_url", sa.Text(), nullable=False),
        sa.Column("endpoint_id", sa.Text(), nullable=False),
        sa.Column("remote_id", sa.Text(), nullable=True),
        sa.Column("hinted_id", sa.Text(), nullable=True),
        sa.Column("token_sha256", sa.Text(), nullable=False),
        sa.Column("request_key", sa.Text(), nullable=False),
        sa.Column("pages", sa.ARRAY(sa.Integer()), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("cancel_wanted", sa.Boolean(), nullable=False),
        sa.Column("deadline_passed", sa.Boolean(), nullable=False),
        sa.Column(
            "submitted_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("lost_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("next_poll_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("polled_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_status", sa.Text(), nullable=True),
        sa.Column("polls", sa.Integer(), nullable=False),
        sa.Column("delay_ms", sa.BigInteger(), nullable=True),
        sa.Column("execution_ms", sa.BigInteger(), nullable=True),
        sa.Column("usd_per_second", sa.Double(), nullable=False),
        sa.Column("gauges", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("error_message", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"], ["runs.id"], name=op.f("fk_remote_jobs_run_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_remote_jobs")),
    )
    op.create_index(
        "ix_remote_jobs_due",
        "remote_jobs",
        ["next_poll_at"],
        unique=False,
        postgresql_where=sa.text("state <> 'ended'"),
    )
    op.create_index("ix_remote_jobs_run", "remote_jobs", ["run_id"], unique=False)
    op.create_index("uq_remote_jobs_token", "remote_jobs", ["token_sha256"], unique=True)
    op.add_column("ocr_servers", sa.Column("probed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("ocr_servers", sa.Column("alarm", sa.Text(), nullable=True))
    op.add_column("pages", sa.Column("remote_job_id", sa.Text(), nullable=True))
    op.add_column("pages", sa.Column("repost_reason", sa.Text(), nullable=True))
    op.create_index(
        "ix_pages_remote_job",
        "pages",
        ["remote_job_id"],
        unique=False,
        postgresql_where=sa.text("remote_job_id IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index(
        "ix_pages_remote_job",
        table_name="pages",
        postgresql_where=sa.text("remote_job_id IS NOT NULL"),
    )
    op.drop_column("pages", "repost_reason")
    op.drop_column("pages", "remote_job_id")
    op.drop_column("ocr_servers", "alarm")
    op.drop_column("ocr_servers", "probed_at")
    op.drop_index("uq_remote_jobs_token", table_name="remote_jobs")
    op.drop_index("ix_remote_jobs_run", table_name="remote_jobs")
    op.drop_index(
        "ix_remote_jobs_due", table_name="remote_jobs", postgresql_where=sa.text("state <> 'ended'")
    )
    op.drop_table("remote_jobs")
