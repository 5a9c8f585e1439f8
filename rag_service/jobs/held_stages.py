"""Stages whose forks have all been held for long by the same documents while others wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.sql import ColumnElement

from rag_service.database.engine import begin
from rag_service.database.models import Document, Run
from rag_service.jobs import live_workers
from rag_service.states import Stage

# Documents that are named.
_NAMED = 5
# Waiting documents that are counted at most.
_COUNTED = 1000


@dataclass(frozen=True, slots=True)
class Holder:
    """A document whose run a fork has held since `since`, for `seconds`."""

    document_id: str
    filename: str
    since: datetime
    seconds: float


@dataclass(frozen=True, slots=True)
class HeldStage:
    """A stage that does nothing for the `waiting` runs, and what holds it, the longest first."""

    stage: Stage
    waiting: int
    holders: Sequence[Holder]

    @property
    def seconds(self) -> float:
        """Since when all forks are held: as long as by the newest holder."""
        return min(holder.seconds for holder in self.holders)

    @property
    def message(self) -> str:
        """A sentence with the documents and since when they hold the forks."""
        named = ", ".join(
            f"{one.filename} ({one.document_id[:8]}) since {one.since:%H:%M:%S} UTC"
            for one in self.holders[:_NAMED]
        )
        more = f" and {len(self.holders) - _NAMED} more" if len(self.holders) > _NAMED else ""
        wait = "1 document waits" if self.waiting == 1 else f"{self.waiting} documents wait"
        return (
            f"All forks are held by {named}{more}, while {wait}. "
            "Cancel these, or start another worker."
        )


def held_stages(after: float, server: str | None) -> list[HeldStage]:
    """Return the stages whose forks have all been held for `after` seconds while runs wait.

    The fork that each worker reserves for interactive documents does not count. An ocr fork that
    stores pages is not held: reading takes long.
    """
    return [held for stage in Stage if (held := _held(stage, after, server)) is not None]


def _held(stage: Stage, after: float, server: str | None) -> HeldStage | None:
    live = live_workers.of_stage(stage)
    places = sum(max(1, worker.forks - 1) for worker in live)
    if sum(worker.busy for worker in live) < places or not places:
        return None
    waiting = sum(live_workers.claimable_counts(stage, server, _COUNTED))
    holders = _holders(stage, after) if waiting else []
    return HeldStage(stage, waiting, holders) if len(holders) >= places else None


def _holders(stage: Stage, after: float) -> list[Holder]:
    seconds = func.extract("epoch", func.clock_timestamp() - _since(stage))
    query = (
        select(Document.id, Document.filename, _since(stage), seconds)
        .join(Document, Document.id == Run.document_id)
        .where(Run.state == stage.working, seconds >= after)
        .order_by(_since(stage))
    )
    with begin() as connection:
        rows = connection.execute(query).all()
    return [
        Holder(document_id, filename, since, float(held))
        for document_id, filename, since, held in rows
        if since is not None
    ]


def _since(stage: Stage) -> ColumnElement[datetime | None]:
    progress = Run.progress_at if stage is Stage.OCR else Run.held_since
    return func.greatest(Run.held_since, progress)
