"""The command `up`: starts the whole service and keeps it running until a signal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from rag_service.cli.common_options import begin_process
from rag_service.cli.local_service import LocalService
from rag_service.cli.log_follower import LogFollower
from rag_service.cli.output import note
from rag_service.cli.signals import Stopped, stop_in_order
from rag_service.cli.start_plan import PROGRAMS

if TYPE_CHECKING:
    from rag_service.cli.start_plan import StartPlan
    from rag_service.config.options import Settings

_INTERVAL = 1.0
_REAP_SECONDS = 1.0


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(up)


def up() -> None:
    """Start the whole service and keep it running; Ctrl-C stops it in order."""
    from rag_service.runtime.orphans import OrphanReaper

    settings = begin_process()
    own_ocr = settings.needs_ocr_server
    _check(settings, own_ocr=own_ocr)
    service, reaper = LocalService(settings, settings.data_dir, durable=True), OrphanReaper()
    with stop_in_order(service.kill), LogFollower(settings.data_dir / "logs", PROGRAMS):
        try:
            with service:
                _serve(service, settings, own_ocr=own_ocr)
                while True:
                    time.sleep(_INTERVAL)
                    reaper.reap()
        except Stopped:
            note("Stopped.")
        finally:
            reaper.reap_all(_REAP_SECONDS)


def _check(settings: Settings, *, own_ocr: bool) -> None:
    """Check what a child would fail on, before anything is started.

    Raises ConfigurationError, StorageUnavailable.
    """
    from rag_service.api.auth import require_safe_binding
    from rag_service.cli.checks import check_service, check_transport
    from rag_service.cli.process_commands import check_flower
    from rag_service.embedded import require_free_port
    from rag_service.embedded.folder import require_unlocked

    require_safe_binding(settings.api)
    # Before the ports, which the other instance uses too.
    require_unlocked(settings.data_dir)
    check_transport(settings)
    check_service(settings)
    check_flower(settings)
    require_free_port(settings.api.host, settings.api.port, "api.port")
    require_free_port(settings.flower.host, settings.flower.port, "flower.port")
    if own_ocr:
        require_free_port(settings.cpu_ocr.host, settings.cpu_ocr.port, "cpu_ocr.port")


def _serve(service: LocalService, settings: Settings, *, own_ocr: bool) -> None:
    """Start everything and print its addresses and folders."""
    from rag_service.cli.checks import check_storage, server_warning
    from rag_service.cli.start_plan import StartPlan, embedded_ocr_environment
    from rag_service.database import connection_budget
    from rag_service.documents.storage import local_folder
    from rag_service.monitoring import disk_space

    cpu = settings.cpu_ocr
    environment = embedded_ocr_environment(settings, cpu.host, cpu.port) if own_ocr else {}
    settings = service.start_servers(environment)
    check_storage(settings)
    wrong = None if own_ocr else server_warning(settings)
    few = connection_budget.shortage(connection_budget.service_connections(settings))
    plan = StartPlan(settings, settings.data_dir / "logs", settings.worker.soft_shutdown)
    programs = [*plan.workers(), plan.api()]
    service.start([plan.ocr_server(), *programs] if own_ocr else programs)
    service.wait_until_ready()
    # Flower asks the workers for their details only once, when it starts.
    service.start([plan.flower()])
    note(_summary(plan, own_ocr=own_ocr))
    low = disk_space.low_disks(settings, local_folder(settings))
    for sentence in filter(None, [wrong, *low, few]):
        note(f"Warning: {sentence}")


def _summary(plan: StartPlan, *, own_ocr: bool) -> str:
    settings = plan.settings
    access = "needs the key RAG_SERVICE_API_KEY" if settings.api.key else "loopback, no key"
    lines = [
        ("API", f"{plan.api_url()} ({access}); documentation: {plan.api_url()}/docs"),
        ("Flower", plan.flower_url()),
        (
            "OCR server",
            f"{settings.page_server}{' (started by `up`, on the CPU)' if own_ocr else ''}",
        ),
        ("Data", str(settings.data_dir)),
        ("Logs", str(plan.logs)),
        ("Render children", _render_memory(settings)),
    ]
    listed = "\n".join(f"  {name:<16} {value}" for name, value in lines)
    return f"\nThe service is up:\n{listed}\nSend files: rag-service ingest FILE…   Stop: Ctrl-C\n"


def _render_memory(settings: Settings) -> str:
    """Say how much memory the processes that read documents may take together."""
    from rag_service.api.page_images import MOST_CHILDREN
    from rag_service.runtime.memory import machine_mib

    forks = settings.prepare.worker_concurrency + settings.ocr.worker_concurrency
    number = forks + MOST_CHILDREN
    each, machine = settings.pdf.child_max_mib, machine_mib()
    has = f"; this machine has {machine:,} MiB" if machine else ""
    return f"{number} of at most {each:,} MiB each, together {number * each:,} MiB{has}"
