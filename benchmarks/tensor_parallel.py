"""What it costs to tell another rank a step: rank 0's time, and how much later the other knows.

    python benchmarks/tensor_parallel.py [--rounds 7] [--steps 2000] [--context 2048]

Prints one JSON line: microseconds per step of so many decodes as [median, spread], spread =
(max - min) / median over the rounds; one step in 16 takes a new page. tell: encoded and sent to one
rank. heard: until another process has the batch and its answer of two bytes is back. No model.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import subprocess
import sys
from multiprocessing.connection import Connection
from time import perf_counter

import numpy as np

from palmette.kernels.batch import ForwardBatch
from palmette.runtime.tensor_parallel.frames import (
    Launch,
    Launches,
    encode,
    receive,
)

PAGE = 16
ROWS = (1, 8, 64, 256)


def decode_batch(rows: int, context: int) -> ForwardBatch:
    pages = -(-context // PAGE)
    numbers = np.arange(rows, dtype=np.int32)
    return ForwardBatch(
        token_ids=numbers + 5,
        positions=np.full(rows, context - 1, np.int32),
        kv_slots=numbers * PAGE,
        qo_indptr=np.arange(rows + 1, dtype=np.int32),
        kv_indptr=np.arange(rows + 1, dtype=np.int32) * np.int32(pages),
        kv_page_ids=np.arange(rows * pages, dtype=np.int32),
        kv_last_page_len=np.full(rows, (context - 1) % PAGE + 1, np.int32),
        sample_rows=numbers,
    )


def follow(connection: Connection) -> None:
    """The other rank: as the worker hears a step."""
    launches = Launches()
    try:
        while True:
            frame = receive(connection)
            assert isinstance(frame, Launch)
            batch, sources = launches.read(frame)
            assert sources is not None and len(sources) == batch.num_tokens
            connection.send_bytes(b"ok")
    except EOFError:
        return


def measure(
    connection: Connection, launches: Launches, *, rows: int, context: int, steps: int
) -> tuple[float, float]:
    batch, sources = decode_batch(rows, context), np.arange(rows, dtype=np.int32)
    telling = 0.0
    start = perf_counter()
    for step in range(steps):
        batch.positions[:] += 1  # with the slots, all that changes until a page is full
        batch.kv_slots[:] += 1
        if step % PAGE == 0:
            batch.kv_page_ids[-1] += 1
        before = perf_counter()
        connection.send_bytes(encode(launches.frame(batch, sources)))
        telling += perf_counter() - before
        connection.recv_bytes()
    return 1e6 * telling / steps, 1e6 * (perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fd is not None:
        follow(Connection(options.fd))
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    child = subprocess.Popen(
        [sys.executable, __file__, "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()]
    )
    theirs.close()
    connection = Connection(ours.detach())
    launches = Launches()
    times: dict[int, list[tuple[float, float]]] = {rows: [] for rows in ROWS}
    for _ in range(options.rounds):
        for rows in ROWS:
            times[rows].append(
                measure(
                    connection, launches, rows=rows, context=options.context, steps=options.steps
                )
            )
    connection.close()
    child.wait()
    names = ("tell", "heard")
    results = {
        f"{name}_{rows}_us": _summary([round_[place] for round_ in times[rows]])
        for rows in ROWS
        for place, name in enumerate(names)
    }
    print(json.dumps({"machine": platform.processor() or platform.machine(), **results}))


def _summary(values: list[float]) -> list[float]:
    median = statistics.median(values)
    return [round(median, 1), round((max(values) - min(values)) / median, 2)]


if __name__ == "__main__":
    main()
