"""Attention of new tokens over cached and new ones, causal and ragged: chunked prefill.

A tile is up to BLOCK_M / GROUP rows of one sequence, with all query heads of one kv head packed
into the M dimension (row-major: token, head in group). One program per tile and kv head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import column_order, factor_order
from .softmax import attend_tile, merge


@triton.jit
def paged_extend_kernel(
    q, keys, values, key_scales, value_scales, out,
    tile_rows, tile_tokens, tile_pages, tile_starts, tile_ends, positions, page_ids,
    q_stride, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr,
    SCALED: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Tile i: rows tile_rows[i] and tile_tokens[i] - 1 after it; page_ids from tile_pages[i] on;
    keys tile_starts[i] .. tile_ends[i]. SPLIT > 0 folds the sum after every SPLIT keys, as
    decoding in parts does."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    packed = tl.arange(0, BLOCK_M)
    token = packed // GROUP_PAD
    head = packed % GROUP_PAD
    valid = (token < tl.load(tile_tokens + tile)) & (head < GROUP)
    row = tl.load(tile_rows + tile) + token
    position = tl.load(positions + row, mask=valid, other=-1)
    dim = tl.arange(0, DIM_PAD)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    lane = (kv_head * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
    queries = tl.load(q + row.to(tl.int64)[:, None] * q_stride + lane, mask=mask, other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)
    if keys.dtype.element_ty == tl.uint32:
        queries = factor_order(queries)
    pages = page_ids + tl.load(tile_pages + tile)
    end = tl.load(tile_ends + tile)
    sure = tl.minimum(end, tl.min(tl.where(valid, position, end), axis=0) + 1)
    acc = tl.zeros((BLOCK_M, DIM_PAD), tl.float32)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SPLIT > 0:
        whole_acc = tl.zeros((BLOCK_M, DIM_PAD), tl.float32)
        whole_peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        whole_total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(tl.load(tile_starts + tile), end, BLOCK_N):
        acc, peak, total = attend_tile(
            queries, acc, peak, total, keys, values, key_scales, value_scales, pages,
            start, end, sure, position, kv_head, scale,
            HEAD_DIM, DIM_PAD, NUM_KV_HEADS, PAGE, BLOCK_N, WINDOW, SCALED, E4M3,
        )  # fmt: skip
        if SPLIT > 0:
            if (start + BLOCK_N) % SPLIT == 0:
                whole_acc, whole_peak, whole_total = merge(
                    whole_acc, whole_peak, whole_total, acc, peak, total
                )
                acc = tl.zeros((BLOCK_M, DIM_PAD), tl.float32)
                peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                total = tl.zeros((BLOCK_M,), tl.float32)
    if SPLIT > 0:
        acc, peak, total = merge(whole_acc, whole_peak, whole_total, acc, peak, total)
    if keys.dtype.element_ty == tl.uint32:
        acc = column_order(acc)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + row.to(tl.int64)[:, None] * (NUM_HEADS * HEAD_DIM) + lane
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)
