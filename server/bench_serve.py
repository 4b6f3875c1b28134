"""`palmette bench serve`: measure any OpenAI-compatible endpoint with the workloads W1 to W7.

A closed loop of clients: at most `concurrency` calls of a workload are under way, and the next
one is sent when one ends. Every round has prompts of its own. Figures are what the clients see;
their parsing of events takes time on the same machine when the server is local, the same for all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich import box
from rich.console import Console
from rich.table import Table

from palmette import __version__
from palmette.runtime import model_store
from palmette.runtime.load import open_tokenizer

from .bench_client import Clock, Endpoint, Message, Timeline
from .bench_figures import Figures, measure_figures, median_figures
from .bench_options import BenchOptions
from .bench_workloads import Call, CountTokens, Workload, build
from .config import UserError
from .output import check_writable, table_console

_STREAMING_EVENTS = 4  # of every stream of W7 before the long prompt arrives


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One workload on one endpoint."""

    workload: Workload  # of the first round
    rounds: tuple[Figures, ...]
    errors: tuple[str, ...]  # of failed calls, each once

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "id": self.workload.workload_id,
            "title": self.workload.title,
            "concurrency": self.workload.concurrency,
            "median": median_figures(self.rounds),
            "rounds": [asdict(figures) for figures in self.rounds],
            "errors": list(self.errors),
        }


class _Runner:
    """Sends the calls of one workload to one endpoint."""

    def __init__(self, endpoint: Endpoint, workload: Workload, clock: Clock):
        self._endpoint = endpoint
        self._workload = workload
        self._clock = clock
        self._timelines: dict[int, Timeline] = {}
        self._prompts: dict[int, str] = {}  # what was sent, for the children
        self._messages: dict[int, list[Message]] = {}
        self._ended = [asyncio.Event() for _ in workload.calls]
        self._streaming = [asyncio.Event() for _ in workload.calls]
        self._places = asyncio.Semaphore(workload.concurrency)

    async def run(self) -> Figures:
        start = self._clock()
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._workload.calls)):
                group.create_task(self._call(index))
        return measure_figures(self._workload, self.timelines(), wall_s=self._clock() - start)

    def timelines(self) -> list[Timeline]:
        return [self._timelines[index] for index in range(len(self._workload.calls))]

    async def _call(self, index: int) -> None:
        call = self._workload.calls[index]
        try:
            if call.parent is not None:
                await self._ended[call.parent].wait()
                if self._timelines[call.parent].error is not None:
                    self._timelines[index] = self._skipped(call)
                    return
            if call.is_arrival:
                for other, event in enumerate(self._streaming):
                    if other != index:
                        await event.wait()
            async with self._places:
                self._timelines[index] = await self._send(index, call)
        finally:
            self._streaming[index].set()
            self._ended[index].set()

    def _skipped(self, call: Call) -> Timeline:
        now = self._clock()
        error = "not sent: the call that it continues failed"
        return Timeline(call_id=call.call_id, sent_s=now, end_s=now, error=error)

    async def _send(self, index: int, call: Call) -> Timeline:
        count = 0

        def on_text() -> None:
            nonlocal count
            count += 1
            if count == _STREAMING_EVENTS:
                self._streaming[index].set()

        if call.is_chat:
            messages = self._chat_of(call)
            self._messages[index] = messages
            return await self._endpoint.chat(
                call.call_id, messages, call.max_tokens, schema=call.schema, on_text=on_text
            )
        prompt = call.text
        if call.parent is not None:
            prompt = self._prompts[call.parent] + self._timelines[call.parent].text + call.text
        self._prompts[index] = prompt
        return await self._endpoint.complete(call.call_id, prompt, call.max_tokens, on_text=on_text)

    def _chat_of(self, call: Call) -> list[Message]:
        messages: list[Message] = []
        if call.parent is not None:
            answer = self._timelines[call.parent].text
            messages = [*self._messages[call.parent], {"role": "assistant", "content": answer}]
        elif call.system:
            messages = [{"role": "system", "content": call.system}]
        return [*messages, {"role": "user", "content": call.text}]


class Bench:
    """An open endpoint that workloads can be run on, one after another."""

    def __init__(self, options: BenchOptions, *, clock: Clock = time.perf_counter):
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._client = httpx.AsyncClient(
            base_url=options.url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=options.timeout_s,
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy would be measured too
        )
        self._options = options
        self._clock = clock
        self._endpoint: Endpoint | None = None

    async def __aenter__(self) -> Bench:
        try:
            self._endpoint = await Endpoint.open(
                self._client, model=self._options.model, clock=self._clock
            )
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.endpoint.close()
        await self._client.aclose()

    @property
    def endpoint(self) -> Endpoint:
        assert self._endpoint is not None, "enter the Bench first"
        return self._endpoint

    async def measure(
        self, workload_id: str, *, count: CountTokens | None = None, first_round: int = 0
    ) -> Measurement:
        """All rounds of one workload, from `first_round` on; each round has its own prompts.

        `count` counts the tokens of a text, see `token_counter`.
        """
        workloads = [
            build(
                workload_id,
                seed=f"{self._options.seed}/{first_round + number}",
                scale=self._options.scale,
                count=count,
            )
            for number in range(self._options.rounds)
        ]
        rounds: list[Figures] = []
        errors: dict[str, None] = {}
        for workload in workloads:
            if self._options.has_flush:
                await self.endpoint.flush()
            runner = _Runner(self.endpoint, workload, self._clock)
            rounds.append(await runner.run())
            errors |= {t.error: None for t in runner.timelines() if t.error is not None}
        return Measurement(workload=workloads[0], rounds=tuple(rounds), errors=tuple(errors))


