"""The CPU OCR server as a process: one engine a node behind the OpenAI protocol.

Started by `rag-service cpu-ocr-server`; the embedded default of `run` and `up`.
"""

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
    """The server as an ASGI application, with the configured engine unless one is given."""
    from workers.servers.cpu_ocr.cpu_ocr_api import create_app as create

    return create(settings, engine)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; the page in hand is answered, what waits is told 503.

    Raises ConfigurationError when the engine cannot be loaded; exits 3 on a taken address.
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
    queue: OcrQueue = app.state.desk
    log_level = settings.log_level.lower()
    server = HttpServer(
        uvicorn.Config(app, host=cpu.host, port=cpu.port, log_level=log_level, access_log=False),
        queue.drain,
    )
    await server.serve()
    if queue.failure is not None:
        raise ConfigurationError(f"The OCR engine could not be loaded: {queue.failure}")
