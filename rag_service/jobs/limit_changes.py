"""Why forks changed the number of requests in flight: counts by server and reason.

The counts only grow, whichever forks come and go; each row also has its last change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.dialects.postgresql import insert as upsert

from rag_service.database.engine import autocommit, begin
from rag_service.database.models import LimitChangeRow
from rag_service.ocr.concurrency.changes import ChangeCount, ChangeReason


@dataclass(frozen=True, slots=True)
class LimitChange:
    """The last change of a fork's limit for a reason, and how many there were in all forks."""

    url: str
    reason: ChangeReason
    count: int
    old: float
    new: float
    fork: str
    at: datetime


def add(fork: str, url: str, counts: Mapping[ChangeReason, ChangeCount]) -> None:
    """Add what a fork counted since its last report, the newest change last."""
    if not counts:
        return
    # One report has one time; this keeps the order of its changes.
    age = {reason: timedelta(milliseconds=n) for n, reason in enumerate(reversed(list(counts)))}
    rows = [
        {
            "url": url,
            "reason": reason.value,
            "times": counted.count,
            "old_limit": counted.old,
            "new_limit": counted.new,
            "fork": fork,
            "changed_at": func.clock_timestamp() - age[reason],
        }
        # One order in all forks, so that two of them cannot wait for each other's rows.
        for reason, counted in sorted(counts.items())
    ]
    statement = upsert(LimitChangeRow).values(rows)
    new = statement.excluded
    change: dict[str, ColumnElement[Any]] = {
        name: new[name] for name in ("old_limit", "new_limit", "fork", "changed_at")
    }
    change["times"] = LimitChangeRow.times + new.times
    with autocommit() as connection:
        connection.execute(
            statement.on_conflict_do_update(index_elements=["url", "reason"], set_=change)
        )


def last_changes(url: str | None = None) -> list[LimitChange]:
    """Return the last change for each reason, newest first; of all servers if `url` is None."""
    query = select(LimitChangeRow).order_by(LimitChangeRow.changed_at.desc())
    if url is not None:
        query = query.where(LimitChangeRow.url == url)
    # A reason that a newer release wrote is left out.
    query = query.where(LimitChangeRow.reason.in_([reason.value for reason in ChangeReason]))
    with begin() as connection:
        return [
            LimitChange(
                url=row.url,
                reason=ChangeReason(row.reason),
                count=row.times,
                old=row.old_limit,
                new=row.new_limit,
                fork=row.fork,
                at=row.changed_at,
            )
            for row in connection.execute(query)
        ]
