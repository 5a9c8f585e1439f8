"""Following documents until they are finished."""

from collections import Counter
from collections.abc import Iterator

import pytest

from rag_service.cli.progress import follow
from rag_service.errors import NotFound, ServiceUnreachable
from rag_service.knowledgebase.views import DocumentView, PageCounts, RunView
from rag_service.states import RunState
from tests.views import view


def look(document_id: str, status: RunState, done: int = 0) -> DocumentView:
    pages = PageCounts(total=3, done=done)
    run = RunView(id="r", status=status, error=None, pages=pages)
    return view(status, id=document_id, filename=f"{document_id}.pdf", latest_run=run)


class Script:
    """Returns scripted answers for each document, the last one again and again."""

    def __init__(self, **answers: list[DocumentView | Exception]) -> None:
        self._answers = answers
        self.asked: Counter[str] = Counter()

    def __call__(self, document_id: str) -> DocumentView:
        self.asked[document_id] += 1
        answers = self._answers[document_id]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_each_document_is_followed_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(
        a=[
            look("a", RunState.QUEUED),
            look("a", RunState.OCR, 1),
            look("a", RunState.PROCESSED, 3),
        ],
        b=[look("b", RunState.FAILED)],
    )
    ended = follow(["a", "b", "a"], script, interval=0)
    assert {name: one.status for name, one in ended.items()} == {"a": "processed", "b": "failed"}
    assert script.asked == {"a": 3, "b": 1}
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("a.pdf")] == [
        "a.pdf: queued, page 0 of 3", "a.pdf: ocr, page 1 of 3", "a.pdf: processed, page 3 of 3",
    ]  # fmt: skip


def test_a_deleted_document_is_no_longer_followed() -> None:
    assert follow(["a"], Script(a=[look("a", RunState.OCR), NotFound()]), interval=0) == {}


def test_parked_documents_do_not_keep_others_from_being_polled() -> None:
    parked = {f"p{n}": [look(f"p{n}", RunState.READY)] for n in range(60)}
    script = Script(**parked, last=[look("last", RunState.PROCESSED)])

    class Polled(Exception):
        pass

    def check() -> None:
        if script.asked["last"]:
            raise Polled

    with pytest.raises(Polled):
        follow([*parked, "last"], script, interval=0, check=check)


def test_follow_continues_when_the_service_answers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr("rag_service.cli.progress.time.sleep", waits.append)
    script = Script(a=[ServiceUnreachable(), ServiceUnreachable(), look("a", RunState.PROCESSED)])
    assert list(follow(["a"], script, interval=0)) == ["a"]
    assert len(waits) == 2


def test_follow_fails_when_the_service_stays_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _clock()
    monkeypatch.setattr("rag_service.cli.progress.time.sleep", lambda _: None)
    monkeypatch.setattr("rag_service.cli.progress.time.monotonic", lambda: next(clock))
    with pytest.raises(ServiceUnreachable):
        follow(["a"], Script(a=[ServiceUnreachable()]), interval=0)


def _clock() -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += 10


def test_nothing_to_follow_ends_at_once() -> None:
    assert follow([], Script(), interval=0) == {}
