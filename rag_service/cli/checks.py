"""What would spoil a service after its start, said before it. Used by run, up and the processes."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from rag_service.errors import ConfigurationError, InvalidOptions, StorageUnavailable

if TYPE_CHECKING:
    from rag_service.config.options import Settings


def check_parser(settings: Settings) -> None:
    """Raise ConfigurationError where the default parser is none."""
    from rag_service.parsers.registry import require_parser

    try:
        require_parser(settings.parser.default)
    except InvalidOptions as error:
        raise ConfigurationError(
            f"parser.default: {error.message} (environment: RAG_SERVICE_PARSER_DEFAULT)"
        ) from error


def check_data_dir(settings: Settings) -> None:
    """Raise ConfigurationError where nothing can be written to the folder of uploads."""
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
    """Write a few bytes into the document store. Raises ConfigurationError, StorageUnavailable.

    Not in a process that forks: the store's threads do not survive it.
    """
    from rag_service.documents.storage import DocumentStore

    try:
        DocumentStore(settings).check()
    except StorageUnavailable as error:
        raise StorageUnavailable(
            f"storage.url: documents cannot be stored: {error.message} "
            "(environment: RAG_SERVICE_STORAGE_URL)"
        ) from error


def check_servers(settings: Settings) -> None:
    """Raise ConfigurationError where a database or broker is named that is not of our kind."""
    from rag_service.database.engine import database_url
    from rag_service.jobs.wake_ups import broker_url

    if settings.database.url is not None:
        database_url(settings)
    if settings.redis.url is not None:
        broker_url(settings)


def check_transport(settings: Settings) -> None:
    """Raise ConfigurationError where jobs could neither be posted nor asked for."""
    if settings.ocr.transport == "runpod" and settings.unset_for_pages is not None:
        raise ConfigurationError(settings.unset_for_pages)


def check_worker(settings: Settings) -> None:
    """Raise ConfigurationError for what would fail every document of a worker."""
    from rag_service.documents.storage import require_address

    check_parser(settings)
    check_servers(settings)
    require_address(settings)


def check_service(settings: Settings) -> None:
    """All of it, for a process that does not fork.

    Raises ConfigurationError, StorageUnavailable.
    """
    check_parser(settings)
    check_servers(settings)
    check_data_dir(settings)
    check_storage(settings)
