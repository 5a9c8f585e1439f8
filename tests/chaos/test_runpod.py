"""Jobs on RunPod with random faults: lost answers, failed polls, and killed processes."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fakes import runpod_call_faults as call_faults
from tests.fakes.runpod_call_faults import CallFault, failed_after, refused
from tests.fakes.runpod_service import Call, read_all
from tests.processes import Program, kill
from tests.remote import Remote, open_remote

_DOCUMENTS, _PAGES = 12, (1, 3, 8, 24)
_KILLS = 12
_SECONDS = 3.0
_PATIENCE = 240.0
# The faults of posts and of polls, and the share of calls that get one.
_POST_FAULTS = [
    refused(502), failed_after(500), call_faults.CUT_BEFORE, call_faults.CUT_AFTER,
    call_faults.HALF_AN_ANSWER, call_faults.HTML_AFTER, call_faults.TRUNCATED_JSON,
    call_faults.NO_ID, refused(429), refused(429),
]  # fmt: skip
_POLL_FAULTS = [
    refused(500), refused(503), call_faults.CUT_BEFORE, call_faults.HTML,
    call_faults.TRUNCATED_JSON, refused(404), call_faults.says("IN_QUEUE"),
    call_faults.says("IN_PROGRESS"), call_faults.says("A_NEW_WORD"),
]  # fmt: skip
_SHARE = 0.25


class RandomFaults:
    """A random fault for every fourth call while active."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.active = True

    def fault(self, call: Call) -> CallFault | None:
        """Called in the server's thread."""
        kinds = {"run": _POST_FAULTS, "status": _POLL_FAULTS}.get(call.name)
        if not self.active or kinds is None or self.random.random() > _SHARE:
            return None
        return self.random.choice(kinds)


@pytest.fixture
def seed() -> int:
    """CHAOS_SEED, or a new one; printed, so that a run can be repeated."""
    seed = int(os.environ.get("CHAOS_SEED") or secrets.randbelow(10**6))
    print(f"\nCHAOS_SEED={seed}")
    return seed


@pytest.fixture
def remote(stack: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    env = {
        "RAG_SERVICE_RUNPOD_POLL_WINDOW": "2",
        # This test kills far more often than any bad document would.
        "RAG_SERVICE_LEASE_CRASH_LIMIT": "50",
        "RAG_SERVICE_LEASE_EXPIRY_LIMIT": "50",
    }
    with open_remote(stack, tmp_path_factory.mktemp("faults"), **env) as remote:
        yield remote


def test_no_document_no_page_and_no_post_is_lost_or_doubled(remote: Remote, seed: int) -> None:
    faults = RandomFaults(seed)
    remote.runpod.on_call = faults.fault
    remote.runpod.play(read_all, workers=3, seconds=_SECONDS)
    remote.start(prepare=1, ocr=3)
    added = {
        remote.add(pages): pages for pages in random.Random(seed).choices(_PAGES, k=_DOCUMENTS)
    }
    killed = [_kill_one(remote, faults.random) for _ in range(_KILLS)]
    faults.active = False
    for document_id, pages in added.items():
        _require_whole(remote, document_id, pages)
    posts = sum(remote.runpod.posts.values())
    jobs = sum(remote.runpod.accepted.values())
    print(f"{len(added)} documents, {posts} posts, {jobs} jobs; killed: {', '.join(killed)}")


def _kill_one(remote: Remote, dice: random.Random) -> str:
    """SIGKILL a fork, a worker's main process with its children, or maintenance."""
    time.sleep(dice.uniform(0.5, 2.5))
    kind = dice.choice(["fork", "fork", "ocr", "maintenance"])
    program = _living(remote, "maintenance" if kind == "maintenance" else "ocr")
    if kind == "fork":
        kill(dice.choice(program.forks()))
        return kind
    program.kill()
    start: dict[str, Callable[[], Program]] = {
        "ocr": lambda: remote.programs.start_worker("ocr", 3),
        "maintenance": remote.programs.start_maintenance,
    }
    new = start[kind]()
    if kind == "ocr":
        remote.programs.wait_ready(new)
    return kind


def _living(remote: Remote, name: str) -> Program:
    return next(p for p in remote.programs.all if p.name == name and p.exit_code is None)


def _require_whole(remote: Remote, document_id: str, pages: int) -> None:
    view = remote.ended(document_id, _PATIENCE)
    assert (view.status, view.pages.ocr) == ("processed", pages), view
    found = [page.markdown for page in remote.service.pages(document_id)]
    assert found == [f"Page {number}." for number in range(1, pages + 1)]
    remote.require_reasons(document_id)
    remote.require_one_handler(document_id)
    reasons = {post.reason for post in remote.rows(document_id)}
    assert reasons <= {"first", "lost_answer"}, remote.rows(document_id)
