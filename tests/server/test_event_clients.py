"""Our clients of other servers' event streams: text with any of Unicode's line breaks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from palmette.server.bench_client import Endpoint
from palmette.server.chat import RemoteChat

BREAKS = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei"


@pytest.fixture
def url() -> Iterator[str]:
    """A server that answers a chat and a completion with BREAKS, not escaped."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "m"}]}).encode(), "application/json")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            choice = {"delta": {"content": BREAKS}, "text": BREAKS, "finish_reason": "stop"}
            event = json.dumps({"choices": [choice]}, ensure_ascii=False).encode()
            self._send(b"data: %s\n\ndata: [DONE]\n\n" % event, "text/event-stream")

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_terminal_chat_shows_every_line_break(url: str) -> None:
    chat = RemoteChat(url, None, {})
    pieces = list(chat.answer([{"role": "user", "content": "x"}]))
    chat.close()
    assert "".join(piece.text for piece in pieces) == BREAKS


def test_the_benchmark_client_reads_every_line_break(url: str) -> None:
    async def call() -> str:
        async with httpx.AsyncClient(base_url=url) as client:
            endpoint = await Endpoint.open(client, model=None, clock=lambda: 1.0)
            timeline = await endpoint.complete("x", "x", 3)
            await endpoint.close()
            assert timeline.error is None
            return timeline.text

    assert asyncio.run(call()) == BREAKS
