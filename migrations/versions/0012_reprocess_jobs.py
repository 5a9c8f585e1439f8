"""Jobs that reprocess many documents, their documents, and the runs that they added"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "reprocess_jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("request", JSONB(), nullable=False),
        sa.Column("priority", sa.SmallInteger(), nullable=False),
        sa.Column("total", sa.Integer(), nullable=False),
        sa.Column("counts", JSONB(), nullable=False),
        sa.Column("message", sa.Text()),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.func.now(), nullable=False
        ),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_reprocess_jobs"),
    )
    op.create_table(
        "reprocess_items",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("document_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", "position", name="pk_reprocess_items"),
    )
    op.add_column("runs", sa.Column("reprocess_job_id", sa.Text()))
    op.create_index(
        "ix_runs_reprocess_job",
        "runs",
        ["reprocess_job_id", "state"],
        postgresql_where=sa.text("reprocess_job_id IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_runs_reprocess_job", "runs")
    op.drop_column("runs", "reprocess_job_id")
    op.drop_table("reprocess_items")
    op.drop_table("reprocess_jobs")
