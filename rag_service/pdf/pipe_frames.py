"""Frames on the pipe between a worker process and its render child: JSON, then raw bytes.

JSON and not pickle: the child reads hostile files, so nothing it sends may run code in the parent.
"""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import dataclass, field
from typing import Any, BinaryIO

_LENGTHS = struct.Struct(">II")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: `head` is small, `body` is a JPEG or empty."""

    head: dict[str, Any]
    body: bytes = field(default=b"", repr=False)


def encode(frame: Frame) -> bytes:
    """Return two big-endian 32-bit lengths, the head as JSON, the body."""
    # Escaped to ASCII: UTF-8 cannot encode a lone surrogate in a message.
    head = json.dumps(frame.head, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(head), len(frame.body)) + head + frame.body


def read(stream: BinaryIO) -> Frame | None:
    """Return the next frame, or None at the end of the stream."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head_length, body_length = _LENGTHS.unpack(lengths)
    return Frame(json.loads(stream.read(head_length)), stream.read(body_length))


async def receive(stream: asyncio.StreamReader) -> Frame:
    """Return the next frame. Raises asyncio.IncompleteReadError at the end of the stream."""
    head_length, body_length = _LENGTHS.unpack(await stream.readexactly(_LENGTHS.size))
    head = json.loads(await stream.readexactly(head_length))
    return Frame(head, await stream.readexactly(body_length) if body_length else b"")
