"""From a call to an HTTP response: as one JSON body, or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Protocol

from fastapi import Response

from palmette.runtime.request import Output

from .calls import Call, CallEnded, Choice
from .config import ServerConfig
from .sse import HEARTBEAT, EventStream, encode, event

Chunk = dict[str, Any]
_CLIENT_GONE = 499  # nginx's; nobody is there to read it


class OutputFormat(Protocol):
    """One API's shape of answers."""

    def whole(self, choices: Sequence[Choice]) -> Any:
        """The body of an answer that is not streamed."""
        ...

    def begin(self) -> Iterable[Chunk]:
        """Events before the first output."""
        ...

    def chunks(self, choice: Choice, output: Output) -> Iterable[Chunk]:
        """Events for one Output; `choice` has it already."""
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
    return EventStream(call, _events(call, formatted, first, config.sse_heartbeat_s))


async def _events(
    call: Call,
    formatted: OutputFormat,
    arrived: list[tuple[Choice, Output]],
    heartbeat_s: float,
) -> AsyncIterator[bytes]:
    for chunk in formatted.begin():
        yield event(chunk)
    while True:
        if arrived:
            chunks = (c for choice, output in arrived for c in formatted.chunks(choice, output))
            data = b"".join(map(event, chunks))
            if data:
                yield data
        elif call.is_open:
            yield HEARTBEAT
        else:
            break
        arrived = await call.next(heartbeat_s)
    for chunk in formatted.end():
        yield event(chunk)
