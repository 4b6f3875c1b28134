"""An EngineClient over HTTP: the same programs on a server, with the same token ids.

One background thread runs an event loop with one `httpx.AsyncClient`; every request is a stream of
server-sent events, and all of them share the loop. `poll` takes what has arrived from a queue. A
stream that breaks ends its requests in an error; nothing waits for a dead connection.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import msgspec

from palmette.constrained.spec import GrammarKind, GrammarSpec
from palmette.runtime.request import (
    EngineInfo,
    ErrorInfo,
    Finish,
    FinishReason,
    Limits,
    Output,
    Request,
    Timing,
    TokenLogprob,
    Usage,
)

from .errors import BackendError

T = TypeVar("T")
_MAX_STREAMS = 64  # at once, as many as an engine runs; more wait here, not at the server
_MAX_TEXTS = 128  # in one /tokenize or /detokenize
_CALL_TIMEOUT_S = 60.0  # for calls that do not generate


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
        self.base_url = base_url.rstrip("/")
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
        self._jobs: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="palmette-http", daemon=True
        )
        self._thread.start()

    # EngineClient

    def submit(self, requests: Sequence[Request]) -> None:
        batches = list(_batches(requests))
        self._open.update(request.request_id for request in requests)
        self._loop.call_soon_threadsafe(self._start, batches)

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._open:
                self._post("/abort_request", {"rid": request_id})

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
        for begin in range(0, len(texts), _MAX_TEXTS):
            part = list(texts[begin : begin + _MAX_TEXTS])
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
        for begin in range(0, len(lists), _MAX_TEXTS):
            part = [list(ids) for ids in lists[begin : begin + _MAX_TEXTS]]
            texts += self._post("/detokenize", {"tokens": part})["text"]
        return texts

    def info(self) -> EngineInfo:
        if self._info is None:
            answer = self._call("GET", "/server_info", None)
            self._info = _engine_info(answer)
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
        if self._loop.is_closed():
            return
        self._run(self._shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # Calls that do not generate

    def _post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        return self._call("POST", path, body)

    def _call(self, method: str, path: str, body: Mapping[str, object] | None) -> dict[str, Any]:
        """One call and its JSON answer.

        Raises:
            BackendError: the server cannot be reached or refuses; with its message.
        """
        return self._run(self._call_async(method, path, body))

    async def _call_async(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> dict[str, Any]:
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise BackendError(_unreachable(self.base_url, error)) from error
        if response.status_code != 200:
            raise _Refused(response.status_code, _error_of(response.content))
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as error:
            raise BackendError(f"{path}: the answer of {self.base_url} is not JSON") from error
        return answer

    def _run(self, work: Coroutine[object, object, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    async def _shut_down(self) -> None:
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await self._client.aclose()
        await self._loop.shutdown_asyncgens()

    # Streams; these run in the background thread

    def _start(self, batches: Sequence[_Batch]) -> None:
        for batch in batches:
            job = self._loop.create_task(self._stream(batch))
            self._jobs.add(job)
            job.add_done_callback(self._jobs.discard)

    async def _stream(self, batch: _Batch) -> None:
        try:
            async with self._streams:
                await self._read(batch)
        except asyncio.CancelledError:
            self._fail(batch, ErrorInfo(code="abort", message="the client was closed"))
            raise
        except httpx.HTTPError as error:
            message = _unreachable(self.base_url, error)
            self._fail(batch, ErrorInfo(code="unreachable", message=message))
        except (_Refused, ValueError, KeyError, TypeError) as error:
            self._fail(batch, _error_info(error))
        else:
            message = "the server ended the stream before the answer was complete"
            self._fail(batch, ErrorInfo(code="unreachable", message=message))

    async def _read(self, batch: _Batch) -> None:
        async with self._client.stream(
            "POST", "/generate", json=batch.body(), timeout=self._timeout
        ) as response:
            if response.status_code != 200:
                await response.aread()
                raise _Refused(response.status_code, _error_of(response.content))
            async for event in _events(response):
                if "error" in event:
                    raise _Refused(200, _error_of_event(event))
                output = batch.output(event)
                if output is not None:
                    self._arrived.put(output)

    def _fail(self, batch: _Batch, error: ErrorInfo) -> None:
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
    """SGLang's name and arguments for `HttpClient`.

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

    def get_model_name(self) -> str:
        return self.info().model

    def get_server_info(self) -> dict[str, Any]:
        return self.server_info()


