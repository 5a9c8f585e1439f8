"""Sends the files of the corpus to the running service over HTTP and returns their outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from benchmarks.corpus import CorpusFile
from benchmarks.stack import Stack
from tests.corpus.expectation import PASSWORDS, Outcome, PageOutcome

# Both forks of each worker take such documents, so that two are always processed in parallel.
PRIORITY = "interactive"
PATIENCE = 1200.0
REQUEST_SECONDS = 60.0


class Pipeline:
    """The service, used over HTTP."""

    def __init__(self, stack: Stack, client: httpx.Client) -> None:
        self._stack = stack
        self._client = client
        self.ids: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def run(self, files: Sequence[CorpusFile]) -> list[Outcome]:
        """Send all files and return their outcomes; those with a password are processed twice."""
        for file in files:
            self._send(file)
        self._wait(list(self.ids.values()))
        first = {file.name: self._outcome(file.name) for file in files}
        locked = [name for name in PASSWORDS if name in self.ids]
        for name in locked:
            self._unlock(name)
        self._wait([self.ids[name] for name in locked])
        for name in locked:
            first[name].opened = self._outcome(name)
        return list(first.values())

    def _send(self, file: CorpusFile) -> None:
        with file.path.open("rb") as body:
            answer = self._client.post(
                "/documents", files={"file": (file.path.name, body)}, data={"priority": PRIORITY}
            )
        if answer.is_success:
            self.ids[file.name] = answer.json()["id"]
        else:
            self.refused[file.name] = answer.json()["code"]

    def _unlock(self, name: str) -> None:
        change = {"password": PASSWORDS[name], "priority": PRIORITY}
        answer = self._client.post(f"/documents/{self.ids[name]}/reprocess", json=change)
        answer.raise_for_status()

    def _wait(self, ids: Sequence[str]) -> None:
        try:
            self._stack.wait(ids, PATIENCE)
        except TimeoutError as error:
            # The table shows the files that have not ended.
            print(error)

    def _outcome(self, name: str) -> Outcome:
        if name in self.refused:
            return Outcome(name, refused=self.refused[name])
        view = self._stack.view(self.ids[name])
        pages = [
            PageOutcome(p.number, p.status, p.markdown, p.dpi, p.error.code if p.error else None)
            for p in self._stack.pages(view.id)
        ]
        return Outcome(
            name,
            status=view.status,
            error=view.error.code if view.error else None,
            message=view.error.message if view.error else "",
            pages=pages,
            seconds=view.run_seconds or 0.0,
        )
