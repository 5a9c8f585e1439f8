"""Ghostscript as a shrinker, bounded in time, memory and disk.

Its exit status proves nothing: it is 0, with one empty page, for files that it could not open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

from rag_service.pdf.child_process import PASSED_ON
from rag_service.pdf.results import ShrinkFailed
from rag_service.runtime import bounded_child

log = logging.getLogger(__name__)

_logged_programs: set[str] = set()

PROGRAM = "gs"
# Ghostscript's names for its presets; /screen alone would go down to 72 DPI, which is illegible.
PRESETS = {150: "/ebook", 100: "/screen"}
# What it prints if it could not read a file, or only a part of it.
MARKERS = (
    "couldn't initialise file", "no pages will be processed", "catalog dictionary not located",
    "requires a password", "couldn't get page info", "page not found", "page drawing error",
    "pdf interpreter encountered an error", "error: /",
)  # fmt: skip
# As in recompress.py: shrinking pictures that are only a little finer gains nothing.
THRESHOLD = 1.1
VERSION_LIMIT = 20.0
# Bytes of output kept from its start and from its end; a broken file may cause gigabytes of it.
KEPT_OUTPUT = 1 << 16
# The largest file that it may write: bytes, plus a multiple of the original's size.
BASE_FILE_BYTES, FILE_SIZE_FACTOR = 64 << 20, 2
MIB = 1 << 20
# Address space of the program with its libraries and fonts.
OWN_MEMORY_BYTES = 512 * MIB
VERSION_BOUNDS = (BASE_FILE_BYTES, OWN_MEMORY_BYTES)


def find() -> str | None:
    """Return the program's path or None; not cached, as it may be installed or removed."""
    return shutil.which(PROGRAM)


async def rewrite(source: Path, dpi: int, target: Path, time_limit: float, max_mib: int) -> None:
    """Write a copy of a PDF with pictures of at most about `dpi`, 150 or 100.

    `time_limit` is in seconds; `max_mib` bounds the memory beside the program's own code and data.
    Raises ShrinkFailed. A copy without an error may still be wrong: compare it with the original.
    """
    program = find()
    if program is None:
        raise ShrinkFailed("Ghostscript (gs) is not installed")
    await _log_version(program)
    file_bytes = source.stat().st_size * FILE_SIZE_FACTOR + BASE_FILE_BYTES
    bounds = (file_bytes, max_mib * MIB + OWN_MEMORY_BYTES)
    command = [program, *_options(dpi), f"-sOutputFile={target}", str(source)]
    status, output = await _run(command, target.parent, bounds, time_limit)
    for marker in MARKERS:
        if marker in output.lower():
            raise ShrinkFailed(f"Ghostscript could not read the file ({marker})")
    if status != 0:
        raise ShrinkFailed(f"Ghostscript ended with status {status}")
    if not target.is_file():
        raise ShrinkFailed("Ghostscript wrote no file")


def _options(dpi: int) -> list[str]:
    options = [
        "-q", "-dSAFER", "-dBATCH", "-dNOPAUSE", "-sDEVICE=pdfwrite", "-dCompatibilityLevel=1.7",
        f"-dPDFSETTINGS={PRESETS[dpi]}",
        # By default the presets turn pages by the direction of their text and change colours.
        "-dAutoRotatePages=/None", "-dColorConversionStrategy=/LeaveColorUnchanged",
    ]  # fmt: skip
    for kind in ("Color", "Gray"):
        options += [
            f"-dDownsample{kind}Images=true", f"-d{kind}ImageResolution={dpi}",
            f"-d{kind}ImageDownsampleThreshold={THRESHOLD}",
            # Its own choice stores the noise of a scan without loss, in three times the space.
            f"-dAutoFilter{kind}Images=false", f"-d{kind}ImageFilter=/DCTEncode",
        ]  # fmt: skip
    return options


async def _log_version(program: str) -> None:
    if program in _logged_programs:
        return
    _logged_programs.add(program)
    # Some versions damage files, so the log must name the version that was used.
    _, output = await _run([program, "--version"], Path("/"), VERSION_BOUNDS, VERSION_LIMIT)
    log.info("Ghostscript %s is at %s.", output.strip()[:80] or "of unknown version", program)


async def _run(
    command: list[str], folder: Path, bounds: tuple[int, int], time_limit: float
) -> tuple[int, str]:
    """Return the status and the output of both streams. Raises ShrinkFailed on time-out.

    `bounds`: the most bytes of a written file, and of address space.
    The whole process group is killed before it returns.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", bounded_child.__file__, str(os.getpid()), *map(str, bounds),
        *command,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT, cwd=folder, env=_environment(folder),
        start_new_session=True,
    )  # fmt: skip
    try:
        async with asyncio.timeout(time_limit):
            output = await _read(process.stdout)
            return await process.wait(), output
    except TimeoutError as error:
        raise ShrinkFailed(f"Ghostscript took longer than {time_limit:g} s") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def _read(stream: asyncio.StreamReader | None) -> str:
    kept = b""
    while stream is not None and (chunk := await stream.read(KEPT_OUTPUT)):
        kept += chunk
        if len(kept) > 2 * KEPT_OUTPUT:
            kept = kept[:KEPT_OUTPUT] + kept[-KEPT_OUTPUT:]
    return kept.decode(errors="replace")


def _environment(folder: Path) -> dict[str, str]:
    """The variables that the program needs, none of them secret; temporary files go to `folder`."""
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**environment, "TMPDIR": str(folder)}
