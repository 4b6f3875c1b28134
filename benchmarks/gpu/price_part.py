"""The price of the deterministic mode: matrix products alone, then whole steps of a model."""

from __future__ import annotations

import sys
from typing import Any

import torch
from measure import (
    DEVICE,
    DRY,
    MODELS,
    MeasuredDevice,
    Results,
    checkpoint_of,
    decode_batch,
    device_ms,
    free_memory,
    graph_ms,
    graphed,
    prefill_batch,
    random_loader,
)
from torch.nn import functional

from palmette.kernels.cuda import gemm
from palmette.runtime.cuda_runner import CudaRunner

PAGE = 16
GEMM_ROWS = (1, 70) if DRY else (1, 64, 256, 2048)
DECODES = ((2, 40),) if DRY else ((1, 1024), (64, 1024))
PREFILL = 40 if DRY else 2048
TOKENS = 1024 if DRY else 80 * 1024
NAMES = ("qwen3-0.6b",) if DRY else ("qwen3-0.6b", "llama-3.1-8b")


def matrices(results: Results, name: str) -> None:
    config = MODELS[name]
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    shapes = {
        "qkv": (heads + 2 * config.num_kv_heads * config.head_dim, hidden),
        "o": (hidden, heads),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    for part, (columns, depth) in shapes.items():
        weight = torch.randn(columns, depth, device=DEVICE, dtype=torch.bfloat16)
        base = torch.randn(GEMM_ROWS[-1], depth, device=DEVICE, dtype=torch.bfloat16)
        ours = gemm.linear(base, weight)
        chosen = [0, 63, GEMM_ROWS[-1] - 1]
        few = torch.cat([gemm.linear(base[i : i + 1], weight) for i in chosen])
        same = torch.equal(few, ours[chosen])
        results.check(f"{name} {part}: bits of a row alone and among {len(base)}", same)
        for rows in GEMM_ROWS:
            x = base[:rows]
            library = device_ms(graphed(lambda x=x, w=weight: functional.linear(x, w)), repeat=10)
            own = device_ms(graphed(lambda x=x, w=weight: gemm.linear(x, w)), repeat=10)
            results.add(
                model=name, matrix=part, rows=rows, us_library=library * 1000,
                us_ours=own * 1000, price=own / library,
                GBps=2 * columns * depth / own / 1e6,
                TFLOPs=2 * rows * columns * depth / own / 1e9,
            )  # fmt: skip


def steps(results: Results, name: str) -> None:
    config = MODELS[name]
    times: dict[tuple[bool, Any], float] = {}
    for deterministic in (True, False):
        device = MeasuredDevice()
        runner = CudaRunner(
            checkpoint_of(config), num_pages=TOKENS // PAGE, page_size=PAGE, device=device,
            graph_rows=tuple(rows for rows, _ in DECODES), deterministic=deterministic,
            load=random_loader(config),
        )  # fmt: skip
        for rows, context in DECODES:
            batch = decode_batch([context] * rows, PAGE, num_pages=runner.pool.num_pages)
            times[deterministic, rows] = graph_ms(runner, device, batch)
        batch = prefill_batch(PREFILL, 0, PAGE)
        run = device_ms(lambda r=runner, b=batch: r.launch(b), repeat=4, cold=False)
        times[deterministic, "prefill"] = run
        del runner
        free_memory()
    for what in (*(rows for rows, _ in DECODES), "prefill"):
        slow, fast = times[True, what], times[False, what]
        results.add(
            model=name, step=f"decode {what} rows" if what != "prefill" else f"prefill {PREFILL}",
            ms_deterministic=slow, ms_free=fast, price=slow / fast,
        )  # fmt: skip


def main() -> int:
    torch.manual_seed(0)
    results = Results("price")
    for name in NAMES:
        steps(results, name)
    for name in NAMES:
        matrices(results, name)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
