"""The inner loop of paged attention, and how two partial softmaxes become one.

A partial softmax over some keys is (acc, max, sum): acc = sum of exp2(s - max) v [M, D], unscaled;
max [M] in units of log2; sum [M]. Decode and extend share this code, so that the same query over
the same keys in the same tiles has the same bits in both. In deterministic launches products
and additions are not fused (`enable_fp_fusion=False`): a compiler may pair them in two ways.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import columns, factors, numbers_of


@triton.jit
def attend_tile(
    queries, acc, peak, total, keys, values, key_scales, value_scales, page_ids,
    start, end, sure, positions, kv_head, scale,
    HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SCALED: tl.constexpr,
    E4M3: tl.constexpr,
):  # fmt: skip
    """Adds the keys start..start+BLOCK_N, those below `end`, to a partial softmax.

    queries [M, DIM_PAD]; positions [M], -1 for a row that sees nothing; sure: every row that
    matters sees all keys below it (and none of a window's is asked of it), so that most tiles are
    not masked; page_ids: pointer to the sequence's first page; scale: 1 / sqrt(D) in units of
    log2. SCALED: keys and values are codes of one byte, their scales [slots, G]; a scale
    multiplies a column of scores or weights, so that no number is rounded twice. They are
    read as words of four (E4M3, or int8): queries are then in `factor_order`, acc in `columns`'.
    """
    WORDS: tl.constexpr = keys.dtype.element_ty == tl.uint32
    at = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, DIM_PAD)
    there = at < end
    page = tl.load(page_ids + at // PAGE, mask=there, other=0).to(tl.int64)
    row = (page * PAGE + at % PAGE) * NUM_KV_HEADS + kv_head
    offset = (row * HEAD_DIM)[:, None] + dim[None, :]
    inside = there[:, None] & (dim < HEAD_DIM)[None, :]
    if WORDS:
        word = tl.arange(0, DIM_PAD // 4)
        words = (row * (HEAD_DIM // 4))[:, None] + word[None, :]
        in_word = there[:, None] & (word < HEAD_DIM // 4)[None, :]
        key = factors(tl.load(keys + words, mask=in_word, other=0), E4M3, queries.dtype)
    elif SCALED:
        key = numbers_of(tl.load(keys + offset, mask=inside, other=0.0), queries.dtype)
    else:
        key = tl.load(keys + offset, mask=inside, other=0.0).to(queries.dtype)
    scores = tl.dot(queries, tl.trans(key), input_precision="tf32x3")
    if SCALED:
        scores *= (scale * tl.load(key_scales + row, mask=there, other=0.0))[None, :]
    if WINDOW > 0 or start + BLOCK_N > sure:
        seen = at[None, :] <= positions[:, None]  # no position is at `end` or beyond it
        if WINDOW > 0:
            seen = seen & (at[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    highest = tl.maximum(peak, largest if SCALED else largest * scale)
    base = tl.where(highest == float("-inf"), 0.0, highest)  # a row that has seen nothing yet
    if SCALED:
        weights = tl.exp2(scores - base[:, None])
    else:  # an exact product: both modes take it with the sum
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, axis=1)
    if WORDS:
        value = columns(tl.load(values + words, mask=in_word, other=0), E4M3, queries.dtype)
    elif SCALED:
        value = numbers_of(tl.load(values + offset, mask=inside, other=0.0), queries.dtype)
    else:
        value = tl.load(values + offset, mask=inside, other=0.0).to(queries.dtype)
    if SCALED:
        weights = weights * tl.load(value_scales + row, mask=there, other=0.0)[None, :]
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(queries.dtype), value, acc, input_precision="tf32x3")
    return acc, highest, total


@triton.jit
def merge(acc, peak, total, other_acc, other_peak, other_total):
    """Two partial softmaxes of the same rows as one; acc [M, D], the others [M]."""
    highest = tl.maximum(peak, other_peak)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    left = tl.exp2(peak - base)
    right = tl.exp2(other_peak - base)
    acc = acc * left[:, None] + other_acc * right[:, None]
    return acc, highest, total * left + other_total * right
