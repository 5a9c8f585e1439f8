"""What must be true once the dust has settled, and the table of what the faults cost.

Used by the chaos tests.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos import witness
from tests.chaos.faults import Fault
from tests.chaos.rig import Fed, Rig
from tests.fakes.scans import Mark

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "chaos.json"


@dataclass
class Line:
    """One kind of fault in the table."""

    kind: str
    times: int = 0
    longest_wait: float = 0.0
    longest_restart: float = 0.0
    pages_in_hand: int = 0
    requests_above_pages: int = 0


def require_all_whole(rig: Rig, documents: Iterable[Fed]) -> None:
    """Each document ended once, as processed; each page was stored once and says what it must."""
    ends = witness.ends()
    for fed in documents:
        view = rig.service.view(fed.id)
        assert view.status == "processed", f"{view.filename}: {view.status}, {view.error}"
        runs = rig.service.rows("SELECT id FROM runs WHERE document_id = :id", id=fed.id)
        assert [ends[run.id] for run in runs] == [["processed"]], view.filename
        assert sorted(witness.stores(runs[0].id)) == _each_once(fed), view.filename
        rows = rig.service.rows(
            "SELECT number, markdown FROM pages WHERE run_id = :run", run=runs[0].id
        )
        for row in rows:
            assert row.markdown == fed.text(row.number), f"{view.filename}, page {row.number}"


def _each_once(fed: Fed) -> list[tuple[int, str]]:
    return [(number, "stored") for number in range(1, fed.pages + 1)]


def require_few_requests(rig: Rig, faults: Sequence[Fault]) -> dict[str, int]:
    """No page was sent again but for a fault that it was in hand at; never two at once.

    Returns the requests above one a page, by the kind of fault.
    """
    reasons: dict[Mark, list[str]] = {}
    numbers = {fed.id: fed.number for fed in rig.fed}
    for fault in faults:
        for document_id, page in fault.in_hand:
            reasons.setdefault(Mark(numbers[document_id], page), []).append(fault.kind)
    above: Counter[str] = Counter()
    asked = Counter(request.mark for request in rig.ocr.requests)
    wanted = {
        Mark(fed.number, page) for fed in rig.fed for page in range(fed.native + 1, fed.pages + 1)
    }
    assert set(asked) == wanted
    for mark, times in asked.items():
        assert mark is not None
        causes = reasons.get(mark, [])
        assert times <= 1 + len(causes), f"{mark}: {times} requests; in hand at {causes}"
        above.update(causes[: times - 1])
    assert rig.ocr.doubled == []
    return dict(above)


def lines(faults: Sequence[Fault], above: dict[str, int]) -> list[Line]:
    """The table's lines, one a kind."""
    found: dict[str, Line] = {}
    for fault in faults:
        line = found.setdefault(fault.kind, Line(fault.kind))
        line.times += 1
        line.longest_wait = max(line.longest_wait, round(fault.wait, 1))
        line.longest_restart = max(line.longest_restart, round(fault.back_after, 1))
        line.pages_in_hand += len(fault.in_hand)
    for kind, requests in above.items():
        found[kind].requests_above_pages = requests
    return list(found.values())


def show(title: str, table_lines: Sequence[Line]) -> None:
    """Print the table."""
    table = Table(title=title)
    for name in Line.__dataclass_fields__:
        table.add_column(name.replace("_", " "), justify="left" if name == "kind" else "right")
    for line in table_lines:
        table.add_row(*map(str, asdict(line).values()))
    Console().print(table)


def keep(name: str, figures: dict[str, Any]) -> None:
    """Put a test's figures beside those of the other tests in the file of results."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[name] = figures
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
