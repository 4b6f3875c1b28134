"""Server-sent events: any cut of the bytes, and no line break but the line feed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from palmette.lang.sse import DataLines, data_lines, data_lines_async

BREAKS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei"
DATA = [json.dumps({"text": BREAKS}, ensure_ascii=False).encode(), b'{"b": "\\r\\n"}', b"[DONE]"]
BODY = b": hello\r\n\r\ndata: %s\r\n\r\ndata:%s\n\nevent: x\n\ndata: %s\n\n" % tuple(DATA)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_data_does_not_depend_on_how_the_bytes_are_cut(size: int) -> None:
    chunks = [BODY[begin : begin + size] for begin in range(0, len(BODY), size)]

    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def read() -> list[bytes]:
        return [data async for data in data_lines_async(arriving())]

    assert list(data_lines(chunks)) == DATA
    assert asyncio.run(read()) == DATA


def test_a_last_line_without_an_end_counts() -> None:
    lines = DataLines()
    assert lines.push(b"data: 1\n\ndata: 2") == [b"1"]
    assert lines.flush() == [b"2"]
    assert lines.flush() == []
