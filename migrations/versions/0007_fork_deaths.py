"""Deaths of a worker's forks in a row, and the reason"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "workers", sa.Column("fork_deaths", sa.Integer(), server_default="0", nullable=False)
    )
    op.add_column("workers", sa.Column("trouble", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("workers", "trouble")
    op.drop_column("workers", "fork_deaths")
