"""Messages between a store and its clients: four bytes of length, then JSON. Nothing is unpickled.

A client opens a connection with `[PROTOCOL, session]`; the server answers `[PROTOCOL, server]`. Then each request
`[number, operation, arguments...]` has one reply `[number, revision, result]`, with a fourth field if it failed.
"""

from __future__ import annotations

import json
import struct
from typing import Any

PROTOCOL = "roundelay-store-1"
HEADER = struct.Struct("!I")
MAX_BYTES = 16 << 20
"""Longest message."""
MAX_HELLO_BYTES = 1024
"""Longest first message, from a client that has not shown who it is."""

_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().decode


class FrameError(Exception):
    """A message is too long or is not a list in JSON."""


def encode(message: list[Any]) -> bytes:
    """Return the message with its length in front. Raises FrameError if it is too long."""
    body = _encode(message).encode()
    if len(body) > MAX_BYTES:
        raise FrameError(f"a message must have at most {MAX_BYTES} bytes (got {len(body)})")
    return HEADER.pack(len(body)) + body


def decode(buffer: bytearray, limit: int = MAX_BYTES) -> list[Any] | None:
    """Remove one message from the front of the buffer and return it; None if it is not complete. Raises FrameError."""
    if len(buffer) < HEADER.size:
        return None
    (length,) = HEADER.unpack_from(buffer)
    if length > limit:
        raise FrameError(f"a message must have at most {limit} bytes (got {length})")
    stop = HEADER.size + length
    if len(buffer) < stop:
        return None
    try:
        message = _decode(buffer[HEADER.size : stop].decode())
    except (ValueError, RecursionError) as error:
        raise FrameError("a message must be JSON") from error
    if not isinstance(message, list) or not message:
        raise FrameError("a message must be a list")
    del buffer[:stop]
    return message
