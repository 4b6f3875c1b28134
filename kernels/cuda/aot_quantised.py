"""Configurations of the products with quantised weights, for the table of `aot.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .compiled import Variant
from .fp8_gemm import encode_rows_kernel
from .quantised_gemm import FP8_BLOCK, quantised_linear_kernel, reduce_parts_kernel, tiles_of

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
        for rows in (1, 64, 2048) if activations != "fp32" else (1,):
            for kind, pointer, group, minimums in _KINDS:
                if activations == "fp32" and group > 64:
                    continue  # float32 is for comparisons, and files have groups of 32
                for capability in (80, 89, 90):
                    # e4m3 is read as bits where there is no conversion
                    read = "*u8" if kind == "fp8" and capability < 89 else pointer
                    yield _linear(activations, dtype, rows, kind, read, group, minimums, capability)
    yield Variant(
        name="encode rows bf16",
        kernel=encode_rows_kernel,
        types={
            **{"x": "*bf16", "codes": "*u8", "scales": "*fp32"},
            **dict.fromkeys(("depth", "x_stride"), "i32"),
        },
        constants={"BLOCK": 4096},
        options={"num_warps": 8},
        needs_wide_loads=True,
        in_short_list=True,
        capabilities=(89, 90),
    )
    yield Variant(
        name="reduce parts bf16",
        kernel=reduce_parts_kernel,
        types={
            **{"parts": "*fp32", "scales": "*fp16", "bias": "*bf16", "out": "*bf16"},
            **dict.fromkeys(("num_rows", "num_columns", "num_parts"), "i32"),
        },
        constants={"HAS_SCALE": False, "HAS_BIAS": True, "BLOCK": 512},
        options={"enable_fp_fusion": False},
        scalars=("num_rows", "num_parts"),
        needs_wide_loads=True,
        in_short_list=True,
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
    sizes = ("num_rows", "num_columns", "depth", "x_stride", "group_stride", "column_stride")
    in_parts = rows <= 64
    return Variant(
        name=f"quantised {kind}{'' if is_fp8 else f'/{group}'}{' min' if minimums else ''} "
        f"{activations} {rows} rows",
        kernel=quantised_linear_kernel,
        types={
            "x": f"*{activations}",
            "codes": pointer,
            "scales": "*fp32" if is_fp8 else "*fp16",
            "minimums": "*fp16",
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
        in_short_list=activations == "bf16" and rows != 64 and (kind, group, minimums) in _SHORT,
        capabilities=(capability,),
    )
