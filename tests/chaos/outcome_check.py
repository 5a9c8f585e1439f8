"""Checks of what must be true after the faults, and the table of what the faults cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos import event_log
from tests.chaos.chaos_service import ChaosDocument, ChaosService
from tests.chaos.faults import Fault
from tests.fakes.scans import Mark

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.json"


@dataclass
class TableRow:
    """The row of one kind of fault."""

    kind: str
    times: int = 0
    longest_wait: float = 0.0
    longest_restart: float = 0.0
    pages_in_progress: int = 0
    requests_above_pages: int = 0


def require_complete(chaos: ChaosService, documents: Iterable[ChaosDocument]) -> None:
    """Require that each document ended once, as processed, and each page was stored once, right."""
    ends = event_log.ends()
    for document in documents:
        view = chaos.service.view(document.id)
        assert view.status == "processed", f"{view.filename}: {view.status}, {view.error}"
        runs = chaos.service.rows("SELECT id FROM runs WHERE document_id = :id", id=document.id)
        assert [ends[run.id] for run in runs] == [["processed"]], view.filename
        assert sorted(event_log.stores(runs[0].id)) == _each_once(document), view.filename
        rows = chaos.service.rows(
            "SELECT number, markdown FROM pages WHERE run_id = :run", run=runs[0].id
        )
        for row in rows:
            assert row.markdown == document.text(row.number), f"{view.filename}, page {row.number}"


def _each_once(document: ChaosDocument) -> list[tuple[int, str]]:
    return [(number, "stored") for number in range(1, document.pages + 1)]


def require_few_requests(chaos: ChaosService, faults: Sequence[Fault]) -> dict[str, int]:
    """Require that a page was sent again only after a fault that hit it, never twice at once.

    Returns the requests beyond one per page, by the kind of fault.
    """
    reasons: dict[Mark, list[str]] = {}
    numbers = {document.id: document.number for document in chaos.documents}
    for fault in faults:
        for document_id, page in fault.in_progress:
            reasons.setdefault(Mark(numbers[document_id], page), []).append(fault.kind)
    above: Counter[str] = Counter()
    asked = Counter(request.mark for request in chaos.ocr.requests)
    wanted = {
        Mark(document.number, page)
        for document in chaos.documents
        for page in range(document.native + 1, document.pages + 1)
    }
    assert set(asked) == wanted
    for mark, times in asked.items():
        assert mark is not None
        causes = reasons.get(mark, [])
        assert times <= 1 + len(causes), f"{mark}: {times} requests; in progress at {causes}"
        above.update(causes[: times - 1])
    assert chaos.ocr.doubled == []
    return dict(above)


def table_rows(faults: Sequence[Fault], above: dict[str, int]) -> list[TableRow]:
    """Return one row for each kind of fault."""
    found: dict[str, TableRow] = {}
    for fault in faults:
        line = found.setdefault(fault.kind, TableRow(fault.kind))
        line.times += 1
        line.longest_wait = max(line.longest_wait, round(fault.wait, 1))
        line.longest_restart = max(line.longest_restart, round(fault.back_after, 1))
        line.pages_in_progress += len(fault.in_progress)
    for kind, requests in above.items():
        found[kind].requests_above_pages = requests
    return list(found.values())


def print_table(title: str, rows: Sequence[TableRow]) -> None:
    """Print the table."""
    table = Table(title=title)
    for name in TableRow.__dataclass_fields__:
        table.add_column(name.replace("_", " "), justify="left" if name == "kind" else "right")
    for line in rows:
        table.add_row(*map(str, asdict(line).values()))
    Console().print(table)


def save_figures(name: str, figures: dict[str, Any]) -> None:
    """Save a test's figures in the results file, next to those of the other tests."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[name] = figures
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
