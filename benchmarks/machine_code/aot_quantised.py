"""Configurations of the products with quantised weights, for the table of `aot.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from compiled import Variant

from palmette.kernels.cuda.fp8_gemm import encode_rows_kernel
from palmette.kernels.cuda.quantised_gemm import (
    FP8_BLOCK,
    quantised_linear_kernel,
    reduce_parts_kernel,
    tiles_of,
)

_ACTIVATIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_KINDS = (  # name, what kernels read, group, minimums
    ("int8", "*u32", 32, False),
    ("int8", "*u32", 64, False),
    ("int8", "*u32", 128, False),
    ("int4", "*u32", 32, False),
    ("int4", "*u32", 32, True),
    ("int4", "*u32", 64, False),
    ("int4", "*u32", 128, True),
    ("fp8", "*fp8e4nv", FP8_BLOCK, False),
)
_SHORT = (("int8", 32, False), ("int4", 32, True), ("fp8", FP8_BLOCK, False))


def quantised_variants() -> Iterator[Variant]:
    for activations, dtype in _ACTIVATIONS.items():
        for rows in (1, 16, 64, 2048) if activations != "fp32" else (1,):
            for kind, pointer, group, minimums in _KINDS:
                if activations == "fp32" and group > 64:
                    continue  # float32 is for comparisons, and files have groups of 32
                for capability in (80, 89, 90) if rows != 1 or activations == "fp32" else (90,):
                    # e4m3 is read as bits where there is no conversion
                    read = "*u8" if kind == "fp8" and capability < 89 else pointer
                    whole = _linear(
                        activations, dtype, rows, kind, read, group, minimums, capability
                    )
                    yield whole
                    if activations == "bf16":
                        yield from _otherwise(whole)
    for depth in (1024, 2048, 4096, 8192):
        yield Variant(
            name=f"encode rows bf16{'' if depth == 4096 else f' {depth}'}",
            kernel=encode_rows_kernel,
            types={
                **{"x": "*bf16", "codes": "*u8", "scales": "*fp32"},
                **dict.fromkeys(("depth", "x_stride"), "i32"),
            },
            constants={"BLOCK": depth},
            options={"num_warps": 8 if depth > 2048 else 4},
            needs_wide_loads=True,
            in_short_list=depth == 4096,
            capabilities=(89, 90),
        )
    for has_scale in (False, True):
        for has_bias in (True, False):
            yield _reduce(has_scale=has_scale, has_bias=has_bias)


def _otherwise(variant: Variant) -> Iterator[Variant]:
    """A matrix of one part although rows are few; with a bias."""
    alone = replace(variant, in_short_list=False)
    if alone.constants["IN_PARTS"]:
        alone = replace(
            alone,
            name=f"{alone.name} one part",
            types={**alone.types, "out": alone.types["x"]},
            constants={**alone.constants, "IN_PARTS": False},
        )
        yield alone
    yield replace(alone, name=f"{alone.name} bias", constants={**alone.constants, "HAS_BIAS": True})


def _reduce(*, has_scale: bool, has_bias: bool) -> Variant:
    return Variant(
        name=f"reduce parts bf16{' scale' if has_scale else ''}{'' if has_bias else ' plain'}",
        kernel=reduce_parts_kernel,
        types={
            **{"parts": "*fp32", "scales": "*fp32" if has_scale else "*fp16"},
            **{"bias": "*bf16", "out": "*bf16"},
            **dict.fromkeys(("num_rows", "num_columns", "num_parts"), "i32"),
        },
        constants={"HAS_SCALE": has_scale, "HAS_BIAS": has_bias, "BLOCK": 512},
        options={"enable_fp_fusion": False},
        scalars=("num_rows", "num_parts"),
        needs_wide_loads=True,
        in_short_list=has_bias and not has_scale,
    )


def _linear(
    activations: str,
    dtype: torch.dtype,
    rows: int,
    kind: str,
    pointer: str,
    group: int,
    minimums: bool,
    capability: int,
) -> Variant:
    is_fp8 = kind == "fp8"
    tiles = tiles_of(rows, dtype, group, is_fp8=is_fp8, capability=capability)
    sizes = ("num_rows", "num_columns", "depth", "x_stride")
    in_parts = rows <= 64
    return Variant(
        name=f"quantised {kind}{'' if is_fp8 else f'/{group}'}{' min' if minimums else ''} "
        f"{activations} {rows} rows",
        kernel=quantised_linear_kernel,
        types={
            "x": f"*{activations}",
            "codes": pointer,
            "scales": "*fp32" if is_fp8 else "*fp16",
            "minimums": "*fp32" if is_fp8 else "*fp16",
            "bias": f"*{activations}",
            "out": "*fp32" if in_parts else f"*{activations}",
            **dict.fromkeys((*sizes, "num_groups", "part_groups"), "i32"),
        },
        constants={
            **{name: tiles[name] for name in ("BLOCK_M", "BLOCK_N", "GROUPS")},
            **{"GROUP": group, "IS_INT4": kind == "int4", "PER_GROUP": not is_fp8},
            **{"HAS_MINIMUM": minimums, "HAS_BIAS": False, "IN_PARTS": in_parts, "UPCAST": False},
        },
        options={
            **{name: tiles[name] for name in ("num_warps", "num_stages")},
            "enable_fp_fusion": False,
        },
        scalars=("num_rows", "num_groups", "part_groups"),
        needs_tensor_core=True,
        needs_warpgroup=rows >= 64 and activations != "fp32",
        # e4m3 beside few rows comes in copies of 64 bits, which keep the memory busy all the same
        needs_wide_loads=activations != "fp32" and (not is_fp8 or rows >= 64),
        in_short_list=activations == "bf16"
        and rows in (1 if capability >= 90 else 16, 2048)
        and (kind, group, minimums) in _SHORT,
        capabilities=(capability,),
    )
