"""The cost of every statement that is sent often, beside an archive of 10^4 to 10^6 documents.

    python -m benchmarks.backlog [--sizes 10000 100000 1000000]

For each size PostgreSQL is filled by its own SQL, as the version before stored status left it,
and migrated; the time of that is measured too. Beside the archive 10,000 documents are queued and
some hundreds are at work, in every size. Each action of a worker, of maintenance, of health, of
the metrics, of a listing and of a reprocess runs as the service runs it, and each of its statements
is explained: the buffers (8 KiB) that it touched, as a number and beside the smallest size, and
the large tables that it read from end to end. The largest size needs about 6 GiB of disk. Prints
a table and writes benchmarks/results/backlog.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from alembic import command
from rich.console import Console
from rich.table import Table
from sqlalchemy import text

from benchmarks.stack import RESULTS, apart, running_stack
from rag_service.database import schema
from rag_service.database.engine import begin, get_engine
from tests.archive import Archive, fill
from tests.archive_actions import all_cases
from tests.plans import plans_of

SIZES = (10_000, 100_000, 1_000_000)
# The revision without stored status.
BEFORE = "0009"


@dataclass(frozen=True)
class Cost:
    """An action: its statements, the buffers they touched together, and their milliseconds."""

    group: str
    action: str
    statements: int
    buffers: int
    milliseconds: float
    scanned: list[str]


@dataclass(frozen=True)
class Measured:
    """What was measured at one size; seconds of the fill and of the migration."""

    documents: int
    database_mib: float
    fill_seconds: float
    migrate_seconds: float
    costs: list[Cost]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    sizes = sorted(parser.parse_args().sizes)
    measured = [apart(measure, size) for size in sizes]
    console = Console(width=140)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, PostgreSQL without flushed writes"
    console.print(machine)
    console.print(table_of(measured))
    if tuple(sizes) == SIZES:
        kept = {"machine": machine, "sizes": [asdict(one) for one in measured]}
        (RESULTS / "backlog.json").write_text(json.dumps(kept, indent=1) + "\n")


def table_of(measured: Sequence[Measured]) -> Table:
    table = Table("action", "statements")
    for one in measured:
        table.add_column(f"{one.documents:,}", justify="right")
        table.add_column("ratio", justify="right")
    table.add_column("ms", justify="right")
    table.add_column("read whole")
    for place, first in enumerate(measured[0].costs):
        costs = [one.costs[place] for one in measured]
        cells = [
            cell
            for cost in costs
            for cell in (f"{cost.buffers:,}", f"{cost.buffers / max(1, first.buffers):.1f}")
        ]
        last = costs[-1]
        scanned = ", ".join(sorted({name for cost in costs for name in cost.scanned}))
        table.add_row(
            f"{first.group}: {first.action}", str(last.statements), *cells,
            f"{last.milliseconds:,.1f}", scanned,
        )  # fmt: skip
    return table


def measure(size: int) -> Measured:
    """Fill, migrate and measure a database of its own. To be called in a fresh process."""
    with running_stack(durable=False) as stack:
        get_engine().dispose()
        _move(command.downgrade, BEFORE)
        began = time.monotonic()
        with begin() as connection:
            fill(connection, Archive(size))
        filled = time.monotonic()
        schema.migrate()
        migrated = time.monotonic()
        _vacuum()
        costs = [_cost(*case) for case in all_cases()]
        with begin() as connection:
            mib = connection.scalar(text("SELECT pg_database_size(current_database())")) / 2**20
        del stack
        return Measured(size, round(mib), filled - began, migrated - filled, costs)


def _move(to: Callable[..., None], revision: str) -> None:
    config = schema._config()
    with get_engine().connect() as connection:
        config.attributes["connection"] = connection
        to(config, revision)
        connection.commit()


def _vacuum() -> None:
    """Do what autovacuum does some minutes later, and keep it from doing so in between."""
    with get_engine().connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM (ANALYZE)"))


def _cost(group: str, action: str, work: Callable[[], object]) -> Cost:
    plans = plans_of(work)
    return Cost(
        group=group,
        action=action,
        statements=len(plans),
        buffers=sum(plan.buffers for plan in plans),
        milliseconds=round(sum(plan.milliseconds for plan in plans), 2),
        scanned=sorted({name for plan in plans for name in plan.scanned}),
    )


if __name__ == "__main__":
    main()
