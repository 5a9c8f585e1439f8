"""The number in flight as a mean, so that short documents count by what they keep open"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_TABLES = ("fork_loads", "server_samples")


def upgrade() -> None:
    for table in _TABLES:
        op.alter_column(table, "in_flight", type_=sa.Float())


def downgrade() -> None:
    for table in _TABLES:
        op.alter_column(table, "in_flight", type_=sa.Integer())
