"""Random-weight models of real shapes: decode and prefill as ratios to the floor, host time."""

from __future__ import annotations

import sys
import time

import numpy as np
from measure import (
    DRY,
    MODELS,
    OPTIONS,
    MeasuredDevice,
    Results,
    checkpoint_of,
    copy_bandwidth,
    decode_batch,
    device_ms,
    free_memory,
    gemm_rate,
    graph_ms,
    kv_bytes,
    load_matrices,
    memory_gib,
    prefill_batch,
    random_loader,
    synchronize,
    wall_ms,
    weight_bytes,
)

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.sampling import SampleBatch
from palmette.runtime.cuda_runner import CudaRunner

PAGE = 16
WEIGHTS, KV = OPTIONS.format.split("/")
ROWS = (1, 8, 64, 256)
PLANS = (  # model, context per row, deterministic or not
    ("llama-3.1-8b", 2048, (True, False)),
    ("qwen3-0.6b", 1024, (True, False)),
    ("smollm2-135m", 1024, (False,)),
)
PREFILLS = ((2048, 0), (128, 8192))
TOKENS = 288 * 1024
if DRY:
    ROWS, PLANS, PREFILLS, TOKENS = (1, 2), (("llama-3.1-8b", 40, (True,)),), ((40, 0),), 1024


def sampling(batch: ForwardBatch, *, temperature: float) -> SampleBatch:
    """For all rows of a step, the tokens behind its own: as an engine asks step after step."""
    rows = len(batch.sample_rows)

    def full(value: float, kind: type) -> np.ndarray:
        return np.full(rows, value, kind)

    return SampleBatch(
        targets=full(-1, np.int32),
        temperature=full(temperature, np.float32),
        top_k=full(0, np.int32),
        top_p=full(0.9 if temperature else 1.0, np.float32),
        min_p=full(0, np.float32),
        presence_penalty=full(0, np.float32),
        frequency_penalty=full(0, np.float32),
        repetition_penalty=full(1, np.float32),
        seeds=full(0, np.uint64),
        choices=full(0, np.int32),
        positions=batch.positions[batch.sample_rows] + np.int32(1),
        rows=(None,) * rows,
        num_top=full(-1, np.int32),
        masks=None,
        has_mask=full(0, np.bool_),
    )


def measure_model(
    results: Results, name: str, context: int, *, deterministic: bool, bandwidth: float, rate: float
) -> None:
    config = MODELS[name]
    started = time.monotonic()
    device = MeasuredDevice()
    runner = CudaRunner(
        checkpoint_of(config), num_pages=TOKENS // PAGE, page_size=PAGE, graph_rows=ROWS,
        deterministic=deterministic, load=random_loader(config), device=device,
        load_matrix=load_matrices(config, WEIGHTS), kv_dtype=KV,
    )  # fmt: skip
    synchronize()
    results.add(
        model=name, deterministic=deterministic, start_s=time.monotonic() - started,
        memory_GiB=memory_gib(),
    )  # fmt: skip
    for rows in ROWS:
        length = min(context, TOKENS // rows // PAGE * PAGE - PAGE)
        batch = decode_batch([length] * rows, PAGE, num_pages=runner.pool.num_pages)
        moved = weight_bytes(config, WEIGHTS) + rows * length * kv_bytes(config, KV)
        floor = moved / bandwidth * 1000
        graph = graph_ms(runner, device, batch)
        plain, drawn = sampling(batch, temperature=0.0), sampling(batch, temperature=0.8)
        step = wall_ms(lambda b=batch, p=plain: runner.launch(b).sample(p))
        draw = wall_ms(lambda b=batch, p=drawn: runner.launch(b).sample(p), repeat=10)
        results.add(
            model=name, deterministic=deterministic, rows=rows, context=length, ms_floor=floor,
            ms_graph=graph, of_floor=floor / graph, ms_step=step, ms_step_drawn=draw,
            tokens_per_s=rows / step * 1000,
        )  # fmt: skip
    for new, cached in PREFILLS:
        batch = prefill_batch(new, cached, PAGE)
        ms = device_ms(lambda b=batch: runner.launch(b), repeat=4, cold=False)
        head = config.vocab_size * config.hidden_size  # reads weights, computes one row
        attention = 4 * config.num_heads * config.head_dim * config.num_layers
        flops = (weight_bytes(config) - 2 * head) * new + attention * new * (cached + new / 2)
        results.add(
            model=name, deterministic=deterministic, prefill=new, cached=cached, ms=ms,
            tokens_per_s=new / ms * 1000, of_gemm=flops / rate / ms * 1000,
        )  # fmt: skip


def main() -> int:
    results = Results("model" if OPTIONS.format == "bf16/bf16" else f"model {OPTIONS.format}")
    bandwidth, rate = copy_bandwidth(), gemm_rate()
    results.add(copy_GBps=bandwidth / 1e9, gemm_TFLOPs=rate / 1e12)
    for name, context, modes in PLANS:
        for deterministic in modes:
            measure_model(
                results, name, context, deterministic=deterministic, bandwidth=bandwidth, rate=rate
            )
            free_memory()
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
