"""Questions to the OCR server or RunPod: would a page be answered, and are the settings right?"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from rag_service.config.options import Settings
from rag_service.database.engine import DatabaseError, error_summary
from rag_service.errors import ConfigurationError
from rag_service.jobs import server_state
from rag_service.ocr.ocr_client import OcrClient, Probe
from workers.remote.endpoint_watch import probe_endpoint

log = logging.getLogger(__name__)

# A server that starts together with the service may need this long until it answers.
_START_SECONDS = 30.0
_AGAIN_SECONDS = 1.0


async def probe_page_server(settings: Settings) -> Probe:
    """Ask the server that reads the pages whether it would answer one."""
    if settings.ocr.transport == "runpod":
        return await probe_endpoint(settings.runpod)
    async with OcrClient(settings.ocr, connections=1) as client:
        return await client.probe()


async def check_settings(settings: Settings) -> Probe:
    """Ask only whether address, key and model are right: RunPod's health, or /v1/models."""
    try:
        if settings.ocr.transport == "runpod":
            return await probe_endpoint(settings.runpod)
        async with OcrClient(settings.ocr, connections=1) as client:
            return await client.probe_models()
    except ConfigurationError as error:
        return Probe(False, misconfigured=True, message=error.message)


def fault_of(probe: Probe) -> str | None:
    """Return the fault as health shows it, or None if the probe passed."""
    if probe.ok:
        return None
    return f"{'misconfigured' if probe.misconfigured else 'down'}: {probe.message}"


class StartCheck:
    """Checks the server once, in a thread, and leaves what is wrong in health."""

    def __init__(self, settings: Settings, stopped: threading.Event) -> None:
        self._settings = settings
        self._stopped = stopped

    def start(self) -> None:
        """Begin; the thread ends with the check."""
        threading.Thread(target=self._run, name="server check", daemon=True).start()

    def _run(self) -> None:
        url = self._settings.page_server
        if url is None:
            return
        probe = self._checked()
        if not probe.ok:
            log.error("The OCR server is not usable: %s", fault_of(probe))
        try:
            self._store(url, probe)
        except DatabaseError as error:
            log.warning("The check of the OCR server is not stored: %s", error_summary(error))

    def _checked(self) -> Probe:
        """Return the first answer; a server that does not answer yet is asked again."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            probe = asyncio.run(check_settings(self._settings))
            if probe.ok or probe.misconfigured or time.monotonic() > deadline:
                return probe
            if self._stopped.wait(_AGAIN_SECONDS):
                return probe

    def _store(self, url: str, probe: Probe) -> None:
        """Park documents if RunPod refuses; of a direct server raise an alarm only.

        Some servers read pages under any model name, so their list of models is no proof.
        """
        if self._settings.ocr.transport == "direct":
            store_alarm(url, probe)
        elif not probe.ok:
            server_state.mark_out(url, probe.message, misconfigured=probe.misconfigured)


def store_alarm(url: str, probe: Probe) -> None:
    """Raise, replace or end the alarm about a direct server that counts as up."""
    record, fault = server_state.get(url), fault_of(probe)
    if fault is not None or (record and record.alarms):
        server_state.set_alarms(url, {server_state.FAULT: fault} if fault else {})
