"""A file open in a render child for the length of one piece of work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from rag_service.config.loader import load_settings
from rag_service.pdf.session import PdfSession

Found = TypeVar("Found")


def on(path: Path, work: Callable[[PdfSession], Awaitable[Found]], **changes: Any) -> Found:
    """Run `work(worker)` with the file open; `changes` are settings of the section `pdf`."""

    async def run() -> Found:
        limits = load_settings().pdf.model_copy(update=changes)
        async with PdfSession(limits, 100) as worker:
            await worker.open(path, "")
            return await work(worker)

    return asyncio.run(run())
