"""The RunPod worker: `python -m workers.runpod_handler.handler [OCR server's command …]`.

With `--rp_serve_api` first, and runpod's own arguments for it, it serves runpod's local API.

It starts the OCR server and the layout server, waits for both, and runs jobs one at a time until
SIGTERM. If the OCR server does not start, or ends, the worker ends with exit status 1. The same
happens if the layout server does not start; if it ends later, it is restarted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import runpod

from rag_service.config.loader import load_settings
from rag_service.config.options import Settings
from rag_service.errors import ConfigurationError, RagServiceError
from rag_service.runtime.log_format import configure_logging
from workers.runpod_handler import start_checks
from workers.runpod_handler.debug_lines import DebugLines, collect
from workers.runpod_handler.faults import ServerUnhealthy
from workers.runpod_handler.job_runner import JobRunner
from workers.runpod_handler.server_process import ServerProcess
from workers.servers.layout.layout_supervisor import LayoutSupervisor

log = logging.getLogger(__name__)

# RunPod sets this in every worker; without it runpod's loop would look for a test job.
_RUNPOD_VARIABLE = "RUNPOD_WEBHOOK_GET_JOB"
# runpod's argument for an API on this machine in place of its loop.
_LOCAL_API = "--rp_serve_api"


class HandlerWorker:
    """The two functions that runpod's loop calls: the start check and the handler."""

    def __init__(
        self, settings: Settings, server: ServerProcess, layout: LayoutSupervisor, debug: DebugLines
    ) -> None:
        self._settings = settings
        self._server = server
        self._layout = layout
        self._debug = debug
        self._runner = JobRunner(settings, server, debug)

    async def check_start(self) -> None:
        """Check the worker and start its servers; an error ends the process with exit status 1."""
        start_checks.check_engine(self._settings.handler)
        start_checks.check_server_named(self._settings.ocr)
        start_checks.check_gpu(self._settings.handler)
        start_checks.warn_of_missing_volume(self._settings.handler)
        await self.start_servers()

    async def start_servers(self) -> None:
        """Start the OCR server, if it is started here, and the layout server; wait for both."""
        try:
            self._server.start()
            await asyncio.to_thread(start_checks.ensure_layout_model, self._settings)
            await asyncio.to_thread(self._layout.start)
            await start_checks.wait_for_server(self._settings, self._server)
        except RagServiceError:
            self.stop()
            raise
        self._server.on_end = _drain

    def stop(self) -> None:
        """Stop both servers."""
        self._layout.stop()
        self._server.stop()

    async def handle(self, job: dict[str, Any]) -> dict[str, Any]:
        """Return the job's output, or its error with the latest log lines."""
        try:
            return await self._runner.run(job)
        except RagServiceError as error:
            log.error("Job %s failed: %s", job["id"], error.message)
            return self._failure(error)

    def _failure(self, error: RagServiceError) -> dict[str, Any]:
        error_report = {
            "error_type": error.code,
            "error_message": f"{error.code}: {error.message}",
            "debug": self._debug.take(),
        }
        # RunPod then replaces a worker whose OCR server is unhealthy.
        return {
            "error": json.dumps(error_report),
            "refresh_worker": isinstance(error, ServerUnhealthy),
        }


def _drain() -> None:
    """End runpod's loop after it has posted its last result."""
    os.kill(os.getpid(), signal.SIGTERM)


def main(command: Sequence[str]) -> int:
    """Run jobs until SIGTERM. Return 0 after a drain, 1 if the OCR server ended or the settings
    are invalid, 2 outside a RunPod worker.
    """
    is_local = command[:1] == [_LOCAL_API]
    if _RUNPOD_VARIABLE not in os.environ and not is_local:
        print(
            f"The handler runs in a RunPod serverless worker only, which sets {_RUNPOD_VARIABLE}; "
            "docs/runpod.md describes how to create the endpoint, and how to run the handler "
            f"without one ({_LOCAL_API}).",
            file=sys.stderr,
        )
        return 2
    try:
        settings = load_settings()
    except ConfigurationError as error:
        print(error.message, file=sys.stderr)
        return 1
    configure_logging(settings)
    server = ServerProcess([] if is_local else command)
    worker = HandlerWorker(settings, server, LayoutSupervisor(settings), collect())
    if is_local:
        return _serve_locally(settings, worker)
    runpod.serverless.register_fitness_check(worker.check_start)
    runpod.serverless.start({"handler": worker.handle, "concurrency_modifier": lambda _: 1})
    ended = server.ended
    worker.stop()
    return 1 if ended else 0


def _serve_locally(settings: Settings, worker: HandlerWorker) -> int:
    """Serve runpod's local API, which runs no fitness checks. Return the exit status."""
    try:
        start_checks.check_server_named(settings.ocr)
        asyncio.run(worker.start_servers())
    except RagServiceError as error:
        print(error.message, file=sys.stderr)
        return 1
    try:
        runpod.serverless.start({"handler": worker.handle})
    finally:
        worker.stop()
    return 0


if __name__ == "__main__":
    arguments = sys.argv[1:]
    # runpod reads its own arguments from sys.argv; its DEBUG lines contain whole documents.
    sys.argv[1:] = ["--rp_log_level", "INFO"]
    if arguments[:1] == [_LOCAL_API]:
        sys.argv += arguments
    sys.exit(main(arguments))
