"""Residual addition and RMSNorm in one pass over a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import check, padded


@triton.jit
def add_rms_norm_kernel(
    x, residual, weight, out, num_columns, row_stride, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < num_columns
    kind = out.dtype.element_ty
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * num_columns + column
        total = value + tl.load(at, mask=inside, other=0.0).to(tl.float32)
        total = total.to(kind)
        tl.store(at, total, mask=inside)
        value = total.to(tl.float32)
    mean = tl.sum(value * value, axis=0) / num_columns
    scaled = (value * (1.0 / tl.sqrt(mean + eps))).to(kind).to(tl.float32)
    wide = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_columns + column, (scaled * wide).to(kind), mask=inside)


def add_rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """[T, N], [N] -> RMSNorm(x + residual) [T, N].

    `residual` [T, N], dense, becomes x + residual, rounded to its dtype; None adds nothing.
    """
    check("x", x, ndim=2)
    num_rows, num_columns = x.shape
    if residual is not None and (residual.shape != x.shape or not residual.is_contiguous()):
        raise ValueError(f"residual: {tuple(residual.shape)} is not dense {tuple(x.shape)}")
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    block = padded(num_columns)
    if num_rows:
        add_rms_norm_kernel[(num_rows,)](
            x, x if residual is None else residual, weight, out, num_columns, x.stride(0), eps,
            HAS_RESIDUAL=residual is not None, BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out
