"""x @ weight^T whose rows do not depend on each other: no split over K, no choice by batch.

Every element is one chain of additions over K in steps of the matrix instruction; tiles only
decide which elements a program computes. Libraries choose other chains for other batch sizes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import INTERPRETED, capability_of, check

FEW_ROWS = 64
_FEW = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
_MANY = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
_WIDE = {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}  # float32
# Hopper. One row or a few: 48 KB of weights on their way to each processor. Tens of rows are read
# anew for each tile of columns, from the cache: as few tiles as there are processors. Many: large
# tiles, since the cache feeds the products.
_HOPPER_FEW = {**_FEW, "BLOCK_K": 256}
_HOPPER_SOME = {**_FEW, "BLOCK_N": 128}
_HOPPER_MANY = {**_MANY, "BLOCK_N": 256, "num_stages": 4}
FEWEST_ROWS, MANY_ROWS = 16, 1024  # where tiles change besides
_PROCESSORS = 128  # no fewer programs for the sake of large tiles


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x, weight, bias, out, num_rows, num_columns, depth, x_stride, weight_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """GROUP tiles of rows share their columns of `weight` in the cache."""
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    column_tiles = tl.cdiv(num_columns, BLOCK_N)
    per_group = GROUP * column_tiles
    first = (program // per_group) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    row = (first + (program % per_group) % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = ((program % per_group) // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    x_row = x + (row.to(tl.int64) * x_stride)[:, None]
    weight_row = weight + (column.to(tl.int64) * weight_stride)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, depth, BLOCK_K):
        k = start + step
        inside = (k < depth)[None, :]
        left = tl.load(x_row + k[None, :], mask=(row < num_rows)[:, None] & inside, other=0.0)
        right = tl.load(
            weight_row + k[None, :], mask=(column < num_columns)[:, None] & inside, other=0.0
        )
        if UPCAST:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="tf32x3")
    kind = out.dtype.element_ty
    result = acc.to(kind)
    if HAS_BIAS:
        added = tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + added[None, :]).to(kind)
    at = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(at, result, mask=(row < num_rows)[:, None] & (column < num_columns)[None, :])


def tiles_of(
    num_rows: int, num_columns: int, dtype: torch.dtype, *, capability: int = 90
) -> dict[str, int]:
    """How the kernel is compiled; none of it decides a bit of the result."""
    if dtype == torch.float32:
        return _WIDE
    is_few = num_rows <= FEW_ROWS
    if capability < 90:
        return _FEW if is_few else _MANY
    large = _HOPPER_SOME if is_few else _HOPPER_MANY
    least = 1 if is_few else MANY_ROWS // large["BLOCK_M"]  # tiles of rows
    enough = num_rows > FEWEST_ROWS if is_few else num_rows >= MANY_ROWS
    if enough and least * triton.cdiv(num_columns, large["BLOCK_N"]) >= _PROCESSORS:
        return large
    return _HOPPER_FEW if is_few else _MANY


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[T, K], [N, K], [N] -> [T, N] in the dtype of x, sums in float32."""
    check("x", x, ndim=2)
    check("weight", weight, ndim=2, dtypes=(x.dtype,))
    num_rows, depth = x.shape
    num_columns = len(weight)
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if num_rows:
        tiles = tiles_of(num_rows, num_columns, x.dtype, capability=capability_of(x.device))
        count = triton.cdiv(num_rows, tiles["BLOCK_M"]) * triton.cdiv(num_columns, tiles["BLOCK_N"])
        linear_kernel[(count,)](
            x, weight, out if bias is None else bias, out, num_rows, num_columns, depth,
            x.stride(0), weight.stride(0),
            GROUP=8, HAS_BIAS=bias is not None, UPCAST=INTERPRETED, **tiles,
        )  # fmt: skip
    return out
