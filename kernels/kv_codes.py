"""Numbers as codes of one byte with a scale for each row: int8, and e4m3 (fp8).

x = scale * code; the scale maps a row's largest |x| to the largest code. The scale of a row that
holds NaN or infinity is NaN, so that such a row stays recognisable. The oracle of what kernels
write.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def encode(x: Tensor, dtype: torch.dtype, *, peak: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[..., D] -> codes [..., D] of `dtype`, scales [...] float32.

    peak [...] float32: the largest |x| of a row that is longer than this part of it.
    """
    wide = x.float()
    peak = wide.abs().amax(dim=-1) if peak is None else peak
    largest = torch.full_like(peak, LARGEST[dtype])  # by a number torch would not divide exactly
    scale = torch.where(peak.isfinite(), peak / largest, torch.nan)
    inverse = torch.where(peak > 0, largest / peak, 0.0)
    inverse = torch.where(inverse.isfinite(), inverse, 0.0)  # of a row that is all but zero
    codes = (wide * inverse.unsqueeze(-1)).nan_to_num(0.0)
    codes = codes.round() if dtype == torch.int8 else codes.clamp(-448.0, 448.0)
    return codes.to(dtype), scale


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """[..., D], [...] -> [..., D] float32."""
    return codes.float() * scales.unsqueeze(-1)
