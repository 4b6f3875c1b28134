"""An OpenAI-compatible HTTP server around a library that has none; the standard library only.

It runs in the peer's own environment. The library generates in one thread and puts token ids into
the queue of each request; a thread per connection turns them into text and events.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Wish:
    prompt: str | None  # or messages
    messages: list[dict[str, str]] | None
    max_tokens: int
    ignore_eos: bool
    schema: dict[str, Any] | None


class Unsupported(Exception):
    """The library cannot do what a request asks for."""


class Answer:
    """The growing answer of one request; iterating gives its text as it comes."""

    def __init__(self, decode: Callable[[list[int]], str], prompt_tokens: int):
        self._decode = decode
        self._queue: queue.SimpleQueue[tuple[Sequence[int], str | None]] = queue.SimpleQueue()
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.finish_reason = ""

    def put(self, token_ids: Sequence[int], finish_reason: str | None = None) -> None:
        """From the generating thread; with a finish_reason it is the last."""
        self._queue.put((token_ids, finish_reason))

    def __iter__(self) -> Iterator[str]:
        pending: list[int] = []  # until they make whole characters
        while not self.finish_reason:
            token_ids, reason = self._queue.get()
            self.completion_tokens += len(token_ids)
            pending += token_ids
            self.finish_reason = reason or ""
            text = self._decode(pending) if pending else ""
            if text and (reason or not text.endswith("\ufffd")):
                pending.clear()
                yield text


class Backend(Protocol):
    name: str

    def start(self, wish: Wish) -> Answer:
        """Queue the request; raises Unsupported."""
        ...


def wish_of(path: str, body: dict[str, Any]) -> Wish:
    """The request of a body of /v1/completions or /v1/chat/completions."""
    response_format = body.get("response_format") or {}
    schema = response_format.get("json_schema", {}).get("schema")
    is_chat = path == "/v1/chat/completions"
    return Wish(
        prompt=None if is_chat else body["prompt"],
        messages=body["messages"] if is_chat else None,
        max_tokens=int(body.get("max_tokens") or 16),
        ignore_eos=bool(body.get("ignore_eos")),
        schema=schema,
    )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections are kept, as with the other servers
    disable_nagle_algorithm = True
    backend: Backend

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": self.backend.name}]})
        else:
            self._json(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self._json(404, {"error": {"message": f"no {self.path}"}})
            return
        wish = wish_of(self.path, json.loads(data))
        try:
            answer = self.backend.start(wish)
        except Unsupported as error:
            self._json(400, {"error": {"message": str(error)}})
            return
        self._stream(answer, is_chat=wish.messages is not None)

    def _stream(self, answer: Answer, *, is_chat: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for text in answer:
            self._event({"choices": [_choice(text, None, is_chat=is_chat)]})
        last = _choice("", answer.finish_reason, is_chat=is_chat)
        usage = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        }
        self._event({"choices": [last]})
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, value: dict[str, Any]) -> None:
        value |= {"object": "chunk", "created": int(time.time()), "model": self.backend.name}
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n" % len(data) + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line a request would be work that the other servers do not do."""


def _choice(text: str, finish_reason: str | None, *, is_chat: bool) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    return choice | ({"delta": {"content": text}} if is_chat else {"text": text})


def arguments(description: str | None) -> argparse.Namespace:
    """What every peer is started with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", type=Path, required=True, help="a .gguf file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--streams", type=int, required=True, help="at once, at most")
    parser.add_argument("--context", type=int, required=True, help="tokens of one request")
    parser.add_argument("--kv-tokens", type=int, required=True, help="tokens of all requests")
    parser.add_argument("--step-tokens", type=int, required=True, help="of one step, at most")
    parser.add_argument("--variant", default="")
    return parser.parse_args()


class Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that come at once


def serve(backend: Backend, port: int) -> None:
    """Until the process is ended."""
    handler = type("BoundHandler", (Handler,), {"backend": backend})
    Listener(("127.0.0.1", port), handler).serve_forever()