def token_counter(tokenizer: str | None, model: str) -> tuple[CountTokens | None, str | None]:
    """How tokens are counted, and by which tokenizer.

    `tokenizer` is a directory, a .gguf file, or the name of a pulled model; None: that of `model`
    when it is such a name, else none.

    Raises:
        UserError: there is no such tokenizer.
    """
    path = _tokenizer_path(tokenizer or model)
    if path is None:
        if tokenizer is not None:
            raise UserError(
                f"--tokenizer: {tokenizer} is neither a directory, a .gguf file nor a pulled model"
            )
        return None, None
    encoder = open_tokenizer(path)
    return (lambda text: len(encoder.encode(text))), path.name


def _tokenizer_path(name: str) -> Path | None:
    if name in model_store.MODELS:
        return model_store.cached(name)
    path = Path(name).expanduser()
    is_model = path.is_dir() or (path.is_file() and path.suffix == ".gguf")
    return path if is_model else None


def run(args: argparse.Namespace) -> int:
    """Measure and print; 1 when a call failed or an answer was not JSON of its schema.

    Raises:
        UserError: the endpoint does not answer, or a flag is wrong.
    """
    options = BenchOptions.of(args)
    if args.json is not None:
        check_writable(args.json)
    console = table_console()
    console.print(f"prompts of seed {options.seed}; --seed {options.seed} repeats them")
    record, measurements = asyncio.run(_measure_all(options, args.tokenizer, console))
    console.print(figures_table(measurements, title=f"{record['model']} at {options.url}"))
    for line in _remarks(measurements):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 1 if any(is_bad(measurement) for measurement in measurements) else 0


async def _measure_all(
    options: BenchOptions, tokenizer: str | None, console: Console
) -> tuple[dict[str, Any], list[Measurement]]:
    measurements = []
    async with Bench(options) as bench:
        model = bench.endpoint.model
        count, tokenizer_name = token_counter(tokenizer, model)
        for workload_id in options.workloads:
            with console.status(f"{workload_id} ..."):
                measurements.append(await bench.measure(workload_id, count=count))
        record = {
            "palmette": __version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(),
            "url": options.url,
            "model": model,
            "tokenizer": tokenizer_name,
            "ignore_eos": bench.endpoint.has_ignore_eos,
            "scale": str(options.scale),
            "seed": options.seed,
            "workloads": [measurement.record() for measurement in measurements],
        }
    return record, measurements


def machine() -> dict[str, Any]:
    """The client's machine, for the record."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [
            line
            for line in info.read_text(encoding="utf-8", errors="replace").splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def is_bad(measurement: Measurement) -> bool:
    """Did a call fail, or an answer break its schema (other than by being cut)?"""
    return any(figures.failed or _num_wrong(figures) for figures in measurement.rounds)


def _num_wrong(figures: Figures) -> int:
    if figures.valid_answers is None or figures.truncated_answers is None:
        return 0
    done = figures.requests - figures.failed
    return done - figures.valid_answers - figures.truncated_answers


_COLUMNS: tuple[tuple[str, Callable[[dict[str, float | None]], str]], ...] = (
    ("TTFT ms\n50 / 99 %", lambda f: _pair(f, "ttft_p50_ms", "ttft_p99_ms")),
    ("ITL ms\n50 / 99 %", lambda f: _pair(f, "itl_p50_ms", "itl_p99_ms")),
    ("TPOT ms\n50 / 99 %", lambda f: _pair(f, "tpot_p50_ms", "tpot_p99_ms")),
    ("out\ntok/s", lambda f: _number(f["output_tokens_per_s"])),
    ("all\ntok/s", lambda f: _number(f["total_tokens_per_s"])),
    ("req/s", lambda f: _number(f["requests_per_s"])),
    ("cached", lambda f: _share(f["cached_tokens"], f["prompt_tokens"])),
)


def figures_table(measurements: Sequence[Measurement], *, title: str) -> Table:
    """One row a workload: medians of its rounds."""
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("", overflow="fold")
    table.add_column("at\nonce", justify="right", overflow="fold")
    for name, _ in _COLUMNS:
        table.add_column(name, justify="right", overflow="fold")
    for measurement in measurements:
        figures = median_figures(measurement.rounds)
        workload = measurement.workload
        table.add_row(
            workload.workload_id,
            str(workload.concurrency),
            *(show(figures) for _, show in _COLUMNS),
        )
    return table


def _remarks(measurements: Sequence[Measurement]) -> list[str]:
    """Lines under the table: what each workload is, what only it measures, what failed."""
    lines = []
    for measurement in measurements:
        figures = median_figures(measurement.rounds)
        extra = ""
        if figures["valid_answers"] is not None:
            wrong = sum(_num_wrong(f) for f in measurement.rounds)
            extra = (
                f"; {figures['valid_answers']:.0f} valid, "
                f"{figures['truncated_answers']:.0f} cut at the limit, {wrong} wrong"
            )
        if figures["arrival_ttft_ms"] is not None:
            extra = (
                f"; its TTFT {_number(figures['arrival_ttft_ms'])} ms, meanwhile ITL p99 "
                f"{_number(figures['stall_p99_ms'])} ms, max {_number(figures['stall_max_ms'])} ms"
            )
        lines.append(f"{measurement.workload.workload_id}: {measurement.workload.title}{extra}")
        if figures["failed"]:
            lines.append(f"  {figures['failed']:.0f} FAILED: {'; '.join(measurement.errors[:3])}")
    return lines


def _number(value: float | None) -> str:
    """About three digits."""
    if value is None:
        return "-"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _pair(figures: dict[str, float | None], first: str, second: str) -> str:
    return f"{_number(figures[first])} / {_number(figures[second])}"


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.0%}"
