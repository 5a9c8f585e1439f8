"""Regions of pages, the layout mode of a run, and the pages it is to redo"""

from __future__ import annotations

import hashlib
import json

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_OPTIONS_BEFORE = ("parser", "model", "ocr", "dpi")


def upgrade() -> None:
    op.add_column(
        "pages",
        sa.Column(
            "regions",
            postgresql.JSONB(astext_type=sa.Text()),
            server_default=sa.text("'[]'"),
            nullable=False,
        ),
    )
    op.alter_column("pages", "regions", server_default=None)
    # Before this migration every page was read whole.
    op.add_column(
        "runs", sa.Column("layout", sa.Text(), server_default=sa.text("'page'"), nullable=False)
    )
    op.alter_column("runs", "layout", server_default=None)
    op.add_column(
        "runs",
        sa.Column(
            "redo_pages", sa.ARRAY(sa.Integer()), server_default=sa.text("'{}'"), nullable=False
        ),
    )
    op.alter_column("runs", "redo_pages", server_default=None)
    _update_fingerprints((*_OPTIONS_BEFORE, "layout"))


def downgrade() -> None:
    _update_fingerprints(_OPTIONS_BEFORE)
    op.drop_column("runs", "redo_pages")
    op.drop_column("runs", "layout")
    op.drop_column("pages", "regions")


def _update_fingerprints(options: tuple[str, ...]) -> None:
    """Update the digests of run options, so that pages read before can still be reused."""
    connection = op.get_bind()
    runs, pages = (sa.table(name, sa.column("fingerprint")) for name in ("runs", "pages"))
    names = ", ".join(("fingerprint", *options))
    found = connection.execute(sa.text(f"SELECT DISTINCT {names} FROM runs")).mappings().all()
    for row in found:
        canonical = json.dumps({name: row[name] for name in options}, sort_keys=True)
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:16]
        for table in (runs, pages):
            connection.execute(
                sa.update(table)
                .where(table.c.fingerprint == row["fingerprint"])
                .values(fingerprint=digest)
            )
