"""Decode and extend attention: bytes and FLOPs per second beside a copy, SDPA and FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from measure import Results, copy_bandwidth, decode_batch, device_ms, gemm_rate, prefill_batch
from torch.nn import functional

from palmette.kernels.cuda.triton_attention import TritonAttention
from palmette.kernels.kv_pool import PagedKVPool

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
MAX_TOKENS = 64 * 8192


def graphed(function: Callable[[], Any]) -> Callable[[], None]:
    """The launches of `function` as one graph, so that the host's time does not count."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def flashinfer_decode(pool: PagedKVPool, batch: Any, q: torch.Tensor) -> Callable[[], Any]:
    import flashinfer

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    indptr, indices, last = (
        torch.from_numpy(np.ascontiguousarray(a)).cuda()
        for a in (batch.kv_indptr, batch.kv_page_ids, batch.kv_last_page_len)
    )
    wrapper.plan(
        indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    shape = (pool.num_pages, PAGE, KV_HEADS, DIM)
    cache = (pool.keys(0).view(shape), pool.values(0).view(shape))
    return lambda: wrapper.run(q, cache)


def decode(results: Results, pool: PagedKVPool, bandwidth: float, rows: int, length: int) -> None:
    batch = decode_batch([length] * rows, PAGE, num_pages=pool.num_pages)
    q = torch.randn(rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    moved = 2 * 2 * rows * length * KV_HEADS * DIM
    contenders: dict[str, Callable[[], Any]] = {}
    for name, deterministic in (("deterministic", True), ("free", False)):
        attention = TritonAttention(pool, num_heads=HEADS, deterministic=deterministic)
        attention.plan(batch)
        contenders[name] = graphed(lambda attention=attention: attention.attend(0, q))
    k, v = (
        torch.randn(rows, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    contenders["sdpa"] = lambda: functional.scaled_dot_product_attention(
        q[:, :, None], k, v, enable_gqa=True
    )
    if find_spec("flashinfer") is not None:
        try:
            contenders["flashinfer"] = flashinfer_decode(pool, batch, q)
        except Exception as error:  # optional, and builds code when it is first used
            results.add(flashinfer=repr(error)[:200])
    for name, function in contenders.items():
        ms = device_ms(function)
        rate = moved / ms / 1e6
        results.add(
            decode=name, rows=rows, context=length, us=ms * 1000, GBps=rate,
            of_copy=rate * 1e9 / bandwidth,
        )  # fmt: skip


def extend(results: Results, pool: PagedKVPool, rate: float, new: int, cached: int) -> None:
    batch = prefill_batch(new, cached, PAGE)
    q = torch.randn(new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    flops = 4 * HEADS * DIM * (new * cached + new * (new + 1) / 2)
    contenders: dict[str, Callable[[], Any]] = {}
    for name, deterministic in (("deterministic", True), ("free", False)):
        attention = TritonAttention(pool, num_heads=HEADS, deterministic=deterministic)
        attention.plan(batch)
        contenders[name] = graphed(lambda attention=attention: attention.attend(0, q))
    if cached == 0:
        heads = q.movedim(0, 1)[None]
        k = torch.randn(1, KV_HEADS, new, DIM, device="cuda", dtype=torch.bfloat16)
        contenders["sdpa"] = lambda: functional.scaled_dot_product_attention(
            heads, k, k, is_causal=True, enable_gqa=True
        )
    for name, function in contenders.items():
        ms = device_ms(function)
        results.add(
            extend=name, new=new, cached=cached, us=ms * 1000, TFLOPs=flops / ms / 1e9,
            of_gemm=flops / ms * 1000 / rate,
        )  # fmt: skip


def main() -> int:
    torch.manual_seed(0)
    results = Results("attention")
    bandwidth, rate = copy_bandwidth(), gemm_rate()
    results.add(copy_GBps=bandwidth / 1e9, gemm_TFLOPs=rate / 1e12)
    pool = PagedKVPool(
        num_layers=1, num_pages=MAX_TOKENS // PAGE, page_size=PAGE, num_kv_heads=KV_HEADS,
        head_dim=DIM, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    with torch.inference_mode():
        for rows, length in ((1, 1024), (1, 16384), (8, 4096), (64, 2048), (64, 8192), (256, 1024)):
            decode(results, pool, bandwidth, rows, length)
        for new, cached in ((2048, 0), (8192, 0), (512, 8192)):
            extend(results, pool, rate, new, cached)
        prefix(results, pool)
    return results.finish()


def prefix(results: Results, pool: PagedKVPool) -> None:
    """64 forks over a prefix of 8192 tokens, each 64 tokens on."""
    batch = decode_batch([8256] * 64, PAGE, shared=8192, num_pages=pool.num_pages)
    q = torch.randn(64, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    times = {}
    for share in (False, True):
        attention = TritonAttention(pool, num_heads=HEADS, share=share)
        attention.plan(batch)
        times[share] = device_ms(graphed(lambda attention=attention: attention.attend(0, q)))
    results.add(
        forks=64, prefix=8192, us_apart=times[False] * 1000, us_shared=times[True] * 1000,
        speedup=times[False] / times[True],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
