"""Outages of an OCR server that were reported to the alarm webhook: each once, and its end once."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select, update

from rag_service.database.engine import begin
from rag_service.database.models import OcrServer
from rag_service.states import ServerState


@dataclass(frozen=True, slots=True)
class OutageReport:
    """A beginning or an end of an outage that was not reported yet."""

    is_over: bool
    since: datetime
    message: str


def next_report(url: str) -> OutageReport | None:
    """Return what is to be reported about the server now, and count it as reported; or None.

    A server on trial is still out.
    """
    row = OcrServer.url == url
    query = select(
        OcrServer.state, OcrServer.message, OcrServer.down_since, OcrServer.outage_reported
    ).where(row)
    with begin() as connection:
        stored = connection.execute(query.with_for_update()).one_or_none()
        if stored is None:
            return None
        is_up, reported = stored.state == ServerState.UP, stored.outage_reported
        if is_up == (reported is None):
            return None
        since = stored.down_since if reported is None else reported
        connection.execute(
            update(OcrServer).where(row).values(outage_reported=None if is_up else since)
        )
    return OutageReport(is_up, since, stored.message)
