"""The CPU OCR server as a process: one engine a node behind the OpenAI protocol.

Started by `rag-service cpu-ocr-server`; the embedded default of `run` and `up`.
"""

from __future__ import annotations

import asyncio
from types import FrameType
from typing import TYPE_CHECKING

from rag_service.config.loader import Settings
from rag_service.config.options import CpuOcrOptions
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

    from workers.servers.cpu_ocr.cpu_ocr_api import create_app as create

    loop = asyncio.get_running_loop()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
            # Not uvicorn's own, which raises the signal once more after a clean stop.
            loop.call_soon_threadsafe(desk.drain)
            self.should_exit = True

    def stop() -> None:
        server.should_exit = True

    cpu = settings.cpu_ocr
    app = create(cpu, on_failure=stop)
    desk: OcrQueue = app.state.desk
    log_level = settings.log_level.lower()
    server = Server(
        uvicorn.Config(app, host=cpu.host, port=cpu.port, log_level=log_level, access_log=False)
    )
    await server.serve()
    if desk.failure is not None:
        raise ConfigurationError(f"The OCR engine could not be loaded: {desk.failure}")
