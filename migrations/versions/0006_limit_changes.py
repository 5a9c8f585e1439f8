"""Changes of the number of requests in flight, counted by server and reason"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limit_changes",
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("times", sa.BigInteger(), nullable=False),
        sa.Column("old_limit", sa.Float(), nullable=False),
        sa.Column("new_limit", sa.Float(), nullable=False),
        sa.Column("fork", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("url", "reason", name="pk_limit_changes"),
    )


def downgrade() -> None:
    op.drop_table("limit_changes")
