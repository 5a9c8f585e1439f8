"""The ID of the document store, and the workers that cannot reach it"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "document_store",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("store_id", sa.Text(), nullable=False),
        sa.Column("bound_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("id", name="pk_document_store"),
    )
    op.add_column("workers", sa.Column("store_fault", sa.Text()))
    op.add_column("workers", sa.Column("store_fault_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    op.drop_column("workers", "store_fault_at")
    op.drop_column("workers", "store_fault")
    op.drop_table("document_store")
