"""Starting, waiting and going away; drains and deaths are in tests/regressions."""

from __future__ import annotations

import json
import os
import signal
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from running_server import WAIT_S, RunningServer, StartServer


def test_the_engine_ends_with_a_killed_parent(start_server: StartServer) -> None:
    server = start_server({"model": "delay=0.02"})
    engine_pid = server.engine_pid
    assert server.complete(prompt="x", max_tokens=5).status_code == 200
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    server.wait_for(lambda: not Path(f"/proc/{engine_pid}").exists())


def test_idle_is_ready(start_server: StartServer) -> None:
    """Signs of the engine keep coming: their age falls again and again."""
    server = start_server(heartbeat_limit_s=WAIT_S)
    ages: list[float] = []

    def has_fallen_twice() -> bool:
        answer = server.client.get("/health/ready")
        assert answer.status_code == 200
        ages.append(answer.json()["last_step_age"])
        return sum(later < age for age, later in pairwise(ages)) >= 2

    server.wait_for(has_fallen_twice)


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
    busy.wait_idle(20.0)  # it would take 40 s
    assert busy.client.get("/health").json()["open_requests"] == 0


def send(server: RunningServer, path: str, body: Any) -> socket.socket:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    sock = socket.create_connection(server.address)
    sock.sendall(head + data)
    return sock


def test_a_stream_that_waits_has_a_heartbeat(start_server: StartServer) -> None:
    server = start_server({"model": "delay=1.2"}, sse_heartbeat_s=0.2)
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
