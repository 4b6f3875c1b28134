"""Choosing tokens from logits: arrays in, arrays out; the same rule on every device.

A row's result depends on that row alone: its logits, its parameters and the counter-based random
number of (seed, choice, position). Nothing here has state.

Legend: S sampled rows, V vocabulary (width of the logits), W mask words = ceil(V / 32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]
Int32Array = NDArray[np.int32]
IndexArray = NDArray[np.intp]

NOT_FINITE = -1  # SampleResult.token_ids of a row whose logits hold NaN or only -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """One row's parameters that are not plain numbers; ids are checked before they get here."""

    bias_ids: Int32Array  # logit_bias
    bias_values: Float32Array
    output_ids: Int32Array  # distinct generated ids, for penalties
    output_counts: Int32Array  # how often each occurred
    prompt_ids: Int32Array  # distinct prompt ids, for the repetition penalty
    banned_ids: Int32Array  # stop ids while min_new_tokens is not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """Parameters of the S rows of one step, in the order of ForwardBatch.sample_rows.

    The same object may be given for the next step when nothing but `positions` and the bits of
    `masks` have changed; where `rows` have as well, one with the same arrays.
    """

    targets: Int32Array  # [S] -1: choose a token; else: only score this id
    temperature: Float32Array  # [S] 0 is greedy: the lowest id among the largest logits
    top_k: Int32Array  # [S] <= 0: off
    top_p: Float32Array  # [S]
    min_p: Float32Array  # [S]
    presence_penalty: Float32Array  # [S]
    frequency_penalty: Float32Array  # [S]
    repetition_penalty: Float32Array  # [S]
    seeds: NDArray[np.uint64]  # [S]
    choices: Int32Array  # [S] Request.choice_index
    positions: Int32Array  # [S] position of the token to be chosen
    rows: tuple[RowSampling | None, ...]  # [S] None: nothing special, the usual case
    num_top: Int32Array  # [S] -1: no logprob wanted; k >= 0: the token's and the k best
    masks: Int32Array | None  # [S, W] grammar masks; rows without a grammar are all ones
    has_mask: NDArray[np.bool_]  # [S]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleResult:
    token_ids: Int32Array  # [S] the chosen id, the target, or NOT_FINITE
    logprobs: Float32Array  # [S] raw log-probability of that id; NaN where none was wanted
    top_ids: tuple[Int32Array, ...]  # [S] arrays of num_top ids, best first
    top_logprobs: tuple[Float32Array, ...]  # [S]


class HostLogits:
    """A runner.StepHandle over logits that lie in host memory.

    Raises:
        ValueError: when `logits` is not a float32 matrix.
    """

    def __init__(self, logits: Float32Array) -> None:
        if logits.ndim != 2 or logits.dtype != np.float32:
            raise ValueError(f"logits: {logits.dtype} {logits.shape}; must be float32 [S, V]")
        self.logits = np.ascontiguousarray(logits)  # [S, V]

    def sample(self, params: SampleBatch) -> SampleResult:
        return sample_rows(self.logits, params)


def sample_rows(logits: Float32Array, params: SampleBatch) -> SampleResult:
    """Choose (or score, where a target is given) one token per row of `logits` [S, V].

    Order of a row: raw log-probabilities; repetition, presence and frequency penalty; logit_bias;
    banned ids; grammar mask; greedy, or temperature, top_k, top_p, min_p and the inverse CDF over
    ascending ids at `uniforms(seed, choice, position)`. Ties go to the lower id. The mask wins
    over a bias and over a ban: where every allowed id is banned, the ban gives way. NOT_FINITE
    also stands for a row with +inf and for one whose allowed logits are all -inf.

    `logits` is not changed. Cost: one pass over V for a greedy row, three for a drawn one.
    """
    num_rows = len(logits)
    token_ids = np.empty(num_rows, np.int32)
    logprobs = np.full(num_rows, np.nan, np.float32)
    top_ids = [_NO_IDS] * num_rows
    top_logprobs = [_NO_VALUES] * num_rows
    random = uniforms(params.seeds, params.choices, params.positions)
    with np.errstate(over="ignore", under="ignore"):  # differences of huge logits are -inf: right
        for i in range(num_rows):
            row = logits[i]
            best = int(row.argmax())  # the first NaN, if there is one
            if not math.isfinite(row[best]):
                token_ids[i] = NOT_FINITE
                continue
            target = int(params.targets[i])
            token_id = target if target >= 0 else _choose(row, params, i, best, float(random[i]))
            token_ids[i] = token_id
            num_top = int(params.num_top[i])
            if token_id == NOT_FINITE or (num_top < 0 and target < 0):
                continue
            normalizer = _log_sum_exp(row, float(row[best]))
            logprobs[i] = float(row[token_id]) - normalizer  # rounded once, as in _logprobs
            if num_top > 0:
                ids = _largest(row, num_top)
                top_ids[i] = ids.astype(np.int32)
                top_logprobs[i] = _logprobs(row[ids], normalizer)
    return SampleResult(
        token_ids=token_ids,
        logprobs=logprobs,
        top_ids=tuple(top_ids),
        top_logprobs=tuple(top_logprobs),
    )


def uniforms(
    seeds: NDArray[np.uint64], choices: Int32Array, positions: Int32Array
) -> NDArray[np.float64]:
    """Counter-based random numbers in [0, 1), float64 [S]; integers only, so equal everywhere.

        h = mix(seed + G);  h = mix((h ^ choice) + G);  h = mix((h ^ position) + G)
        result = (h >> 11) * 2**-53

    all modulo 2**64, where mix is the finaliser of splitmix64 (Steele, Lea, Flood 2014) and G its
    increment 0x9E3779B97F4A7C15.
    """
    mixed = _mix(np.atleast_1d(seeds).astype(np.uint64) + _GOLDEN)
    mixed = _mix((mixed ^ choices.astype(np.uint64)) + _GOLDEN)
    mixed = _mix((mixed ^ positions.astype(np.uint64)) + _GOLDEN)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def allowed_ids(mask: Int32Array, vocab_size: int) -> IndexArray | None:
    """The ids whose bits are set in `mask` [W], ascending; None when too many for a list to pay.

    Only non-zero words are expanded, so a mask that allows few ids costs one pass over W words.
    """
    words = np.flatnonzero(mask)
    if len(words) * _SPARSE_PART > len(mask):
        return None
    return _expand(mask, words, vocab_size)


_NO_IDS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SPARSE_PART = 8  # a mask is worked on as a list of ids below 1 / 8 of its words
_BLOCK = 256  # weights per partial sum of the inverse CDF
_FIRST_TOP = 64  # first guess at how many ids top_p keeps
_NUM_BINS = 1024  # of top_p's cut of a flat row
_NO_WEIGHT = np.float32(1e-12)  # less than this share of the best one is one bin
_LARGEST_FLOAT = np.finfo(np.float32).max


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _log_sum_exp(row: Float32Array, largest: float) -> float:
    """log(sum(exp(row))): float32 terms, added in float64 in numpy's fixed order."""
    terms = np.exp(row - np.float32(largest))
    return largest + math.log(float(terms.sum(dtype=np.float64)))


