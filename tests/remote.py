"""A whole service that reads its pages with jobs on a fake RunPod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rag_service.config.loader import get_settings
from rag_service.knowledgebase import document_queries
from rag_service.knowledgebase.views import DocumentView
from tests.fakes.runpod_service import RunPodService
from tests.fakes.scans import new_number, scan
from tests.processes import PATIENCE, Program
from tests.service import Service, open_service

# Times that are minutes with the real RunPod, here a second or less.
QUICK_JOBS = {
    "RAG_SERVICE_RUNPOD_POLL_MIN": "0.3",
    "RAG_SERVICE_RUNPOD_POLL_MAX": "0.6",
    "RAG_SERVICE_RUNPOD_POLL_WINDOW": "4",
    "RAG_SERVICE_RUNPOD_REPOST_AFTER": "1",
    "RAG_SERVICE_RUNPOD_REQUEST_TIMEOUT": "3",
    "RAG_SERVICE_RUNPOD_CONNECT_TIMEOUT": "3",
}


@dataclass(frozen=True)
class Post:
    """The columns of a row of remote_jobs that tests check."""

    reason: str
    outcome: str | None
    pages: tuple[int, ...]
    state: str
    remote_id: str | None
    request_key: str
    execution_ms: int | None
    usd_per_second: float
    cancel_wanted: bool


class Remote:
    """The service and its RunPod; a request key begins with the id of the document's run."""

    def __init__(self, service: Service, runpod: RunPodService) -> None:
        self.service, self.runpod = service, runpod
        self.programs = service.programs

    def start(self, *, prepare: int = 1, ocr: int = 3) -> Program:
        """Start workers and maintenance; return the ocr worker."""
        self.programs.start_maintenance()
        preparer = self.programs.start_worker("prepare", prepare)
        worker = self.programs.start_worker("ocr", ocr)
        self.programs.wait_ready(preparer, worker)
        return worker

    def add(self, pages: int = 1, **options: str) -> str:
        """Add a new scan; return its document id."""
        number = new_number()
        return self.service.add(scan(number, pages), f"scan-{number}.pdf", **options)

    def run_id(self, document_id: str) -> str:
        run_id: str = self.service.run(document_id).id
        return run_id

    def view(self, document_id: str) -> DocumentView:
        view = document_queries.get_document(document_id, get_settings().page_server)
        assert view is not None
        return view

    def ended(self, document_id: str, seconds: float = PATIENCE) -> DocumentView:
        return self.service.wait_for(document_id, seconds=seconds)

    def rows(self, document_id: str) -> list[Post]:
        """Return the document's posts, oldest first."""
        query = (
            "SELECT remote_jobs.* FROM remote_jobs JOIN runs ON runs.id = run_id"
            " WHERE document_id = :id ORDER BY submitted_at"
        )
        return [
            Post(
                row.reason, row.outcome, tuple(row.pages), row.state, row.remote_id,
                row.request_key, row.execution_ms, row.usd_per_second, row.cancel_wanted,
            )
            for row in self.service.rows(query, id=document_id)
        ]  # fmt: skip

    def wait(self, condition: Any, what: str, seconds: float = PATIENCE) -> Any:
        return self.programs.wait_until(condition, what, seconds)

    def live(self, document_id: str, number: int = 1) -> list[Post]:
        """Wait until this number of the document's posts is live; return them."""

        def found() -> list[Post]:
            live = [post for post in self.rows(document_id) if post.state == "live"]
            return live if len(live) >= number else []

        rows: list[Post] = self.wait(found, f"{document_id} has {number} live jobs")
        return rows

    def posts(self, document_id: str) -> Counter[str]:
        """Count the posts that RunPod received, by request key."""
        return self._of(document_id, self.runpod.posts)

    def accepted(self, document_id: str) -> Counter[str]:
        """Count the posts that made a job, by request key."""
        return self._of(document_id, self.runpod.accepted)

    def _of(self, document_id: str, counts: Counter[str]) -> Counter[str]:
        start = self.run_id(document_id) + ":"
        return Counter({key: n for key, n in counts.items() if key.startswith(start)})

    def require_reasons(self, document_id: str) -> None:
        """Assert that each post has its row, and each after a page's first one a reason."""
        made = [post for post in self.rows(document_id) if post.outcome != "refused"]
        firsts = Counter(page for post in made if post.reason == "first" for page in post.pages)
        assert set(firsts.values()) == {1} or not made, made
        assert {page for post in made for page in post.pages} == set(firsts), made
        sent = Counter(post.request_key for post in self.rows(document_id))
        assert set(self.posts(document_id)) <= set(sent)
        for key, jobs in self.accepted(document_id).items():
            assert jobs <= sent[key], (key, jobs, self.rows(document_id))

    def require_one_handler(self, document_id: str) -> None:
        """Assert that no two handlers ever worked on the same page, by RunPod's job table.

        Handlers with a volume do the work of one key once, even for two jobs after a lost answer.
        """
        start = self.run_id(document_id) + ":"
        jobs = [job for job in self.runpod.jobs if job.key.startswith(start) and job.takes]
        for one, other in combinations(jobs, 2):
            if one.key != other.key and set(one.pages) & set(other.pages):
                earlier, later = sorted([one, other], key=lambda job: job.started or 0.0)
                assert earlier.ended is not None, (one, other)
                assert later.started is not None, (one, other)
                assert earlier.ended <= later.started, (one, other)
        lost = Counter(
            post.request_key for post in self.rows(document_id) if post.reason == "lost_answer"
        )
        for key in self.accepted(document_id):
            assert self.runpod.table.most_alive[key] <= 1 + lost[key], key

    def pass_time(self, seconds: float, *, remote_id: str) -> None:
        """Make a job older, and nearer to its ttl, by these seconds."""
        self.service.rows(
            "UPDATE remote_jobs SET submitted_at = submitted_at - make_interval(secs => :s),"
            " expires_at = expires_at - make_interval(secs => :s)"
            " WHERE remote_id = :id RETURNING id",
            s=seconds,
            id=remote_id,
        )


@contextmanager
def open_remote(stack: dict[str, str], folder: Path, **variables: str) -> Iterator[Remote]:
    """Open a service with an empty database and a RunPod without workers; start no program."""
    with RunPodService() as runpod:
        env = {
            "RAG_SERVICE_OCR_TRANSPORT": "runpod",
            "RUNPOD_API_BASE": runpod.base_url,
            "RUNPOD_ENDPOINT_ID": runpod.endpoint,
            "RUNPOD_API_KEY": runpod.key,
        }
        with open_service(stack, folder, **(env | QUICK_JOBS | variables)) as service:
            yield Remote(service, runpod)
