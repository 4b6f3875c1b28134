"""What the language costs beside the model: microseconds per operation, and a thousand programs.

    python benchmarks/lang_costs.py [--rounds 7] [--programs 1000]

Prints one JSON line: microseconds per node as [median, spread], spread = (max - min) / median over
the rounds, to compile a function, to record it as `run` does, to fill a compiled program with
arguments, to write it as JSON and to read it again; then seconds, megabytes and threads for so many
programs of six calls that are under way together on a `FakeModel`; and the milliseconds of
`import palmette` and of the first program, in a fresh interpreter. Times are of this process's CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import process_time

import palmette as pm
from palmette.lang.backends import session_of
from palmette.lang.binding import Arguments, bind
from palmette.lang.expressions import RunDefaults

BRANCHES = 40  # of the program that is recorded: some 300 nodes


@pm.function
def judge(s: pm.ProgramState, essay: str) -> None:
    s += "Judge this essay: " + essay
    forks = s.fork(BRANCHES)
    for index, fork in enumerate(forks):
        fork += f"\nPoint {index} of "
        fork += essay
        fork += ":" + pm.gen("view", max_tokens=8, stop="\n")
        fork += " Grade:" + pm.select("grade", ["A", "B", "C"])
    forks.join()


@pm.function
def six_calls(s: pm.ProgramState, number: int) -> None:
    s += f"Number {number}." + pm.gen("a", max_tokens=4)
    forks = s.fork(4)
    forks += lambda i: f" Part {i}:" + pm.gen("part", max_tokens=4)
    forks.join()
    s += " All:" + pm.gen("end", max_tokens=4)
    s += f" {s['end']}"


def per_node_us(work: Callable[[], object], num_nodes: int, rounds: int) -> list[float]:
    samples = []
    for _ in range(rounds):
        gc.collect()
        start = process_time()
        for _ in range(5):
            work()
        samples.append((process_time() - start) / 5 / num_nodes * 1e6)
    median = statistics.median(samples)
    return [round(median, 2), round((max(samples) - min(samples)) / median, 2)]


def operations(rounds: int) -> dict[str, list[float]]:
    program = judge.compile()
    num_nodes = len(judge.trace("text").nodes)
    model = pm.testing.FakeModel()
    chat = session_of(model).chat
    data = program.to_json()
    arguments = Arguments(program, {"essay": "text"})

    def record() -> None:
        state = judge.run("text", backend=model)
        state._host.reading.sinks[0].fail_calls("recorded")  # nothing runs

    def fill() -> None:
        bind(program, arguments, RunDefaults(), chat)

    def write() -> None:
        pm.Program(
            **{name: getattr(program, name) for name in program.__dataclass_fields__}
        ).to_json()

    return {
        "compile": per_node_us(judge.compile, num_nodes, rounds),
        "record": per_node_us(record, num_nodes, rounds),
        "fill": per_node_us(fill, len(program.nodes), rounds),
        "write_json": per_node_us(write, len(program.nodes), rounds),
        "read_json": per_node_us(lambda: pm.Program.from_json(data), len(program.nodes), rounds),
    }


def together(count: int) -> dict[str, float]:
    model = pm.testing.FakeModel()
    six_calls.run(0, backend=model).sync()
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = process_time()
    states = six_calls.run_batch([{"number": number} for number in range(count)], backend=model)
    seconds = process_time() - start
    assert all(state.error() is None for state in states)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "seconds": round(seconds, 2),
        "peak_mb": round(after / 1024, 1),
        "added_mb": round((after - before) / 1024, 1),
        "threads": threading.active_count(),
    }


def import_ms(code: str, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        timed = f"import time; t = time.process_time(); {code}; print(time.process_time() - t)"
        done = subprocess.run(
            [sys.executable, "-c", timed], capture_output=True, text=True, check=True
        )
        times.append(float(done.stdout.splitlines()[-1]) * 1e3)
    return round(statistics.median(times), 1)


def commit() -> str:
    folder = Path(__file__).resolve().parent
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--programs", type=int, default=1000)
    args = parser.parse_args()
    first = (
        "import palmette as pm; m = pm.testing.FakeModel(); "
        "pm.function(lambda s: s.__iadd__('x' + pm.gen('a'))).run(backend=m)['a']"
    )
    print(
        json.dumps(
            {
                "benchmark": "lang_costs",
                "machine": platform.processor() or platform.machine(),
                "commit": commit(),
                "programs": {"count": args.programs, **together(args.programs)},
                "us_per_node": operations(args.rounds),
                "import_ms": import_ms("import palmette", args.rounds),
                "first_program_ms": import_ms(first, args.rounds),
            }
        )
    )


if __name__ == "__main__":
    main()
