"""Palmette's server beside other servers: the workloads of `palmette bench serve`, in turn.

    python benchmarks/peers.py [--rounds 3] [--scale small] [--servers palmette,xllamacpp] ...

Every server reads the same GGUF file, has the same number of threads, streams and tokens a step,
and is measured by the same client. Round by round and workload by workload they take turns, in
another order each round; one at a time is under load, and the CPU time that the idle ones take
meanwhile is recorded. The table has ratios of medians. Peers live in environments of their own
under the user's cache; `transformers` runs in this one.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs
from peer_servers import DEFAULT_PEERS, FOLDER, PEERS, Server, running, versions
from requantised import FILE_TYPES, requantise
from rich import box
from rich.console import Console
from rich.table import Table

from palmette.runtime.model_store import resolve_model
from palmette.server.bench_client import Endpoint
from palmette.server.bench_figures import Figures, median_figures
from palmette.server.bench_options import BenchOptions
from palmette.server.bench_serve import Bench, is_bad, machine, token_counter
from palmette.server.bench_workloads import WORKLOADS, CountTokens, Scale, select
from palmette.server.config import UserError

IDLE_WARNING = 0.05  # of one core

log = logging.getLogger("peers")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One server in one workload of one round."""

    server: str
    workload_id: str
    title: str
    figures: Figures
    errors: tuple[str, ...]
    is_bad: bool
    idle_cpu: float  # cores that the other servers used meanwhile


def measure_one(
    server: Server,
    others: list[Server],
    workload_id: str,
    *,
    options: BenchOptions,
    count: CountTokens | None,
    number: int,
) -> Result:
    """One round of one workload on one server."""

    async def run() -> tuple[Endpoint, Any]:
        async with Bench(replace(options, url=server.url)) as bench:
            measured = await bench.measure(workload_id, count=count, first_round=number)
            return bench.endpoint, measured

    before, start = sum(other.cpu_s() for other in others), time.perf_counter()
    _, measurement = asyncio.run(run())
    wall_s = time.perf_counter() - start
    idle_cpu = (sum(other.cpu_s() for other in others) - before) / wall_s
    if idle_cpu > IDLE_WARNING:
        log.warning("%s: idle servers used %.2f cores", workload_id, idle_cpu)
    return Result(
        server=server.peer.name,
        workload_id=workload_id,
        title=measurement.workload.title,
        figures=measurement.rounds[0],
        errors=measurement.errors,
        is_bad=is_bad(measurement),
        idle_cpu=idle_cpu,
    )


def measure_all(
    servers: list[Server],
    workloads: tuple[str, ...],
    *,
    options: BenchOptions,
    count: CountTokens | None,
    rounds: int,
) -> list[Result]:
    """Rounds 0, 1, ...; the warm-up before them has prompts of its own."""
    small = replace(options, scale=Scale.SMALL)
    for server in servers:
        others = [other for other in servers if other is not server]
        measure_one(server, others, "W1", options=small, count=count, number=-1)
    results = []
    for number in range(rounds):
        for workload_id in workloads:
            for offset in range(len(servers)):
                server = servers[(offset + number) % len(servers)]
                if workload_id not in server.peer.only or workload_id in server.peer.skips:
                    continue
                others = [other for other in servers if other is not server]
                result = measure_one(
                    server, others, workload_id, options=options, count=count, number=number
                )
                log.info(
                    "round %d %-6s %-18s %8.1f tokens/s out %s",
                    number,
                    workload_id,
                    server.peer.name,
                    result.figures.output_tokens_per_s,
                    "; ".join(result.errors[:2]),
                )
                results.append(result)
    return results


# What is compared: a figure, and whether more of it is better.
_COMPARED = {
    "output_tokens_per_s": True,
    "total_tokens_per_s": True,
    "ttft_p50_ms": False,
    "ttft_p99_ms": False,
    "tpot_p50_ms": False,
    "itl_p99_ms": False,
    "arrival_ttft_ms": False,
    "stall_p99_ms": False,
    "stall_max_ms": False,
}
_SHOWN = (
    ("output_tokens_per_s", "out tok/s"),
    ("ttft_p50_ms", "TTFT ms"),
    ("tpot_p50_ms", "TPOT ms"),
    ("itl_p99_ms", "ITL 99%"),
)


def ratios(
    ours: dict[str, float | None], theirs: dict[str, float | None]
) -> dict[str, float | None]:
    """Above 1: ours is better."""
    result: dict[str, float | None] = {}
    for name, is_more_better in _COMPARED.items():
        first, second = (ours[name], theirs[name]) if is_more_better else (theirs[name], ours[name])
        result[name] = first / second if first is not None and second else None
    return result


