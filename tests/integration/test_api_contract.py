"""The API keeps its OpenAPI document: requests made from it by a schema fuzzer, with a fixed seed.

Each request is valid, or wrong in one place. Every answer must have a documented status, type and
form; valid requests must be accepted and wrong ones refused; none may fail inside.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rag_service.states import RunState
from tests.conftest import Api

CONFIG = Path(__file__).with_name("api_contract.toml")
# For each operation and phase; about 900 requests in all.
EXAMPLES = 10


def test_the_api_keeps_its_description(
    api: Api, make_pdf: Callable[..., bytes], work_off: Callable[..., RunState], tmp_path: Path
) -> None:
    api.add(make_pdf("a", "b"))
    work_off("a", "b")
    api.add(make_pdf("c"))
    done = subprocess.run(
        [
            sys.executable, "-m", "schemathesis.cli", f"--config-file={CONFIG}", "run",
            f"{api.url}/openapi.json", f"--max-examples={EXAMPLES}", "--no-color",
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    print(done.stdout[-20_000:], done.stderr[-4000:])
    assert done.returncode == 0
    assert "Tested: 0" not in done.stdout
