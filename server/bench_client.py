"""One call to an OpenAI-compatible endpoint, streamed, with the time of every event.

Works on any server that streams /v1/completions and /v1/chat/completions. What differs between
servers is found out once, by `Endpoint.open`: the model's name, and whether `ignore_eos` and
`stream_options` are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from palmette.lang.reaching import unreachable
from palmette.lang.sse import DONE, data_lines_async
from palmette.lang.wire import error_of

from .bench_http import Answer, HttpError, StreamClient
from .config import UserError

Message = dict[str, str]  # {"role": ..., "content": ...}
Clock = Callable[[], float]

_PROBE_TOKENS = 2
_TIMEOUT_S = 600.0
_SHOWN_CHARACTERS = 200  # of a server's error


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True, kw_only=True)
class Timeline:
    """A call as its client saw it; times are seconds of one clock.

    `token_s` has the arrival of every event that carried text: one a token, unless the server
    put several into one event or held back half a character.
    """

    call_id: str
    sent_s: float
    end_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None

    @property
    def output_tokens(self) -> int:
        """As the endpoint tells, else the number of events."""
        return self.usage.completion_tokens if self.usage else len(self.token_s)


class Endpoint:
    """A server under test. `on_text` of a call is called after each event with text."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        streams: StreamClient,
        *,
        model: str,
        has_ignore_eos: bool,
        has_stream_options: bool,
        clock: Clock,
    ):
        self.model = model
        self.has_ignore_eos = has_ignore_eos
        self.has_stream_options = has_stream_options
        self._client = client
        self._streams = streams
        self._clock = clock

    @classmethod
    async def open(cls, client: httpx.AsyncClient, *, model: str | None, clock: Clock) -> Endpoint:
        """Ask for the model's name, then try a short call, with fewer extras if it is refused.

        Raises:
            UserError: the endpoint does not answer, or refuses the plain call too.
        """
        try:
            models = await client.get("/v1/models")
        except httpx.HTTPError as error:
            url = str(client.base_url).rstrip("/")
            raise UserError(unreachable(url, error)) from error
        name = model or _first_model(models)
        headers = {k: v for k, v in client.headers.items() if k == "authorization"}
        timeout_s = client.timeout.read or _TIMEOUT_S
        streams = StreamClient(str(client.base_url), headers, timeout_s=timeout_s)
        timeline: Timeline | None = None
        for extras in ((True, True), (False, True), (True, False), (False, False)):
            endpoint = cls(
                client,
                streams,
                model=name,
                has_ignore_eos=extras[0],
                has_stream_options=extras[1],
                clock=clock,
            )
            timeline = await endpoint.complete("probe", "Once upon a time", _PROBE_TOKENS)
            if timeline.error is None:
                return endpoint
        await streams.close()
        assert timeline is not None
        raise UserError(f"{client.base_url}: {timeline.error}")

    async def close(self) -> None:
        """Let go of kept connections."""
        await self._streams.close()

    async def flush(self) -> bool:
        """Empty the server's prefix cache where it has SGLang's /flush_cache; True when it did."""
        try:
            response = await self._client.post("/flush_cache")
        except httpx.HTTPError:
            return False
        return response.is_success

    async def complete(
        self,
        call_id: str,
        prompt: str,
        max_tokens: int,
        *,
        on_text: Callable[[], None] | None = None,
    ) -> Timeline:
        """/v1/completions, greedy. Faults of the endpoint end up in `Timeline.error`."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens}
        if self.has_ignore_eos:
            body["ignore_eos"] = True
        return await self._stream("/v1/completions", call_id, body, on_text)

    async def chat(
        self,
        call_id: str,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        schema: dict[str, Any] | None = None,
        on_text: Callable[[], None] | None = None,
    ) -> Timeline:
        """/v1/chat/completions, greedy; with a schema the answer ends where the grammar says."""
        body: dict[str, Any] = {"messages": list(messages), "max_tokens": max_tokens}
        if schema is not None:
            name = {"name": call_id.replace(".", "_"), "schema": schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": name}
        elif self.has_ignore_eos:
            body["ignore_eos"] = True
        return await self._stream("/v1/chat/completions", call_id, body, on_text)

    async def _stream(
        self,
        path: str,
        call_id: str,
        body: dict[str, Any],
        on_text: Callable[[], None] | None,
    ) -> Timeline:
        body |= {"model": self.model, "temperature": 0, "stream": True}
        if self.has_stream_options:
            body["stream_options"] = {"include_usage": True}
        timeline = Timeline(call_id=call_id, sent_s=self._clock())
        try:
            async with self._streams.post(path, msgspec.json.encode(body)) as answer:
                if not 200 <= answer.status < 300:
                    text = (await answer.text())[:_SHOWN_CHARACTERS]
                    timeline.error = f"HTTP status {answer.status}: {text}"
                else:
                    await self._read(answer, timeline, on_text)
        except HttpError as error:
            timeline.error = str(error)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            timeline.error = f"an event that is not of OpenAI's shape: {error}"
        if timeline.end_s == 0.0:
            timeline.end_s = self._clock()
        return timeline

    async def _read(
        self, answer: Answer, timeline: Timeline, on_text: Callable[[], None] | None
    ) -> None:
        pieces: list[str] = []
        async for data in data_lines_async(answer.body):
            if data == DONE:
                continue  # to the end of the body: then the connection serves the next call
            event = _decode_event(data)
            if event.error is not None:
                timeline.error = str(event.error)[:_SHOWN_CHARACTERS]
                break
            timeline.usage = event.usage or timeline.usage
            for choice in event.choices:
                text = choice.text or (choice.delta.content if choice.delta else None)
                if text:
                    timeline.token_s.append(self._clock())
                    pieces.append(text)
                    if on_text is not None:
                        on_text()
                if choice.finish_reason is not None:
                    timeline.finish_reason = choice.finish_reason
                    timeline.end_s = self._clock()
        timeline.text = "".join(pieces)
        if timeline.error is None and timeline.finish_reason is None:
            timeline.error = "the stream ended without a finish_reason"


def _first_model(models: httpx.Response) -> str:
    if not models.is_success:
        told = error_of(models.content).message
        raise UserError(f"{models.url}: status {models.status_code}: {told}")
    try:
        return str(models.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{models.url} names no model; give --model") from error
