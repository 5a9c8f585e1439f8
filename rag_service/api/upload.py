"""Multipart bodies taken apart while they arrive: the file straight onto the disk, never whole
in memory. Used by the routes that take files or forms.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
# Boundaries, part headers and options of one body.
_OVERHEAD_BYTES = 64 * 1024
_FIELD_BYTES = 8 * 1024
# Parsed, hashed and written in one go by a thread.
_BATCH_BYTES = 1024 * 1024
_SILENCE_SECONDS = 60.0
_ESCAPES = ((b"%0A", b"\n"), (b"%0D", b"\r"), (b"%22", b'"'))


class Form:
    """One multipart body: its text fields and, where one is allowed, its file.

    Fed by one thread at a time. Raises InvalidOptions for what is no such form, TooLarge.
    """

    def __init__(
        self, settings: Settings, boundary: bytes, fields: Collection[str], *, takes_file: bool
    ) -> None:
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._spool: IncomingFile | None = None
        self._settings = settings
        self._allowed = fields
        self._takes_file = takes_file
        self._most = _most(settings, takes_file=takes_file)
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
        """Take the next bytes of the body."""
        self._bytes += len(data)
        self._most.require(self._bytes)
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _malformed(str(error)) from error

    def finish(self) -> None:
        """The body has ended; a body that broke off in the middle is none."""
        if not self._ended:
            raise _malformed("it ends before its last boundary")

    @property
    def spool(self) -> IncomingFile:
        """The file. Raises InvalidOptions where the form has none."""
        if self._spool is None:
            raise InvalidOptions("file: the form has no part of this name.")
        return self._spool

    def close(self) -> None:
        """Remove what has been written of the file."""
        if self._spool is not None:
            self._spool.close()

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
        if name == FILE and self._takes_file:
            self._open_file(options.get(b"filename", b""))
            return
        if name not in self._allowed:
            raise InvalidOptions(f"There is no field {name[:80]!r}; there are: {self._names()}.")
        if name in self.fields:
            raise InvalidOptions(f"{name}: the form has this field twice.")
        self._field = name
        self._value = bytearray()

    def _open_file(self, filename: bytes) -> None:
        if self._spool is not None:
            raise InvalidOptions("file: one request takes one file.")
        self._field = None
        self.filename = _unescaped(filename).decode("utf-8", "replace")
        self._spool = IncomingFile(self._settings)

    def _names(self) -> str:
        return ", ".join([*([FILE] if self._takes_file else []), *self._allowed])

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self.spool.write(data[start:end])
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
            raise InvalidOptions(f"{self._field}: this is not UTF-8.") from error

    def _end(self) -> None:
        self._ended = True


@asynccontextmanager
async def received(
    request: Request, settings: Settings, fields: Collection[str], *, takes_file: bool
) -> AsyncIterator[Form]:
    """The whole form, its file on the disk for the length of the block.

    A sender that hangs up leaves nothing behind. Raises InvalidOptions, TooLarge.
    """
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise InvalidOptions("Send multipart/form-data with a boundary.")
    require_size(request, _most(settings, takes_file=takes_file))
    form = Form(settings, options[b"boundary"], fields, takes_file=takes_file)
    try:
        async for batch in _batches(request.stream()):
            await anyio.to_thread.run_sync(form.feed, batch)
        form.finish()
        yield form
    finally:
        form.close()


@dataclass(frozen=True, slots=True)
class Most:
    """The size that a body may have, and what to say of one that is larger."""

    bytes: int
    refusal: str

    def require(self, size: int) -> None:
        """Raise TooLarge for a larger size."""
        if size > self.bytes:
            raise TooLarge(self.refusal)


def require_size(request: Request, most: Most) -> None:
    """Raise TooLarge where the request itself says that it is too large."""
    length = request.headers.get("content-length", "")
    if length.isdecimal():
        most.require(int(length))


async def body_of(request: Request, most_bytes: int) -> bytes:
    """A small body, whole. Raises TooLarge as soon as it is over `most_bytes`."""
    most = Most(most_bytes, _request_too_large(most_bytes))
    require_size(request, most)
    body = bytearray()
    async for chunk in _impatient(request.stream()):
        body += chunk
        most.require(len(body))
    return bytes(body)


async def _batches(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    batch = bytearray()
    async for chunk in _impatient(chunks):
        batch += chunk
        if len(batch) >= _BATCH_BYTES:
            yield bytes(batch)
            batch.clear()
    if batch:
        yield bytes(batch)


async def _impatient(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks, unless the sender falls silent: it would hold a place that others wait for."""
    while True:
        try:
            async with asyncio.timeout(_SILENCE_SECONDS):
                chunk = await anext(chunks)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise InvalidOptions(
                f"The body broke off: nothing more came for {_SILENCE_SECONDS:g} seconds."
            ) from error
        yield chunk


def _most(settings: Settings, *, takes_file: bool) -> Most:
    if not takes_file:
        return Most(_OVERHEAD_BYTES, _request_too_large(_OVERHEAD_BYTES))
    limit = settings.limits.max_bytes
    return Most(
        _OVERHEAD_BYTES + limit, f"The file is larger than limits.max_bytes ({limit} bytes)."
    )


def _request_too_large(most_bytes: int) -> str:
    return f"The request is larger than {most_bytes} bytes."


def _unescaped(filename: bytes) -> bytes:
    """The name as it was before the form was encoded, by the HTML standard's multipart rule.

    It escapes these three and not the per cent sign, so a literal %22 cannot be told apart.
    """
    for escaped, letter in _ESCAPES:
        filename = filename.replace(escaped, letter)
    return filename


def _parser(boundary: bytes, callbacks: MultipartCallbacks) -> MultipartParser:
    try:
        return MultipartParser(boundary, callbacks)
    except FormParserError as error:
        raise _malformed(str(error)) from error


def _malformed(why: str) -> InvalidOptions:
    return InvalidOptions(f"The body is not valid multipart/form-data: {why}.")
