"""An EngineClient over HTTP: the same programs on a server, with the same token ids.

One background thread runs an event loop with one `httpx.AsyncClient`; every request is a stream of
server-sent events, and all of them share the loop. `poll` takes what has arrived from a queue. A
stream that breaks ends its requests in an error; nothing waits for a dead connection.
"""

from __future__ import annotations

import asyncio
import json
import queue
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from palmette.runtime.faults import deadline_passed
from palmette.runtime.request import (
    EngineInfo,
    ErrorInfo,
    Finish,
    FinishReason,
    Output,
    Release,
    Request,
    RequestError,
)

from .errors import BackendError
from .executor import program_error
from .forecast import Forecast
from .program import Program
from .reaching import unreachable
from .release_sender import ReleaseSender
from .served import RunRequest
from .sse import json_events
from .wire import (
    MAX_TEXTS,
    Batch,
    batches_of,
    engine_info,
    error_of,
    error_of_event,
    sent_json,
)

T = TypeVar("T")
_MAX_STREAMS = 64  # at once, as many as an engine runs; more wait here, not at the server
_ABORT_S = 1.0  # for an aborted stream to end by itself
CLOSED = "the client was closed"
_CALL_TIMEOUT_S = 60.0  # for calls that do not generate
_DEADLINE_GRACE_S = 2.0  # the server keeps a request's deadline; this is for one that does not


