"""x @ weight^T where the weights are codes with scales: see `quantised.py` for the kinds.

Activations keep their dtype, codes are widened to it exactly. A scale multiplies the sum of its
group in float32, so no weight is rounded again:

    int8   out = sum over groups of scale * (x . code)
    int4   the same, and minimum * (sum of x) where there are minimums
    fp8    out = scale * (x . code)

The product is taken as weight @ x^T: codes are then the operand that stays in registers, and few
rows of x are the narrow side of a matrix instruction, the same one for every number of rows.

The sum over K is cut into parts of whole groups, by the shape of the matrix alone. With few rows
each part is a program, and `reduce_parts_kernel` adds them in order; with many, one program folds
its sum at the same places. A row has the same bits either way, whatever the other rows are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import int4_numbers, int8_numbers, numbers_of, readable
from .common import INTERPRETED, capability_of, check
from .quantised import QuantisedMatrix

FP8_BLOCK = 64  # inputs of a step where a scale is an output's
_FEW = {"BLOCK_M": 16, "BLOCK_N": 128, "num_warps": 4, "num_stages": 4, "GROUPS": 4}
_FEWEST = {**_FEW, "BLOCK_M": 8}  # Hopper's narrowest: half the sums, and more programs at once
_SOME = {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "GROUPS": 1}
_MANY = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "GROUPS": 1}
_WIDE = {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "GROUPS": 1}  # float32
_IN_PARTS_UP_TO = 64  # rows
_PROGRAMS = 264  # that parts should make of a matrix: two for each processor of an H200
_PART_INPUTS = 512  # of a part, at least
_REDUCE_BLOCK = 512


@triton.jit
def load_groups(pointers, is_column, num_left, num_columns, GROUPS: tl.constexpr):
    """float16 [N, GROUPS] of the next groups, zero beyond num_left: together, a copy is wide
    enough to be asynchronous."""
    group = tl.arange(0, GROUPS)
    known = is_column[:, None] & (group < num_left)[None, :]
    return tl.load(pointers[:, None] + (group * num_columns)[None, :], mask=known, other=0.0)


@triton.jit
def one_group(groups, index: tl.constexpr, GROUPS: tl.constexpr):
    """[N, GROUPS] -> [N, 1] float32 of one of 1, 2 or 4 groups."""
    if GROUPS == 1:
        found = groups
    else:
        if GROUPS == 4:
            even, odd = tl.split(groups.reshape([groups.shape[0], 2, 2]))
            first, second = tl.split(odd if index % 2 else even)
        else:
            first, second = tl.split(groups)
        found = (second if index // (GROUPS // 2) else first)[:, None]
    return found.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_groups", "part_groups"])
def quantised_linear_kernel(
    x, codes, scales, minimums, bias, out, num_rows, num_columns, depth,
    x_stride, num_groups, part_groups,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr, IS_INT4: tl.constexpr,
    PER_GROUP: tl.constexpr, HAS_MINIMUM: tl.constexpr, HAS_BIAS: tl.constexpr,
    IN_PARTS: tl.constexpr, UPCAST: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Programs (tile of columns, tile of rows, part). IN_PARTS: out is [parts, T, N] float32.

    GROUPS of a step: 4 where reading is all there is to do.
    """
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_column = column < num_columns
    is_row = row < num_rows
    k = tl.arange(0, GROUP)
    # codes are read as words where a scale is a group's
    WIDTH: tl.constexpr = GROUP // 8 if IS_INT4 else (GROUP // 4 if PER_GROUP else GROUP)
    ZERO: tl.constexpr = 0 if HAS_MINIMUM else 8
    narrow: tl.constexpr = tl.float16 if x.dtype.element_ty == tl.float16 else tl.bfloat16
    byte = tl.arange(0, WIDTH)
    if PER_GROUP:  # products of constants: 16 bytes at a time are read only where that is known
        column_stride = WIDTH
        group_stride = num_columns * WIDTH
    else:
        column_stride = depth
        group_stride = GROUP
    # scalars carry the 64 bits: tiles of pointers would take the registers
    x_tile = x + tl.program_id(1).to(tl.int64) * BLOCK_M * x_stride
    x_offset = tl.arange(0, BLOCK_M)[None, :] * x_stride + k[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2) * part_groups
    code_tile = codes + tl.program_id(0).to(tl.int64) * BLOCK_N * column_stride
    code_tile += first.to(tl.int64) * group_stride
    code_offset = tl.arange(0, BLOCK_N)[:, None] * column_stride + byte[None, :]
    last = num_groups
    if IN_PARTS:
        last = tl.minimum(first + part_groups, num_groups)
    for begin in range(first, last, part_groups):
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        stop = tl.minimum(begin + part_groups, last)
        for start in range(begin, stop, GROUPS):
            if PER_GROUP:
                at = start * num_columns + column
                scale = load_groups(scales + at, is_column, stop - start, num_columns, GROUPS)
                if HAS_MINIMUM:
                    minimum = load_groups(
                        minimums + at, is_column, stop - start, num_columns, GROUPS
                    )
            for index in tl.static_range(GROUPS):
                group = start + index
                inside = (group * GROUP + k < depth)[:, None] & is_row[None, :]
                left = tl.load(x_tile + group * GROUP + x_offset, mask=inside, other=0.0)
                if UPCAST:
                    left = left.to(tl.float32)
                if PER_GROUP:
                    known = column < tl.where(group < stop, num_columns, 0)
                    raw = tl.load(code_tile + code_offset, mask=known[:, None], other=0)
                else:
                    known = is_column[:, None] & (group * GROUP + byte < depth)[None, :]
                    raw = tl.load(code_tile + code_offset, mask=known, other=0.0)
                code_tile += group_stride
                if IS_INT4:
                    weight = int4_numbers(raw, ZERO, narrow, left.dtype)
                elif PER_GROUP:
                    weight = int8_numbers(raw, narrow, left.dtype)
                else:
                    weight = numbers_of(raw, left.dtype)
                if PER_GROUP:
                    part = tl.dot(weight, left, input_precision="tf32x3")
                    acc = tl.fma(part, one_group(scale, index, GROUPS), acc)
                    if HAS_MINIMUM:  # by the same instruction: a sum of its own has other bits
                        ones = tl.full((BLOCK_N, GROUP), 1.0, left.dtype)
                        sums = tl.dot(ones, left, input_precision="tf32x3")
                        acc = tl.fma(sums, one_group(minimum, index, GROUPS), acc)
                else:
                    acc = tl.dot(weight, left, acc, input_precision="tf32x3")
        total += acc
    mask = is_column[:, None] & is_row[None, :]
    at = row.to(tl.int64)[None, :] * num_columns + column[:, None]
    if IN_PARTS:
        at += tl.program_id(2).to(tl.int64) * num_rows * num_columns
    else:
        if not PER_GROUP:
            total *= tl.load(scales + column, mask=is_column, other=0.0)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def reduce_parts_kernel(
    parts, scales, bias, out, num_rows, num_columns, num_parts,
    HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Programs (row, block of columns): parts [P, T, N] float32 added in order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    total = tl.zeros((BLOCK,), tl.float32)
    at = parts + row * num_columns + column
    for _ in range(0, num_parts):
        total += tl.load(at, mask=inside, other=0.0)
        at += num_rows * num_columns
    if HAS_SCALE:
        total *= tl.load(scales + column, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_columns + column, total.to(out.dtype.element_ty), mask=inside)


def tiles_of(
    num_rows: int, dtype: torch.dtype, group: int, *, is_fp8: bool = False, capability: int = 90
) -> dict[str, int]:
    """How the kernel is compiled; none of it decides a bit of the result."""
    if dtype == torch.float32:
        return _WIDE
    tiles = _MANY
    if num_rows <= _IN_PARTS_UP_TO:
        tiles = _FEW if num_rows <= _FEW["BLOCK_M"] else _SOME
        if num_rows <= _FEWEST["BLOCK_M"] and capability >= 90:
            tiles = _FEWEST
    if is_fp8:  # no scales to wait for
        return {**tiles, "GROUPS": 1}
    # the codes of a tile are in registers at once, before Hopper x too
    if group == 64:
        tiles = {**tiles, "GROUPS": min(2, tiles["GROUPS"])}
    if group > 64:
        tiles = {**tiles, "num_stages": 3}
    is_large = group > 64 or (capability < 90 and tiles is _MANY)
    return {**tiles, "BLOCK_N": tiles["BLOCK_N"] // 2} if is_large else tiles


def parts_of(num_columns: int, depth: int, group: int) -> tuple[int, int]:
    """(groups of a part, parts) of a matrix: enough programs for a device, parts not too small."""
    num_groups = triton.cdiv(depth, group)
    wanted = triton.cdiv(_PROGRAMS, triton.cdiv(num_columns, _FEW["BLOCK_N"]))
    per_part = max(triton.cdiv(num_groups, wanted), triton.cdiv(_PART_INPUTS, group))
    # a step's groups are of one part
    per_part = _FEW["GROUPS"] * triton.cdiv(per_part, _FEW["GROUPS"])
    return per_part, triton.cdiv(num_groups, per_part)


def linear(x: Tensor, weight: QuantisedMatrix, bias: Tensor | None = None) -> Tensor:
    """[T, K], [N, K], [N] -> [T, N] in the dtype of x; sums in float32."""
    check("x", x, ndim=2)
    num_rows, depth = x.shape
    if depth != weight.depth:
        raise ValueError(f"x: {depth} inputs do not fit a matrix of {weight.depth}")
    num_columns = weight.num_columns
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    is_fp8 = weight.kind == "fp8"
    group = FP8_BLOCK if is_fp8 else weight.group
    part_groups, num_parts = parts_of(num_columns, depth, group)
    tiles = tiles_of(num_rows, x.dtype, group, is_fp8=is_fp8, capability=capability_of(x.device))
    in_parts = num_rows <= _IN_PARTS_UP_TO and num_parts > 1
    parts = (
        torch.empty(num_parts, num_rows, num_columns, dtype=torch.float32, device=x.device)
        if in_parts
        else out
    )
    codes = readable(weight.codes) if is_fp8 else weight.codes.view(torch.uint32)
    added = out if bias is None else bias
    grid = (
        triton.cdiv(num_columns, tiles["BLOCK_N"]),
        triton.cdiv(num_rows, tiles["BLOCK_M"]),
        num_parts if in_parts else 1,
    )
    quantised_linear_kernel[grid](
        x, codes, weight.scales, weight.scales if weight.minimums is None else weight.minimums,
        added, parts, num_rows, num_columns, depth, x.stride(0),
        triton.cdiv(depth, group), part_groups,
        GROUP=group, IS_INT4=weight.kind == "int4", PER_GROUP=not is_fp8,
        HAS_MINIMUM=weight.minimums is not None, HAS_BIAS=bias is not None and not in_parts,
        IN_PARTS=in_parts, UPCAST=INTERPRETED, enable_fp_fusion=False, **tiles,
    )  # fmt: skip
    if in_parts:
        reduce_parts_kernel[(num_rows, triton.cdiv(num_columns, _REDUCE_BLOCK))](
            parts, weight.scales, added, out, num_rows, num_columns, num_parts,
            HAS_SCALE=is_fp8, HAS_BIAS=bias is not None, BLOCK=_REDUCE_BLOCK,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
