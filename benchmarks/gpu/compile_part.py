"""Compiles what the other parts launch, side by side, into Triton's cache on disk.

A kernel depends on a model's heads and widths, not on its number of layers: one layer of each is
built and warmed up as a server is, each in a process of its own; so are the engines that
are checked.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from engine_setups import SETUPS, make_runner
from measure import (
    DRY,
    MODELS,
    OPTIONS,
    MeasuredDevice,
    Results,
    checkpoint_of,
    load_matrices,
    random_loader,
)

from palmette.runtime.cuda_runner import CudaRunner

WEIGHTS, KV = OPTIONS.format.split("/")
JOBS = min(16, os.cpu_count() or 1)


def compile_model(name: str, deterministic: bool) -> float:
    """Seconds that it took."""
    started = time.monotonic()
    config = replace(MODELS[name], num_layers=1)
    CudaRunner(
        checkpoint_of(config), num_pages=2 if DRY else 64, page_size=16,
        graph_rows=(1,) if DRY else (1, 4), deterministic=deterministic,
        load=random_loader(config), load_matrix=load_matrices(config, WEIGHTS), kv_dtype=KV,
        device=MeasuredDevice(), warm=True,
    ).close()  # fmt: skip
    return time.monotonic() - started


def compile_setup(index: int) -> float:
    """Seconds that it took, of an engine's."""
    started = time.monotonic()
    make_runner(SETUPS[index], 64, num_layers=1, warm=True).close()
    return time.monotonic() - started


def main() -> int:
    results = Results("compile" if OPTIONS.format == "bf16/bf16" else f"compile {OPTIONS.format}")
    names = list(MODELS)[:1] if DRY else list(MODELS)
    wanted = [(name, deterministic) for name in names for deterministic in (True, False)]
    if DRY:
        wanted = wanted[:1]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(JOBS, context, max_tasks_per_child=1) as pool:
        running = [pool.submit(compile_model, *one) for one in wanted]
        others = range(1, len(SETUPS)) if OPTIONS.format == "bf16/bf16" else ()
        setups = {SETUPS[place].name: pool.submit(compile_setup, place) for place in others}
        for (name, deterministic), future in zip(wanted, running, strict=True):
            results.add(model=name, deterministic=deterministic, s_compile=future.result())
        for name, future in setups.items():
            results.add(setup=name, s_compile=future.result())
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
