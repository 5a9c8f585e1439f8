"""The division of pages into jobs, and the size of a job's body."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rag_service.runpod.job_body import Envelope, job_body
from rag_service.runpod.job_format import JobInput
from rag_service.runpod.page_ranges import MIN_PAGES, ranges


def lengths(pages: int, max_pages: int = 30, workers: int = 3) -> list[int]:
    return [len(part) for part in ranges(range(1, pages + 1), max_pages, workers)]


@given(st.integers(0, 2000), st.integers(1, 200), st.integers(1, 40))
def test_every_page_is_in_one_range_of_limited_length(
    pages: int, max_pages: int, workers: int
) -> None:
    numbers = [3 * number for number in range(1, pages + 1)]
    parts = ranges(numbers, max_pages, workers)
    assert [number for part in parts for number in part] == numbers
    assert all(0 < len(part) <= max_pages for part in parts)
    assert max(map(len, parts), default=0) - min(map(len, parts), default=0) <= 1
    if len(parts) > workers:
        assert len(parts) % workers == 0 or len(parts) == pages


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (0, []),
        (1, [1]),
        (2 * MIN_PAGES - 1, [2 * MIN_PAGES - 1]),
        (2 * MIN_PAGES, [MIN_PAGES] * 2),
        (30, [10, 10, 10]),
        (61, [21, 20, 20]),
        (91, [16, 15, 15, 15, 15, 15]),
        (155, [26, 26, 26, 26, 26, 25]),
    ],
)
def test_a_document_keeps_all_workers_busy(pages: int, expected: list[int]) -> None:
    assert lengths(pages) == expected


@given(
    st.binary(max_size=500),
    st.text(max_size=40),
    st.lists(st.integers(1, 9999), max_size=40),
    st.one_of(st.none(), st.text(max_size=40)),
    st.sampled_from(["base64", "zip+base64"]),
)
def test_a_body_has_the_computed_size_and_content(
    document: bytes, filename: str, pages: list[int], webhook: str | None, encoding: str
) -> None:
    envelope = Envelope('k"data":""', 150, "page", 32768, 660_000, 86_400_000, webhook)
    frame = job_body(envelope, filename, pages, encoding)
    body = frame.fill(document)
    assert len(body) == frame.size(len(document))
    tree = json.loads(body)
    job = JobInput.model_validate(tree["input"])
    assert (job.filename, job.pages) == (filename, pages)
    assert (job.document.kind, job.document.encoding) == ("inline", encoding)
    assert base64.b64decode(job.document.data, validate=True) == document
    assert tree["policy"] == {"executionTimeout": 660_000, "ttl": 86_400_000}
    assert tree.get("webhook") == webhook
