"""silu(gate) * up over one matrix that holds both, as the fused projection writes it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import check

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, num_columns, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    base = gate_up + row * row_stride
    gate = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(base + num_columns + column, mask=inside, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)  # rounded as the reference
    tl.store(out + row * num_columns + column, (active * up).to(kind), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 N] -> [T, N]: the first N columns are the gate."""
    check("gate_up", gate_up, ndim=2)
    num_rows, width = gate_up.shape
    num_columns = width // 2
    out = torch.empty(num_rows, num_columns, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(num_columns, BLOCK))
        silu_mul_kernel[grid](gate_up, out, num_columns, gate_up.stride(0), BLOCK=BLOCK)
    return out
