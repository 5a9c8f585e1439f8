"""Whether this process gets what its work needs: descriptors, threads, memory, scratch space.

A process that lacks one of them must not judge documents: everything that it tries fails.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator

from rag_service.errors import ProcessInTrouble

_DESCRIPTORS = 16
_MEMORY_BYTES = 64 << 20
_SCRATCH_BYTES = 1 << 20
# Without EAGAIN: a socket that is not ready says the same as a refused fork.
_SHORT = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EIO}
    | {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
)
# CPython's words for a thread or a lock that the system refuses (Modules/_threadmodule.c).
_THREAD_WORDS = ("can't start new thread", "can't allocate lock")


def find_shortage() -> str | None:
    """Try to get some of each resource, and give it back. Return what fails, or None.

    Takes about a millisecond. Call it in an error's handler, too: many libraries hide the cause.
    """
    for name, attempt in _ATTEMPTS:
        try:
            attempt()
        except (OSError, RuntimeError, MemoryError) as error:
            return f"{name} ({_words(error)})"
    return None


def shortage_in(error: BaseException) -> str | None:
    """Return the system's words if a lack of resources caused this error, or None."""
    return next((_words(one) for one in _causes(error) if _is_shortage(one)), None)


def require_resources(error: BaseException | None) -> None:
    """Raise ProcessInTrouble if this process lacks resources, or if that caused the error."""
    short = find_shortage() or (shortage_in(error) if error is not None else None)
    if short is not None:
        raise ProcessInTrouble(f"{ProcessInTrouble().message} {short}") from error


def _try_descriptors() -> None:
    opened: list[int] = []
    try:
        while len(opened) < _DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _try_thread() -> None:
    thread = threading.Thread(target=int, name="resource check", daemon=True)
    thread.start()
    thread.join()


def _try_memory() -> None:
    mmap.mmap(-1, _MEMORY_BYTES).close()


def _try_scratch() -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        if file.write(bytes(_SCRATCH_BYTES)) < _SCRATCH_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


_ATTEMPTS: tuple[tuple[str, Callable[[], None]], ...] = (
    ("no free descriptors", _try_descriptors),
    ("no free threads", _try_thread),
    ("no free memory", _try_memory),
    ("no space for temporary files", _try_scratch),
)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all that led to it, also inside groups and database errors."""
    waiting, seen = [error], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        nested = one.exceptions if isinstance(one, BaseExceptionGroup) else ()
        links = (one.__cause__, one.__context__, getattr(one, "orig", None), *nested)
        waiting += [link for link in links if isinstance(link, BaseException)]


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _SHORT
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in _THREAD_WORDS)
    return isinstance(error, MemoryError)


def _words(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or type(error).__name__
