"""Alembic's environment: runs the migrations on the connection in its attributes."""

from __future__ import annotations

from alembic import context

from rag_service.database.models import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True)
with context.begin_transaction():
    context.run_migrations()
