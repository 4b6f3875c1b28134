"""Continuous beside static batching on answers of skewed lengths: tokens per second, use of rows.

    python benchmarks/batching.py [--requests 32] [--rows 8] [--model NAME] [--rounds 1]

Both serve the same requests with the same engine and number of rows; most answers are short, some
are eight times as long. Static: as many requests as there are rows are sent, and the next when all
of them are done. Prints one JSON line: for each, the median over the rounds, which alternate, of
the generated tokens per second and of the rows' use: decodes made over rows times decode steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
from collections.abc import Sequence
from time import perf_counter

from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.request import Request, SamplingParams

SHORT, LONG = 16, 128  # new tokens; one of four is long


def trace(count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(
            request_id=f"{i}",
            prompt_ids=tuple(rng.randrange(100, 5000) for _ in range(32)),
            sampling=SamplingParams(
                max_new_tokens=LONG if rng.random() < 0.25 else SHORT,
                temperature=0.0,
                ignore_eos=True,
            ),
        )
        for i in range(count)
    ]


def serve(engine: Engine, groups: Sequence[Sequence[Request]], rows: int) -> tuple[float, float]:
    """Tokens per second and use of rows when each group is sent once the one before is done."""
    engine.flush_cache()
    before, start = engine.stats().generated_tokens, perf_counter()
    steps = 0
    for group in groups:
        engine.submit(group)
        while engine.has_work:
            engine.step()
            steps += 1
    tokens = engine.stats().generated_tokens - before
    return tokens / (perf_counter() - start), tokens / (rows * steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", default=EngineConfig().model)
    args = parser.parse_args()
    scheduler = SchedulerConfig(max_running=args.rows)
    engine = Engine.load(EngineConfig(model=args.model, kv_tokens=16384, scheduler=scheduler))
    requests = trace(args.requests, 0)
    ways = {
        "continuous": [requests],
        "static": [requests[i : i + args.rows] for i in range(0, len(requests), args.rows)],
    }
    serve(engine, [requests[: args.rows]], args.rows)  # warm
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, groups in ways.items():
            samples[name].append(serve(engine, groups, args.rows))
    engine.close()
    result: dict[str, object] = {
        "benchmark": "batching",
        "machine": platform.processor() or platform.machine(),
        **vars(args),
    }
    for name, values in samples.items():
        result[name] = {
            "tokens_per_s": round(statistics.median(rate for rate, _ in values), 1),
            "use_of_rows": round(statistics.median(use for _, use in values), 3),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
