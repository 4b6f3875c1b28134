"""uvicorn with a drain: a signal first lets running requests end.

SIGTERM or SIGINT: not ready and no new requests at once; running ones finish within the drain
timeout, the rest get an error event; then the listening socket closes and the exit status is 0.
A second signal ends it now.
"""

from __future__ import annotations

import asyncio
import logging
from types import FrameType

from fastapi import FastAPI
from uvicorn import Config, Server

from .bounded_http import bounded_protocol
from .config import ServerConfig
from .context import ServerContext

log = logging.getLogger("palmette.server")

_DELIVERY_S = 1.0  # for the error events of what the drain timeout cut off
_CLOSE_S = 2  # for connections to close after the drain


class DrainingServer(Server):
    """Serves one application made by `create_app`."""

    def __init__(self, app: FastAPI, config: ServerConfig):
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # `Boundary` logs failures
        super().__init__(
            Config(
                app,
                http=bounded_protocol(config.max_header_bytes, config.header_timeout_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(config.keep_alive_s),
                timeout_graceful_shutdown=_CLOSE_S,
            )
        )
        self._context: ServerContext = app.state.palmette
        self._drain_timeout_s = config.drain_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        await super().main_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: the first signal drains, the second one ends."""
        if self._context.draining or self._loop is None:
            self.force_exit = self.should_exit = True
            return
        self._context.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._finish_calls())

    async def _finish_calls(self) -> None:
        calls = self._context.calls
        log.info("draining %d calls", calls.num_open)
        if not await calls.wait_idle(self._drain_timeout_s):
            self._context.stop_all("the server is shutting down")
            await calls.wait_idle(_DELIVERY_S)
        self.should_exit = True
