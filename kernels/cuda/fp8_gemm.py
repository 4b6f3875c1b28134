"""x @ weight^T with both in e4m3, by the library: a scale per row of x and per output.

For sm_89 and later. Activations are rounded, and the library chooses its kernel by the number of
rows: faster with many, and not for deterministic runs. `quantised_gemm` keeps activations as they
are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import E4M3_LARGEST, e4m3_bits, magnitude, native_e4m3, row_scale
from .common import padded
from .quantised import QuantisedMatrix

_MULTIPLE = 16  # of both sides of the matrix, as the library wants
_LARGEST_BLOCK = 16384
_TILE = 256  # rows whose scales a kernel of the library reads at once, also behind the last one


@triton.jit
def encode_rows_kernel(x, codes, scales, depth, x_stride, BLOCK: tl.constexpr):
    """Programs (row): e4m3 codes [T, K] uint8 and scales [T] of x [T, K]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    numbers = tl.load(x + row * x_stride + at, mask=at < depth, other=0.0).to(tl.float32)
    scale, inverse = row_scale(tl.max(magnitude(numbers), axis=0), E4M3_LARGEST)
    bits = e4m3_bits(tl.where(inverse > 0.0, numbers * inverse, 0.0))
    tl.store(codes + row * depth + at, bits, mask=at < depth)
    tl.store(scales + row, scale)


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, K] -> codes [T, K] float8_e4m3fn, scales [T, 1] float32."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    room = -(-len(x) // _TILE) * _TILE  # pytorch/pytorch#133334
    scales = torch.empty(room, 1, dtype=torch.float32, device=x.device)[: len(x)]
    if len(x):
        encode_rows_kernel[(len(x),)](
            x, codes, scales, x.shape[1], x.stride(0), BLOCK=padded(x.shape[1]),
            num_warps=8 if x.shape[1] > 2048 else 4,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def why_not(weight: QuantisedMatrix, dtype: torch.dtype) -> str | None:
    """Why the library cannot multiply activations of `dtype` with this matrix; None if it can."""
    if weight.kind != "fp8":
        return f"weights are {weight.kind}"
    if not native_e4m3(weight.codes.device):
        return "e4m3 products need sm_89 or later"
    if dtype != torch.bfloat16:
        return f"results are {dtype}, the library's are bfloat16"
    if weight.depth % _MULTIPLE or weight.num_columns % _MULTIPLE:
        return f"{weight.num_columns} x {weight.depth} are not multiples of {_MULTIPLE}"
    if weight.depth > _LARGEST_BLOCK:
        return f"{weight.depth} inputs are more than {_LARGEST_BLOCK}"
    return None


def linear(x: Tensor, weight: QuantisedMatrix, bias: Tensor | None = None) -> Tensor:
    """[T, K], [N, K], [N] -> [T, N] bfloat16."""
    codes, scales = encode_rows(x)
    out: Tensor = torch._scaled_mm(
        codes,
        weight.codes.view(torch.float8_e4m3fn).T,
        scale_a=scales,
        scale_b=weight.scales.unsqueeze(0),
        out_dtype=torch.bfloat16,
    )
    return out if bias is None else out + bias
