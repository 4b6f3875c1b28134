"""Whole steps over shared prefixes, with shared pages read once and without."""

from __future__ import annotations

import sys

from measure import (
    DRY,
    MODELS,
    MeasuredDevice,
    Results,
    checkpoint_of,
    decode_batch,
    free_memory,
    graph_ms,
    random_loader,
)

from palmette.kernels.cuda import flashinfer
from palmette.runtime.cuda_runner import CudaRunner

PAGE = 16
WORKLOADS = {  # rows, shared tokens, own tokens
    "W3 64 questions about one document": (64, 8192, 128),
    "W5 fork in 16": (16, 2048, 64),
    "256 requests, one system prompt": (256, 1024, 128),
}
TOKENS = 60 * 1024
if DRY:
    WORKLOADS, TOKENS = {"W3 dry": (3, 512, 16)}, 1024


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
        for workload, (rows, shared, own) in WORKLOADS.items():
            batch = decode_batch(
                [shared + own] * rows, PAGE, shared=shared, num_pages=runner.pool.num_pages
            )
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
