"""Real files through the whole service: API, workers, CPU OCR server, database and broker.

The folder is RAG_CORPUS, else ../shared/corpus beside the repository. Prints a table and writes
benchmarks/results/corpus.json.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from sqlalchemy import text

from benchmarks.corpus import MANIFEST, default_folder, read_manifest
from benchmarks.stack import RESULTS, Stack, running_stack
from rag_service.database.engine import begin
from rag_service.states import TERMINAL, Stage
from tests.corpus.expectation import PASSWORDS, Outcome, expectation_for, faults
from tests.corpus.pipeline import REQUEST_SECONDS, Pipeline

FOLDER = default_folder()
FEWEST_RIGHT = 91
KNOWN_WRONG = {
    "geometry/imagemagick-CCITTFaxDecode.pdf": (
        "a face of 33 x 33 pixels, which the smallest engine reads as a letter"
    ),
}

pytestmark = [
    pytest.mark.corpus,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        not (FOLDER / MANIFEST).exists(), reason=f"no {MANIFEST} in {FOLDER}; set RAG_CORPUS"
    ),
]


@dataclass(frozen=True)
class Verdict:
    """An outcome and its faults."""

    outcome: Outcome
    faults: list[str]


@dataclass(frozen=True)
class Result:
    """The result of the whole corpus; `stack` is still running."""

    stack: Stack
    verdicts: list[Verdict]
    accepted: set[str]

    @property
    def wrong(self) -> dict[str, list[str]]:
        return {v.outcome.name: v.faults for v in self.verdicts if v.faults}


@pytest.fixture(scope="module")
def result() -> Iterator[Result]:
    files = read_manifest(FOLDER)
    with running_stack(durable=False) as stack:
        stack.start([stack.plan.ocr_server(), *stack.plan.workers(), stack.plan.api()])
        url = stack.plan.api_url()
        with httpx.Client(base_url=url, timeout=REQUEST_SECONDS, trust_env=False) as client:
            pipeline = Pipeline(stack, client)
            started = time.monotonic()
            outcomes = pipeline.run(files)
            seconds = time.monotonic() - started
        verdicts = [
            Verdict(outcome, faults(expectation_for(file), outcome))
            for file, outcome in zip(files, outcomes, strict=True)
        ]
        show(verdicts, seconds)
        keep(verdicts, seconds)
        yield Result(stack, verdicts, set(pipeline.ids.values()))


def show(verdicts: list[Verdict], seconds: float) -> None:
    print(f"\n{'':6} {'file':58} {'outcome':26} pages")
    for verdict in verdicts:
        outcome = verdict.outcome
        pages = ", ".join(f"{count} {state}" for state, count in sorted(outcome.counts.items()))
        mark = "WRONG" if verdict.faults else "right"
        print(f"{mark:6} {outcome.name:58} {in_words(outcome):26} {pages}")
        for fault in verdict.faults:
            known = KNOWN_WRONG.get(outcome.name)
            print(f"{'':6} {fault}" + (f" (known: {known})" if known else ""))
    right = sum(not verdict.faults for verdict in verdicts)
    print(f"{right} of {len(verdicts)} files right in {seconds:.0f} s on {os.cpu_count()} cores")


def in_words(outcome: Outcome) -> str:
    if outcome.refused:
        return f"refused: {outcome.refused}"
    if outcome.opened:
        return f"{outcome.error}, then {outcome.opened.status}"
    return outcome.error or outcome.status or "?"


def keep(verdicts: list[Verdict], seconds: float) -> None:
    files = [
        {
            "file": v.outcome.name,
            "right": not v.faults,
            "faults": v.faults,
            "outcome": in_words(v.outcome),
            "pages": v.outcome.counts,
            "seconds": v.outcome.seconds,
        }
        for v in verdicts
    ]
    right = sum(not v.faults for v in verdicts)
    summary = {"cores": os.cpu_count(), "seconds": round(seconds, 1), "right": right}
    RESULTS.mkdir(parents=True, exist_ok=True)
    report = summary | {"of": len(verdicts), "files": files}
    (RESULTS / "corpus.json").write_text(json.dumps(report, indent=1) + "\n")


def test_every_file_ends_as_it_should(result: Result) -> None:
    surprises = {name: why for name, why in result.wrong.items() if name not in KNOWN_WRONG}
    assert not surprises
    assert len(result.verdicts) - len(result.wrong) >= FEWEST_RIGHT


def test_every_document_has_one_final_record(result: Result) -> None:
    query = (
        "SELECT d.id, count(r.id) AS runs, count(DISTINCT r.number) AS numbers,"
        " count(r.id) FILTER (WHERE r.state = ANY(:ended)) AS ended"
        " FROM documents d LEFT JOIN runs r ON r.document_id = d.id GROUP BY d.id"
    )
    with begin() as connection:
        rows = connection.execute(text(query), {"ended": list(TERMINAL)}).all()
    assert {row.id for row in rows} == result.accepted
    assert all(row.runs == row.ended == row.numbers for row in rows)
    # Only the unlocked documents were run twice.
    runs = sorted(row.runs for row in rows)
    assert sum(runs) == len(rows) + len(PASSWORDS)
    assert runs[0] == 1


def test_no_file_ends_a_worker(result: Result) -> None:
    restarted = [program for program in result.stack.programs() if program.restarts]
    assert not restarted
    with begin() as connection:
        # One claim by prepare and one by ocr: no run was lost and claimed again.
        claims = text("SELECT max(epoch) AS most, sum(crashes + expiries) AS lost FROM runs")
        row = connection.execute(claims).one()
    assert row.most <= len(Stage)
    assert row.lost == 0
