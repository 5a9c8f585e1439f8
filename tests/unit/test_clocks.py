"""No time of the database or of another machine is compared with this process's own clock."""

import ast
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx

from rag_service.runtime.clocks import file_system_clock, steady_wall_clock
from rag_service.runtime.http_client import retry_after

ROOT = Path(__file__).parents[2]
# The module that wraps the clock, and a field of the OpenAI protocol that nothing compares.
ALLOWED = {"rag_service/runtime/clocks.py", "workers/servers/cpu_ocr/cpu_ocr_api.py"}
CLOCKS = {
    "time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime",
    "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
}  # fmt: skip


def clocks_in(path: Path) -> list[int]:
    """Return the lines that name a wall clock, called or passed on, in order."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [node for node in nodes if isinstance(node, ast.Attribute)]
    return sorted(node.lineno for node in names if ast.unparse(node).endswith(tuple(CLOCKS)))


def test_no_module_reads_a_wall_clock() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for package in ("rag_service", "workers")
        for path in sorted((ROOT / package).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in ALLOWED
        for line in clocks_in(path)
    ]
    assert found == [], "compare times in SQL, or use rag_service.runtime.clocks"


def test_the_test_finds_a_clock_that_is_only_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "import time\nfrom datetime import datetime\nf(now=time.time)\ndatetime.now()\n"
    )
    assert clocks_in(path) == [3, 4]


def test_a_retry_date_is_compared_with_the_servers_own_clock() -> None:
    there = datetime.now(UTC) + timedelta(hours=5)
    word = "%a, %d %b %Y %H:%M:%S GMT"
    later = {"Retry-After": (there + timedelta(seconds=30)).strftime(word)}
    assert retry_after(httpx.Response(503, headers=later | {"Date": there.strftime(word)})) == 30
    assert retry_after(httpx.Response(503, headers=later)) is None


def test_the_clock_of_a_file_system_is_that_of_its_files(tmp_path: Path) -> None:
    before = file_system_clock(tmp_path)
    (tmp_path / "a").touch()
    assert before <= (tmp_path / "a").stat().st_mtime <= file_system_clock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_steady_clock_does_not_go_back() -> None:
    assert steady_wall_clock() <= steady_wall_clock()