class _Refused(BackendError):
    """An answer other than success."""

    def __init__(self, status: int, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.status = status
        self.info = info


@dataclass(slots=True)
class _Progress:
    """How much of one request's cumulative answer was passed on."""

    request: Request
    num_chars: int = 0
    num_ids: int = 0
    num_logprobs: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class _Batch:
    """Requests that travel in one POST: the choices of one prompt, or of one select."""

    requests: list[Request]
    is_choices: bool  # one prompt, n = len(requests)
    progress: list[_Progress] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = [_Progress(request) for request in self.requests]

    def unfinished(self) -> list[Request]:
        return [one.request for one in self.progress if not one.is_finished]

    def body(self) -> dict[str, object]:
        first = self.requests[0]
        is_list = not self.is_choices and len(self.requests) > 1
        prompts = [list(request.prompt_ids) for request in self.requests]
        rids = [request.request_id for request in self.requests]
        body: dict[str, object] = {
            "input_ids": prompts if is_list else prompts[0],
            "rid": rids if is_list else rids[0],
            "sampling_params": _sampling(
                first, num_choices=len(self.requests) if self.is_choices else 1
            ),
            "stream": True,
            "priority": first.priority,
        }
        options = first.logprobs
        if options.output or options.prompt_start is not None:
            starts = [request.logprobs.prompt_start for request in self.requests]
            wanted = [-1 if start is None else start for start in starts]
            body |= {
                "return_logprob": True,
                "logprob_start_len": wanted if is_list else wanted[0],
                "top_logprobs_num": options.num_top,
                "null_first_logprob": False,
            }
        if first.namespace:
            body["extra_key"] = "\0".join(first.namespace)
        return body

    def output(self, event: Mapping[str, Any]) -> Output | None:
        """One event as an Output; None for an event of a choice that has ended."""
        one = self.progress[int(event.get("index", 0))]
        if one.is_finished:
            return None
        meta = event["meta_info"]
        text, ids = event["text"], event.get("output_ids") or []
        finish = _finish(meta.get("finish_reason"))
        is_first = one.num_ids == 0
        rows = meta.get("output_token_logprobs") or []
        tops = meta.get("output_top_logprobs") or []
        output = Output(
            request_id=one.request.request_id,
            token_ids=tuple(ids[one.num_ids :]),
            text=text[one.num_chars :],
            logprobs=_logprobs(rows[one.num_logprobs :], tops[one.num_logprobs :]),
            prompt_logprobs=self._prompt_logprobs(one.request, meta) if is_first else (),
            finish=finish,
            usage=Usage(
                prompt_tokens=meta.get("prompt_tokens", 0),
                cached_tokens=meta.get("cached_tokens", 0),
                computed_tokens=meta.get("computed_tokens", 0),
                shared_tokens=meta.get("shared_tokens", 0),
                recomputed_tokens=meta.get("recomputed_tokens", 0),
                completion_tokens=meta.get("completion_tokens", 0),
                num_preemptions=meta.get("num_retractions", 0),
                miss_reason=meta.get("miss_reason"),
            ),
            timing=Timing(finished_s=None if finish is None else meta.get("e2e_latency")),
            error=_abort_error(finish, meta),
        )
        one.num_ids, one.num_chars, one.num_logprobs = len(ids), len(text), len(rows)
        one.is_finished = finish is not None
        return output

    def _prompt_logprobs(
        self, request: Request, meta: Mapping[str, Any]
    ) -> tuple[TokenLogprob, ...]:
        start = request.logprobs.prompt_start
        if start is None:
            return ()
        rows = meta.get("input_token_logprobs") or []
        tops = meta.get("input_top_logprobs") or []
        num_wanted = len(request.prompt_ids) - start
        return _logprobs(rows[len(rows) - num_wanted :], tops[len(tops) - num_wanted :])


def _batches(requests: Sequence[Request]) -> Iterator[_Batch]:
    """Requests that belong together in one POST: they fail together, so few do."""
    group: list[Request] = []
    is_choices = False
    for request in requests:
        if group:
            first = group[0]
            if is_choices and _is_next_choice(group, request):
                group.append(request)
                continue
            if (
                first.hint.group is not None
                and first.hint.group == request.hint.group
                and len(group) < _MAX_TEXTS
            ):
                group.append(request)
                continue
            yield _Batch(group, is_choices and len(group) > 1)
        group = [request]
        is_choices = request.hint.group is None
    if group:
        yield _Batch(group, is_choices and len(group) > 1)


def _is_next_choice(group: Sequence[Request], request: Request) -> bool:
    first = group[0]
    return (
        first.choice_index == 0
        and request.choice_index == len(group)
        and request.prompt_ids == first.prompt_ids
        and request.sampling == first.sampling
        and request.grammar == first.grammar
        and request.logprobs == first.logprobs
    )


def _sampling(request: Request, *, num_choices: int) -> dict[str, object]:
    sampling = request.sampling
    body: dict[str, object] = {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": sampling.skip_special_tokens,
        "no_stop_trim": sampling.no_stop_trim,
    }
    if num_choices > 1:
        body["n"] = num_choices
    if sampling.seed is not None:
        body["sampling_seed"] = sampling.seed
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias}
    if request.grammar is not None:
        body |= _grammar(request.grammar)
    return body


