"""uvicorn's HTTP parser with bounds on headers: bytes, and seconds until they are complete."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from .errors import ApiError
from .sse import encode

_HEADER_OVERHEAD = 4  # colon, blank, line end


class BoundedProtocol(HttpToolsProtocol):
    """One connection. Subclasses set the two limits; see `bounded_protocol`."""

    max_header_bytes = 64 * 1024
    header_timeout_s = 10.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        super().__init__(config, server_state, app_state, _loop)
        self._in_headers = True  # a new connection owes us a request
        self._num_header_bytes = 0  # received while headers are incomplete
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_headers = self._in_headers
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._num_header_bytes += len(data) if was_in_headers else 0
            if self._num_header_bytes > self.max_header_bytes:
                self._refuse(431, "the headers are too large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._num_header_bytes = 0
        if self._header_timer is None:
            self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._stop_timer()
        size = len(self.url) + sum(
            len(name) + len(value) + _HEADER_OVERHEAD for name, value in self.headers
        )
        if size > self.max_header_bytes:
            self._refuse(431, "the headers are too large")
            raise ValueError("headers too large")  # ends the parser; the answer is out
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            self._refuse(400, "the request is not valid HTTP")

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(
            self.header_timeout_s, self._refuse, 408, "the headers did not arrive in time"
        )

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application, then close."""
        self._header_timer = None
        if self.transport.is_closing():
            return
        body = encode(ApiError(status, message, code="invalid_http").body)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()


def bounded_protocol(max_header_bytes: int, header_timeout_s: float) -> type[BoundedProtocol]:
    """The protocol class with these limits, for `uvicorn.Config(http=...)`."""
    limits = {"max_header_bytes": max_header_bytes, "header_timeout_s": header_timeout_s}
    return type("LimitedProtocol", (BoundedProtocol,), limits)
