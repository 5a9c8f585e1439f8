"""Occupancy of OCR servers: open requests of forks, samples, and the last good limit"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ocr_servers", sa.Column("good_in_flight", sa.Float(), nullable=True))
    op.add_column(
        "ocr_servers", sa.Column("starved_since", sa.DateTime(timezone=True), nullable=True)
    )
    op.add_column("ocr_servers", sa.Column("starved_why", sa.Text(), nullable=True))
    op.add_column(
        "workers", sa.Column("low_memory", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
    op.alter_column("workers", "low_memory", server_default=None)
    op.create_table(
        "fork_loads",
        sa.Column("fork", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("in_flight", sa.Integer(), nullable=False),
        sa.Column("limit_now", sa.Float(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("fork", name="pk_fork_loads"),
    )
    op.create_table(
        "server_samples",
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("running", sa.Float(), nullable=True),
        sa.Column("waiting", sa.Float(), nullable=True),
        sa.Column("slots", sa.Integer(), nullable=True),
        sa.Column("cache_use", sa.Float(), nullable=True),
        sa.Column("in_flight", sa.Integer(), nullable=False),
        sa.Column("in_flight_limit", sa.Float(), nullable=True),
        sa.Column("tokens_per_second", sa.Float(), nullable=True),
        sa.Column("pages_per_minute", sa.Float(), nullable=False),
        sa.Column("pages_waiting", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("url", "at", name="pk_server_samples"),
    )


def downgrade() -> None:
    op.drop_table("server_samples")
    op.drop_table("fork_loads")
    op.drop_column("workers", "low_memory")
    op.drop_column("ocr_servers", "starved_why")
    op.drop_column("ocr_servers", "starved_since")
    op.drop_column("ocr_servers", "good_in_flight")
