"""`palmette chat`: a conversation in the terminal, with the model here or on a server.

Each turn sends the whole conversation; the prefix cache makes that cheap.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import httpx
from rich.console import Console

from palmette.lang.reaching import unreachable
from palmette.lang.sse import DONE, data_lines
from palmette.lang.wire import error_of
from palmette.runtime.config import EngineConfig

from .config import UserError

if TYPE_CHECKING:
    from palmette.runtime.client import EngineClient
    from palmette.runtime.request import Output

Message = dict[str, Any]
_HELP = "/clear forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"
_CUT = " [cut: the limit of new tokens is reached]"


class Piece(NamedTuple):
    """New text of an answer; `is_cut` with the last one: the limit of new tokens ended it."""

    text: str
    is_cut: bool = False


class Backend(Protocol):
    name: str

    def answer(self, messages: list[Message]) -> Generator[Piece]: ...
    def close(self) -> None: ...


class RemoteChat:
    """A server with /v1/chat/completions."""

    def __init__(self, url: str, api_key: str | None, options: dict[str, Any]):
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=600.0)
        self._url = url
        self._options = options
        try:
            response = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            self._client.close()
            raise UserError(unreachable(url, error)) from error
        if response.status_code != 200:
            self._client.close()
            told = error_of(response.content).message
            raise UserError(f"{url}: status {response.status_code}: {told}")
        self.name: str = response.json()["data"][0]["id"]

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        body = {"model": self.name, "messages": messages, "stream": True, **self._options}
        path = "/v1/chat/completions"
        with self._stream(path, body) as response:
            if response.status_code != 200:
                response.read()
                raise ValueError(response.json()["error"]["message"])
            for data in data_lines(response.iter_bytes()):
                if data == DONE:
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                for choice in event["choices"]:
                    text = choice["delta"].get("content") or ""
                    yield Piece(text, choice.get("finish_reason") == "length")

    @contextmanager
    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[httpx.Response]:
        try:
            with self._client.stream("POST", path, json=body) as response:
                yield response
        except httpx.HTTPError as error:
            raise ValueError(unreachable(self._url, error)) from error

    def close(self) -> None:
        self._client.close()


class LocalChat:
    """An engine in this process; `close` closes the client."""

    def __init__(self, client: EngineClient, *, max_tokens: int | None, temperature: float):
        from palmette.runtime.request import SamplingParams

        self._client = client
        self._sampling = SamplingParams(max_new_tokens=max_tokens, temperature=temperature)
        self._num_turns = 0
        self.name = self._client.info().model

    def answer(self, messages: list[Message]) -> Generator[Piece]:
        from palmette.runtime.chat_template import encode_rendered, render
        from palmette.runtime.request import Request

        info = self._client.info()
        rendered = render(info.chat_template, messages, special_tokens=info.special_tokens)
        ids = encode_rendered(self._client, rendered)
        if info.bos_token_id is not None and ids[:1] != [info.bos_token_id]:
            ids.insert(0, info.bos_token_id)
        self._num_turns += 1
        request_id = f"turn-{self._num_turns}"
        request = Request(request_id=request_id, prompt_ids=tuple(ids), sampling=self._sampling)
        is_open = True
        try:
            self._client.submit([request])
            while is_open:
                for output in self._outputs_of(request_id):
                    is_open = is_open and output.finish is None
                    if output.error is not None:
                        raise ValueError(output.error.message)
                    is_cut = output.finish is not None and output.finish.reason == "length"
                    yield Piece(output.text, is_cut)
        finally:
            if is_open:
                self._abort(request_id)

    def _outputs_of(self, request_id: str) -> list[Output]:
        """What is new of one request; late outputs of earlier ones are dropped."""
        outputs = self._client.poll()
        if not outputs:
            raise ValueError("the engine ended without an answer")
        return [output for output in outputs if output.request_id == request_id]

    def _abort(self, request_id: str) -> None:
        """Stop a request and wait for its end, so that the next turn finds a quiet engine."""
        self._client.abort([request_id])
        while outputs := self._client.poll():
            if any(o.request_id == request_id and o.finish is not None for o in outputs):
                return

    def close(self) -> None:
        self._client.close()


def chat(
    config: EngineConfig,
    *,
    system: str | None,
    max_tokens: int | None,
    temperature: float,
    url: str | None,
    api_key: str | None,
) -> int:
    """Read lines until the end of input; print answers as they come."""
    console = Console(highlight=False)
    backend: Backend
    if url is not None:
        options: dict[str, Any] = {"temperature": temperature}
        if max_tokens is not None:
            options["max_tokens"] = max_tokens
        backend = RemoteChat(url, api_key, options)
    else:
        from palmette.constrained.backend import select_backend
        from palmette.runtime.client import LocalClient
        from palmette.runtime.engine import Engine

        from .commands import resolved

        select_backend(config.grammar_backend)  # a missing one is told before anything begins
        with console.status("loading the model"):
            client = LocalClient(Engine.load(resolved(config)))
        backend = LocalChat(client, max_tokens=max_tokens, temperature=temperature)
    console.print(f"[bold]{backend.name}[/bold]  {_HELP}", style="dim")
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    try:
        converse(backend, console, start)
    finally:
        backend.close()
    return 0


def converse(backend: Backend, console: Console, start: list[Message]) -> None:
    """The loop of turns."""
    messages = list(start)
    while True:
        try:
            line = console.input("[bold green]>[/bold green] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line in ("/quit", "/exit"):
            return
        if line == "/clear":
            messages = list(start)
        elif line.startswith("/"):
            console.print(_HELP, style="dim")
        elif line:
            messages.append({"role": "user", "content": line})
            text = _print_answer(backend, console, messages)
            messages.append({"role": "assistant", "content": text})


def _print_answer(backend: Backend, console: Console, messages: list[Message]) -> str:
    parts: list[str] = []
    try:
        with closing(backend.answer(messages)) as pieces:  # stopped here also by Ctrl-C in print
            for text, is_cut in pieces:
                parts.append(text)
                console.print(text, end="", markup=False)
                if is_cut:
                    console.print(_CUT, end="", style="dim", markup=False)
    except KeyboardInterrupt:
        console.print(" [stopped]", end="", style="dim", markup=False)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
    console.print()
    return "".join(parts)
