"""`palmette bench`: a closed loop of clients against a running server.

All prompts share a prefix of random token ids and differ in their suffix, so the figures show
what prefix sharing gives. Works on any server with SGLang's /generate.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from .config import UserError

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    url: str
    api_key: str | None = None
    num_requests: int = 32
    concurrency: int = 8
    prefix_tokens: int = 256
    suffix_tokens: int = 32
    max_tokens: int = 32

    def __post_init__(self) -> None:
        for name in ("num_requests", "concurrency", "suffix_tokens", "max_tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}: {getattr(self, name)} is out of range; must be >= 1")
        if self.prefix_tokens < 0:
            raise UserError(f"prefix_tokens: {self.prefix_tokens} is out of range; must be >= 0")


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, seconds."""

    first_s: float
    total_s: float
    output_tokens: int
    cached_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures over all requests; times in milliseconds."""

    requests: int
    wall_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    first_token_ms_p50: float
    first_token_ms_p99: float
    per_token_ms_p50: float
    per_token_ms_p99: float
    cached_share: float  # of the prompt tokens


async def measure(options: BenchOptions) -> Report:
    """Send the requests, `concurrency` at a time."""
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    limits = httpx.Limits(max_connections=options.concurrency)
    async with httpx.AsyncClient(
        base_url=options.url, headers=headers, timeout=600.0, limits=limits
    ) as client:
        info = (await client.get("/server_info")).raise_for_status().json()
        prompts = _prompts(options, int(info["vocab_size"]))
        samples: list[Sample] = []

        async def worker() -> None:
            while prompts:
                samples.append(await _one(client, prompts.pop(), options.max_tokens))

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(options.concurrency):
                group.create_task(worker())
        return _report(samples, time.perf_counter() - start)


def bench(options: BenchOptions, *, as_json: bool) -> int:
    """Measure and print."""
    try:
        report = asyncio.run(measure(options))
    except* httpx.HTTPError as errors:
        first = errors.exceptions[0]
        raise UserError(f"{options.url}: {first or type(first).__name__}") from first
    if as_json:
        print(json.dumps({"options": asdict(options) | {"api_key": None}, **asdict(report)}))
        return 0
    for name, value in asdict(report).items():
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"{name:<22}{text:>12}")
    return 0


def _prompts(options: BenchOptions, vocab_size: int) -> list[list[int]]:
    generator = random.Random(_SEED)  # noqa: S311 - token ids, no secrets

    def ids(count: int) -> list[int]:
        return [generator.randrange(vocab_size) for _ in range(count)]

    prefix = ids(options.prefix_tokens)
    return [prefix + ids(options.suffix_tokens) for _ in range(options.num_requests)]


async def _one(client: httpx.AsyncClient, prompt: list[int], max_tokens: int) -> Sample:
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    start = time.perf_counter()
    first: float | None = None
    meta: dict[str, Any] = {}
    async with client.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise UserError(event["error"]["message"])
            if first is None:
                first = time.perf_counter() - start
            meta = event["meta_info"]
    total = time.perf_counter() - start
    return Sample(
        first_s=total if first is None else first,
        total_s=total,
        output_tokens=meta["completion_tokens"],
        cached_tokens=meta["cached_tokens"],
        prompt_tokens=meta["prompt_tokens"],
    )


def _report(samples: Sequence[Sample], wall_s: float) -> Report:
    first = [1000 * s.first_s for s in samples]
    per_token = [
        1000 * (s.total_s - s.first_s) / (s.output_tokens - 1)
        for s in samples
        if s.output_tokens > 1
    ] or [0.0]
    prompt_tokens = sum(s.prompt_tokens for s in samples)
    return Report(
        requests=len(samples),
        wall_s=wall_s,
        output_tokens_per_s=sum(s.output_tokens for s in samples) / wall_s,
        prompt_tokens_per_s=prompt_tokens / wall_s,
        first_token_ms_p50=statistics.median(first),
        first_token_ms_p99=_p99(first),
        per_token_ms_p50=statistics.median(per_token),
        per_token_ms_p99=_p99(per_token),
        cached_share=sum(s.cached_tokens for s in samples) / prompt_tokens,
    )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]
