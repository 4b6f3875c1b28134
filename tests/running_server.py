"""Starts a server with a scripted model and talks to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

SCRIPT = Path(__file__).with_name("serve_fake_model.py")
WAIT_S = 60.0  # for what a loaded machine does late; no limit of the product


class RunningServer:
    """A server process; `client` has the base URL, and the key when there is one."""

    def __init__(self, *, server: dict[str, Any], engine: dict[str, Any]):
        options = json.dumps({"server": server, "engine": engine})
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), options], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.stdout.close()
            raise RuntimeError(f"exit status {self.process.wait(WAIT_S)} at the start")
        self.url: str = json.loads(line)["url"]
        self.address = (httpx.URL(self.url).host, httpx.URL(self.url).port or 80)
        keys = server.get("api_keys", [])
        headers = {"authorization": f"Bearer {keys[0]}"} if keys and keys[0].isascii() else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=WAIT_S)

    @property
    def engine_pid(self) -> int:
        pid = self.process.pid
        [child] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", body)

    def generate(self, **body: Any) -> Any:
        response = self.post("/generate", body)
        assert response.status_code == 200, response.text
        return response.json()

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get("/server_info").json()["internal_states"][0]
        return answer

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
        """Poll until `condition` holds."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout_s, "the condition did not come to hold"
            time.sleep(0.01)

    def wait_idle(self, timeout_s: float = WAIT_S) -> None:
        """Until no request holds pages."""
        self.wait_for(self._is_idle, timeout_s)

    def _is_idle(self) -> bool:
        stats = self.stats()
        return stats["running"] == stats["waiting"] == stats["used_pages"] == 0

    def raw(self, data: bytes, *, timeout_s: float = WAIT_S) -> bytes:
        """Send bytes as they are, and read until the server closes or is silent."""
        with socket.create_connection(self.address, timeout=timeout_s) as sock:
            sock.sendall(data)
            received = b""
            try:
                while chunk := sock.recv(65536):
                    received += chunk
                    is_head = data.startswith(b"HEAD ")  # its answer has no body
                    if b"\r\n\r\n" in received and (is_head or _is_whole(received)):
                        break
            except TimeoutError:
                pass
            return received

    def stream(self, path: str, body: Any) -> Iterator[str]:
        """The data of all events."""
        with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _is_whole(received: bytes) -> bool:
    head, _, body = received.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) >= int(line.split(b":")[1])
    return body.endswith(b"0\r\n\r\n")


def events(lines: Iterator[str]) -> list[Any]:
    """The JSON events of a stream, which must end in [DONE]."""
    data = list(lines)
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


StartServer = Callable[..., RunningServer]


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """Letters by position, a context of 2048 tokens, 4096 tokens of pages, no key."""
    running = RunningServer(server={}, engine={})
    yield running
    running.close()


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts servers of a test's own: `start_server(engine={...}, **server_config)`."""
    started: list[RunningServer] = []

    def start(engine: dict[str, Any] | None = None, **server: Any) -> RunningServer:
        started.append(RunningServer(server=server, engine=engine or {}))
        return started[-1]

    yield start
    for running in started:
        running.close()
