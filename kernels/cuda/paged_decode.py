"""Attention of one new token per sequence: split over the keys, then reduced (Flash-Decoding).

A split is SPLIT keys at absolute positions, so the bits of a row do not depend on the batch. An
item is one split for one or several rows that hold the same pages there: a shared prefix is read
once for all rows of an item (a cascade over the tree of pages), whatever follows it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import column_order, factor_order
from .softmax import attend_tile, merge

REDUCED_TOGETHER = 4  # parts of a row


@triton.jit
def paged_decode_kernel(
    q, keys, values, key_scales, value_scales, part_acc, part_peak, part_total,
    num_items, item_first, item_count, item_pages, item_split, item_rows,
    row_parts, positions, page_ids, q_stride, scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, UPCAST: tl.constexpr,
    SCALED: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Programs (any number, kv head) take items in turn: a graph's grid need not fit the step.

    Item i: split item_split[i] of the rows item_rows[item_first[i] ..][: item_count[i]], pages
    from page_ids[item_pages[i]] on (the sequence's first page). Its part of row r goes to
    part_*[row_parts[r] + split], each [parts, H] ([parts, H, D] for acc).
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    kv_head = tl.program_id(1)
    packed = tl.arange(0, BLOCK_M)
    place = packed // GROUP_PAD
    head = packed % GROUP_PAD
    dim = tl.arange(0, DIM_PAD)
    for item in range(tl.program_id(0), tl.load(num_items), tl.num_programs(0)):
        valid = (place < tl.load(item_count + item)) & (head < GROUP)
        row = tl.load(item_rows + tl.load(item_first + item) + place, mask=valid, other=0)
        position = tl.load(positions + row, mask=valid, other=-1)
        mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
        lane = (kv_head * GROUP + head)[:, None] * HEAD_DIM + dim[None, :]
        queries = tl.load(q + row.to(tl.int64)[:, None] * q_stride + lane, mask=mask, other=0.0)
        if UPCAST:
            queries = queries.to(tl.float32)
        if keys.dtype.element_ty == tl.uint32:
            queries = factor_order(queries)
        split = tl.load(item_split + item)
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, tl.max(position, axis=0) + 1)
        sure = tl.minimum(end, tl.min(tl.where(valid, position, end), axis=0) + 1)
        pages = page_ids + tl.load(item_pages + item)
        acc = tl.zeros((BLOCK_M, DIM_PAD), tl.float32)
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(begin, end, BLOCK_N):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, keys, values, key_scales, value_scales, pages,
                start, end, sure, position, kv_head, scale,
                HEAD_DIM, DIM_PAD, NUM_KV_HEADS, PAGE, BLOCK_N, WINDOW, SCALED, E4M3,
            )  # fmt: skip
        if keys.dtype.element_ty == tl.uint32:
            acc = column_order(acc)
        part = (tl.load(row_parts + row, mask=valid, other=0) + split).to(tl.int64)
        target = part * NUM_HEADS + kv_head * GROUP + head
        tl.store(part_acc + target[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask)
        tl.store(part_peak + target, peak, mask=valid)
        tl.store(part_total + target, total, mask=valid)


@triton.jit
def reduce_kernel(
    part_acc, part_peak, part_total, out, rows, first_parts, num_parts,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Programs (decode row, head): folds the parts first_parts[i] .. + num_parts[i] in order.

    PARTS at a time are asked for before the first is folded; one that is not there changes no bit.
    """
    index = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_PAD)
    inside = dim < HEAD_DIM
    acc = tl.zeros((1, DIM_PAD), tl.float32)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    one = tl.arange(0, 1)
    first = tl.load(first_parts + index).to(tl.int64)
    count = tl.load(num_parts + index)
    for start in range(0, count, PARTS):
        for place in tl.static_range(PARTS):
            part = start + place
            at = (first + part) * NUM_HEADS + head
            there = one < count - part
            known = dim < tl.where(part < count, HEAD_DIM, 0)
            other = tl.load(part_acc + at * HEAD_DIM + dim, mask=known, other=0.0)
            acc, peak, total = merge(
                acc, peak, total, other[None, :],
                tl.load(part_peak + at + one, mask=there, other=float("-inf")),
                tl.load(part_total + at + one, mask=there, other=1.0),  # times 0
            )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    row = tl.load(rows + index).to(tl.int64)
    target = out + (row * NUM_HEADS + head) * HEAD_DIM + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside[None, :])
