"""Streams that decode while a long prompt arrives: how long they wait, and how long it waits.

    python benchmarks/head_of_line.py [--streams 4] [--prompt 4000] [--chunks 32,64,128,512]
                                      [--targets 1.5] [--model NAME] [--threads N]

Prints one JSON line. For each static chunk, and for each target as a multiple of the idle time
between tokens: the longest and the 99th percentile of the milliseconds between two tokens of a
stream while the prompt is read, the streams' time per token (TPOT; all step together) from their
first one on, also over that of idle steps, the prompt's time to first token, and the tokens per
second of prompt and streams together. With --cpu-time all of that is in CPU seconds of one
thread: comparable among its lines even where other processes use the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from time import perf_counter, process_time

import numpy as np

from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.request import Request, SamplingParams


def streams(engine: Engine, clock: Callable[[], float], count: int) -> list[float]:
    """Start `count` sequences and let them decode for a while; milliseconds of the steps."""
    rng = random.Random(1)
    sampling = SamplingParams(max_new_tokens=2000, temperature=0.0, ignore_eos=True)
    engine.submit(
        [
            Request(
                request_id=f"stream {i}",
                prompt_ids=tuple(rng.randrange(100, 5000) for _ in range(32)),
                sampling=sampling,
            )
            for i in range(count)
        ]
    )
    while engine.stats().generated_tokens < count:
        engine.step()
    return times_until(engine, clock, None, steps=24)


def times_until(
    engine: Engine, clock: Callable[[], float], request_id: str | None, *, steps: int = 10**6
) -> list[float]:
    """Milliseconds from token to token until `request_id` has its first one."""
    times, last = [], clock()
    for _ in range(steps):
        outputs = engine.step()
        now = clock()
        times.append((now - last) * 1e3)
        last = now
        if any(output.request_id == request_id for output in outputs):
            break
    return times


def measure(
    args: argparse.Namespace, num_streams: int, *, target: float | None = None, **scheduler: object
) -> dict[str, float]:
    config = EngineConfig(
        model=args.model,
        threads=1 if args.cpu_time else args.threads,
        kv_tokens=args.prompt + 1024 * args.streams,
        scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
    )
    clock = process_time if args.cpu_time else perf_counter
    engine = Engine.load(config)
    engine._clock = clock
    before = streams(engine, clock, num_streams)
    idle = times_until(engine, clock, None, steps=40)
    idle_ms = statistics.median(idle)
    if target is not None:  # of this very engine's idle steps: the machine drifts between runs
        engine._scheduler.budget._tpot_s = target * idle_ms / 1e3
    rng = random.Random(2)
    prompt = tuple(rng.randrange(100, 5000) for _ in range(args.prompt))
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    start = clock()
    engine.submit([Request(request_id="long", prompt_ids=prompt, sampling=sampling)])
    times = times_until(engine, clock, "long")
    spent = clock() - start
    tpot_ms = statistics.fmean([*before, *idle, *times])
    error = engine.stats().step_time_error
    engine.close()
    return {
        "idle_ms": round(idle_ms, 2),
        "max_itl_ms": round(max(times), 1),
        "p99_itl_ms": round(float(np.percentile(times, 99)), 1),
        "tpot_ms": round(tpot_ms, 2),
        "tpot_over_idle": round(tpot_ms / idle_ms, 2),
        "ttft_s": round(spent, 2),
        "tokens_per_s": round((args.prompt + num_streams * len(times)) / spent, 1),
        "step_time_error": round(error, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--chunks", default="32,64,128,512")
    parser.add_argument("--targets", default="1.5")
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    result: dict[str, object] = {"benchmark": "head_of_line", **vars(args)}
    for chunk in [int(text) for text in args.chunks.split(",") if text]:
        result[f"chunk {chunk}"] = measure(args, args.streams, mixed_chunk_tokens=chunk)
    for target in [float(text) for text in args.targets.split(",") if text]:
        result[f"target {target}"] = measure(args, args.streams, target=target, tpot_slo_ms=1e3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
