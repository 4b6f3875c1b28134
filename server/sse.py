"""Server-sent events: the stream of one call, with heartbeats, a single end and no lost errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .calls import Call, CallEnded
from .errors import ApiError, internal

log = logging.getLogger("palmette.server")

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": waiting\n\n"
_SEND_TIMEOUT_S = 60.0  # a client that takes nothing for so long is gone

_encoder = msgspec.json.Encoder()


def encode(value: Any) -> bytes:
    """JSON in UTF-8."""
    return _encoder.encode(value)


def event(value: Any) -> bytes:
    """One event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventStream(Response):
    """Sends `events`, then `[DONE]`; an ApiError becomes one error event and the end.

    Owns the call: it is closed whatever happens, so a client that goes away frees its pages.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        events: AsyncIterator[bytes],
        *,
        pause_s: float,
        headers: Mapping[str, str] | None = None,
    ):
        """`pause_s`: the longest time between two events, heartbeats included."""
        self._call = call
        self._events = events
        self._patience_s = _SEND_TIMEOUT_S + pause_s
        self.status_code = 200
        self.background = None
        self.init_headers(
            {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            clock = asyncio.get_running_loop().time
            # One limit for the whole stream, moved on once a second at most: a timer per event
            # would cost as much as the event.
            async with asyncio.timeout(self._patience_s) as limit:
                moved = clock()
                async for chunk in self._guarded():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if (now := clock()) - moved > 1.0:
                        moved = now
                        limit.reschedule(now + self._patience_s)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except CallEnded:
            pass
        except TimeoutError:
            log.info("a client took nothing of its stream for %.0f s", _SEND_TIMEOUT_S)
        finally:
            self._call.close()

    async def _guarded(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._events:
                yield chunk
            yield DONE
        except CallEnded:
            raise
        except ApiError as error:
            yield event(error.body)
        except Exception:  # the fault boundary of one stream: its client must hear of it
            log.exception("a stream failed")
            yield event(internal().body)
