"""The row of the document store: the ID that its marker must have."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import func, select, union, update
from sqlalchemy.dialects.postgresql import insert as upsert

from rag_service.database.engine import begin
from rag_service.database.models import Document, DocumentStoreRow, new_id

# Documents whose files are looked for in a store without a marker: the newest and the oldest.
_SAMPLED = 10


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """The store's ID; `bound`: a store with this marker has been seen."""

    id: str
    bound: bool


def identity() -> StoreIdentity:
    """Return the identity of the database's document store; the first call chooses its ID."""
    query = select(DocumentStoreRow.store_id, DocumentStoreRow.bound_at)
    with begin() as connection:
        row = connection.execute(query).one_or_none()
    if row is None:
        # Two processes may come at once: one of their IDs stays.
        first = upsert(DocumentStoreRow).values(id=1, store_id=new_id())
        with begin() as connection:
            connection.execute(first.on_conflict_do_nothing())
            row = connection.execute(query).one()
    return StoreIdentity(row.store_id, bound=row.bound_at is not None)


def note_bound() -> None:
    """Note that a store with the right marker has been seen: it is never made again."""
    with begin() as connection:
        connection.execute(
            update(DocumentStoreRow)
            .where(DocumentStoreRow.bound_at.is_(None))
            .values(bound_at=func.clock_timestamp())
        )


def some_source_keys() -> list[str]:
    """Return the storage keys of the newest and the oldest documents; none without documents."""
    orders = (Document.created_at.desc(), Document.created_at)
    ends = [select(Document.source_key).order_by(order).limit(_SAMPLED) for order in orders]
    with begin() as connection:
        return list(connection.scalars(union(*(end.subquery().select() for end in ends))))
