"""Grammar masks applied to logits in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import check

BLOCK = 4096


@triton.jit
def bitmask_kernel(logits, masks, vocab_size, logits_stride, mask_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    word = tl.load(masks + row * mask_stride + token // 32, mask=inside, other=-1)
    banned = ((word >> (token % 32)) & 1) == 0
    tl.store(logits + row * logits_stride + token, float("-inf"), mask=inside & banned)


def apply_bitmask(logits: Tensor, masks: Tensor) -> None:
    """logits [S, V] float32: -inf where the bit of masks [S, ceil(V / 32)] int32 is 0."""
    check("logits", logits, ndim=2, dtypes=(torch.float32,))
    check("masks", masks, ndim=2, dtypes=(torch.int32,))
    num_rows, vocab_size = logits.shape
    if masks.shape[0] != num_rows or masks.shape[1] * 32 < vocab_size:
        raise ValueError(f"masks: {tuple(masks.shape)} does not cover {tuple(logits.shape)}")
    if num_rows:
        bitmask_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
            logits, masks, vocab_size, logits.stride(0), masks.stride(0), BLOCK=BLOCK
        )