def _logprobs(logits: Float32Array, normalizer: float) -> Float32Array:
    return (logits.astype(np.float64) - normalizer).astype(np.float32)


@np.errstate(over="ignore")  # of a tiny temperature or penalty: infinity is its limit
def _choose(row: Float32Array, params: SampleBatch, i: int, best: int, random: float) -> int:
    """The id to emit for a finite row whose first largest logit is at `best`."""
    special = params.rows[i]
    mask = params.masks[i] if params.masks is not None and params.has_mask[i] else None
    if special is None:
        return _choose_allowed(row, params, i, mask, best, random)
    edited = edited_row(row, special, params, i)
    if len(special.banned_ids):
        kept = edited[special.banned_ids]
        edited[special.banned_ids] = -np.inf
        token_id = _choose_allowed(edited, params, i, mask, None, random)
        if token_id != NOT_FINITE:
            return token_id
        edited[special.banned_ids] = kept  # nothing else is allowed: the grammar wins
    return _choose_allowed(edited, params, i, mask, None, random)


@np.errstate(over="ignore")  # of a tiny penalty: infinity is cut below
def edited_row(
    row: Float32Array, special: RowSampling, params: SampleBatch, i: int
) -> Float32Array:
    """A copy of `row` with penalties and biases applied."""
    edited = row.copy()
    repetition = params.repetition_penalty[i]
    if repetition != 1:
        # From the raw values both times: an id in both lists is penalised once.
        for ids in (special.prompt_ids, special.output_ids):
            raw = row[ids]
            edited[ids] = np.where(raw > 0, raw / repetition, raw * repetition)
    presence, frequency = params.presence_penalty[i], params.frequency_penalty[i]
    if presence != 0 or frequency != 0:
        counts = special.output_counts.astype(np.float32)
        edited[special.output_ids] -= presence + frequency * counts
    if len(special.bias_ids):
        np.add.at(edited, special.bias_ids, special.bias_values)
    np.minimum(edited, _LARGEST_FLOAT, out=edited)  # a tiny repetition penalty overflows
    return edited


