"""Whole steps over shared prefixes, with shared pages read once and without."""

from __future__ import annotations

import sys

from measure import (
    DRY,
    MODELS,
    MeasuredDevice,
    Results,
    checkpoint_of,
    free_memory,
    graph_ms,
    random_loader,
    tree_batch,
)

from palmette.kernels.cuda import flashinfer
from palmette.runtime.cuda_runner import CudaRunner

PAGE = 16
Levels = tuple[tuple[int, int], ...]  # (tokens of a node, nodes below each), root first
WORKLOADS: dict[str, Levels] = {
    # docs/performance.md, in the midst of what is generated
    "W3 64 requests": ((1000, 1), (40 + 8, 64)),
    "W3-own 64 requests": ((1048, 64),),
    "W5 tree of 3 levels": ((600, 1), (32, 4), (32, 4), (16, 4)),
    "64 forks over 8k": ((8192, 1), (128, 64)),
    "fork in 16": ((2048, 1), (64, 16)),
    "256 requests, one system prompt": ((1024, 1), (128, 256)),
}
TOKENS = 80 * 1024
if DRY:
    WORKLOADS, TOKENS = {"W5 dry": ((256, 1), (256, 2), (9, 2))}, 2048


def measure(results: Results, name: str, attention: str) -> None:
    config = MODELS[name]
    times: dict[tuple[str, bool], float] = {}
    for share in (False, True):
        device = MeasuredDevice()
        runner = CudaRunner(
            checkpoint_of(config), num_pages=TOKENS // PAGE, page_size=PAGE, device=device,
            graph_rows=(4,) if DRY else (16, 64, 256), share_pages=share, attention=attention,
            deterministic=attention == "triton", load=random_loader(config),
        )  # fmt: skip
        for workload, levels in WORKLOADS.items():
            batch = tree_batch(levels, PAGE, num_pages=runner.pool.num_pages)
            times[workload, share] = graph_ms(runner, device, batch)
            results.add(
                model=name, attention=attention, workload=workload, share=share,
                ms=times[workload, share],
            )  # fmt: skip
        del runner
        free_memory()
    for workload in WORKLOADS:
        results.add(
            model=name, attention=attention, workload=workload,
            speedup=times[workload, False] / times[workload, True],
        )  # fmt: skip


def main() -> int:
    results = Results("prefix")
    for name in ("qwen3-0.6b",) if DRY else ("llama-3.1-8b", "qwen3-0.6b"):
        measure(results, name, "triton")
    reason = flashinfer.why_not(MODELS["qwen3-0.6b"].head_dim)
    if reason is not None:
        results.skip("flashinfer", reason)
        return results.finish()
    try:  # last: it may have to compile its kernels
        measure(results, "qwen3-0.6b", "flashinfer")
    except Exception as error:
        results.skip("flashinfer", repr(error)[:300])
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
