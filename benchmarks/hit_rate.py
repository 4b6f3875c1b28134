"""How much of the prompts the cache finds in too small a pool, beside the best it could find.

    python benchmarks/hit_rate.py [--traces chat,agents] [--memory 0.3] [--size 2] [--seed 0]
                                  [--page-size 16] [--json FILE]

The traces of `traces.py` run on the real scheduler and tree with a runner that computes nothing,
in a pool of `--memory` of the pages that the trace fills when nothing is ever evicted, under each
eviction policy and each order of the waiting queue. Prints a table of hit rates in percent: tokens
found by all admissions over the tokens of their prompts.

What is found decides what is admitted next, so each policy admits in an order of its own even under
one queue, and Belady's optimum (`belady.py`) is one of an order: another policy may pass it, in
another order. `best` is the optimum for the order in which `program` admitted, and `of best` the
part of it that `program` reached. Then one JSON line, which has the optimum for the order of each
policy (`best for the order of lru`); --json writes it to a file as well.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent))

from belady import Log, optimum
from traces import TRACES, Trace

from palmette.runtime.client import LocalClient
from palmette.runtime.config import EngineConfig, SchedulerConfig
from palmette.runtime.fake_runner import fake_engine

EVICTIONS = ("lru", "lfu", "slru", "program")
QUEUES = ("fcfs", "lpm", "dfs-weight", "program")
MAX_RUNNING = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    trace: Trace
    size: int
    seed: int
    page_size: int

    def run(self, num_pages: int, *, eviction: str, queue: str) -> tuple[Log, int]:
        """The log of a run in a pool of `num_pages`, and how many it holds at the end."""
        engine = fake_engine(
            num_pages=num_pages,
            page_size=self.page_size,
            context_length=8192,
            scheduler=SchedulerConfig(policy=queue, max_running=MAX_RUNNING),
            config=EngineConfig(eviction_policy=eviction),
            clock=lambda: 0.0,
        )
        log = Log(engine.cache.tree)
        self.trace(LocalClient(engine), random.Random(self.seed), self.size)
        engine.check()
        return log, engine.stats().cached_pages


def best_for(eviction: str) -> str:
    """The name of the optimum for the order in which a run under this policy admitted."""
    return f"best for the order of {eviction}"


def measure(workload: Workload, memory: float) -> dict[str, object]:
    """Hit rates of one trace."""
    full, num_needed = workload.run(1 << 17, eviction="lru", queue="fcfs")
    num_pages = int(memory * num_needed)
    queues: dict[str, dict[str, float]] = {}
    for queue in QUEUES:
        rates: dict[str, float] = {}
        for eviction in EVICTIONS:
            log, _ = workload.run(num_pages, eviction=eviction, queue=queue)
            num_tokens = log.num_tokens()
            rates[eviction] = log.num_matched() / num_tokens
            rates[best_for(eviction)] = optimum(log, num_pages) / num_tokens
        rates["of best"] = rates["program"] / rates[best_for("program")]
        queues[queue] = {name: round(rate, 5) for name, rate in rates.items()}
    return {
        "requests": full.num_admissions(),
        "prompt_tokens": full.num_tokens(),
        "pages_needed": num_needed,
        "pages": num_pages,
        "unbounded": round(full.num_matched() / full.num_tokens(), 5),
        "queues": queues,
    }


def print_table(name: str, figures: dict[str, object]) -> None:
    queues = figures["queues"]
    assert isinstance(queues, dict)
    print(
        f"{name}: {figures['requests']} requests, {figures['pages']} of "
        f"{figures['pages_needed']} pages, {figures['unbounded']:.1%} with all of them"
    )
    print("  queue       " + "".join(f"{column:>9}" for column in (*EVICTIONS, "best", "of best")))
    for queue, rates in queues.items():
        columns = [rates[eviction] for eviction in EVICTIONS]
        columns += [rates[best_for("program")], rates["of best"]]
        print(f"  {queue:12}" + "".join(f"{100 * rate:9.2f}" for rate in columns), flush=True)
    print("  best: the optimum for the order in which `program` admitted under that queue")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", default=",".join(TRACES), help="some of: %(default)s")
    parser.add_argument("--memory", type=float, default=0.3, help="part of the pages needed")
    parser.add_argument("--size", type=int, default=2, help="scales the number of programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start = perf_counter()
    figures: dict[str, object] = {
        "benchmark": "hit_rate",
        "memory": options.memory,
        "size": options.size,
        "seed": options.seed,
        "page_size": options.page_size,
    }
    traces: dict[str, dict[str, object]] = {}
    for name in options.traces.split(","):
        workload = Workload(
            trace=TRACES[name],
            size=options.size,
            seed=options.seed,
            page_size=options.page_size,
        )
        traces[name] = measure(workload, options.memory)
        print_table(name, traces[name])
    line = json.dumps({**figures, "traces": traces, "seconds": round(perf_counter() - start, 1)})
    print(line)
    if options.json is not None:
        options.json.write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