def _choose_allowed(
    row: Float32Array,
    params: SampleBatch,
    i: int,
    mask: Int32Array | None,
    best: int | None,
    random: float,
) -> int:
    """Apply the mask, then pick greedily or draw; NOT_FINITE when nothing is possible."""
    if params.temperature[i] == 0:
        best = int(row.argmax()) if best is None else best
        if mask is None or int(mask[best >> 5]) >> (best & 31) & 1:
            return best if row[best] > -np.inf else NOT_FINITE
    if mask is None:
        ids, values = None, row
    else:
        ids, values = _masked(row, mask)
    if len(values) == 0:
        return NOT_FINITE
    best = int(values.argmax())
    if values[best] == -np.inf:
        return NOT_FINITE
    if params.temperature[i] == 0:
        return best if ids is None else int(ids[best])
    place = _draw(values, values[best], params, i, random)
    return place if ids is None else int(ids[place])


def _masked(row: Float32Array, mask: Int32Array) -> tuple[IndexArray | None, Float32Array]:
    """(allowed ids, their logits) when few are allowed, else (None, row with -inf elsewhere)."""
    ids = allowed_ids(mask, len(row))
    if ids is not None:
        return ids, row[ids]
    banned = allowed_ids(~mask, len(row))
    if banned is None:
        bits = np.unpackbits(_bytes(mask), count=len(row), bitorder="little")
        return None, np.where(bits.view(np.bool_), row, np.float32(-np.inf))
    if len(banned):
        row = row.copy()
        row[banned] = -np.inf
    return None, row


def _expand(mask: Int32Array, words: IndexArray, vocab_size: int) -> IndexArray:
    """Ids of the set bits of `words` of a mask, ascending, padding bits left out."""
    bits = np.unpackbits(_bytes(mask[words]), bitorder="little")
    places = np.flatnonzero(bits)
    ids: IndexArray = (words[places >> 5] << 5) + (places & 31)
    return ids[: int(np.searchsorted(ids, vocab_size))]


def _bytes(words: Int32Array) -> NDArray[np.uint8]:
    return np.ascontiguousarray(words, "<i4").view(np.uint8)


def _draw(
    values: Float32Array, largest: np.float32, params: SampleBatch, i: int, random: float
) -> int:
    """An index into `values`, whose maximum `largest` is finite, by temperature and filters."""
    kept: IndexArray | None = None  # None: all of them; else ascending indices
    top_k = int(params.top_k[i])
    if 0 < top_k < len(values):
        kept = np.sort(_largest(values, top_k))
        values = values[kept]
    weights = values - largest
    weights /= params.temperature[i]
    np.exp(weights, out=weights)
    top_p, min_p = float(params.top_p[i]), float(params.min_p[i])
    if top_p < 1:
        nucleus = _nucleus(values, weights, top_p)
        kept, weights = nucleus if kept is None else kept[nucleus], weights[nucleus]
    if min_p > 0:  # the largest weight is exactly 1
        likely = np.flatnonzero(weights >= min_p)
        kept, weights = likely if kept is None else kept[likely], weights[likely]
    place = _inverse_cdf(weights, random)
    return place if kept is None else int(kept[place])


