"""POST over HTTP/1.1 with the answer as a stream: what a client under test needs, and no more.

A general client costs more CPU per event than a server does, on the cores that the server wants.
This one keeps connections open and understands bodies in chunks, of a length, and up to the end
of the connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

_READ_BYTES = 64 * 1024
_LIMIT = 1024 * 1024  # of a line or the headers

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpError(Exception):
    """The endpoint cannot be reached, or what it sent is not HTTP."""


@dataclass(slots=True)
class Answer:
    """The head of an answer; iterate over `body` for its bytes as they come."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: AsyncIterator[bytes]
    is_complete: bool = False  # the body has been read to its end

    async def text(self) -> str:
        return b"".join([data async for data in self.body]).decode("utf-8", "replace")


class StreamClient:
    """Connections to one server. `timeout_s`: of a call without news."""

    def __init__(self, base_url: str, headers: Mapping[str, str], *, timeout_s: float) -> None:
        parts = urlsplit(base_url)
        self._host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path.rstrip("/")
        lines = {"host": parts.netloc, "accept-encoding": "identity", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._timeout_s = timeout_s
        self._idle: list[Pair] = []

    async def close(self) -> None:
        while self._idle:
            await _end(self._idle.pop()[1])

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[Answer]:
        """Send JSON; gives the answer once its headers are there.

        Raises:
            HttpError: no connection, no HTTP, or the answer ended early; also while it is read.
        """
        request = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._head}content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body
        writer: asyncio.StreamWriter | None = None
        try:
            (reader, writer), answer = await self._exchange(request)
            yield answer
            if answer.is_complete and answer.headers.get("connection", "").lower() != "close":
                self._idle.append((reader, writer))
                writer = None
        except TimeoutError:
            raise HttpError(f"nothing came for {self._timeout_s:.0f} s") from None
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise HttpError(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        finally:
            if writer is not None:
                await _end(writer)

    async def _exchange(self, request: bytes) -> tuple[Pair, Answer]:
        """On a kept connection if it still lives, else on a new one."""
        while self._idle:
            pair = self._idle.pop()
            try:
                return pair, await self._ask(pair, request)
            except (ConnectionError, EOFError):  # the server had closed it meanwhile
                await _end(pair[1])
        pair = await asyncio.wait_for(
            asyncio.open_connection(self._host, self._port, ssl=self._ssl, limit=_LIMIT),
            self._timeout_s,
        )
        try:
            return pair, await self._ask(pair, request)
        except BaseException:
            await _end(pair[1])
            raise

    async def _ask(self, pair: Pair, request: bytes) -> Answer:
        reader, writer = pair
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(self._timeout_s):
            head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ValueError(f"not HTTP/1.1: {first[:80]!r}")
        named = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in named}
        answer = Answer(int(rest[:3]), headers, _nothing())
        answer.body = self._body(reader, answer)
        return answer

    async def _body(self, reader: asyncio.StreamReader, answer: Answer) -> AsyncIterator[bytes]:
        if answer.headers.get("transfer-encoding", "").lower() == "chunked":
            chunks = _Chunks()
            while not chunks.is_over:
                data = await self._read(reader)
                if not data:
                    raise EOFError("the connection ended inside the answer")
                if payload := chunks.push(data):
                    yield payload
            answer.is_complete = True
            return
        length = answer.headers.get("content-length")
        left = None if length is None else int(length)
        while left is None or left > 0:
            data = await self._read(reader)
            if not data:
                if left is None:
                    return
                raise EOFError("the connection ended inside the answer")
            left = None if left is None else left - len(data)
            yield data
        answer.is_complete = True

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(self._timeout_s):
            return await reader.read(_READ_BYTES)


class _Chunks:
    """push(bytes) -> the payload of the chunks in them, however they are cut."""

    def __init__(self) -> None:
        self._pending = b""  # of a size line
        self._left = 0  # of the current chunk, its line end included
        self.is_over = False

    def push(self, data: bytes) -> bytes:
        data = self._pending + data
        payload: list[bytes] = []
        at = 0
        while not self.is_over:
            if self._left > 0:
                part = data[at : at + self._left]
                at += len(part)
                # the last two bytes of a chunk are its line end
                payload.append(part[: max(0, min(len(part), self._left - 2))])
                self._left -= len(part)
                if self._left > 0:
                    break
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            size = int(data[at:end].partition(b";")[0], 16)
            if size == 0:  # trailers may follow, up to an empty line
                self.is_over = data.endswith(b"\r\n\r\n")
                break
            at = end + 2
            self._left = size + 2
        self._pending = data[at:]
        return b"".join(payload)


async def _end(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
