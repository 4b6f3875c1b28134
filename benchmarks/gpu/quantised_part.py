"""Quantised weights, K and V on the device: against float64, and beside the library's bf16."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from attention_cases import Case, make_batch, poisoned_pool, random_rows
from measure import DEVICE, DRY, Results, copy_bandwidth, device_ms, graphed
from torch.nn import functional

from palmette.kernels.cuda import fp8_gemm, quantised_gemm
from palmette.kernels.cuda.quantised import (
    QuantisedMatrix,
    dequantised,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
)
from palmette.kernels.cuda.triton_attention import TritonAttention
from palmette.kernels.reference import ReferenceAttention

QUANTISE = {"int8": quantise_int8, "int4": quantise_int4, "fp8": quantise_fp8}
SHAPES = ((6144, 4096), (4096, 14336), (28672, 4096))  # qkv, down, gate and up of Llama 3.1 8B
ROWS = (1, 16, 64, 2048)
CASE = Case(heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
            sequences=((1, 700), (1, 15), (40, 300), (1, 64)))  # fmt: skip
if DRY:
    SHAPES, ROWS = ((40, 64),), (1, 70)
    CASE = Case(heads=2, kv_heads=1, dtype=torch.bfloat16, sequences=((1, 20), (5, 14)))


def products(results: Results, bandwidth: float) -> None:
    for columns, depth in SHAPES:
        weight = torch.randn(columns, depth, device=DEVICE, dtype=torch.bfloat16)
        base = torch.randn(max(ROWS), depth, device=DEVICE, dtype=torch.bfloat16)
        for name, quantise in QUANTISE.items():
            matrix = quantise(weight)
            _check(results, f"{name} {columns} x {depth}", base, matrix)
            for rows in ROWS:
                x = base[:rows]
                ours = _ms(lambda x=x, m=matrix: quantised_gemm.linear(x, m))
                plain = _ms(lambda x=x, w=weight: functional.linear(x, w))
                rate = matrix.num_bytes / ours * 1000
                row = {"us": ours * 1000, "us_bf16": plain * 1000, "of_copy": rate / bandwidth}
                if fp8_gemm.why_not(matrix, torch.bfloat16) is None:
                    library = _ms(lambda x=x, m=matrix: fp8_gemm.linear(x, m))
                    row["us_fp8_library"] = library * 1000
                results.add(weights=name, columns=columns, depth=depth, rows=rows, **row)


def _ms(function: Callable[[], torch.Tensor]) -> float:
    return device_ms(graphed(function), repeat=10)


def _check(results: Results, name: str, base: torch.Tensor, matrix: QuantisedMatrix) -> None:
    whole = quantised_gemm.linear(base, matrix)
    picked = [0, len(base) - 1]
    exact = base[picked].double() @ dequantised(matrix).double().T
    error = ((whole[picked].double() - exact).abs() / exact.abs().max()).max().item()
    results.check(f"{name} against float64", error < 2.0**-7, error=error)
    for rows in ROWS[:-1]:
        few = quantised_gemm.linear(base[-rows:], matrix)
        same = torch.equal(few, whole[-rows:])
        results.check(f"{name}: bits of {rows} rows alone and among {len(base)}", same)
    if fp8_gemm.why_not(matrix, torch.bfloat16) is None:
        library = fp8_gemm.linear(base, matrix)[picked].double()
        off = ((library - exact).abs() / exact.abs().max()).max().item()
        results.check(f"{name} by the library", off < 2.0**-3, error=off)


def attention(results: Results) -> None:
    for name, codes in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        for case in (CASE, replace(CASE, head_dim=64)):
            batch = make_batch(case)
            rows = random_rows(case, batch, DEVICE)
            found = []
            for deterministic in (None, True, False):
                pool = poisoned_pool(case, DEVICE, kv_dtype=codes)
                backend: ReferenceAttention | TritonAttention = (
                    ReferenceAttention(pool)
                    if deterministic is None
                    else TritonAttention(
                        pool,
                        num_heads=case.heads,
                        deterministic=deterministic,
                        query_dtype=case.dtype,
                    )
                )
                backend.plan(batch)
                found.append(backend.run(1, *rows).float())
            for mode, result in zip(("deterministic", "free"), found[1:], strict=True):
                error = (result - found[0]).abs().max().item()
                results.check(f"kv {name} D{case.head_dim} {mode}", error < 2e-2, error=error)


def main() -> int:
    torch.manual_seed(0)
    results = Results("quantised")
    bandwidth = copy_bandwidth()
    results.add(copy_GBps=bandwidth / 1e9)
    with torch.inference_mode():
        attention(results)
        products(results, bandwidth)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
