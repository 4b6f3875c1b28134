"""From a call to an HTTP response: as one JSON body, or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import Any, Protocol

from fastapi import Response

from palmette.runtime.request import Output

from .calls import Call, CallEnded, Choice
from .config import ServerConfig
from .sse import HEARTBEAT, EventStream, encode, event

Chunk = dict[str, Any]

# An event that tells the whole state grows with the answer, so one per token would be quadratic in
# bytes. After a round of such events the next one waits until the stream is down to this rate; what
# comes meanwhile is in it. Short answers are not delayed: 4 kB cost half a millisecond.
CUMULATIVE_BYTES_PER_S = 8e6
_WRITE_BYTES = 64 * 1024  # what came together goes out together, up to about so much
_CLIENT_GONE = 499  # nginx's; nobody is there to read it


class OutputFormat(Protocol):
    """One API's shape of answers."""

    is_cumulative: bool  # every event tells the whole state of its choice

    def prepare(self, choice: Choice) -> Iterator[None]:
        """Encode what of a choice is long; the event loop runs wherever this yields.

        Not called for a stream that is not cumulative.
        """
        ...

    def whole(self, choices: Sequence[Choice]) -> Any:
        """The body of an answer that is not streamed; all choices are prepared."""
        ...

    def begin(self) -> Iterable[Chunk]:
        """Events before the first output."""
        ...

    def chunks(self, choice: Choice, output: Output) -> Iterable[Chunk]:
        """Events for one Output; `choice` has it already and is prepared."""
        ...

    def end(self) -> Iterable[Chunk]:
        """Events after the last output."""
        ...


class JsonBody(Response):
    """A value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content)


async def json_response(call: Call, formatted: OutputFormat) -> Response:
    """Wait for the end, then answer. A client that goes away ends the call."""
    try:
        choices = await call.collect()
        for choice in choices:
            await _prepare(call, formatted, choice)
        return JsonBody(formatted.whole(choices))
    except CallEnded:
        return Response(status_code=_CLIENT_GONE)
    finally:
        call.close()


async def stream_response(call: Call, formatted: OutputFormat, config: ServerConfig) -> Response:
    """Answer as events; errors before the first output are still plain HTTP errors."""
    try:
        first = await call.next(config.sse_heartbeat_s)
    except CallEnded:
        call.close()
        return Response(status_code=_CLIENT_GONE)
    except BaseException:
        call.close()
        raise
    heartbeat_s = config.sse_heartbeat_s
    events = _events(call, formatted, first, heartbeat_s)
    # a cumulative event may wait as long again, see `_latest`
    return EventStream(call, events, pause_s=2 * heartbeat_s + 1)


async def _events(
    call: Call,
    formatted: OutputFormat,
    arrived: list[tuple[Choice, Output]],
    heartbeat_s: float,
) -> AsyncIterator[bytes]:
    for chunk in formatted.begin():
        yield event(chunk)
    while True:
        started, num_bytes = time.monotonic(), 0
        if arrived:
            data = b""
            for choice, output in arrived:
                if formatted.is_cumulative:
                    await _prepare(call, formatted, choice)
                data += b"".join(map(event, formatted.chunks(choice, output)))
                if len(data) > _WRITE_BYTES:
                    num_bytes += len(data)
                    yield data
                    data = b""
                    await asyncio.sleep(0)
            call.check_client()
            num_bytes += len(data)
            if data:
                yield data
        elif call.is_open:
            yield HEARTBEAT
        else:
            break
        arrived = await call.next(heartbeat_s)
        if formatted.is_cumulative:
            until = started + min(num_bytes / CUMULATIVE_BYTES_PER_S, heartbeat_s)
            arrived = await _latest(call, arrived, until)
    for chunk in formatted.end():
        yield event(chunk)


async def _prepare(call: Call, formatted: OutputFormat, choice: Choice) -> None:
    """Let the loop serve others before each piece; stop at once when the client is gone."""
    await asyncio.sleep(0)
    call.check_client()
    for _ in formatted.prepare(choice):
        await asyncio.sleep(0)
        call.check_client()


async def _latest(
    call: Call, arrived: list[tuple[Choice, Output]], until: float
) -> list[tuple[Choice, Output]]:
    """The last Output of each choice until then, or until all have ended."""
    latest = {choice.index: (choice, output) for choice, output in arrived}
    while call.is_open and (wait_s := until - time.monotonic()) > 0:
        for choice, output in await call.next(wait_s):
            latest[choice.index] = (choice, output)
    return list(latest.values())
