"""The socket that the server listens on."""

from __future__ import annotations

import asyncio
import socket

import pytest

from palmette.server.config import UserError
from palmette.server.serve import bind


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_connections_do_not_wait_for_acknowledgements(host: str) -> None:
    try:
        listener = bind(host, 0)
    except UserError:
        pytest.skip(f"no {host} here")

    async def no_delay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            sock = writer.get_extra_info("socket")
            accepted.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(on_connection, sock=listener):
            _, client = await asyncio.open_connection(*listener.getsockname()[:2])
            result = await accepted
            client.close()
            await client.wait_closed()
            return result

    assert asyncio.run(no_delay()) != 0
