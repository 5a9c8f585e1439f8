"""uvicorn's server for our processes: a signal stops it in order and is not raised again."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable
from types import FrameType

import uvicorn


class HttpServer(uvicorn.Server):
    """A uvicorn server that calls `on_stop` in its event loop when a signal arrives.

    uvicorn's own handler raises the signal again after a clean stop, so the process would end
    with the signal's status. With `second_forces`, a second signal ends open connections.
    Make it inside the event loop that serves.
    """

    def __init__(
        self, config: uvicorn.Config, on_stop: Callable[[], object], *, second_forces: bool = False
    ) -> None:
        super().__init__(config)
        self._serving_loop: AbstractEventLoop = get_running_loop()
        self._on_stop = on_stop
        self._second_forces = second_forces

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Stop serving; called in the signal's handler."""
        self._serving_loop.call_soon_threadsafe(self._on_stop)
        if self._second_forces:
            self.force_exit = self.should_exit
        self.should_exit = True
