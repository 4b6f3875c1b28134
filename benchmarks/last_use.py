"""What programs' hints are worth in too small a pool: hit rates, steps, and seconds on a model.

    python benchmarks/last_use.py [--traces chat,agents] [--memory 0.3,0.6] [--size 2] [--seed 0]
                                  [--queue fcfs] [--model] [--problems 4] [--rounds 3]
                                  [--json FILE]

The traces of `traces.py` run as in `hit_rate.py`, in a pool of `--memory` of the pages that a trace
fills when nothing is evicted, under each eviction policy, without hints (`off`: the engine is told
no future uses, no last uses and no ends of programs) and with them (`on`). Prints, in percent, the
prompt tokens that admissions found over all prompt tokens, and in brackets the part of Belady's
optimum (`belady.py`) for the order in which that run admitted; then how many steps and computed
rows the tree of thought takes. With --model `--problems` of it run on the default model too, in a
pool of the first `--memory` of what they fill there: [median of the wall seconds, spread, computed
rows], spread = (max - min) / median over the rounds, in which the ways take turns. Then one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent))

from belady import Log, optimum
from traces import TRACES, Trace, search_problems

from palmette.runtime.client import LocalClient
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.engine import Engine
from palmette.runtime.fake_runner import fake_engine
from palmette.runtime.request import Release, Request, ReuseHint

EVICTIONS = ("lru", "priority", "program")
HINTS = ("off", "on")
MAX_RUNNING = 6
PAGE_SIZE = 16


class Silent(LocalClient):
    """Tells the engine nothing of the future."""

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit([replace(one, hint=ReuseHint()) for one in requests])

    def release(self, releases: Sequence[Release]) -> None:
        return


def run(trace: Trace, engine: Engine, *, hints: str, size: int, seed: int) -> Log:
    """The log of a trace on an engine."""
    log = Log(engine.cache.tree)
    client = LocalClient(engine) if hints == "on" else Silent(engine)
    trace(client, random.Random(seed), size)
    engine.check()
    return log


def fake(num_pages: int, *, eviction: str, queue: str) -> Engine:
    return fake_engine(
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        context_length=8192,
        scheduler=SchedulerConfig(policy=queue, max_running=MAX_RUNNING),
        config=EngineConfig(eviction_policy=eviction),
        clock=lambda: 0.0,
    )


def pages_needed(trace: Trace, *, size: int, seed: int) -> int:
    engine = fake(1 << 17, eviction="lru", queue="fcfs")
    run(trace, engine, hints="off", size=size, seed=seed)
    return engine.stats().cached_pages


def measure(
    trace: Trace, num_pages: int, *, queue: str, size: int, seed: int
) -> dict[str, dict[str, float]]:
    """By policy and hints: what was found, of the best for its order, steps, computed rows."""
    found: dict[str, dict[str, float]] = {}
    for eviction in EVICTIONS:
        for hints in HINTS:
            engine = fake(num_pages, eviction=eviction, queue=queue)
            log = run(trace, engine, hints=hints, size=size, seed=seed)
            best, stats = optimum(log, num_pages), engine.stats()
            found[f"{eviction} {hints}"] = {
                "found": round(log.num_matched() / log.num_tokens(), 5),
                "of best": round(log.num_matched() / best, 5),
                "steps": stats.steps,
                "rows": stats.forward_tokens,
            }
    return found


def on_model(memory: float, *, problems: int, seed: int, rounds: int) -> dict[str, object]:
    """Wall seconds of the tree of thought on the default model."""

    def engine_with(num_pages: int | None, eviction: str) -> Engine:
        kv_tokens = 1 << 15 if num_pages is None else num_pages * PAGE_SIZE
        scheduler = SchedulerConfig(max_running=MAX_RUNNING)
        return Engine.load(
            EngineConfig(
                eviction_policy=eviction,
                page_size=PAGE_SIZE,
                kv_tokens=kv_tokens,
                scheduler=scheduler,
            )
        )

    def seconds(engine: Engine, hints: str) -> tuple[float, int]:
        engine.flush_cache()
        rows, start = engine.stats().forward_tokens, perf_counter()
        client = LocalClient(engine) if hints == "on" else Silent(engine)
        search_problems(client, random.Random(seed), problems)
        return perf_counter() - start, engine.stats().forward_tokens - rows

    large = engine_with(None, "lru")
    seconds(large, "off")
    num_pages = int(memory * large.stats().cached_pages)
    large.close()
    engines = {eviction: engine_with(num_pages, eviction) for eviction in ("lru", "program")}
    ways = [(eviction, hints) for eviction in engines for hints in HINTS]
    times: dict[str, list[tuple[float, int]]] = {" ".join(way): [] for way in ways}
    for number in range(rounds):
        for eviction, hints in ways[number % len(ways) :] + ways[: number % len(ways)]:
            times[f"{eviction} {hints}"].append(seconds(engines[eviction], hints))
    for engine in engines.values():
        engine.close()
    found: dict[str, object] = {"pages": num_pages, "problems": problems}
    for way, samples in times.items():
        durations = [duration for duration, _ in samples]
        median = statistics.median(durations)
        spread = (max(durations) - min(durations)) / median
        found[way] = [round(median, 3), round(spread, 3), samples[0][1]]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", default=",".join(TRACES), help="some of: %(default)s")
    parser.add_argument("--memory", default="0.3,0.6", help="parts of the pages needed")
    parser.add_argument("--size", type=int, default=2, help="scales the number of programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queue", default="fcfs")
    parser.add_argument("--model", action="store_true", help="also on the default model")
    parser.add_argument("--problems", type=int, default=4, help="of the tree of thought there")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    scale = {"size": options.size, "seed": options.seed}
    memories = [float(part) for part in options.memory.split(",")]
    figures: dict[str, object] = {"benchmark": "last_use", "queue": options.queue, **scale}
    columns = [f"{eviction} {hints}" for eviction in EVICTIONS for hints in HINTS]
    print(f"{'':24}" + "".join(f"{column:>17}" for column in columns))
    for name in options.traces.split(","):
        needed = pages_needed(TRACES[name], **scale)
        for memory in memories:
            num_pages = int(memory * needed)
            found = measure(TRACES[name], num_pages, queue=options.queue, **scale)
            figures[f"{name} {memory}"] = {"pages": num_pages, "needed": needed, **found}
            told = [(100 * found[one]["found"], 100 * found[one]["of best"]) for one in columns]
            print(
                f"{name + f', {memory:.0%}':24}"
                + "".join(f"{rate:8.2f} ({part:6.2f})" for rate, part in told),
                flush=True,
            )
            if name == "tree of thought":
                for what in ("steps", "rows"):
                    counts = "".join(f"{found[one][what]:17.0f}" for one in columns)
                    print(f"{'  ' + what:24}{counts}")
    if options.model:
        figures["seconds"] = on_model(
            memories[0], problems=options.problems, seed=options.seed, rounds=options.rounds
        )
        print(f"  seconds at {memories[0]:.0%}: {figures['seconds']}")
    line = json.dumps(figures)
    print(line)
    if options.json is not None:
        options.json.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
