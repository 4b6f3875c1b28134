"""Hosted APIs as backends: what OpenAI's and Anthropic's clients have in common.

Each request is one streamed HTTP call in a background thread's event loop. What an API cannot do
is refused when it is asked for, by name.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.runtime.faults import deadline_passed
from palmette.runtime.request import (
    EngineInfo,
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Request,
    RequestError,
)

from .hosted_text import Characters
from .sse import DONE, data_lines_async
from .wire import error_of

CLOSED = "the client was closed"
_MAX_STREAMS = 64
_CODES = {401: "unauthorized", 403: "unauthorized", 404: "not_found", 429: "overloaded"}


@dataclass(slots=True)
class TokenUsage:
    """Tokens that an API has counted, of all requests since `reset`."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    def reset(self) -> None:
        self.prompt_tokens = self.completion_tokens = 0


class HostedClient:
    """An EngineClient of an API that takes text. Subclasses say how a call is written and read."""

    def __init__(
        self,
        info: EngineInfo,
        *,
        base_url: str,
        headers: Mapping[str, str],
        timeout_s: float | None,
        transport: httpx.AsyncBaseTransport | None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.token_usage = TokenUsage()
        self._info = info
        self._characters = Characters()
        self._arrived: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._open: set[str] = set()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._http = httpx.AsyncClient(
            headers=dict(headers), timeout=httpx.Timeout(timeout_s), transport=transport
        )
        self._loop = asyncio.new_event_loop()
        self._streams = asyncio.Semaphore(_MAX_STREAMS)
        self._is_closed = False
        self._closing = threading.Lock()  # held by who closes it or gives it work
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="palmette-api", daemon=True
        )
        self._thread.start()

    # What a subclass says

    def _call(self, request: Request) -> tuple[str, dict[str, object]]:
        """The path and the body of a request.

        Raises:
            RequestError: the API cannot do what is asked.
        """
        raise NotImplementedError

    def _outputs(
        self, request: Request, events: AsyncIterator[dict[str, Any]]
    ) -> AsyncIterator[Output]:
        """The outputs that the events of one answer make; the last has a finish."""
        raise NotImplementedError

    def _answer(
        self, request: Request, path: str, body: dict[str, object]
    ) -> AsyncIterator[Output]:
        """The outputs of one request, which may take other calls than this one, or none.

        Raises:
            RequestError: what the API gives is of no use to it.
        """
        return self._outputs(request, self._events(path, body))

    # EngineClient

    def submit(self, requests: Sequence[Request]) -> None:
        calls = [self._call(request) for request in requests]
        with self._closing:
            if self._is_closed:
                raise RequestError(CLOSED, code="unavailable")
            self._open.update(request.request_id for request in requests)
            for request, (path, body) in zip(requests, calls, strict=True):
                self._loop.call_soon_threadsafe(self._start, request, path, body)

    def abort(self, request_ids: Sequence[str]) -> None:
        with self._closing:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._cancel, list(request_ids))

    def poll(self) -> list[Output]:
        if not self._open:
            return []
        outputs = [self._arrived.get()]
        while not self._arrived.empty():
            outputs.append(self._arrived.get_nowait())
        for output in outputs:
            if output.finish is not None:
                self._open.discard(output.request_id)
                self.token_usage.prompt_tokens += output.usage.prompt_tokens
                self.token_usage.completion_tokens += output.usage.completion_tokens
        return outputs

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """One id for each character; the API's own tokens are not known."""
        return self._characters.encode(text, parse_special=parse_special)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._characters.decode(token_ids)

    def info(self) -> EngineInfo:
        return self._info

    def flush_cache(self) -> bool:
        """There is nothing here to flush."""
        return False

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # In the background thread

    async def _shut_down(self) -> None:
        await asyncio.sleep(0)  # what was submitted begins, so that it has an end
        jobs = list(self._jobs.values())
        self._cancel(list(self._jobs))
        await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.sleep(0)  # their ends are told
        await self._http.aclose()

    def _cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._jobs:
                self._jobs[request_id].cancel()

    def _start(self, request: Request, path: str, body: dict[str, object]) -> None:
        job = self._loop.create_task(self._run(request, path, body))
        self._jobs[request.request_id] = job
        job.add_done_callback(lambda job: self._end(request.request_id, job))

    def _end(self, request_id: str, job: asyncio.Task[None]) -> None:
        """Also of a call that was cancelled before it began: it has an output, too."""
        self._jobs.pop(request_id, None)
        if job.cancelled():
            finish = Finish(reason=FinishReason.ABORT)
            self._arrived.put(Output(request_id=request_id, finish=finish))

    async def _run(self, request: Request, path: str, body: dict[str, object]) -> None:
        error = ErrorInfo(code="unreachable", message="the API ended the stream too early")
        try:
            async with self._streams, asyncio.timeout(request.deadline_s):
                async for output in self._answer(request, path, body):
                    self._arrived.put(output)
                    if output.finish is not None:
                        return
        except TimeoutError:
            error = deadline_passed(request)
        except httpx.HTTPError as failure:
            message = f"{self.base_url} cannot be reached: {failure or type(failure).__name__}"
            error = ErrorInfo(code="unreachable", message=message)
        except Refused as refused:
            error = refused.info
        except RequestError as refused:
            error = ErrorInfo(code=refused.code, message=str(refused), field=refused.field)
        except Exception as failure:  # the fault boundary of one call: whoever polls must hear
            message = f"the answer of {self.base_url} is not understood: {failure!r}"
            error = ErrorInfo(code="http", message=message)
        finish = Finish(reason=FinishReason.ERROR)
        self._arrived.put(Output(request_id=request.request_id, finish=finish, error=error))

    async def _events(self, path: str, body: dict[str, object]) -> AsyncIterator[dict[str, Any]]:
        """The JSON of one answer: its events, or the whole where it is not streamed."""
        if not path:
            return  # nothing is asked for
        async with self._http.stream("POST", self.base_url + path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise Refused(response.status_code, error_of(response.content))
            if not body.get("stream"):
                yield json.loads(await response.aread())
                return
            async for data in data_lines_async(response.aiter_bytes()):
                if data == DONE:
                    return
                event = msgspec.json.decode(data)
                if isinstance(event.get("error"), dict):
                    raise Refused(200, error_of(data))
                yield event


class Refused(Exception):
    """An answer other than success."""

    def __init__(self, status: int, info: ErrorInfo) -> None:
        if not info.message.strip():
            message = f"the API answered with the status {status} and nothing else"
            info = ErrorInfo(code=info.code, message=message)
        super().__init__(info.message)
        code = _CODES.get(status, "unavailable" if status >= 500 else info.code)
        self.info = ErrorInfo(code=code, message=info.message, field=info.field)


def check_text(grammar: GrammarSpec | None, text: str) -> ErrorInfo | None:
    """What is wrong with an answer: an API's word for it is not enough."""
    if grammar is None:
        return None
    import jsonschema_rs

    try:
        value = json.loads(text)
        if grammar.kind == GrammarKind.JSON_SCHEMA:
            jsonschema_rs.validator_for(json.loads(grammar.source)).validate(value)
    except (ValueError, jsonschema_rs.ValidationError) as error:
        message = f"json_schema: the API's answer breaks the schema: {str(error).splitlines()[0]}"
        return ErrorInfo(code="constraint", message=message)
    return None