def _grammar(spec: GrammarSpec) -> dict[str, object]:
    body: dict[str, object] = {"whitespace": str(spec.whitespace)}
    if spec.kind is GrammarKind.JSON_OBJECT:
        return body | {"json_schema": '{"type": "object"}'}
    if spec.kind is GrammarKind.CHOICE:
        return body | {"choice": msgspec.json.decode(spec.source)}
    return body | {str(spec.kind): spec.source}


def _logprobs(rows: Sequence[Any], tops: Sequence[Any]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=row[1],
            logprob=row[0],
            top=tuple((top[1], top[0]) for top in (tops[index] if index < len(tops) else ()) or ()),
        )
        for index, row in enumerate(rows)
    )


def _finish(reason: Mapping[str, Any] | None) -> Finish | None:
    if reason is None:
        return None
    kind = reason["type"]
    if kind == "abort" and reason.get("status_code") is not None:
        kind = "error"
    return Finish(reason=FinishReason(kind), matched=reason.get("matched"))


def _abort_error(finish: Finish | None, meta: Mapping[str, Any]) -> ErrorInfo | None:
    if finish is None or finish.reason not in (FinishReason.ABORT, FinishReason.ERROR):
        return None
    return ErrorInfo(code="abort", message=str(meta["finish_reason"].get("message", "aborted")))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events; comments are heartbeats, and [DONE] is the last event."""
    async for line in response.aiter_lines():
        data = line[5:].strip() if line.startswith("data:") else "[DONE]"
        if data == "[DONE]":
            continue
        event: object = msgspec.json.decode(data)
        if not isinstance(event, dict):
            raise ValueError("an event of the server is not a JSON object")
        yield event


def _engine_info(answer: Mapping[str, Any]) -> EngineInfo:
    """EngineInfo from /server_info; of a server that is not Palmette's, what it tells."""
    engine = answer.get("engine")
    if engine is not None:
        return msgspec.convert(engine, EngineInfo)
    context = int(answer.get("context_length") or answer.get("max_req_input_len") or 4096)
    pool = int(answer.get("max_total_num_tokens") or context)
    return EngineInfo(
        model=str(answer.get("model_path", "")),
        vocab_size=int(answer.get("vocab_size") or 1 << 31),
        context_length=context,
        page_size=1,
        num_pages=pool,
        eos_token_ids=(),
        bos_token_id=None,
        chat_template=None,
        limits=Limits(),
    )


def _error_of(content: bytes) -> ErrorInfo:
    try:
        value: object = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return ErrorInfo(code="http", message=content.decode("utf-8", "replace")[:2000])
    return _error_of_event(value if isinstance(value, dict) else {"error": value})


def _error_of_event(event: Mapping[str, Any]) -> ErrorInfo:
    """Palmette's and SGLang's shape of errors, or whatever else it is as text."""
    error = event.get("error", event.get("detail", event))
    if isinstance(error, Mapping):
        message = str(error.get("message", error))
        return ErrorInfo(
            code=str(error.get("code") or "http"), message=message, field=error.get("param")
        )
    return ErrorInfo(code="http", message=str(error))


def _error_info(error: Exception) -> ErrorInfo:
    if isinstance(error, _Refused):
        return error.info
    return ErrorInfo(code="http", message=f"the answer is not understood: {error!r}")


def _unreachable(url: str, error: httpx.HTTPError) -> str:
    return f"{url} cannot be reached: {type(error).__name__}: {error}"
