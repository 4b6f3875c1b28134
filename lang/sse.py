"""The data of server-sent events, out of the bytes of an answer however they are cut.

Lines end with a line feed, or a carriage return and a line feed, and with nothing else: the JSON
in them may hold U+2028, U+2029 and U+0085, at which `str.splitlines` and httpx's `iter_lines`
break. One event is one `data:` line here, as every server of language models sends it.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import Any

import msgspec

DONE = b"[DONE]"  # the data of the last event, where a server sends one


class DataLines:
    """push(bytes) -> the data of the lines that they complete; other lines are left out."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the line that is not complete

    def push(self, chunk: bytes) -> list[bytes]:
        if b"\n" not in chunk:
            self._parts.append(chunk)
            return []
        first, *lines = chunk.split(b"\n")
        lines.insert(0, b"".join((*self._parts, first)))
        self._parts = [lines.pop()]
        return _data(lines)

    def flush(self) -> list[bytes]:
        """End the stream: its last line may lack an end."""
        last, self._parts = b"".join(self._parts), []
        return _data([last])


def _data(lines: Iterable[bytes]) -> list[bytes]:
    return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def data_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    lines = DataLines()
    for chunk in chunks:
        yield from lines.push(chunk)
    yield from lines.flush()


async def data_lines_async(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    lines = DataLines()
    async for chunk in chunks:
        for data in lines.push(chunk):
            yield data
    for data in lines.flush():
        yield data


async def json_events(chunks: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events, without the [DONE] at their end."""
    async for data in data_lines_async(chunks):
        if data == DONE:
            continue
        event: object = msgspec.json.decode(data)
        if not isinstance(event, dict):
            raise ValueError("an event of the server is not a JSON object")
        yield event
