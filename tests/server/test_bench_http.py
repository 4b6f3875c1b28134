"""The bench client's HTTP: bodies however they are framed and cut, kept and lost connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from palmette.server.bench_http import Answer, HttpError, StreamClient, _Chunks

CHUNKED = b"7;note=x\r\ndata: a\r\n3\r\n\r\n\n\r\n0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n"


@pytest.mark.parametrize("size", range(1, len(CHUNKED) + 1))
def test_chunks_are_joined_however_they_are_cut(size: int) -> None:
    chunks = _Chunks()
    parts = [CHUNKED[i : i + size] for i in range(0, len(CHUNKED), size)]
    assert b"".join(map(chunks.push, parts)) == b"data: a\r\n\n"
    assert chunks.is_over


def exchange(answers: list[bytes], calls: Callable[[StreamClient], Awaitable[None]]) -> int:
    """Runs `calls` against a server that gives `answers` in turn; one that ends with b'CLOSE' is
    followed by the end of its connection. Returns how many connections were made."""
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        while answers:
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            await reader.readexactly(2)
            answer = answers.pop(0)
            writer.write(answer.removesuffix(b"CLOSE"))
            if answer.endswith(b"CLOSE"):
                break
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = StreamClient(f"http://127.0.0.1:{port}", {}, timeout_s=10)
        try:
            await calls(client)
        finally:
            await client.close()
            server.close()

    asyncio.run(run())
    return num_connections


async def body(client: StreamClient) -> str:
    async with client.post("/x", b"{}") as answer:
        assert isinstance(answer, Answer) and answer.status == 200
        return await answer.text()


def test_a_connection_serves_the_next_call() -> None:
    async def calls(client: StreamClient) -> None:
        assert await body(client) == "data: a\r\n\n"
        assert await body(client) == "four"

    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED
    assert exchange([chunked, HEAD + b"content-length: 4\r\n\r\nfour"], calls) == 1


def test_a_connection_that_the_server_closed_is_made_anew() -> None:
    async def calls(client: StreamClient) -> None:
        assert await body(client) == "one"
        await asyncio.sleep(0.05)
        assert await body(client) == "two"

    answers = [
        HEAD + b"content-length: 3\r\n\r\noneCLOSE",
        HEAD + b"connection: close\r\n\r\ntwoCLOSE",
    ]
    assert exchange(answers, calls) == 2


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"content-length: 9\r\n\r\nfourCLOSE",
        HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nfourCLOSE",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\nfourCLOSE",
        b"not HTTP at all\r\n\r\nCLOSE",
        b"CLOSE",
    ],
)
def test_an_answer_that_is_cut_or_no_http_is_an_error(answer: bytes) -> None:
    async def calls(client: StreamClient) -> None:
        with pytest.raises(HttpError):
            await body(client)

    exchange([answer], calls)


def test_nobody_listens() -> None:
    async def call() -> None:
        await body(StreamClient("http://127.0.0.1:1", {}, timeout_s=5))

    with pytest.raises(HttpError, match="ConnectionRefusedError"):
        asyncio.run(call())
