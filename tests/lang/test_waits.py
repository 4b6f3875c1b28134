"""Every wait has an owner and ends with its backend; what follows raises the same error."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

import palmette as pm
from palmette.runtime.client import EngineClient, LocalClient
from palmette.runtime.fake_runner import fake_engine


@pm.function
def program(s: pm.ProgramState) -> None:
    s += "Question: why?\nAnswer:" + pm.gen("a", max_tokens=1000, temperature=0)  # the line
    s += " more" + pm.gen("b")
    s += pm.select("c", ["x", "y"])


@pm.function
async def async_program(s: pm.AsyncState) -> None:
    s += "Question: why?\nAnswer:" + pm.gen("a", max_tokens=1000, temperature=0)
    await s["a"]


def check_told(state: pm.ProgramState, message: str, code: str) -> None:
    """The same error for everything that depends on the failed gen, with all it should tell."""
    errors: list[BaseException] = []
    for read in (lambda: state["a"], lambda: state["b"], lambda: state["c"], state.text):
        with pytest.raises(pm.ProgramError, match=message) as caught:
            read()
        errors.append(caught.value)
    assert all(error is errors[0] for error in errors) and state.error() is errors[0]
    error = errors[0]
    assert isinstance(error, pm.ProgramError)
    assert (error.variable, error.code) == ("a", code)
    assert error.excerpt == "Question: why?\nAnswer:"
    assert "# the line" in str(error) and r"after ...'Question: why?\nAnswer:'" in str(error)


# An engine in this process


@pytest.mark.parametrize("through_client", [False, True])
def test_closing_an_engine_ends_what_waits_for_it(through_client: bool) -> None:
    engine = fake_engine(lambda ids: ord("k"))
    client = LocalClient(engine)
    state = program.run(backend=client)
    next(state.text_iter("a"))
    (client if through_client else engine).close()
    check_told(state, "the engine was closed", "unavailable")
    assert engine.live_ids() == [] and engine.stats().used_pages == 0
    with pytest.raises(pm.ProgramError, match="the engine was closed"):
        program.run(backend=client)["a"]


def test_closing_an_engine_ends_awaits_too() -> None:
    client = LocalClient(fake_engine(lambda ids: ord("k")))

    async def main() -> None:
        state = async_program.start(backend=client)
        async for _ in state.text_async_iter("a"):
            break
        await asyncio.to_thread(client.close)
        with pytest.raises(pm.ProgramError, match="the engine was closed"):
            await state["a"]

    asyncio.run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3])
def test_a_client_that_is_closed_ends_what_waits_for_it(after_s: float) -> None:
    with answering(lambda connection: threading.Event().wait(20.0)) as url:
        client = pm.HttpClient(url)
        closer = threading.Timer(after_s, client.close)
        closer.start()
        with pytest.raises(RuntimeError, match="the client was closed"):
            program.run(backend=client)["a"]
        closer.join()
        with pytest.raises(RuntimeError, match="the client was closed"):
            program.run(backend=client)["a"]


# A server


ANSWERS: dict[str, object] = {
    "/server_info": {"model_path": "m"},
    "/tokenize": {"tokens": [1, 2, 3]},
    "/abort_request": {},
}


@contextmanager
def answering(generate: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server that tells about itself; `generate` answers what generates on the bare socket."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            if self.path == "/generate":
                generate(self.connection)
                self.close_connection = True
                return
            content = json.dumps(ANSWERS[self.path]).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing on stderr."""

    class Server(ThreadingHTTPServer):
        block_on_close = False
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


EVENT = {"text": "so", "output_ids": [5], "meta_info": {"prompt_tokens": 3}}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def lose_in_the_middle(connection: socket.socket) -> None:
    connection.sendall(HEAD + chunk(b"data: " + json.dumps(EVENT).encode() + b"\n\n"))


def lose_at_once(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def end_too_early(connection: socket.socket) -> None:
    lose_in_the_middle(connection)
    connection.sendall(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def say_nonsense(connection: socket.socket) -> None:
    connection.sendall(HEAD + chunk(b"data: [1, 2]\n\n") + b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("generate", "message", "code"),
    [
        (lose_in_the_middle, "cannot be reached", "unreachable"),
        (lose_at_once, "cannot be reached", "unreachable"),
        (end_too_early, "ended the stream before the answer was complete", "unreachable"),
        (say_nonsense, "is not understood", "http"),
    ],
)
def test_a_lost_connection_ends_what_waits_for_it(
    generate: Callable[[socket.socket], object], message: str, code: str
) -> None:
    with answering(generate) as url:
        client = pm.HttpClient(url)
        check_told(program.run(backend=client), message, code)
        with pytest.raises(pm.ProgramError, match=message):
            async_program.run(backend=client)
        client.close()


def test_a_silent_server_is_not_waited_for_longer_than_the_client_s_limit() -> None:
    with answering(lambda connection: threading.Event().wait(20.0)) as url:
        client = pm.HttpClient(url, timeout_s=0.1)
        check_told(program.run(backend=client), "cannot be reached: ReadTimeout", "unreachable")
        client.close()


def test_a_server_that_never_tells_about_itself_is_an_error() -> None:
    async def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("timed out")

    client = pm.HttpClient("http://nowhere", transport=httpx.MockTransport(answer))
    backends: list[EngineClient] = [client]
    for backend in backends:
        with pytest.raises(RuntimeError, match="cannot be reached: timed out"):
            program.run(backend=backend)["a"]
        with pytest.raises(RuntimeError, match="cannot be reached: timed out"):
            async_program.run(backend=backend)
    client.close()
