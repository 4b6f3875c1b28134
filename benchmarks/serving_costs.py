"""What a streamed token costs around the model: the server's CPU, and the engine's host code.

    python benchmarks/serving_costs.py [--streams 16] [--tokens 192] [--route completions]

Starts `palmette serve` with the default model (options after `--` go to it) and reads as many
streams at once, whose parsing is a count of `data:`. Prints one JSON line: CPU microseconds of the
server process per streamed token, beside those of the engine process per step, then the host's
share of a step of an engine in this process, by phase, with as many streams and with 64 (`plan` is
the scheduler). CPU times hold on a busy machine; the
share does not. Linux: CPU times come from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import HostLogits
from palmette.runtime.config import EngineConfig
from palmette.runtime.cpu_runner import CpuRunner
from palmette.runtime.engine import Engine
from palmette.runtime.request import Request, SamplingParams
from palmette.server import transport

BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "completions": ("/v1/completions", {"prompt": "Once upon a time", "ignore_eos": True}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Tell a story."}], "ignore_eos": True},
    ),
    "generate": ("/generate", {"text": "Once upon a time"}),
}
WARM_EVENTS = 8  # of every stream before the clock starts


class Streams:
    """Reads `count` streams; the figures are of the time in which all of them stream."""

    def __init__(self, pids: list[int], count: int) -> None:
        self._pids = pids
        self._warm = count
        self._num_events = 0
        self._first: tuple[float, list[float], int] | None = None
        self.last: tuple[float, list[float], int] | None = None

    def _mark(self) -> tuple[float, list[float], int]:
        return perf_counter(), [cpu_s(pid) for pid in self._pids], self._num_events

    async def read(self, port: int, request: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        own = 0
        while data := await reader.read(1 << 16):
            count = data.count(b"data: ")
            if own < WARM_EVENTS <= own + count:
                self._warm -= 1
            own += count
            self._num_events += count
            if self._first is None and self._warm == 0:
                self._first = self._mark()
            if b"[DONE]" in data:
                break
        if self.last is None:
            self.last = self._mark()
        writer.close()

    def figures(self) -> tuple[float, list[float], int]:
        """Seconds, CPU seconds of each process, events."""
        if self._first is None or self.last is None:
            raise RuntimeError("the streams ended before all of them had begun; ask for more")
        (t0, cpu0, n0), (t1, cpu1, n1) = self._first, self.last
        return t1 - t0, [b - a for a, b in zip(cpu0, cpu1, strict=True)], n1 - n0


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    total = int(fields[0]) / 1e9
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if thread.name != str(pid):
            total += int((thread / "schedstat").read_text().split()[0]) / 1e9
    return total


async def stream_all(port: int, pids: list[int], route: str, count: int, tokens: int) -> Streams:
    path, body = BODIES[route]
    limit = {"sampling_params": {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}}
    full = body | (limit if route == "generate" else {"max_tokens": tokens, "temperature": 0})
    data = json.dumps(full | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    request = head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data
    streams = Streams(pids, count)
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(streams.read(port, request))
    return streams


def serving(args: argparse.Namespace) -> dict[str, object]:
    """Figures of a server process and its engine process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "palmette.server", "serve", "--port", str(port), *args.options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the server did not start")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        pids = [process.pid, int(children[0])]
        run = stream_all(port, pids, args.route, args.streams, args.tokens)
        wall_s, (server_s, engine_s), events = asyncio.run(run).figures()
    finally:
        process.terminate()
        process.communicate()
    return {
        "server_cpu_us_per_token": round(server_s / events * 1e6, 1),
        "engine_cpu_ms_per_step": round(engine_s / events * args.streams * 1e3, 2),
        "tokens_per_s": round(events / wall_s, 1),
    }


class TimedRunner(CpuRunner):
    """Adds up the time inside the native call."""

    native_s = 0.0

    def launch(self, batch: ForwardBatch) -> HostLogits:
        start = perf_counter()
        result = super().launch(batch)
        self.native_s += perf_counter() - start
        return result


def host_share(streams: int, steps: int) -> dict[str, object]:
    """Medians over the steps of an engine in which `streams` sequences decode.

    Without SIGINT, as in the engine process; where it is handled each step defers it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    engine = Engine.load(EngineConfig(runner="native", kv_tokens=streams * (steps + 64)))
    runner = engine._runner
    runner.__class__ = TimedRunner
    assert isinstance(runner, TimedRunner)
    ours, theirs = socket.socketpair()
    sender, receiver = transport.engine_end(ours), transport.server_end(theirs)
    sampling = SamplingParams(max_new_tokens=steps + 16, temperature=0.0, ignore_eos=True)
    ids = [tuple(range(1000 + i, 1016 + i)) for i in range(streams)]
    engine.submit(
        [Request(request_id=f"{i}", prompt_ids=p, sampling=sampling) for i, p in enumerate(ids)]
    )
    while engine.stats().generated_tokens < streams:
        engine.step()
    names = ("plan", "build", "native", "mask", "sample", "commit", "send", "step")
    samples: dict[str, list[float]] = {name: [] for name in names}
    for number in range(steps - 4):
        before, native_s, start = engine.stats(), runner.native_s, perf_counter()
        outputs = engine.step()
        stepped = perf_counter()
        sender.send(transport.StepOutputs(number, outputs))
        end = perf_counter()
        after, native_s = engine.stats(), runner.native_s - native_s
        for name in ("plan", "mask", "sample", "commit"):
            samples[name].append(getattr(after, f"{name}_s") - getattr(before, f"{name}_s"))
        samples["build"].append(after.launch_s - before.launch_s - native_s)
        samples["native"].append(native_s)
        samples["send"].append(end - stepped)
        samples["step"].append(end - start)
        receiver.receive()
    engine.close()
    ours.close()
    theirs.close()
    medians = {name: statistics.median(values) for name, values in samples.items()}
    host = [a - b for a, b in zip(samples["step"], samples["native"], strict=True)]
    shares = [h / s for h, s in zip(host, samples["step"], strict=True)]
    return {
        "plan_share_of_step": round(medians["plan"] / medians["step"], 4),
        "host_share_of_step": round(statistics.median(shares), 4),
        "median_us": {name: round(value * 1e6) for name, value in medians.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--route", choices=sorted(BODIES), default="completions")
    parser.add_argument("options", nargs="*", help="for palmette serve")
    args = parser.parse_args()
    result: dict[str, object] = {
        "benchmark": "serving_costs",
        "machine": platform.processor() or platform.machine(),
        "load": round(os.getloadavg()[0], 2),
        "streams": args.streams,
        "route": args.route,
    }
    result |= serving(args) | host_share(args.streams, args.tokens)
    result["64 sequences"] = host_share(64, 48)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
