"""Runs a function with a file that is open in a render child."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from rag_service.config.loader import load_settings
from rag_service.pdf.session import PdfSession

Found = TypeVar("Found")


def on(path: Path, work: Callable[[PdfSession], Awaitable[Found]], **changes: Any) -> Found:
    """Run `work(session)` with the file open; `changes` are settings of the section `pdf`."""

    async def run() -> Found:
        limits = load_settings().pdf.model_copy(update=changes)
        async with PdfSession(limits, 100) as session:
            await session.open(path, "")
            return await work(session)

    return asyncio.run(run())
