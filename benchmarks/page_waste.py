"""What paging wastes of the KV pool, beside reserving contiguous memory for each request.

    python benchmarks/page_waste.py [--requests 400] [--pool 32768] [--seed 0]

The real scheduler serves a mixed trace on a runner that computes nothing; a step takes all prompts
for which there is room, so that memory alone limits how many run. Prints one JSON line:
for each page size, and for contiguous reservations of prompt and most new tokens and of the whole
context, the percentage of the memory held that holds no token (mean over the steps), the mean
number of sequences that run in the same pool, and the steps to serve the trace. `shared`: with the
prefix cache, where half of the prompts begin alike, tokens per token of memory held; above 100
since one page serves many sequences. With --table the same as Markdown.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics

from engine_overhead import NoRunner

from palmette.runtime.config import SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Request, SamplingParams

CONTEXT = 2048
PAGES = (1, 16, 64)
MAX_RUNNING = 256
MOST = (64, 128, 256, 512)  # new tokens that a request may ask for


def trace(count: int, seed: int) -> list[Request]:
    """Prompts of 8 to 1,500 tokens, answers that end after a part of what they may take."""
    rng = random.Random(seed)
    stems = [tuple(rng.randrange(256) for _ in range(300)) for _ in range(4)]
    requests = []
    for i in range(count):
        length = min(1200, max(8, int(rng.lognormvariate(4.6, 1.0))))
        most = MOST[i % 4]
        stem = rng.choice(stems) if i % 2 else ()
        requests.append(
            Request(
                request_id=f"{i}",
                prompt_ids=stem + tuple(rng.randrange(256) for _ in range(length)),
                sampling=SamplingParams(
                    max_new_tokens=max(1, int(most * rng.random() ** 2)),
                    temperature=0.0,
                    ignore_eos=True,
                ),
            )
        )
    return requests


def paged(requests: list[Request], *, pool: int, page_size: int, shares: bool) -> dict[str, float]:
    runner = NoRunner(num_pages=pool // page_size, page_size=page_size, vocab_size=300)
    scheduler = SchedulerConfig(
        prefix_cache=shares, max_running=MAX_RUNNING, token_budget=pool, mixed_chunk_tokens=pool
    )
    engine = fake_engine(runner=runner, context_length=CONTEXT, scheduler=scheduler)
    engine.submit(requests)
    used, running, steps = [], [], 0
    while engine.has_work:
        engine.step()
        steps += 1
        if engine.stats().waiting:  # as long as memory is what is scarce
            used.append(used_part(engine, page_size))
            running.append(len(engine._scheduler.running))
    engine.close()
    return {
        "used_percent": round(statistics.fmean(used) * 100, 2),
        "running": round(statistics.fmean(running), 1),
        "steps": steps,
    }


def used_part(engine: Engine, page_size: int) -> float:
    """Tokens of the running sequences over the places of the pages they hold."""
    tokens = sum(sequence.num_leased for sequence in engine._scheduler.running)
    return tokens / (engine.stats().used_pages * page_size)


def contiguous(requests: list[Request], *, pool: int, whole_context: bool) -> dict[str, float]:
    """First come, first served; each takes its reservation and one token a step."""
    waiting, live = list(reversed(requests)), list[list[int]]()  # [reserved, tokens, to go]
    used, running, steps = [], [], 0
    while waiting or live:
        while waiting and len(live) < MAX_RUNNING:
            request = waiting[-1]
            prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens or 0
            most = MOST[int(request.request_id) % 4]
            reserved = CONTEXT if whole_context else prompt + most
            if sum(one[0] for one in live) + reserved > pool:
                break
            live.append([reserved, prompt, new])
            waiting.pop()
        if waiting:
            used.append(sum(one[1] for one in live) / sum(one[0] for one in live))
            running.append(len(live))
        steps += 1
        live = [[size, tokens + 1, left - 1] for size, tokens, left in live if left > 1]
    return {
        "used_percent": round(statistics.fmean(used) * 100, 2),
        "running": round(statistics.fmean(running), 1),
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pool", type=int, default=32768, help="tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    requests = trace(args.requests, args.seed)
    rows: dict[str, dict[str, float]] = {}
    for page_size in PAGES:
        rows[f"page {page_size}"] = paged(
            requests, pool=args.pool, page_size=page_size, shares=False
        )
    for name, whole in (("prompt and most new tokens", False), ("whole context", True)):
        rows[f"contiguous, {name}"] = contiguous(requests, pool=args.pool, whole_context=whole)
    for page_size in PAGES:
        rows[f"page {page_size}, shared"] = paged(
            requests, pool=args.pool, page_size=page_size, shares=True
        )
    if args.table:
        print(
            "| memory | tokens per place held, % | sequences that run | steps |\n|---|---|---|---|"
        )
        for name, row in rows.items():
            print(f"| {name} | {row['used_percent']} | {row['running']} | {row['steps']} |")
        return
    print(json.dumps({"benchmark": "page_waste", **vars(args), "rows": rows}))


if __name__ == "__main__":
    main()