class HttpClient:
    """Speaks SGLang's /generate and Palmette's /server_info, /tokenize and /detokenize.

    `verify` is httpx's: a path of a CA bundle, or False. `transport` replaces the network, for
    an application in this process. `timeout_s` bounds the silence of one stream.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        verify: bool | str | None = None,
        timeout_s: float | None = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")  # as other clients are given it
        self._arrived: queue.SimpleQueue[Output] = queue.SimpleQueue()
        self._open: set[str] = set()
        self._info: EngineInfo | None = None
        self._timeout = httpx.Timeout(timeout_s, connect=_CALL_TIMEOUT_S)
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            verify=True if verify is None else verify,
            timeout=_CALL_TIMEOUT_S,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_STREAMS),
            transport=transport,
        )
        self._loop = asyncio.new_event_loop()
        self._streams = asyncio.Semaphore(_MAX_STREAMS)
        self._jobs: set[asyncio.Task[None]] = set()  # streams and aborts
        self._batches: dict[str, tuple[Batch, asyncio.Task[None]]] = {}  # by unfinished request
        self._runs: dict[str, asyncio.Task[None]] = {}  # of programs, by their request
        self._releases = ReleaseSender(self._call_async)
        self._programs: set[str] = set()  # that the server has
        self._runs_programs = True  # as far as known
        self._is_closed = False
        self._closing = threading.Lock()  # held by who closes it or gives it work
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="palmette-http", daemon=True
        )
        self._thread.start()

    # EngineClient

    def submit(self, requests: Sequence[Request]) -> None:
        with self._closing:
            if self._is_closed:
                raise RequestError(CLOSED, code="unavailable")
            batches = list(batches_of([one for one in requests if not isinstance(one, RunRequest)]))
            self._open.update(request.request_id for request in requests)
            self._loop.call_soon_threadsafe(self._start, batches)
            for request in requests:
                if isinstance(request, RunRequest):
                    self._loop.call_soon_threadsafe(self._start_run, request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Does not wait for the server; what it makes of it shows in the outputs."""
        ids = [request_id for request_id in request_ids if request_id in self._open]
        if ids and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._start_abort, ids)

    def release(self, releases: Sequence[Release]) -> None:
        """Told to a server of Palmette's, soon and with few calls; nobody waits for it."""
        if self._info is None or not self._info.version or self._loop.is_closed():
            return
        self._releases.add(releases)
        with suppress(RuntimeError):  # it was closed just now
            self._loop.call_soon_threadsafe(lambda: self._add_job(self._releases.run()))

    def poll(self) -> list[Output]:
        if not self._open:
            return []
        outputs = [self._arrived.get()]
        while not self._arrived.empty():
            outputs.append(self._arrived.get_nowait())
        for output in outputs:
            if output.finish is not None:
                self._open.discard(output.request_id)
        return outputs

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        return self.encode_many([text], parse_special=parse_special)[0]

    def encode_many(self, texts: Sequence[str], *, parse_special: bool = False) -> list[list[int]]:
        """`encode` of several texts with few calls."""
        lists: list[list[int]] = []
        for begin in range(0, len(texts), MAX_TEXTS):
            part = list(texts[begin : begin + MAX_TEXTS])
            body = {"text": part if len(part) > 1 else part[0], "parse_special": parse_special}
            answer = self._post("/tokenize", body | {"add_special_tokens": False})
            tokens = answer["tokens"]
            lists += tokens if len(part) > 1 else [tokens]
        return lists

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._post("/detokenize", {"tokens": list(token_ids)})["text"]
        return text

    def decode_many(self, lists: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of several lists with few calls."""
        texts: list[str] = []
        for begin in range(0, len(lists), MAX_TEXTS):
            part = [list(ids) for ids in lists[begin : begin + MAX_TEXTS]]
            texts += self._post("/detokenize", {"tokens": part})["text"]
        return texts

    def info(self) -> EngineInfo:
        if self._info is None:
            answer = self._call("GET", "/server_info", None)
            self._info = engine_info(answer)
        return self._info

    def server_info(self) -> dict[str, Any]:
        """What the server says of itself right now, as it says it."""
        return self._call("GET", "/server_info", None)

    def flush_cache(self) -> bool:
        try:
            self._post("/flush_cache", {})
        except _Refused as error:
            if error.status < 500:
                return False
            raise
        return True

    def close(self) -> None:
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Programs

    def takes_program(self, program: Program) -> bool:
        """Whether the server runs this program; registers it there, once."""
        if not self._runs_programs or getattr(self, "chat_template_name", None) is not None:
            return False
        try:
            if program.id in self._programs:
                return True
            self._post("/v1/programs", program.to_json())
        except _Refused as error:
            self._runs_programs = error.status not in (404, 405)
            return False
        except (BackendError, ValueError):
            return False  # what cannot be reached says so to the first call; a host function
        self._programs.add(program.id)
        return True

    def forecast(self, program: Program, body: Mapping[str, object]) -> Forecast | None:
        """What the server foresees of runs; None: it does not foresee anything.

        Raises:
            ProgramError: a call fails.
            BackendError: the server refuses; with its message.
        """
        sent = program.sent
        if not self.takes_program(sent):
            return None
        path = f"/v1/programs/{sent.id}/explain"
        try:
            try:
                answer = self._post(path, body, timeout=self._timeout)
            except _Refused as error:
                if error.info.code != "program_not_found":
                    raise
                self._post("/v1/programs", sent.to_json())
                answer = self._post(path, body, timeout=self._timeout)
        except _Refused as error:
            if error.status in (404, 405):
                return None  # an older server
            place = re.fullmatch(r"nodes\[(\d+)\]", error.info.field or "")
            if place is None:
                raise
            raise program_error(program.nodes[int(place[1])], error.info) from None
        return Forecast.from_json(json.dumps(answer["forecast"]))

    def _start_run(self, request: RunRequest) -> None:
        job = self._add_job(self._run_program(request))
        self._runs[request.request_id] = job
        job.add_done_callback(lambda _: self._runs.pop(request.request_id, None))

    async def _run_program(self, request: RunRequest) -> None:
        failure = ErrorInfo(code="unreachable", message="the server ended the stream too early")
        try:
            async with self._streams:
                try:
                    is_over = await self._read_run(request)
                except _Refused as error:
                    if error.status != 404:
                        raise
                    await self._call_async("POST", "/v1/programs", request.program_json)
                    is_over = await self._read_run(request)
                if is_over:
                    return
        except asyncio.CancelledError as error:
            message = str(error) or CLOSED
            self._arrived.put(request.failed(ErrorInfo(code="abort", message=message)))
            raise
        except httpx.HTTPError as error:
            failure = ErrorInfo(code="unreachable", message=unreachable(self.base_url, error))
        except _Refused as error:
            failure = error.info
        except Exception as error:  # the fault boundary of one run: whoever polls must hear
            message = f"the answer of {self.base_url} is not understood: {error!r}"
            failure = ErrorInfo(code="http", message=message)
        self._arrived.put(request.failed(failure))

    async def _read_run(self, request: RunRequest) -> bool:
        """Pass events on; True when the run is complete."""
        path = f"/v1/programs/{request.program_id}/run"
        async with self._client.stream(
            "POST", path, timeout=self._timeout, **sent_json(request.body)
        ) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refused(response)
            async for event in json_events(response.aiter_bytes()):
                if "error" in event and "event" not in event:
                    raise _Refused(200, error_of_event(event))
                output = request.output(event)
                self._arrived.put(output)
                if output.finish is not None:
                    return True
        return False

    # Calls that do not generate

    def _post(
        self,
        path: str,
        body: Mapping[str, object] | bytes,
        timeout: httpx.Timeout | float = _CALL_TIMEOUT_S,
    ) -> dict[str, Any]:
        return self._call("POST", path, body, timeout)

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | bytes | None,
        timeout: httpx.Timeout | float = _CALL_TIMEOUT_S,
    ) -> dict[str, Any]:
        """One call and its JSON answer.

        Raises:
            BackendError: the server cannot be reached or refuses; with its message.
        """
        return self._run(self._call_async(method, path, body, timeout))

    async def _call_async(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | bytes | None,
        timeout: httpx.Timeout | float = _CALL_TIMEOUT_S,
    ) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, timeout=timeout, **sent_json(body))
        except httpx.HTTPError as error:
            raise BackendError(unreachable(self.base_url, error)) from error
        if response.status_code != 200:
            raise _refused(response)
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise BackendError(f"{path}: the answer of {self.base_url} is not JSON") from error
        return answer

    def _run(self, work: Coroutine[object, object, T]) -> T:
        with self._closing:
            if self._is_closed:
                work.close()
                raise BackendError(CLOSED)
            future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise BackendError(CLOSED) from None

    async def _shut_down(self) -> None:
        """End streams and calls; whoever waits for them hears of it."""
        await asyncio.sleep(0)  # what was submitted begins, so that it has an end
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_S):
                await self._releases.send()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel(CLOSED)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        await self._loop.shutdown_asyncgens()

    # Streams; these run in the background thread

    def _start(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            job = self._add_job(self._stream(batch))
            self._batches.update((one.request_id, (batch, job)) for one in batch.requests)

    def _add_job(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        job = self._loop.create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    def _start_abort(self, request_ids: Sequence[str]) -> None:
        jobs: dict[asyncio.Task[None], tuple[Batch, list[str]]] = {}
        for request_id in request_ids:
            if request_id in self._runs:
                self._runs[request_id].cancel("the program was aborted")
            if request_id in self._batches:
                batch, job = self._batches[request_id]
                jobs.setdefault(job, (batch, []))[1].append(request_id)
        for job, (batch, ids) in jobs.items():
            self._add_job(self._abort(batch, job, ids))

    async def _abort(self, batch: Batch, job: asyncio.Task[None], ids: Sequence[str]) -> None:
        """Ask the server; close the stream of a batch that is given up and goes on all the same.

        It goes on where the server did not have the request yet: it was on its way.
        """
        if batch.is_sent:
            with suppress(httpx.HTTPError, BackendError):
                for request_id in ids:
                    await self._call_async("POST", "/abort_request", {"rid": request_id})
        if not {one.request_id for one in batch.unfinished()} <= set(ids):
            return  # others of the batch go on
        if not batch.is_sent or not (await asyncio.wait({job}, timeout=_ABORT_S))[0]:
            job.cancel("the request was aborted")

    async def _stream(self, batch: Batch) -> None:
        try:
            async with self._streams:
                batch.is_sent = True
                async with asyncio.timeout(batch.deadline_s(_DEADLINE_GRACE_S)):
                    await self._read(batch)
        except asyncio.CancelledError as error:
            message = str(error) or CLOSED
            self._fail(batch, ErrorInfo(code="abort", message=message))
            raise
        except httpx.HTTPError as error:
            message = unreachable(self.base_url, error)
            self._fail(batch, ErrorInfo(code="unreachable", message=message))
        except TimeoutError:
            self._fail(batch, deadline_passed(batch.requests[0]))
        except _Refused as error:
            self._fail(batch, error.info)
        except Exception as error:  # the fault boundary of one stream: whoever polls must hear
            message = f"the answer of {self.base_url} is not understood: {error!r}"
            self._fail(batch, ErrorInfo(code="http", message=message))
        else:
            message = "the server ended the stream before the answer was complete"
            self._fail(batch, ErrorInfo(code="unreachable", message=message))
        finally:
            for request in batch.requests:
                self._batches.pop(request.request_id, None)

    async def _read(self, batch: Batch) -> None:
        body = batch.body(with_hints=self._info is not None and bool(self._info.version))
        async with self._client.stream(
            "POST", "/generate", timeout=self._timeout, **sent_json(body)
        ) as response:
            if response.status_code != 200:
                await response.aread()
                raise _refused(response)
            async for event in json_events(response.aiter_bytes()):
                if "error" in event:
                    raise _Refused(200, error_of_event(event))
                output = batch.output(event)
                if output is not None:
                    self._arrived.put(output)

    def _fail(self, batch: Batch, error: ErrorInfo) -> None:
        """End what is unfinished; does nothing after a complete answer."""
        for request in batch.unfinished():
            self._arrived.put(
                Output(
                    request_id=request.request_id,
                    finish=Finish(reason=FinishReason.ERROR),
                    error=error,
                )
            )


class RuntimeEndpoint(HttpClient):
    """A server as a backend, under SGLang's name and arguments; see `HttpClient`.

        pm.set_default_backend(pm.RuntimeEndpoint("http://127.0.0.1:30000"))
        state = program.run(question="Why?")

    `chat_template_name` overrides the template that the server tells of.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: bool | str | None = None,
        chat_template_name: str | None = None,
    ) -> None:
        super().__init__(base_url, api_key=api_key, verify=verify)
        self.chat_template_name = chat_template_name

    @property
    def model_info(self) -> dict[str, Any]:
        """What the server says of its model: `model_path`, `tokenizer_path`, ..."""
        return self._call("GET", "/get_model_info", None)

    def get_model_name(self) -> str:
        return self.info().model

    def get_server_info(self) -> dict[str, Any]:
        return self.server_info()


_NO_KEY = "give the server's key: api_key=, or --api-key"


class _Refused(BackendError):
    """An answer other than success."""

    def __init__(self, status: int, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.status = status
        if info.code == "http" and status in (429, 502, 503, 504):  # of a proxy in between
            info = ErrorInfo(code="unavailable", message=info.message)
        self.info = info


def _refused(response: httpx.Response) -> _Refused:
    """The error of an answer; one without words of its own tells who gave it, and what it was."""
    info = error_of(response.content)
    if not info.message.strip():
        remedy = "; is it the address of a Palmette server?" if response.status_code == 404 else ""
        message = f"{response.url} answered with the status {response.status_code}{remedy}"
        info = ErrorInfo(code=info.code, message=message)
    if response.status_code == 401:
        info = ErrorInfo(code=info.code, message=f"{info.message}; {_NO_KEY}")
    return _Refused(response.status_code, info)
