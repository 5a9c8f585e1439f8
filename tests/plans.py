"""The plans of the statements that an action sends, explained as it sends them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import event

from rag_service.database.engine import get_engine

_EXPLAINED = re.compile(r"\s*(?:WITH|SELECT|INSERT|UPDATE|DELETE)\b")
# Tables that grow with what has been stored.
LARGE = frozenset({"documents", "runs", "pages", "remote_jobs"})


@dataclass(frozen=True)
class Plan:
    """A statement as PostgreSQL executed it: its nodes, buffers touched and milliseconds."""

    statement: str
    nodes: list[dict[str, Any]]
    buffers: int
    milliseconds: float

    @property
    def scanned(self) -> set[str]:
        """The large tables that were read from end to end."""
        read = {n["Relation Name"] for n in self.nodes if n["Node Type"].endswith("Seq Scan")}
        return read & LARGE


def plans_of(action: Callable[[], object]) -> list[Plan]:
    """Return the plans of the action's statements, in order. The action takes effect."""
    plans: list[Plan] = []

    def explain(_: object, cursor: Any, statement: str, parameters: Any, *more: Any) -> None:
        if _EXPLAINED.match(statement) and not more[-1]:
            plans.append(_explained(cursor.connection, statement, parameters))

    event.listen(get_engine(), "before_cursor_execute", explain)
    try:
        action()
    finally:
        event.remove(get_engine(), "before_cursor_execute", explain)
    return plans


def _explained(connection: psycopg.Connection[Any], statement: str, parameters: Any) -> Plan:
    """Execute the statement to explain it, and undo what it did."""
    cursor = psycopg.ClientCursor(connection)
    begin, undo = ("SAVEPOINT plan", "ROLLBACK TO SAVEPOINT plan")
    if connection.autocommit:
        begin, undo = ("BEGIN", "ROLLBACK")
    sql = cursor.mogrify(statement, parameters)
    cursor.execute(begin)
    cursor.execute("EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) " + sql)
    [[[found]]] = cursor.fetchall()
    cursor.execute(undo)
    root = found["Plan"]
    return Plan(
        statement=statement,
        nodes=list(_nodes(root)),
        buffers=root["Shared Hit Blocks"] + root["Shared Read Blocks"],
        milliseconds=found["Execution Time"],
    )


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from _nodes(child)
