from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from running_server import RunningServer, StartServer


def long_stream(server: RunningServer, max_tokens: int, into: list[Any]) -> threading.Thread:
    """Stream in the background; `into` gets the data of all events."""
    started = threading.Event()

    def run() -> None:
        body = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
        with httpx.Client(base_url=server.url, timeout=60.0) as client:
            with client.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        into.append(line.removeprefix("data: "))
                    started.set()
        started.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30.0)
    return thread


def test_a_drain_lets_streams_end(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"}, drain_timeout_s=20.0)
    received: list[list[Any]] = [[] for _ in range(4)]
    threads = [long_stream(server, 60, into) for into in received]
    server.signal()
    took = server.wait_for(lambda: server.client.get("/health/ready").status_code == 503)
    assert took < 0.5
    assert server.client.get("/health/ready").json()["status"] == "draining"
    assert server.client.get("/health/live").status_code == 200
    refused = server.complete(prompt="x")
    assert refused.status_code == 503 and "retry-after" in refused.headers
    for thread in threads:
        thread.join()
    assert server.process.wait(10.0) == 0
    for into in received:
        assert into[-1] == "[DONE]"
        text = "".join(json.loads(item)["choices"][0]["text"] for item in into[:-1])
        assert len(text) == 60


def test_the_drain_timeout_ends_the_rest_with_an_error(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"}, drain_timeout_s=0.5)
    received: list[Any] = []
    thread = long_stream(server, 2000, received)
    start = time.monotonic()
    server.signal()
    thread.join()
    assert server.process.wait(10.0) == 0
    assert time.monotonic() - start < 0.5 + 2.0
    assert json.loads(received[-1])["error"]["code"] == "unavailable"


def test_a_second_signal_ends_it_now(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"}, drain_timeout_s=30.0)
    engine_pid = server.engine_pid
    body = {"prompt": "x", "max_tokens": 2000, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        server.signal()
        server.wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        start = time.monotonic()
        server.signal(signal.SIGINT)
        assert server.process.wait(10.0) == 0
        assert time.monotonic() - start < 2.0
    assert not Path(f"/proc/{engine_pid}").exists()


def test_the_engine_ends_with_a_killed_parent(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"})
    engine_pid = server.engine_pid
    long = long_stream(server, 5, [])
    long.join()
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    server.wait_for(lambda: not Path(f"/proc/{engine_pid}").exists(), 5.0)


def test_a_dead_engine_is_told_to_all(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"})
    received: list[Any] = []
    thread = long_stream(server, 2000, received)
    os.kill(server.engine_pid, signal.SIGKILL)
    start = time.monotonic()
    thread.join()
    assert time.monotonic() - start < 2.0
    assert json.loads(received[-1])["error"]["code"] == "unavailable"
    later = server.complete(prompt="x")
    assert later.status_code == 503 and "retry-after" in later.headers
    assert server.client.get("/health/ready").json()["status"] == "dead"
    assert server.client.get("/health/live").status_code == 503
    assert server.client.get("/metrics").status_code == 200


def test_a_frozen_engine_is_not_ready_then_given_up(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"}, heartbeat_limit_s=1.3, dead_limit_s=3.0)
    received: list[Any] = []
    thread = long_stream(server, 2000, received)
    os.kill(server.engine_pid, signal.SIGSTOP)
    took = server.wait_for(lambda: server.client.get("/health/ready").status_code == 503)
    assert 0.3 < took < 2.8
    details = server.client.get("/health/ready").json()
    assert details["status"] == "stalled" and details["last_step_age"] > 1.3
    assert server.client.get("/health/live").status_code == 200
    thread.join()
    assert json.loads(received[-1])["error"]["code"] == "unavailable"
    server.wait_for(lambda: server.client.get("/health/live").status_code == 503)


def test_idle_is_ready(start_server: StartServer) -> None:
    server = start_server(heartbeat_limit_s=1.5)
    deadline = time.monotonic() + 2.5
    while time.monotonic() < deadline:
        assert server.client.get("/health/ready").status_code == 200
        time.sleep(0.1)


def test_a_model_that_does_not_load_is_an_error_of_the_start(start_server: StartServer) -> None:
    with pytest.raises(RuntimeError, match="exit status 1 at the start"):
        start_server({"model": "missing=1"})


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_client_that_goes_away_frees_its_pages(
    busy: RunningServer, path: str, stream: bool
) -> None:
    body: dict[str, Any] = {"stream": stream}
    if path == "/generate":
        body |= {"text": "x" * 40, "sampling_params": {"max_new_tokens": 2000}}
    else:
        body |= {"prompt": "x" * 40, "max_tokens": 2000}
    sock = send(busy, path, body)
    busy.wait_for(lambda: busy.stats()["running"] == 1)
    sock.close()
    assert busy.wait_idle() < 0.6
    assert busy.client.get("/health").json()["open_requests"] == 0


def send(server: RunningServer, path: str, body: Any) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    sock = socket.create_connection(server.address)
    sock.sendall(head + data)
    return sock


def test_a_stream_that_waits_has_a_heartbeat(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.6"}, sse_heartbeat_s=0.2)
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert ": waiting" in lines
    assert lines[-1] == "data: [DONE]"


@pytest.fixture(scope="module")
def busy() -> Any:
    """A server of which each step takes 20 ms."""
    running = RunningServer(server={}, engine={"model": "delay=0.02"})
    yield running
    running.close()