def _largest(values: Float32Array, k: int) -> IndexArray:
    """Indices of the min(k, n) largest of `values` [n], best first, ties by index; no NaN.

    One pass for small k: the k-th largest of the column maxima of `values` as a matrix bounds
    the k-th largest value from below, so few values are left to sort.
    """
    k = min(k, len(values))
    num_columns = len(values) // 64
    if k == len(values):
        candidates = np.arange(len(values))
    elif k <= num_columns // 2:
        maxima = values[: num_columns * 64].reshape(64, num_columns).max(axis=0)
        bound = np.partition(maxima, num_columns - k)[num_columns - k]
        candidates = np.flatnonzero(values >= bound)
    else:
        bound = np.partition(values, len(values) - k)[len(values) - k]
        candidates = np.flatnonzero(values >= bound)
    order = np.argsort(-values[candidates], kind="stable")[:k]
    return candidates[order]


def _nucleus(values: Float32Array, weights: Float32Array, top_p: float) -> IndexArray:
    """Ascending indices of the fewest best values whose weights reach `top_p` of the total.

    Tries a few best ones first. A flat row is cut into bins of falling weight, and only the bin
    in which the sum is reached is sorted.
    """
    wanted = top_p * float(weights.sum(dtype=np.float64))
    order = _largest(values, _FIRST_TOP)
    sums = np.cumsum(weights[order], dtype=np.float64)
    if sums[-1] >= wanted or len(order) == len(values):
        return np.sort(order[: int(np.searchsorted(sums, wanted)) + 1])
    bins = -np.log(np.maximum(weights, _NO_WEIGHT))
    bins *= _NUM_BINS / max(float(bins.max()), 1e-3)
    places = bins.astype(np.int32)  # ascending as values fall
    running = np.cumsum(np.bincount(places, weights))
    cut = int(np.searchsorted(running, wanted))
    within = np.flatnonzero(places == cut)
    within = within[np.argsort(-values[within], kind="stable")]
    before = float(running[cut - 1]) if cut > 0 else 0.0
    sums = before + np.cumsum(weights[within], dtype=np.float64)
    kept = places < cut
    kept[within[: int(np.searchsorted(sums, wanted)) + 1]] = True
    return np.flatnonzero(kept)


def _inverse_cdf(weights: Float32Array, random: float) -> int:
    """The first index at which the running sum exceeds `random` of the total.

    Long rows are added by blocks first. An index of weight 0 is never returned.
    """
    start = 0
    if len(weights) > 16 * _BLOCK:
        running = np.cumsum(_block_sums(weights), dtype=np.float64)
        goal = random * float(running[-1])
        block = _first_above(running, goal)
        if block > 0:
            goal = max(goal - float(running[block - 1]), 0.0)
        start = block * _BLOCK
        running = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    else:
        running = np.cumsum(weights, dtype=np.float64)
        goal = random * float(running[-1])
    return start + _first_above(running, goal)


def _block_sums(weights: Float32Array) -> Float32Array:
    num_whole = len(weights) // _BLOCK
    sums = np.empty(num_whole + 1, np.float32)
    whole = weights[: num_whole * _BLOCK].reshape(num_whole, _BLOCK)
    whole.sum(axis=1, out=sums[:num_whole])
    sums[num_whole] = weights[num_whole * _BLOCK :].sum()
    return sums


def _first_above(running: NDArray[np.float64], goal: float) -> int:
    place = int(np.searchsorted(running, goal, side="right"))
    if place == len(running):  # rounding carried the goal to the end: the last non-zero step
        place = int(np.searchsorted(running, running[-1]))
    return place
