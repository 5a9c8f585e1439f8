"""The layout server's process: one model per node, pictures of all forks in small batches.

Run as `python -m workers.servers.layout.layout_server` or `rag-service layout-server`.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import socket
import sys
from contextlib import ExitStack
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

# Not __name__, which is __main__ if this module is the program.
log = logging.getLogger("workers.servers.layout.layout_server")


# M_MMAP_THRESHOLD of malloc.h: larger allocations are separate mappings, unmapped when freed.
_M_MMAP_THRESHOLD = -3
_LARGE = 1 << 20


def main() -> None:
    """Serve with the settings of the environment. Exits with status 2 if they are wrong."""
    try:
        settings = get_settings()
        configure_logging(settings)
        serve(settings)
    except ConfigurationError as error:
        print(f"layout-server: {error.message}", file=sys.stderr)
        sys.exit(2)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; pictures in progress are answered.

    If another server serves the socket, wait to take over without loading the model. Raises
    ConfigurationError if the model cannot load or the address cannot be used.
    """
    with ExitStack() as stack:
        listener = _listen(settings, stack)
        _return_freed_memory()
        asyncio.run(_serve(settings, listener))


def _return_freed_memory() -> None:
    """Keep large tensors out of glibc's heaps, which would double the server's memory.

    By default glibc raises the threshold with every large block that is freed.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)


def _listen(settings: Settings, stack: ExitStack) -> socket.socket:
    """Return the listening socket; `stack` removes what it leaves in a folder."""
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
            "layout.url names another server; set layout.host for a server that listens here"
        )
    lock = NodeLock(path)
    stack.callback(lock.release)
    return lock.bind()


async def _serve(settings: Settings, listener: socket.socket) -> None:
    import uvicorn

    from rag_service.runtime.http_server import HttpServer
    from workers.servers.layout.layout_api import create_app

    def stop() -> None:
        server.should_exit = True

    app = create_app(settings.layout, lambda: load_model(settings.layout), on_failure=stop)
    queue: LayoutQueue = app.state.queue
    server = HttpServer(uvicorn.Config(app, log_level="warning", access_log=False), queue.drain)
    log.info("The layout server listens on %s", listener.getsockname())
    await server.serve(sockets=[listener])
    if isinstance(queue.failure, ConfigurationError):
        raise queue.failure


if __name__ == "__main__":
    main()