def summary(results: list[Result], workloads: tuple[str, ...]) -> list[dict[str, Any]]:
    """For each workload, the medians of each server and the ratio of ours to them."""
    rows = []
    for workload_id in workloads:
        mine = [r for r in results if r.workload_id == workload_id]
        servers: dict[str, Any] = {}
        for name in dict.fromkeys(r.server for r in mine):
            rounds = [r for r in mine if r.server == name]
            rates = [r.figures.output_tokens_per_s for r in rounds]
            middle = statistics.median(rates)
            servers[name] = {
                "median": median_figures([r.figures for r in rounds]),
                "spread": (max(rates) - min(rates)) / middle if middle else None,
                "output_tokens_per_s": rates,
                "idle_cpu": max(r.idle_cpu for r in rounds),
                "errors": sorted({error for r in rounds for error in r.errors}),
                "is_bad": any(r.is_bad for r in rounds),
            }
        ours = servers.get("palmette")
        for name, server in servers.items():
            if ours is not None and name != "palmette":
                server["ratios"] = ratios(ours["median"], server["median"])
        title = mine[0].title if mine else ""
        rows.append({"id": workload_id, "title": title, "servers": servers})
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table(
        title="medians; in brackets how many times better palmette is",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    result.add_column("", no_wrap=True)
    result.add_column("server", no_wrap=True)
    for _, name in _SHOWN:
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        for number, (name, server) in enumerate(row["servers"].items()):
            cells = [_cell(server, figure) for figure, _ in _SHOWN]
            mark = " !" if server["is_bad"] else ""
            is_last = number == len(row["servers"]) - 1
            result.add_row("" if number else row["id"], name + mark, *cells, end_section=is_last)
    return result


def remarks(row: dict[str, Any]) -> Iterator[str]:
    """What only W7 and W6 measure, and what failed; a line each."""
    for name, server in row["servers"].items():
        figures = server["median"]
        if figures["arrival_ttft_ms"] is not None:
            yield (
                f"  {name}: its TTFT {_cell(server, 'arrival_ttft_ms')} ms, meanwhile ITL p99 "
                f"{_cell(server, 'stall_p99_ms')}, max {_cell(server, 'stall_max_ms')} ms\n"
            )
        if figures["valid_answers"] is not None:
            yield f"  {name}: {figures['valid_answers']:.0f} of {figures['requests']:.0f} valid\n"
        if server["errors"]:
            yield f"  {name}: {figures['failed']} FAILED: {'; '.join(server['errors'][:3])}\n"


def _cell(server: dict[str, Any], figure: str) -> str:
    value, ratio = server["median"][figure], server.get("ratios", {}).get(figure)
    shown = "-" if value is None else f"{value:.{0 if value >= 100 else 1}f}"
    return shown + ("" if ratio is None else f" ({ratio:.{1 if ratio >= 10 else 2}f}x)")


def encoded(model: Path, encoding: str, cache: Path) -> Path:
    """The same weights in another block encoding, kept in the cache."""
    status = model.stat()
    digest = hashlib.sha256(f"{model} {status.st_size} {status.st_mtime_ns}".encode()).hexdigest()
    target = cache / f"{model.stem}-{digest[:8]}-{encoding}.gguf"
    if not target.is_file():
        log.info("writing %s", target)
        requantise(model, target, encoding)
    return target


def commit() -> str:
    """With -dirty when files were changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="a name or a .gguf file")
    parser.add_argument(
        "--encoding",
        choices=list(FILE_TYPES),
        help="requantise the file to this first, for every server",
    )
    parser.add_argument("--servers", default=",".join(DEFAULT_PEERS), help=", ".join(PEERS))
    parser.add_argument("--workloads", default="all", help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=Scale, choices=list(Scale), default=Scale.FULL)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.servers = args.servers.split(",")
    for name in args.servers:
        if name not in PEERS:
            parser.error(f"--servers: {name} is not known; use {', '.join(PEERS)}")
    try:
        names = args.workloads.split(",")
        args.workloads = WORKLOADS if args.workloads == "all" else select(names)
    except ValueError as error:
        parser.error(f"--{error}")
    return args


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the servers would stay behind
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    args = arguments()
    cache = Path(platformdirs.user_cache_dir("palmette")) / "peers"
    cache.mkdir(parents=True, exist_ok=True)
    model = resolve_model(args.model).resolve()
    if args.encoding:
        model = encoded(model, args.encoding, cache)
    count, _ = token_counter(str(model), "")
    options = BenchOptions(scale=args.scale, seed=args.seed)
    left_out: dict[str, str] = {}
    start = machine()  # with the load before ours
    with ExitStack() as stack:
        servers = []
        for name in args.servers:
            context = running(PEERS[name], model=model, threads=args.threads, cache=cache)
            try:
                servers.append(stack.enter_context(context))
            except (RuntimeError, subprocess.CalledProcessError) as error:
                left_out[name] = str(error)
                log.error("%s is left out: %s", name, error)
        results = measure_all(
            servers, args.workloads, options=options, count=count, rounds=args.rounds
        )
        config = {
            server.peer.name: {
                "command": server.command,
                "note": server.peer.note,
                "skips": server.peer.skips,
                "versions": versions(Path(server.command[0])),
            }
            for server in servers
        }
    rows = summary(results, args.workloads)
    Console().print(table(rows))
    for row in rows:
        print(f"{row['id']}: {row['title']}")
        print("".join(remarks(row)), end="")
    record = {
        "machine": start,
        "commit": commit(),
        "config": config | {"model": model.name, "threads": args.threads},
        "left_out": left_out,
        "rounds": args.rounds,
        "scale": str(args.scale),
        "seed": args.seed,
        "workloads": rows,
    }
    line = json.dumps(record)
    if args.json is None:
        print(line)
    else:
        args.json.write_text(line + "\n", encoding="utf-8")
    return 1 if left_out or any(r.is_bad and r.server == "palmette" for r in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"peers: {error}")
