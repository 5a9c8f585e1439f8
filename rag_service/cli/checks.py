"""Checks of settings before a service starts: what would make it fail later is reported now."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from rag_service.errors import ConfigurationError, InvalidOptions, StorageUnavailable

if TYPE_CHECKING:
    from rag_service.config.options import Settings


def check_parser(settings: Settings) -> None:
    """Raise ConfigurationError if the default parser does not exist."""
    from rag_service.parsers.registry import require_parser

    try:
        require_parser(settings.parser.default)
    except InvalidOptions as error:
        raise ConfigurationError(
            f"parser.default: {error.message} (environment: RAG_SERVICE_PARSER_DEFAULT)"
        ) from error


def check_data_dir(settings: Settings) -> None:
    """Raise ConfigurationError if the data folder cannot be written."""
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.data_dir):
            return
    except OSError as error:
        raise ConfigurationError(
            f"data_dir: {settings.data_dir} cannot be written: {error.strerror} "
            "(environment: RAG_SERVICE_DATA_DIR)"
        ) from error


def check_storage(settings: Settings) -> None:
    """Check the document store: with the database its marker, without it only its place.

    Do not call it in a process that forks: the store's threads do not survive a fork. Raises
    ConfigurationError, StorageUnavailable.
    """
    from rag_service.database.engine import DatabaseError
    from rag_service.documents.storage import DocumentStore

    store = DocumentStore(settings)
    try:
        store.check_place()
        if settings.database.url is not None:
            store.check()
    except DatabaseError:
        # Health reports it, and the store is checked again before it is used.
        return
    except StorageUnavailable as error:
        raise StorageUnavailable(
            f"storage.url: documents cannot be stored: {error.message} "
            "(environment: RAG_SERVICE_STORAGE_URL)"
        ) from error


def check_servers(settings: Settings) -> None:
    """Raise ConfigurationError if the database is not PostgreSQL or the broker not Redis."""
    from rag_service.database.engine import database_url
    from rag_service.jobs.wake_ups import broker_url

    if settings.database.url is not None:
        database_url(settings)
    if settings.redis.url is not None:
        broker_url(settings)


def check_transport(settings: Settings) -> None:
    """Raise ConfigurationError if jobs should go to RunPod and its key or endpoint is not set."""
    if settings.ocr.transport == "runpod" and settings.unset_for_pages is not None:
        raise ConfigurationError(settings.unset_for_pages)


def check_worker(settings: Settings) -> None:
    """Raise ConfigurationError for settings with which a worker would fail every document."""
    from rag_service.documents.storage import require_address

    check_parser(settings)
    check_servers(settings)
    require_address(settings)


def check_service(settings: Settings) -> None:
    """Do all checks of a process that does not fork.

    Raises ConfigurationError, StorageUnavailable.
    """
    check_parser(settings)
    check_servers(settings)
    check_data_dir(settings)
    check_storage(settings)


def server_warning(settings: Settings) -> str | None:
    """Ask the configured OCR server or RunPod once; return what is wrong with it, or None.

    It may be repaired while the service runs, so it does not stop the start.
    """
    import asyncio

    from workers.server_check import check_settings

    probe = asyncio.run(check_settings(settings))
    return None if probe.ok else f"no page can be read by the OCR server for now: {probe.message}"
