"""Choosing tokens on the device by the rule of `kernels/sampling.py`, one program per row.

A row's passes over its logits, in fixed blocks and a fixed order, so that its result depends on
that row alone: (1) extremes, (2) normaliser, then only for drawn rows (3) the cut of top_k, of
top_p, each a search of 11 passes for an exact threshold, no sort, (4) the total, (5) the place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.sampling import Float32Array, Int32Array, RowSampling

from .common import Launch, check, padded

MAX_BLOCK = 4096  # with so many warps the widest without spills
NUM_WARPS = 16
_EDIT_BLOCK = 256


@triton.jit
def _load_block(logits, masks, start, vocab_size, has_mask, BLOCK: tl.constexpr):
    """(ids, values) of a block; -inf where the mask forbids an id or the row has ended."""
    token = start + tl.arange(0, BLOCK)
    inside = token < vocab_size
    value = tl.load(logits + token, mask=inside, other=float("-inf"))
    if has_mask:
        word = tl.load(masks + token // 32, mask=inside, other=0)
        value = tl.where(((word >> (token % 32)) & 1) != 0, value, float("-inf"))
    return token, value


@triton.jit
def _sort_key(value):
    """int32 that orders as the float32 does; both zeros are one key."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _threshold(
    logits, masks, vocab_size, has_mask, largest, temperature, goal, low_key, low_extra,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(key, above): the largest key with at least `goal` at or above it, and what lies above.

    Counts ids, or sums weights. Keys above `low_key` count as they are; those at `low_key`
    together count `low_extra`; lower ones are out already. Three bits of the key per pass.
    """
    lane = tl.arange(0, 8).to(tl.int64)
    prefix = tl.zeros((), tl.int64)  # of the key, offset to be unsigned
    above = tl.zeros((), tl.float64)
    low = low_key.to(tl.int64) + 2147483648
    for digit in range(11):
        shift = 30 - 3 * digit
        candidate = prefix + (lane << shift)
        key_at = (tl.minimum(candidate, 4294967295) - 2147483648).to(tl.int32)
        reached = tl.where(candidate <= low, low_extra, tl.zeros((8,), tl.float64))
        for start in range(0, vocab_size, BLOCK):
            _ids, value = _load_block(logits, masks, start, vocab_size, has_mask, BLOCK)
            key = _sort_key(value)
            one = tl.where(value > float("-inf"), 1.0, 0.0)
            if BY_WEIGHT:
                one = one * tl.exp((value - largest) / temperature)
            one = tl.where(key > low_key, one, 0.0)
            at_or_above = key[:, None] >= key_at[None, :]
            reached += tl.sum(tl.where(at_or_above, one[:, None], 0.0), axis=0).to(tl.float64)
        fits = (reached >= goal) & (candidate < 4294967296)
        step = tl.max(tl.where(fits, lane, 0), axis=0)
        next_up = tl.where((lane == step + 1) & (candidate < 4294967296), reached, 0.0)
        is_there = tl.sum(tl.where(lane == step + 1, 1, 0), axis=0) > 0
        is_there = is_there & (prefix + ((step + 1) << shift) < 4294967296)
        above = tl.where(is_there, tl.sum(next_up, axis=0), above)
        prefix += step << shift
    return (prefix - 2147483648).to(tl.int32), above


@triton.jit
def _kept_weights(
    logits, masks, start, vocab_size, has_mask, largest, temperature, min_weight, key_at, num_ties,
    ties_before, BLOCK: tl.constexpr,
):  # fmt: skip
    """(ids, weights, ties in the block): 0 for what the filters drop; ties stay by lowest id."""
    token, value = _load_block(logits, masks, start, vocab_size, has_mask, BLOCK)
    key = _sort_key(value)
    weight = tl.where(value > float("-inf"), tl.exp((value - largest) / temperature), 0.0)
    is_tie = key == key_at
    rank = ties_before + tl.cumsum(is_tie.to(tl.int32), axis=0)
    keep = (key > key_at) | (is_tie & (rank <= num_ties))
    weight = tl.where(keep & (weight >= min_weight), weight, 0.0)
    return token, weight, tl.sum(is_tie.to(tl.int32), axis=0)


# Where logprobs begin depends on the number of rows, and a stride is that of masks or of nothing:
# neither may make it another kernel, which would be compiled while requests wait.
@triton.jit(do_not_specialize=["mask_stride"], do_not_specialize_on_alignment=["out_logprobs"])
def sample_kernel(
    raw, edited, masks, has_masks, targets, temperatures, top_ks, top_ps, min_ps, randoms,
    wants_logprob, out_ids, out_logprobs, vocab_size, raw_stride, edited_stride, mask_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    raw += row * raw_stride
    edited += row * edited_stride
    masks += row * mask_stride
    has_mask = tl.load(has_masks + row) != 0
    target = tl.load(targets + row)
    temperature = tl.load(temperatures + row)
    highest = tl.full((), float("-inf"), tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    best = tl.zeros((), tl.int32)
    num_allowed = tl.zeros((), tl.int32)
    is_bad = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(raw + token, mask=token < vocab_size, other=float("-inf"))
        is_bad += tl.sum((value != value).to(tl.int32), axis=0)
        highest = tl.maximum(highest, tl.max(tl.where(value == value, value, 0.0), axis=0))
        token, value = _load_block(edited, masks, start, vocab_size, has_mask, BLOCK)
        num_allowed += tl.sum((value > float("-inf")).to(tl.int32), axis=0)
        block_best = tl.max(tl.where(value == value, value, float("-inf")), axis=0)
        if block_best > largest:
            largest = block_best
            best = tl.min(tl.where(value == block_best, token, 2147483647), axis=0)
    if (highest == float("inf")) | (highest == float("-inf")):
        is_bad += 1
    chosen = best
    if target >= 0:
        chosen = target
    elif largest == float("-inf"):
        is_bad += 1
    elif temperature > 0:
        if is_bad == 0:
            chosen = _draw(
                edited, masks, vocab_size, has_mask, largest, temperature, num_allowed,
                tl.load(top_ks + row), tl.load(top_ps + row), tl.load(min_ps + row),
                tl.load(randoms + row), BLOCK,
            )  # fmt: skip
    if is_bad > 0:
        chosen = -1
    logprob = tl.full((), float("nan"), tl.float32)
    if (is_bad == 0) & (tl.load(wants_logprob + row) != 0):
        terms = tl.zeros((), tl.float64)
        for start in range(0, vocab_size, BLOCK):
            token = start + tl.arange(0, BLOCK)
            value = tl.load(raw + token, mask=token < vocab_size, other=float("-inf"))
            terms += tl.sum(tl.exp(value - highest), axis=0).to(tl.float64)
        shifted = (tl.load(raw + chosen) - highest).to(tl.float64)
        logprob = (shifted - tl.log(terms)).to(tl.float32)
    tl.store(out_ids + row, chosen)
    tl.store(out_logprobs + row, logprob)


@triton.jit
def _draw(
    logits, masks, vocab_size, has_mask, largest, temperature, num_allowed, top_k, top_p, min_p,
    random, BLOCK: tl.constexpr,
):  # fmt: skip
    """The id at `random` of the kept weights' sum, ids ascending."""
    key_at = tl.full((), -2147483648, tl.int32)
    num_ties = tl.full((), 0, tl.int32)
    low_extra = tl.zeros((), tl.float64)
    if (top_k > 0) & (top_k < num_allowed):
        key_at, above = _threshold(
            logits, masks, vocab_size, has_mask, largest, temperature, top_k.to(tl.float64),
            key_at, low_extra, False, BLOCK,
        )  # fmt: skip
        num_ties = top_k - above.to(tl.int32)
    if top_p < 1.0:
        tie_value = (key_at ^ ((key_at >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        if num_ties > 0:
            tie_weight = tl.exp((tie_value - largest) / temperature).to(tl.float64)
            low_extra = tie_weight * num_ties.to(tl.float64)
        everything = low_extra
        for start in range(0, vocab_size, BLOCK):
            _ids, value = _load_block(logits, masks, start, vocab_size, has_mask, BLOCK)
            weight = tl.where(value > float("-inf"), tl.exp((value - largest) / temperature), 0.0)
            weight = tl.where(_sort_key(value) > key_at, weight, 0.0)
            everything += tl.sum(weight, axis=0).to(tl.float64)
        wanted = everything * top_p.to(tl.float64)
        old_key, old_ties = key_at, num_ties
        key_at, above = _threshold(
            logits, masks, vocab_size, has_mask, largest, temperature, wanted, key_at, low_extra,
            True, BLOCK,
        )  # fmt: skip
        tie_value = (key_at ^ ((key_at >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tie_weight = tl.exp((tie_value - largest) / temperature).to(tl.float64)
        needed = tl.ceil(((wanted - above) / tie_weight).to(tl.float32)).to(tl.int32)
        num_ties = tl.maximum(needed, 1)
        if key_at == old_key:
            num_ties = tl.minimum(num_ties, old_ties)
    total = tl.zeros((), tl.float64)
    ties = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        _ids, weight, count = _kept_weights(
            logits, masks, start, vocab_size, has_mask, largest, temperature, min_p, key_at,
            num_ties, ties, BLOCK,
        )  # fmt: skip
        total += tl.sum(weight, axis=0).to(tl.float64)
        ties += count
    goal = total * random
    running = tl.zeros((), tl.float64)
    ties = tl.zeros((), tl.int32)
    found = tl.full((), -1, tl.int32)
    last = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        if found < 0:
            token, weight, count = _kept_weights(
                logits, masks, start, vocab_size, has_mask, largest, temperature, min_p, key_at,
                num_ties, ties, BLOCK,
            )  # fmt: skip
            ties += count
            block_total = tl.sum(weight, axis=0)
            if block_total > 0:
                last = tl.max(tl.where(weight > 0, token, 0), axis=0)
                if running + block_total.to(tl.float64) > goal:
                    sums = running + tl.cumsum(weight, axis=0).to(tl.float64)
                    hit = (sums > goal) & (weight > 0)
                    first = tl.min(tl.where(hit, token, 2147483647), axis=0)
                    found = tl.minimum(first, last)  # rounding: at the end of the block
            running += block_total.to(tl.float64)
    if found < 0:
        found = last
    return found


@triton.jit(do_not_specialize=["num_edits"])
def edit_kernel(
    logits, rows, ids, repetitions, subtracts, adds, num_edits, stride, BLOCK: tl.constexpr
):
    """One logit per edit: repetition penalty, other penalties, bias; -inf in `adds` bans."""
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = edit < num_edits
    row = tl.load(rows + edit, mask=inside, other=0).to(tl.int64)
    at = logits + row * stride + tl.load(ids + edit, mask=inside, other=0)
    value = tl.load(at, mask=inside, other=0.0)
    repetition = tl.load(repetitions + edit, mask=inside, other=1.0)
    value = tl.where(value > 0, value / repetition, value * repetition)
    value -= tl.load(subtracts + edit, mask=inside, other=0.0)
    value += tl.load(adds + edit, mask=inside, other=0.0)
    tl.store(at, tl.minimum(value, 3.4028234663852886e38), mask=inside)


def edits_of(
    rows: Sequence[RowSampling | None],
    *,
    presence: NDArray[np.float32],
    frequency: NDArray[np.float32],
    repetition: NDArray[np.float32],
) -> tuple[Int32Array, Int32Array, Float32Array, Float32Array, Float32Array]:
    """What `apply_edits` takes, on the host: (rows, ids, repetitions, subtracts, adds)."""
    parts: list[tuple[Int32Array, Int32Array, Float32Array, Float32Array, Float32Array]] = []
    for index, row in enumerate(rows):
        if row is None:
            continue
        repeated = [row.prompt_ids, row.output_ids] if repetition[index] != 1 else []
        counted = [row.output_ids] if presence[index] != 0 or frequency[index] != 0 else []
        ids = np.unique(np.concatenate((*repeated, *counted, row.bias_ids, row.banned_ids)))
        if len(ids) == 0:
            continue
        factors = np.ones(len(ids), np.float32)
        subtracts, adds = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
        for listed in repeated:
            factors[np.searchsorted(ids, listed)] = repetition[index]
        if counted:
            amounts = presence[index] + frequency[index] * row.output_counts.astype(np.float32)
            subtracts[np.searchsorted(ids, row.output_ids)] = amounts
        np.add.at(adds, np.searchsorted(ids, row.bias_ids), row.bias_values)
        adds[np.searchsorted(ids, row.banned_ids)] = -np.inf
        owner = np.full(len(ids), index, np.int32)
        parts.append((owner, ids.astype(np.int32), factors, subtracts, adds))
    if not parts:
        whole, real = np.empty(0, np.int32), np.empty(0, np.float32)
        return whole, whole, real, real, real
    owners, ids_, factors_, subtracts_, adds_ = zip(*parts, strict=True)
    return (
        np.concatenate(owners),
        np.concatenate(ids_),
        np.concatenate(factors_),
        np.concatenate(subtracts_),
        np.concatenate(adds_),
    )


def apply_edits(
    logits: Tensor, rows: Tensor, ids: Tensor, repetitions: Tensor, subtracts: Tensor, adds: Tensor
) -> None:
    """logits [S, V] float32 in place; the others [E]: no (row, id) may occur twice."""
    check("logits", logits, ndim=2, dtypes=(torch.float32,))
    num_edits = len(rows)
    if num_edits:
        edit_kernel[(triton.cdiv(num_edits, _EDIT_BLOCK),)](
            logits, rows, ids, repetitions, subtracts, adds, num_edits, logits.stride(0),
            BLOCK=_EDIT_BLOCK, num_warps=4,
        )  # fmt: skip


def sample(
    raw: Tensor,
    edited: Tensor,
    masks: Tensor | None,
    *,
    has_masks: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    randoms: Tensor,
    wants_logprob: Tensor,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(ids [S] int32, logprobs [S] float32, NaN where not wanted); -1: the row is not finite.

    raw, edited [S, V] float32: the logits, and those with penalties and biases (may be the same
    tensor); masks [S, W] int32 or None; per row [S]: has_masks, targets, top_ks, wants_logprob
    int32, temperatures, top_ps, min_ps float32, randoms float64 in [0, 1). Both results lie in
    `out` [2, S] int32, the second row bit by bit.
    """
    launch, ids, logprobs = sample_launch(
        raw,
        edited,
        masks,
        has_masks=has_masks,
        targets=targets,
        temperatures=temperatures,
        top_ks=top_ks,
        top_ps=top_ps,
        min_ps=min_ps,
        randoms=randoms,
        wants_logprob=wants_logprob,
        out=out,
    )
    launch()
    return ids, logprobs


def sample_launch(
    raw: Tensor,
    edited: Tensor,
    masks: Tensor | None,
    *,
    has_masks: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    randoms: Tensor,
    wants_logprob: Tensor,
    out: Tensor | None,
) -> tuple[Launch, Tensor, Tensor]:
    """The launch that fills what `sample` returns."""
    check("raw", raw, ndim=2, dtypes=(torch.float32,))
    check("edited", edited, ndim=2, dtypes=(torch.float32,))
    check("randoms", randoms, ndim=1, dtypes=(torch.float64,))
    num_rows, vocab_size = raw.shape
    if out is None:
        out = torch.empty(2, num_rows, dtype=torch.int32, device=raw.device)
    if out.shape != (2, num_rows):
        raise ValueError(f"out: {tuple(out.shape)} is not (2, {num_rows})")
    if masks is not None and (len(masks) != num_rows or masks.shape[1] * 32 < vocab_size):
        raise ValueError(f"masks: {tuple(masks.shape)} does not cover {tuple(raw.shape)}")
    ids, logprobs = out[0], out[1].view(torch.float32)
    masks = has_masks.view(-1, 1) if masks is None else masks
    arguments = (
        raw, edited, masks, has_masks, targets, temperatures, top_ks, top_ps, min_ps, randoms,
        wants_logprob, ids, logprobs, vocab_size, raw.stride(0), edited.stride(0),
        masks.stride(0),
    )  # fmt: skip
    options = {"BLOCK": min(MAX_BLOCK, padded(vocab_size)), "num_warps": NUM_WARPS}
    return Launch(sample_kernel, (num_rows,), arguments, options), ids, logprobs
