"""The host's time per step: until a launch returns, and what a whole step takes beyond the device.

A decode step with its graph and without, then the plan of its attention alone.
"""

from __future__ import annotations

import sys

from measure import (
    DRY,
    MODELS,
    MeasuredDevice,
    Results,
    checkpoint_of,
    decode_batch,
    device_ms,
    free_memory,
    graph_ms,
    host_ms,
    random_loader,
    wall_ms,
)
from model_part import sampling

from palmette.kernels.cuda.triton_attention import TritonAttention
from palmette.runtime.cuda_runner import CudaRunner

PAGE = 16
NAME = "qwen3-0.6b"
ROWS = (2,) if DRY else (1, 8, 64, 256)
CONTEXT = 40 if DRY else 1024


def main() -> int:
    results = Results("host")
    config = MODELS[NAME]
    tokens = ROWS[-1] * (CONTEXT + 2 * PAGE)
    for has_graphs in (True, False):
        device = MeasuredDevice()
        runner = CudaRunner(
            checkpoint_of(config), num_pages=tokens // PAGE, page_size=PAGE, device=device,
            graph_rows=ROWS if has_graphs else (), load=random_loader(config),
        )  # fmt: skip
        for rows in ROWS:
            batch = decode_batch([CONTEXT] * rows, PAGE, num_pages=runner.pool.num_pages)
            params = sampling(batch, temperature=0.0)
            launch = host_ms(lambda b=batch, r=runner: r.launch(b))
            step = wall_ms(lambda b=batch, r=runner, p=params: r.launch(b).sample(p))
            if has_graphs:
                on_device = graph_ms(runner, device, batch)
            else:
                on_device = device_ms(lambda b=batch, r=runner: r.launch(b), repeat=5, cold=False)
            attention = TritonAttention(runner.pool, num_heads=config.num_heads)
            plan = host_ms(lambda b=batch, a=attention: a.prepare(b))
            results.add(
                model=NAME, graphs=has_graphs, rows=rows, us_host_launch=launch * 1000,
                us_host_plan=plan * 1000, ms_device=on_device, ms_step=step,
                us_gap=(step - on_device) * 1000,
            )  # fmt: skip
        del runner
        free_memory()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
