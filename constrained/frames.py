"""Messages between a compile worker and its parent: JSON and raw bytes, never pickles."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

_SIZES = struct.Struct("<II")  # of the JSON text and of the bytes


def write(stream: IO[bytes], header: dict[str, Any], body: bytes = b"") -> None:
    text = json.dumps(header).encode()
    stream.write(_SIZES.pack(len(text), len(body)))
    stream.write(text)
    stream.write(body)
    stream.flush()


def read(stream: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None at the end of the stream, also in the middle of a message."""
    sizes = stream.read(_SIZES.size)
    if len(sizes) < _SIZES.size:
        return None
    text_size, body_size = _SIZES.unpack(sizes)
    text, body = stream.read(text_size), stream.read(body_size)
    if len(text) < text_size or len(body) < body_size:
        return None
    return json.loads(text), body
