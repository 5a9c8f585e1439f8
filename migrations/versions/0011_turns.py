"""Places in the queue, time that the pages of a run took, its last progress"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

_SPENT = (("page_seconds", sa.Float()), ("late_pages", sa.Integer()), ("late_texts", sa.Integer()))
_ACTIVE = "state NOT IN ('cancelled', 'failed', 'processed')"


def upgrade() -> None:
    now = sa.text("now()")
    op.add_column(
        "runs",
        sa.Column("queued_at", sa.DateTime(timezone=True), server_default=now, nullable=False),
    )
    # Only runs that have not ended have a place in a queue.
    op.execute(f"UPDATE runs SET queued_at = created_at WHERE {_ACTIVE}")
    for name, kind in _SPENT:
        op.add_column("runs", sa.Column(name, kind, server_default="0", nullable=False))
    op.add_column("runs", sa.Column("progress_at", sa.DateTime(timezone=True), nullable=True))
    _replace_index("queued_at")


def downgrade() -> None:
    _replace_index("created_at")
    for name in ("progress_at", *(name for name, _ in _SPENT), "queued_at"):
        op.drop_column("runs", name)


def _replace_index(order: str) -> None:
    op.drop_index("ix_runs_claim", "runs")
    op.create_index(
        "ix_runs_claim",
        "runs",
        ["state", "priority", order, "id"],
        postgresql_where=sa.text(_ACTIVE),
    )
