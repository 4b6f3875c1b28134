"""Norms of q and k per head, RoPE, and the write of K and V into their pages: one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import E4M3_LARGEST, INT8_LARGEST, e4m3_bits, int8_code, magnitude, row_scale
from .common import check, padded

HEAD_BLOCK = 8


@triton.jit
def rope_write_kernel(
    qkv, q_out, keys, values, key_scales, value_scales, positions, slots, cos, sin,
    q_norm, k_norm, eps, row_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr, HEAD_BLOCK: tl.constexpr, QK_NORM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Programs (row, block of heads); the blocks are those of q, then of k, then of v."""
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_BLOCKS: tl.constexpr = (NUM_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    KV_BLOCKS: tl.constexpr = (NUM_KV_HEADS + HEAD_BLOCK - 1) // HEAD_BLOCK
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    is_q = block < Q_BLOCKS
    is_v = block >= Q_BLOCKS + KV_BLOCKS
    part = tl.where(is_q, block, tl.where(is_v, block - Q_BLOCKS - KV_BLOCKS, block - Q_BLOCKS))
    num_heads = tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)
    first_head = tl.where(is_q, 0, tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    head = part * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    dim = tl.arange(0, HALF_PAD)
    inside = (head < num_heads)[:, None] & (dim < HALF)[None, :]
    source = qkv + row * row_stride + (first_head + head)[:, None] * HEAD_DIM + dim[None, :]
    kind = q_out.dtype.element_ty
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if not is_v:
        if QK_NORM:
            total = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
            scale = (1.0 / tl.sqrt(total / HEAD_DIM + eps))[:, None]
            is_dim = dim < HALF
            norm = k_norm
            if is_q:
                norm = q_norm
            low = tl.load(norm + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
            high = tl.load(norm + HALF + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
            first = ((first * scale).to(kind).to(tl.float32) * low).to(kind).to(tl.float32)
            second = ((second * scale).to(kind).to(tl.float32) * high).to(kind).to(tl.float32)
        angle = tl.load(positions + row).to(tl.int64) * HALF + dim
        c = tl.load(cos + angle, mask=dim < HALF, other=0.0)[None, :]
        s = tl.load(sin + angle, mask=dim < HALF, other=0.0)[None, :]
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    if is_q:
        q_target = q_out + (row * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
        tl.store(q_target, first.to(kind), mask=inside)
        tl.store(q_target + HALF, second.to(kind), mask=inside)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        place = slot * NUM_KV_HEADS + head
        offset = place[:, None] * HEAD_DIM + dim[None, :]
        pool = keys.dtype.element_ty
        target = keys + offset
        if is_v:
            target = values + offset
        if SCALED:
            peak = tl.max(tl.maximum(magnitude(first), magnitude(second)), axis=1)
            is_int8: tl.constexpr = pool == tl.int8
            scale, inverse = row_scale(peak, INT8_LARGEST if is_int8 else E4M3_LARGEST)
            first = tl.where(inverse[:, None] > 0.0, first * inverse[:, None], 0.0)
            second = tl.where(inverse[:, None] > 0.0, second * inverse[:, None], 0.0)
            if is_int8:
                first_code = int8_code(first)
                second_code = int8_code(second)
            else:
                first_code = e4m3_bits(first)
                second_code = e4m3_bits(second)
            scale_target = key_scales + place
            if is_v:
                scale_target = value_scales + place
            if slot >= 0:
                tl.store(target, first_code, mask=inside)
                tl.store(target + HALF, second_code, mask=inside)
                tl.store(scale_target, scale, mask=head < num_heads)
        else:
            if slot >= 0:
                tl.store(target, first.to(pool), mask=inside)
                tl.store(target + HALF, second.to(pool), mask=inside)


def rope_write(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> Tensor:
    """[T, (H + 2 G) D] -> q [T, H, D], normed and rotated; K and V go to `slots` of the pool.

    keys, values [slots, G, D] dense; positions, slots [T] int32, a slot of -1 writes nothing;
    cos, sin [positions, D/2] float32; q_norm, k_norm [D] or both None. key_scales, value_scales
    [slots, G] float32 where keys and values are codes: int8, or uint8 for e4m3.
    """
    check("qkv", qkv, ndim=2)
    check("positions", positions, ndim=1, dtypes=(torch.int32,))
    check("slots", slots, ndim=1, dtypes=(torch.int32,))
    num_rows = qkv.shape[0]
    num_kv_heads, head_dim = keys.shape[1:]
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(f"qkv: {tuple(qkv.shape)} is not {num_heads}+2*{num_kv_heads} heads")
    q = torch.empty(num_rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    has_norm = q_norm is not None and k_norm is not None
    scaled = key_scales is not None and value_scales is not None
    if scaled != (keys.dtype in (torch.int8, torch.uint8)):
        raise ValueError(f"keys: {keys.dtype} {'has no' if scaled else 'needs'} scales")
    head_block = min(HEAD_BLOCK, padded(num_heads))
    blocks = triton.cdiv(num_heads, head_block) + 2 * triton.cdiv(num_kv_heads, head_block)
    if num_rows:
        rope_write_kernel[(num_rows, blocks)](
            qkv, q, keys, values, key_scales if scaled else cos, value_scales if scaled else cos,
            positions, slots, cos, sin,
            q_norm if has_norm else cos, k_norm if has_norm else cos, eps, qkv.stride(0),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
            HALF_PAD=padded(head_dim // 2), HEAD_BLOCK=head_block, QK_NORM=has_norm,
            SCALED=scaled, num_warps=1,
        )  # fmt: skip
    return q
