"""The CPU OCR server's process: one engine per node behind the OpenAI protocol."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rag_service.config.options import CpuOcrOptions, Settings
from rag_service.errors import ConfigurationError

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from workers.servers.cpu_ocr.ocr_engine import TextRecogniser
    from workers.servers.cpu_ocr.ocr_queue import OcrQueue


def create_app(settings: CpuOcrOptions, engine: TextRecogniser | None = None) -> Starlette:
    """Return the server as an ASGI application, with the configured engine unless one is given."""
    from workers.servers.cpu_ocr.cpu_ocr_api import create_app as create

    return create(settings, engine)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; the page in progress is answered, waiting requests get 503.

    Raises ConfigurationError if the engine cannot be loaded; exits 3 if the address is taken.
    """
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    import uvicorn

    from rag_service.runtime.http_server import HttpServer
    from workers.servers.cpu_ocr.cpu_ocr_api import create_app as create

    def stop() -> None:
        server.should_exit = True

    cpu = settings.cpu_ocr
    app = create(cpu, on_failure=stop)
    queue: OcrQueue = app.state.queue
    log_level = settings.log_level.lower()
    server = HttpServer(
        uvicorn.Config(app, host=cpu.host, port=cpu.port, log_level=log_level, access_log=False),
        queue.drain,
    )
    await server.serve()
    if queue.failure is not None:
        raise ConfigurationError(f"The OCR engine could not be loaded: {queue.failure}")
