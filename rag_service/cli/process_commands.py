"""The commands that run one process each. Compose and `up` run a service with them."""

from __future__ import annotations

import os
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rag_service.cli.checks import check_service, check_transport, check_worker
from rag_service.cli.common_options import begin, begin_process
from rag_service.cli.output import note
from rag_service.errors import ConfigurationError, DatabaseUnavailable

if TYPE_CHECKING:
    from rag_service.config.options import Settings

_MIGRATE_WAIT = 60.0
_MIGRATE_POLL = 0.5
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class WorkerKind(StrEnum):
    """Which worker to run."""

    PREPARE = "prepare"
    OCR = "ocr"
    MAINTENANCE = "maintenance"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command()(worker)
    app.command()(serve)
    app.command()(flower)
    app.command("layout-server")(layout_server)
    app.command("cpu-ocr-server")(cpu_ocr_server)
    app.command()(migrate)


def worker(
    kind: Annotated[WorkerKind, typer.Argument(help="Which worker.", show_default=False)],
) -> None:
    """Run one worker: prepare, ocr or maintenance."""
    settings = begin_process()
    check_worker(settings)
    if kind is not WorkerKind.PREPARE:
        check_transport(settings)
    if kind is WorkerKind.MAINTENANCE:
        from workers import maintenance

        maintenance.main(settings)
        return
    forks = (
        settings.prepare.worker_concurrency
        if kind is WorkerKind.PREPARE
        else settings.ocr.worker_concurrency
    )
    # SIGTERM stays Celery's warm shutdown: the forks release their runs.
    _celery(worker_arguments(kind, forks, settings.log_level))


def worker_arguments(kind: WorkerKind, forks: int, log_level: str) -> list[str]:
    """Return Celery's arguments for a worker of one stage."""
    return [
        *("--quiet", "worker", "-Q", kind.value),
        *("--concurrency", str(forks), "--prefetch-multiplier", "1", "-O", "fair"),
        *("--without-gossip", "--without-mingle"),
        *("-n", f"{kind.value}@%h", "--loglevel", log_level),
    ]


def serve() -> None:
    """Run the HTTP API."""
    settings = begin_process()
    check_service(settings)
    from rag_service.api import app
    from rag_service.database import connection_budget, engine

    connection_budget.warn_of_shortage({"the API": engine.most_connections(settings)})

    app.serve(settings)


def flower() -> None:
    """Run Flower, the monitor of the Celery workers."""
    settings = begin_process()
    check_flower(settings)
    from rag_service.jobs.wake_ups import broker_url

    broker_url(settings)
    auth = settings.flower.basic_auth
    # Flower's API can stop workers: without credentials it is disabled, on loopback too.
    os.environ.pop("FLOWER_UNAUTHENTICATED_API", None)
    if auth is None:
        from workers.flower_access import require_local_names

        require_local_names()
    else:
        # Not an argument, which every user of the machine can read.
        os.environ["FLOWER_BASIC_AUTH"] = auth.get_secret_value()
    _celery(["flower", f"--address={settings.flower.host}", f"--port={settings.flower.port}"])


def check_flower(settings: Settings) -> None:
    """Raise ConfigurationError if Flower would be open to other machines without credentials."""
    if settings.flower.basic_auth is None and settings.flower.host not in LOOPBACK:
        raise ConfigurationError(
            f"flower.host: {settings.flower.host} is not loopback, so Flower needs credentials: "
            "set RAG_SERVICE_FLOWER_BASIC_AUTH to user:password."
        )


def layout_server() -> None:
    """Run the layout server: one model for all worker forks of this machine."""
    settings = begin_process()
    from workers.servers.layout.layout_server import serve as serve_layout

    serve_layout(settings)


def cpu_ocr_server() -> None:
    """Run the CPU OCR server, which speaks the OpenAI protocol."""
    settings = begin_process()
    from workers.servers.cpu_ocr.cpu_ocr_server import serve as serve_ocr

    serve_ocr(settings)


def migrate() -> None:
    """Migrate the database to this version's schema."""
    begin()
    from rag_service.database import schema

    await_postgres(_MIGRATE_WAIT)
    note(f"The database is at revision {schema.migrate()}.")


def await_postgres(seconds: float) -> None:
    """Return when PostgreSQL answers. Raise DatabaseUnavailable after this many seconds."""
    from rag_service.database import engine

    deadline = time.monotonic() + seconds
    noted = False
    while True:
        try:
            engine.ping()
            return
        except DatabaseUnavailable:
            if time.monotonic() > deadline:
                raise
            if not noted:
                note(f"PostgreSQL does not answer yet; waiting up to {seconds:g} s.")
                noted = True
            time.sleep(_MIGRATE_POLL)


def _celery(arguments: list[str]) -> NoReturn:
    """Run Celery's command line with our application.

    `celery -A` would import it from the current folder first.
    """
    from workers.celery_app import app

    raise typer.Exit(app.start(arguments) or 0)
