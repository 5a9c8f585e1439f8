"""The layout server as a process: one model a node, pictures of all forks in small batches.

Started by the ocr worker's main process and by the RunPod handler as `python -m
workers.servers.layout.layout_server`, and by `rag-service layout-server` in a container of its own.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import sys
from typing import TYPE_CHECKING

from rag_service.config.loader import get_settings
from rag_service.config.options import Settings
from rag_service.errors import ConfigurationError
from rag_service.layout.address import layout_address
from rag_service.layout.model_loader import load_model
from rag_service.runtime.log_format import configure_logging
from workers.servers.layout.node_lock import NodeLock

if TYPE_CHECKING:
    from workers.servers.layout.layout_queue import LayoutQueue

# Not __name__, which is __main__ where this module is the program.
log = logging.getLogger("workers.servers.layout.layout_server")


# As malloc.h names it: allocations from this size are pages of their own, which go back when freed.
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20


def main() -> None:
    """Serve with the settings of the environment; what is wrong with them ends it with status 2."""
    try:
        settings = get_settings()
        configure_logging(settings)
        serve(settings)
    except ConfigurationError as error:
        print(f"layout-server: {error.message}", file=sys.stderr)
        sys.exit(2)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; the pictures in hand are answered.

    On a socket where another server serves, wait to take over, with nothing loaded. Raises
    ConfigurationError when the model cannot load or the address cannot be had.
    """
    listener = _listen(settings)
    _return_freed_memory()
    asyncio.run(_serve(settings, listener))


def _return_freed_memory() -> None:
    """Keep a run's large tensors out of glibc's heaps: they double what the server holds for good.

    Left to itself glibc raises the threshold with every large block that is freed.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)


def _listen(settings: Settings) -> socket.socket:
    host, port = settings.layout.host, settings.layout.port
    if host is not None:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigurationError(
                f"layout.host: cannot listen on {host}:{port}: {error.strerror}"
            ) from error
    path = layout_address(settings).socket
    if path is None:
        raise ConfigurationError(
            "layout.url names a server elsewhere; set layout.host for one that listens here"
        )
    return NodeLock(path).bind()


async def _serve(settings: Settings, listener: socket.socket) -> None:
    import uvicorn

    from rag_service.runtime.http_server import HttpServer
    from workers.servers.layout.layout_api import create_app

    def stop() -> None:
        server.should_exit = True

    app = create_app(settings.layout, lambda: load_model(settings.layout), on_failure=stop)
    queue: LayoutQueue = app.state.desk
    server = HttpServer(uvicorn.Config(app, log_level="warning", access_log=False), queue.drain)
    log.info("The layout server listens on %s", listener.getsockname())
    await server.serve(sockets=[listener])
    if isinstance(queue.failure, ConfigurationError):
        raise queue.failure


if __name__ == "__main__":
    main()
