"""Request bodies with size limits. A multipart body is parsed while it arrives: its file goes
straight to the disk, never as a whole into memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from rag_service.config.options import Settings
from rag_service.documents.incoming_file import IncomingFile
from rag_service.errors import InvalidOptions, TooLarge

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FILE = "file"
# Limit for the boundaries, part headers and options of one body.
_OVERHEAD_BYTES = 64 * 1024
_FIELD_BYTES = 8 * 1024
# Parsed, hashed and written by one call of a thread.
_BATCH_BYTES = 1024 * 1024
_SILENCE_SECONDS = 60.0
# A sender may be this slow for a while: less than a modem, so no honest sender is refused.
_LEAST_BYTES_PER_SECOND = 1024
_SLOW_START_SECONDS = 30.0
OnFile = Callable[[Mapping[str, str]], None]
_ESCAPES = ((b"%0A", b"\n"), (b"%0D", b"\r"), (b"%22", b'"'))


class Form:
    """One multipart body: its text fields and, if one is allowed, its file.

    `incoming`: the folder for its file; None if it takes none. One thread at a time may call
    `feed`. Raises InvalidOptions if it is not such a form, TooLarge.
    """

    def __init__(
        self,
        settings: Settings,
        boundary: bytes,
        fields: Collection[str],
        incoming: Path | None,
        on_file: OnFile | None = None,
    ) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._file: IncomingFile | None = None
        self._settings = settings
        self._allowed = fields
        self._incoming = incoming
        self._on_file = on_file
        self._limit = _size_limit(settings, takes_file=incoming is not None)
        self._bytes = 0
        self._ended = False
        self._headers: dict[bytes, bytes] = {}
        self._header_name = b""
        self._header_value = b""
        # The field being read; None inside the file.
        self._field: str | None = None
        self._value = bytearray()
        self._parser = _parser(boundary, self._callbacks())

    def feed(self, data: bytes) -> None:
        """Parse the next bytes of the body."""
        self._bytes += len(data)
        self._limit.require(self._bytes)
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from error

    def finish(self) -> None:
        """Check at the end of the body that the form is complete."""
        if not self._ended:
            raise _malformed("it ends before its last boundary")

    @property
    def file(self) -> IncomingFile:
        """The file. Raises InvalidOptions if the form has none."""
        if self._file is None:
            raise InvalidOptions("file: the form has no part with this name.")
        return self._file

    def close(self) -> None:
        """Remove the incoming file."""
        if self._file is not None:
            self._file.close()

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_header_begin": self._begin_header,
            "on_header_field": self._take_header_name,
            "on_header_value": self._take_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._open_part,
            "on_part_data": self._take_data,
            "on_part_end": self._end_part,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._headers = {}

    def _begin_header(self) -> None:
        self._header_name = self._header_value = b""

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._header_name.lower()] = self._header_value

    def _open_part(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == FILE and self._incoming is not None:
            self._open_file(options.get(b"filename", b""), self._incoming)
            return
        if name not in self._allowed:
            raise InvalidOptions(f"Unknown field {name[:80]!r}; valid: {self._names()}.")
        if name in self.fields:
            raise InvalidOptions(f"{name}: the form contains this field twice.")
        self._field = name
        self._value = bytearray()

    def _open_file(self, filename: bytes, folder: Path) -> None:
        if self._file is not None:
            raise InvalidOptions("file: one request takes one file.")
        self._field = None
        self.filename = _unescaped(filename).decode("utf-8", "replace")
        if self._on_file is not None:
            self._on_file(self.fields)
        self._file = IncomingFile(self._settings, folder)

    def _names(self) -> str:
        return ", ".join([*([FILE] if self._incoming is not None else []), *self._allowed])

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.file.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _FIELD_BYTES:
            raise InvalidOptions(f"{self._field}: longer than {_FIELD_BYTES} bytes.")

    def _end_part(self) -> None:
        if self._field is None:
            return
        try:
            self.fields[self._field] = self._value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidOptions(f"{self._field}: not UTF-8.") from error

    def _end(self) -> None:
        self._ended = True


@asynccontextmanager
async def receive_form(
    request: Request,
    settings: Settings,
    fields: Collection[str],
    incoming: Path | None = None,
    *,
    on_file: OnFile | None = None,
) -> AsyncIterator[Form]:
    """Yield the whole form; its file is in the folder `incoming` until the end of the block.

    `on_file` gets the fields that came before the file, and may refuse it by an error.

    Nothing is left if the client disconnects. Raises InvalidOptions, TooLarge.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidOptions("Send multipart/form-data with a boundary.")
    require_size(request, _size_limit(settings, takes_file=incoming is not None))
    form = Form(settings, options[b"boundary"], fields, incoming, on_file)
    try:
        async for batch in _batches(request.stream()):
            await anyio.to_thread.run_sync(form.feed, batch)
        form.finish()
        yield form
    finally:
        form.close()


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The largest size of a body, and the message for a larger one."""

    bytes: int
    message: str

    def require(self, size: int) -> None:
        """Raise TooLarge if the size is larger."""
        if size > self.bytes:
            raise TooLarge(self.message)


def require_size(request: Request, limit: SizeLimit) -> None:
    """Raise TooLarge if the request's Content-Length is too large."""
    length = request.headers.get("content-length", "")
    if length.isdecimal():
        limit.require(int(length))


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Return the whole body. Raises TooLarge as soon as it is longer than `max_bytes`."""
    limit = SizeLimit(max_bytes, _request_too_large(max_bytes))
    require_size(request, limit)
    body = bytearray()
    async for chunk in _with_time_limit(request.stream()):
        body += chunk
        limit.require(len(body))
    return bytes(body)


async def _batches(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    batch = bytearray()
    async for chunk in _with_time_limit(chunks):
        batch += chunk
        if len(batch) >= _BATCH_BYTES:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)


async def _with_time_limit(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks. Raises InvalidOptions if the client is silent or slow, because it would
    keep an upload slot that others wait for. Only the time spent waiting for the client counts.
    """
    waited, received = 0.0, 0
    while True:
        allowed = _SLOW_START_SECONDS + received / _LEAST_BYTES_PER_SECOND - waited
        started = time.monotonic()
        try:
            async with asyncio.timeout(min(allowed, _SILENCE_SECONDS)):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise InvalidOptions(
                f"The body is incomplete: {received} bytes came in "
                f"{waited + time.monotonic() - started:.0f} seconds; send at least "
                f"{_LEAST_BYTES_PER_SECOND} bytes a second."
            ) from error
        waited += time.monotonic() - started
        received += len(chunk)
        yield chunk


def _size_limit(settings: Settings, *, takes_file: bool) -> SizeLimit:
    if not takes_file:
        return SizeLimit(_OVERHEAD_BYTES, _request_too_large(_OVERHEAD_BYTES))
    limit = settings.limits.max_bytes
    return SizeLimit(
        _OVERHEAD_BYTES + limit, f"The file is larger than limits.max_bytes ({limit} bytes)."
    )


def _request_too_large(max_bytes: int) -> str:
    return f"The request is larger than {max_bytes} bytes."


def _unescaped(filename: bytes) -> bytes:
    """Return the name before its encoding by the HTML standard's rule for multipart forms.

    The rule escapes these three but not the per cent sign, so a literal %22 becomes a quote.
    """
    for escaped, letter in _ESCAPES:
        filename = filename.replace(escaped, letter)
    return filename


def _parser(boundary: bytes, callbacks: MultipartCallbacks) -> MultipartParser:
    try:
        return MultipartParser(boundary, callbacks)
    except FormParserError as error:
        raise _malformed(str(error)) from error


def _malformed(reason: str) -> InvalidOptions:
    return InvalidOptions(f"The body is not valid multipart/form-data: {reason}.")
