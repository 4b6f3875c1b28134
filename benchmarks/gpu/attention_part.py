"""Decode and extend attention: bytes and FLOPs per second beside a copy, SDPA and FlashInfer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from measure import (
    DEVICE,
    DRY,
    Results,
    copy_bandwidth,
    decode_batch,
    device_ms,
    gemm_rate,
    graphed,
    prefill_batch,
)
from torch.nn import functional

from palmette.kernels.cuda.triton_attention import TritonAttention
from palmette.kernels.kv_pool import PagedKVPool

HEADS, KV_HEADS, DIM, PAGE = (4, 1, 64, 16) if DRY else (32, 8, 128, 16)
MAX_TOKENS = 4096 if DRY else 64 * 8192
DECODES = ((1, 1024), (1, 16384), (8, 4096), (64, 2048), (64, 8192), (256, 1024))
EXTENDS = ((2048, 0), (8192, 0), (512, 8192))
FORKS = (64, 8192, 64)  # rows, tokens that they share, tokens of their own
if DRY:
    DECODES, EXTENDS, FORKS = ((2, 300),), ((20, 0), (5, 300)), (3, 512, 16)


def flashinfer_attention(results: Results, pool: PagedKVPool, **options: bool) -> Any:
    """FlashInfer behind our interface, its kernels for decodes and for chunks; None without it."""
    from palmette.kernels.cuda import flashinfer

    reason = flashinfer.why_not(DIM)
    if reason is not None:
        results.skip("flashinfer", reason)
        return None
    try:
        return flashinfer.FlashInferAttention(pool, num_heads=HEADS, **options)
    except Exception as error:  # optional, and builds code when it is first used
        results.skip("flashinfer", repr(error)[:200])
        return None


def flashinfer_contender(
    results: Results, pool: PagedKVPool, batch: Any, q: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    """Planned for `batch` and run once, so that its kernels are there."""
    attention = flashinfer_attention(results, pool)
    try:
        if attention is None:
            return {}
        attention.plan(batch)
        attention.attend(0, q)
    except Exception as error:
        results.skip("flashinfer", repr(error)[:200])
        return {}
    return {"flashinfer": lambda: attention.attend(0, q)}


def decode(
    results: Results, pool: PagedKVPool, bandwidth: float, shape: tuple[int, int], *, rival: bool
) -> None:
    rows, length = shape
    batch = decode_batch([length] * rows, PAGE, num_pages=pool.num_pages)
    q = torch.randn(rows, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    moved = 2 * 2 * rows * length * KV_HEADS * DIM
    if rival:
        contenders = flashinfer_contender(results, pool, batch, q)
    else:
        contenders = ours(pool, batch, q)
        k, v = (
            torch.randn(rows, KV_HEADS, length, DIM, device=DEVICE, dtype=torch.bfloat16)
            for _ in range(2)
        )
        contenders["sdpa"] = lambda: functional.scaled_dot_product_attention(
            q[:, :, None], k, v, enable_gqa=True
        )
    for name, function in contenders.items():
        ms = device_ms(function)
        rate = moved / ms / 1e6
        results.add(
            decode=name, rows=rows, context=length, us=ms * 1000, GBps=rate,
            of_copy=rate * 1e9 / bandwidth,
        )  # fmt: skip


def ours(pool: PagedKVPool, batch: Any, q: torch.Tensor) -> dict[str, Callable[[], Any]]:
    contenders: dict[str, Callable[[], Any]] = {}
    for name, deterministic in (("deterministic", True), ("free", False)):
        attention = TritonAttention(pool, num_heads=HEADS, deterministic=deterministic)
        attention.plan(batch)
        contenders[name] = graphed(lambda attention=attention: attention.attend(0, q))
    return contenders


def extend(
    results: Results, pool: PagedKVPool, rate: float, shape: tuple[int, int], *, rival: bool
) -> None:
    new, cached = shape
    batch = prefill_batch(new, cached, PAGE)
    q = torch.randn(new, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    flops = 4 * HEADS * DIM * (new * cached + new * (new + 1) / 2)
    contenders = flashinfer_contender(results, pool, batch, q) if rival else ours(pool, batch, q)
    if cached == 0 and not rival:
        heads = q.movedim(0, 1)[None]
        k = torch.randn(1, KV_HEADS, new, DIM, device=DEVICE, dtype=torch.bfloat16)
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
        head_dim=DIM, dtype=torch.bfloat16, device=DEVICE,
    )  # fmt: skip
    with torch.inference_mode():
        for rival in (False, True):  # flashinfer last: it may have to compile its kernels
            if rival and flashinfer_attention(results, pool) is None:
                break
            for shape in DECODES:
                decode(results, pool, bandwidth, shape, rival=rival)
            for shape in EXTENDS:
                extend(results, pool, rate, shape, rival=rival)
            prefix(results, pool, rival=rival)
    return results.finish()


def prefix(results: Results, pool: PagedKVPool, *, rival: bool) -> None:
    """Forks over one prefix, their shared pages read once and once per fork."""
    rows, shared, own = FORKS
    batch = decode_batch([shared + own] * rows, PAGE, shared=shared, num_pages=pool.num_pages)
    q = torch.randn(rows, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    times: dict[bool, float] = {}
    for share in (False, True):
        if not rival:
            attention: Any = TritonAttention(pool, num_heads=HEADS, share=share)
        else:
            attention = flashinfer_attention(results, pool, share=share)
        attention.plan(batch)
        run = graphed if not rival else (lambda function: function)
        times[share] = device_ms(run(lambda a=attention: a.attend(0, q)))
    results.add(
        forks=rows, prefix=shared, of="flashinfer" if rival else "triton",
        us_apart=times[False] * 1000, us_shared=times[True] * 1000,
        speedup=times[False] / times[True],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
