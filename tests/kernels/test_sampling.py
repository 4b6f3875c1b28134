"""Both samplers against a slow, obvious float64 oracle, and the laws of the random stream."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from palmette.kernels import sampling
from palmette.kernels.cpu import build, ops
from palmette.kernels.cpu.sampling import NativeSampler
from palmette.kernels.sampling import (
    NOT_FINITE,
    HostLogits,
    RowSampling,
    SampleBatch,
    SampleResult,
    _inverse_cdf,
    allowed_ids,
    uniforms,
)

Sample = Callable[[np.ndarray, SampleBatch], SampleResult]


NATIVE = build.instruction_sets()


@pytest.fixture(scope="module", params=["numpy", *NATIVE, f"{NATIVE[0]}, maxima known"])
def sample_rows(request: pytest.FixtureRequest) -> Iterator[Sample]:
    """kernels.sampling.sample_rows, and the native library's on two threads."""
    if request.param == "numpy":
        yield sampling.sample_rows
        return
    name, _, is_known = request.param.partition(", ")
    pool = ops.Pool(2, instruction_set=name)

    def sample(logits: np.ndarray, params: SampleBatch) -> SampleResult:
        maxima = block_maxima(logits)
        return NativeSampler(pool, logits.shape[1]).sample(
            logits, params, maxima=maxima.ctypes.data if is_known else 0
        )

    yield sample
    pool.close()


def block_maxima(logits: np.ndarray) -> np.ndarray:
    """What a forward pass leaves beside its logits."""
    starts = range(0, logits.shape[1], ops.MAXIMA_BLOCK)
    blocks = [logits[:, start : start + ops.MAXIMA_BLOCK].max(axis=1) for start in starts]
    return np.stack(blocks, axis=1).astype(np.float32)


def int32(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def row_sampling(**fields: Any) -> RowSampling:
    empty: dict[str, Any] = {
        "bias_ids": int32(),
        "bias_values": np.empty(0, np.float32),
        "output_ids": int32(),
        "output_counts": int32(),
        "prompt_ids": int32(),
        "banned_ids": int32(),
    }
    return RowSampling(**(empty | fields))


def mask_of(ids: list[int], vocab_size: int) -> np.ndarray:
    """One mask row; the padding bits of the last word are set, to prove they are ignored."""
    bits = np.ones(-(-vocab_size // 32) * 32, np.uint8)
    bits[:vocab_size] = 0
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def batch(num_rows: int, **fields: Any) -> SampleBatch:
    defaults: dict[str, tuple[Any, Any]] = {
        "targets": (-1, np.int32),
        "temperature": (0, np.float32),
        "top_k": (-1, np.int32),
        "top_p": (1, np.float32),
        "min_p": (0, np.float32),
        "presence_penalty": (0, np.float32),
        "frequency_penalty": (0, np.float32),
        "repetition_penalty": (1, np.float32),
        "seeds": (0, np.uint64),
        "choices": (0, np.int32),
        "positions": (0, np.int32),
        "num_top": (-1, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(fields.get(name, value), dtype), (num_rows,)).copy()
        for name, (value, dtype) in defaults.items()
    }
    masks: list[np.ndarray | None] = fields.get("masks", [None] * num_rows)
    width = max((len(mask) for mask in masks if mask is not None), default=0)
    stacked = np.full((num_rows, width), -1, np.int32)
    for i, mask in enumerate(masks):
        if mask is not None:
            stacked[i] = mask
    return SampleBatch(
        rows=tuple(fields.get("rows", [None] * num_rows)),
        masks=stacked if width else None,
        has_mask=np.array([mask is not None for mask in masks]),
        **arrays,
    )


# The oracle: one row, python floats, every step spelled out.


def oracle_logprobs(row: np.ndarray) -> np.ndarray:
    wide = row.astype(np.float64)
    return wide - (wide.max() + math.log(np.exp(wide - wide.max()).sum()))


def oracle_allowed(mask: np.ndarray | None, vocab_size: int) -> list[int]:
    if mask is None:
        return list(range(vocab_size))
    return [i for i in range(vocab_size) if int(mask[i // 32]) >> (i % 32) & 1]


def oracle_logits(row: np.ndarray, params: SampleBatch, i: int, ban: bool = True) -> np.ndarray:
    out = row.astype(np.float64)
    special = params.rows[i]
    if special is not None:
        penalty = float(params.repetition_penalty[i])
        for token_id in set(special.prompt_ids.tolist()) | set(special.output_ids.tolist()):
            out[token_id] = (
                out[token_id] / penalty if out[token_id] > 0 else out[token_id] * penalty
            )
        for token_id, count in zip(special.output_ids, special.output_counts, strict=True):
            out[token_id] -= params.presence_penalty[i] + params.frequency_penalty[i] * count
        for token_id, bias in zip(special.bias_ids, special.bias_values, strict=True):
            out[token_id] += bias
        if ban:
            out[special.banned_ids] = -math.inf
    forbidden = np.ones(len(row), bool)
    mask = params.masks[i] if params.masks is not None and params.has_mask[i] else None
    forbidden[oracle_allowed(mask, len(row))] = False
    out[forbidden] = -math.inf
    if ban and np.all(out == -math.inf):
        return oracle_logits(row, params, i, ban=False)
    return out


def oracle_distribution(row: np.ndarray, params: SampleBatch, i: int) -> np.ndarray:
    """Probability of each id, after every filter; one-hot for greedy."""
    logits = oracle_logits(row, params, i)
    if params.temperature[i] == 0:
        return np.eye(1, len(row), int(logits.argmax()))[0]
    order = sorted(range(len(row)), key=lambda t: (-logits[t], t))
    weights = np.exp((logits - logits.max()) / float(params.temperature[i]))
    if params.top_k[i] > 0:
        order = order[: params.top_k[i]]
    if params.top_p[i] < 1:
        total, running, kept = sum(weights[t] for t in order), 0.0, []
        for t in order:
            kept.append(t)
            running += weights[t]
            if running >= float(params.top_p[i]) * total:
                break
        order = kept
    order = [t for t in order if weights[t] >= float(params.min_p[i]) * weights[order[0]]]
    out = np.zeros(len(row))
    out[order] = weights[order]
    return out / out.sum()


def check_against_oracle(logits: np.ndarray, params: SampleBatch, sample_rows: Sample) -> None:
    """Every chosen id is the one whose interval of the oracle's CDF holds the random number."""
    result = sample_rows(logits, params)
    random = uniforms(params.seeds, params.choices, params.positions)
    for i, row in enumerate(logits):
        chosen = int(result.token_ids[i])
        probabilities = oracle_distribution(row, params, i)
        assert probabilities[chosen] > 0
        high = probabilities[: chosen + 1].sum()
        low = high - probabilities[chosen]
        assert low - 1e-5 <= random[i] <= high + 1e-5, (i, chosen, low, random[i], high)


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 50.0},
    "cold": {"temperature": 0.05},
    "top_k": {"temperature": 1.0, "top_k": 7},
    "top_k_large": {"temperature": 1.0, "top_k": 700},
    "top_k_beyond_vocabulary": {"temperature": 1.0, "top_k": 10**6},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_p_nearly_all": {"temperature": 2.0, "top_p": 0.999},
    "top_p_of_a_flat_row": {"temperature": 30.0, "top_p": 0.6},
    "top_k_large_and_top_p": {"temperature": 2.0, "top_k": 900, "top_p": 0.97},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all_filters": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
}


@pytest.mark.parametrize("vocab_size", [1, 33, 1000, 12289])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_choice_equals_oracle(case: str, vocab_size: int, sample_rows: Sample) -> None:
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal((12, vocab_size)) * 3).astype(np.float32)
    params = batch(12, **CASES[case], seeds=np.arange(12), positions=np.arange(12) + 5)
    check_against_oracle(logits, params, sample_rows)


@pytest.mark.parametrize("num_allowed", [1, 2, 40, 500, 980, 999])
@pytest.mark.parametrize("case", ["greedy", "temperature", "top_k", "top_p", "all_filters"])
def test_masked_choice_equals_oracle(case: str, num_allowed: int, sample_rows: Sample) -> None:
    rng = np.random.default_rng(8)
    logits = (rng.standard_normal((12, 1000)) * 3).astype(np.float32)
    masks = [mask_of(list(rng.choice(1000, num_allowed, replace=False)), 1000) for _ in range(12)]
    params = batch(12, **CASES[case], masks=masks, seeds=np.arange(12))
    check_against_oracle(logits, params, sample_rows)


@pytest.mark.parametrize("case", ["greedy", "temperature", "top_k", "top_p", "all_filters"])
def test_masks_that_leave_all_some_or_nothing_of_a_block(case: str, sample_rows: Sample) -> None:
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal((12, 1000)) * 3).astype(np.float32)
    masks = []
    for row in logits:
        kinds = np.repeat(rng.choice([0.0, 0.5, 1.0], 16), 64)[:1000]
        allowed = np.flatnonzero(rng.random(1000) < kinds)
        row[rng.choice(1000, 50)] = row[allowed[0]]  # ties with what is forbidden
        masks.append(mask_of(allowed.tolist(), 1000))
    params = batch(12, **CASES[case], masks=masks, seeds=np.arange(12))
    check_against_oracle(logits, params, sample_rows)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", ["greedy", "temperature", "all_filters"])
def test_penalties_bias_and_bans_equal_oracle(case: str, masked: bool, sample_rows: Sample) -> None:
    rng = np.random.default_rng(9)
    vocab_size = 70
    logits = (rng.standard_normal((30, vocab_size)) * 2).astype(np.float32)
    rows = [
        row_sampling(
            bias_ids=rng.choice(vocab_size, 5, replace=False).astype(np.int32),
            bias_values=rng.uniform(-5, 5, 5).astype(np.float32),
            output_ids=rng.choice(vocab_size, 9, replace=False).astype(np.int32),
            output_counts=rng.integers(1, 5, 9).astype(np.int32),
            prompt_ids=rng.choice(vocab_size, 9, replace=False).astype(np.int32),
            banned_ids=rng.choice(vocab_size, 3, replace=False).astype(np.int32),
        )
        for _ in range(30)
    ]
    masks = [mask_of(list(rng.choice(vocab_size, 20)), vocab_size) if masked else None] * 30
    params = batch(
        30,
        **CASES[case],
        rows=rows,
        masks=masks,
        seeds=np.arange(30),
        presence_penalty=0.7,
        frequency_penalty=-0.3,
        repetition_penalty=1.3,
    )
    check_against_oracle(logits, params, sample_rows)


@pytest.mark.parametrize("case", ["temperature", "top_k", "top_p", "min_p"])
def test_draws_follow_the_distribution(case: str, sample_rows: Sample) -> None:
    """Chi-square over 10,000 draws; the limit is the 0.9999 quantile by Wilson and Hilferty."""
    rng = np.random.default_rng(10)
    row = (rng.standard_normal(40) * 1.5).astype(np.float32)
    draws = 10_000
    params = batch(draws, **CASES[case], seeds=1234, positions=np.arange(draws))
    probabilities = oracle_distribution(row, params, 0)
    counts = np.bincount(sample_rows(np.tile(row, (draws, 1)), params).token_ids, minlength=40)
    assert counts[probabilities == 0].sum() == 0
    frequent = probabilities * draws >= 5
    expected = np.append(probabilities[frequent], probabilities[~frequent].sum()) * draws
    observed = np.append(counts[frequent], counts[~frequent].sum())
    used = expected > 0
    statistic = (((observed - expected) ** 2)[used] / expected[used]).sum()
    freedom = int(used.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_uniforms_are_fixed_for_ever() -> None:
    seeds = np.array([0, 1, 2**64 - 1], np.uint64)
    values = uniforms(seeds, int32(0, 1, 2), int32(0, 7, 2**31 - 1))
    assert [value.hex() for value in values.tolist()] == FIXED_UNIFORMS


FIXED_UNIFORMS = ["0x1.1c13ade1c7e5cp-3", "0x1.8b927ffc224d8p-2", "0x1.bdbf804e4385ap-2"]


def reference_uniform(seed: int, choice: int, position: int) -> float:
    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    h = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
    h = mix(((h ^ choice) + 0x9E3779B97F4A7C15) % 2**64)
    h = mix(((h ^ position) + 0x9E3779B97F4A7C15) % 2**64)
    return (h >> 11) / 2**53


def test_uniforms_equal_python_integers() -> None:
    rng = np.random.default_rng(3)
    seeds = rng.integers(0, 2**64, 200, np.uint64)
    choices, positions = rng.integers(0, 2**31, (2, 200)).astype(np.int32)
    wanted = [
        reference_uniform(*map(int, key)) for key in zip(seeds, choices, positions, strict=True)
    ]
    assert uniforms(seeds, choices, positions).tolist() == wanted


def test_same_seed_same_token_and_choices_differ(sample_rows: Sample) -> None:
    rng = np.random.default_rng(11)
    row = rng.standard_normal(5000).astype(np.float32)
    logits = np.tile(row, (64, 1))
    params = batch(64, temperature=1.0, seeds=99, choices=np.arange(64) % 32, positions=3)
    first = sample_rows(logits, params).token_ids
    assert first[:32].tolist() == first[32:].tolist()
    assert len(set(first[:32].tolist())) > 25


def test_choices_are_independent(sample_rows: Sample) -> None:
    """Two choices of one seed agree as often as two independent draws do (1/8), 4 sigma."""
    draws = 10_000
    logits = np.zeros((draws, 8), np.float32)
    tokens = [
        sample_rows(
            logits, batch(draws, temperature=1.0, seeds=5, choices=c, positions=np.arange(draws))
        ).token_ids
        for c in (0, 1)
    ]
    agree = int((tokens[0] == tokens[1]).sum())
    assert abs(agree - draws / 8) < 4 * math.sqrt(draws * 7 / 64)


def mixed_batch(rng: np.random.Generator, vocab_size: int) -> tuple[np.ndarray, SampleBatch]:
    logits = (rng.standard_normal((10, vocab_size)) * 3).astype(np.float32)
    logits[4, 3] = np.nan
    masks = [None] * 10
    masks[2] = masks[5] = mask_of([1, 9, vocab_size - 1], vocab_size)
    rows: list[RowSampling | None] = [None] * 10
    rows[6] = row_sampling(banned_ids=int32(0, 1, 2), prompt_ids=int32(5))
    return logits, batch(
        10,
        temperature=rng.choice([0, 0.7], 10),
        top_k=rng.choice([-1, 20], 10),
        top_p=rng.choice([1, 0.9], 10),
        seeds=np.arange(10),
        targets=np.where(np.arange(10) == 7, 11, -1),
        num_top=np.arange(10) % 4 - 1,
        rows=rows,
        masks=masks,
        repetition_penalty=1.2,
    )


def pick(params: SampleBatch, order: np.ndarray) -> SampleBatch:
    fields = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    rows = tuple(params.rows[i] for i in order)
    return SampleBatch(**{n: rows if n == "rows" else v[order] for n, v in fields.items()})


@pytest.mark.parametrize("vocab_size", [37, 4999, 20001])
def test_row_depends_on_nothing_but_itself(vocab_size: int, sample_rows: Sample) -> None:
    """Bit for bit the same alone, in another order and at another memory alignment."""
    rng = np.random.default_rng(12)
    logits, params = mixed_batch(rng, vocab_size)
    together = sample_rows(logits, params)
    for i in range(10):
        padded = np.empty(vocab_size + 3, np.float32)
        alone = padded[3:].reshape(1, -1)
        alone[0] = logits[i]
        result = sample_rows(alone, pick(params, np.array([i])))
        assert result.token_ids[0] == together.token_ids[i]
        np.testing.assert_array_equal(result.logprobs[0], together.logprobs[i])
        np.testing.assert_array_equal(result.top_ids[0], together.top_ids[i])
        np.testing.assert_array_equal(result.top_logprobs[0], together.top_logprobs[i])


@pytest.mark.parametrize("num_banned", [1, 700, 4000])
def test_logits_are_not_changed(num_banned: int, sample_rows: Sample) -> None:
    logits, params = mixed_batch(np.random.default_rng(13), 5000)
    before = logits.copy()
    sample_rows(logits, params)
    masks = [mask_of(list(range(num_banned, 5000)), 5000)] * 10
    sample_rows(logits, batch(10, temperature=1.0, masks=masks))
    np.testing.assert_array_equal(logits, before)


def test_logprobs_and_top_equal_oracle(sample_rows: Sample) -> None:
    rng = np.random.default_rng(14)
    logits = (rng.standard_normal((6, 3001)) * 4).astype(np.float32)
    result = sample_rows(logits, batch(6, num_top=int32(-1, 0, 1, 5, 20, 3001)))
    assert np.isnan(result.logprobs[0])
    for i in range(1, 6):
        wanted = oracle_logprobs(logits[i])
        order = sorted(range(3001), key=lambda t: (-logits[i][t], t))[
            : int32(0, 0, 1, 5, 20, 3001)[i]
        ]
        assert result.logprobs[i] == pytest.approx(wanted[result.token_ids[i]], abs=2e-6)
        assert result.top_ids[i].tolist() == order
        np.testing.assert_allclose(result.top_logprobs[i], wanted[order], rtol=2e-7, atol=2e-6)


def test_logprobs_are_of_the_raw_distribution(sample_rows: Sample) -> None:
    row = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    special = row_sampling(bias_ids=int32(0), bias_values=np.array([50], np.float32))
    params = batch(1, temperature=0.3, num_top=2, rows=[special], masks=[mask_of([0], 4)])
    result = sample_rows(row, params)
    assert result.token_ids.tolist() == [0]
    assert result.logprobs[0] == pytest.approx(oracle_logprobs(row[0])[0])
    assert result.top_ids[0].tolist() == [3, 2]
    assert result.top_logprobs[0].dtype == np.float32


def test_chosen_logprob_equals_its_entry_in_top(sample_rows: Sample) -> None:
    logits = np.random.default_rng(15).standard_normal((50, 2000)).astype(np.float32)
    result = sample_rows(logits, batch(50, num_top=1))
    assert [top[0] for top in result.top_logprobs] == result.logprobs.tolist()


def test_target_is_scored_not_sampled(sample_rows: Sample) -> None:
    row = np.array([[1.0, 9.0, 3.0]], np.float32)
    params = batch(1, targets=2, temperature=1.0, num_top=1, masks=[mask_of([1], 3)])
    result = sample_rows(row, params)
    assert result.token_ids.tolist() == [2]
    assert result.logprobs[0] == pytest.approx(oracle_logprobs(row[0])[2])
    assert result.top_ids[0].tolist() == [1]


def test_target_is_scored_without_top(sample_rows: Sample) -> None:
    result = sample_rows(np.zeros((1, 4), np.float32), batch(1, targets=3))
    assert result.logprobs[0] == pytest.approx(-math.log(4))


@pytest.mark.parametrize("targets", [-1, 1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_row_that_is_not_finite_is_told(
    bad: float, temperature: float, targets: int, sample_rows: Sample
) -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[1, 60 if bad != -np.inf else slice(None)] = bad
    masks = [mask_of([5, 6], 100)] * 3
    params = batch(3, temperature=temperature, num_top=2, targets=targets, masks=masks)
    result = sample_rows(logits, params)
    assert result.token_ids[1] == NOT_FINITE
    assert np.isnan(result.logprobs[1])
    assert len(result.top_ids[1]) == 0
    assert result.token_ids[0] >= 0 and result.token_ids[2] >= 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_by_mask_is_told(temperature: float, sample_rows: Sample) -> None:
    logits = np.zeros((2, 100), np.float32)
    logits[1, 7] = -np.inf
    masks = [mask_of([], 100), mask_of([7], 100)]
    params = batch(2, temperature=temperature, masks=masks)
    assert sample_rows(logits, params).token_ids.tolist() == [NOT_FINITE, NOT_FINITE]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-6])
def test_ties_go_to_the_lowest_id_when_cold(temperature: float, sample_rows: Sample) -> None:
    row = np.zeros((1, 5000), np.float32)
    row[0, [40, 700, 4000]] = 3.0
    params = batch(1, temperature=temperature, top_k=1)
    assert sample_rows(row, params).token_ids.tolist() == [40]


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.00021}])
def test_ties_are_kept_by_id(filters: dict[str, float], sample_rows: Sample) -> None:
    """5,000 equal logits: two are kept, ids 0 and 1, both drawn over 200 positions."""
    params = batch(200, temperature=1.0, positions=np.arange(200), **filters)
    tokens = sample_rows(np.zeros((200, 5000), np.float32), params).token_ids
    assert set(tokens.tolist()) == {0, 1}


def test_top_p_cuts_through_ties_by_id(sample_rows: Sample) -> None:
    """Of 4,000 equal logits above 1,000 small ones, half the sum is the first 2,000 ids."""
    row = np.zeros(5000, np.float32)
    row[4000:] = -20
    params = batch(3000, temperature=1.0, top_p=0.5, positions=np.arange(3000))
    tokens = sample_rows(np.tile(row, (3000, 1)), params).token_ids
    assert 1900 < tokens.max() <= 2000


def test_tiny_top_p_keeps_the_best(sample_rows: Sample) -> None:
    logits = np.random.default_rng(16).standard_normal((20, 3000)).astype(np.float32)
    params = batch(20, temperature=1.0, top_p=1e-30, seeds=np.arange(20))
    assert sample_rows(logits, params).token_ids.tolist() == logits.argmax(axis=1).tolist()


def test_tiny_temperature_is_greedy_without_ties(sample_rows: Sample) -> None:
    logits = np.random.default_rng(17).standard_normal((20, 3000)).astype(np.float32)
    params = batch(20, temperature=1e-6, seeds=np.arange(20))
    assert sample_rows(logits, params).token_ids.tolist() == logits.argmax(axis=1).tolist()


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1025])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_but_one_masked(temperature: float, vocab_size: int, sample_rows: Sample) -> None:
    last = vocab_size - 1
    logits = np.zeros((1, vocab_size), np.float32)
    logits[0, last] = -1e30
    params = batch(1, temperature=temperature, masks=[mask_of([last], vocab_size)])
    assert sample_rows(logits, params).token_ids.tolist() == [last]


def test_mask_wins_over_bias(sample_rows: Sample) -> None:
    special = row_sampling(bias_ids=int32(2), bias_values=np.array([100], np.float32))
    params = batch(1, rows=[special], masks=[mask_of([0, 1], 3)])
    logits = np.array([[0.0, 1.0, 50.0]], np.float32)
    assert sample_rows(logits, params).token_ids.tolist() == [1]


def test_ban_gives_way_when_the_grammar_allows_nothing_else(sample_rows: Sample) -> None:
    special = row_sampling(banned_ids=int32(2))
    masks = [mask_of([2], 3), mask_of([1, 2], 3)]
    params = batch(2, rows=[special, special], masks=masks)
    logits = np.array([[0.0, 1.0, 50.0]] * 2, np.float32)
    assert sample_rows(logits, params).token_ids.tolist() == [2, 1]


def test_ban_gives_way_when_everything_is_banned(sample_rows: Sample) -> None:
    special = row_sampling(banned_ids=int32(0, 1))
    logits = np.array([[0.0, 1.0]], np.float32)
    assert sample_rows(logits, batch(1, rows=[special])).token_ids.tolist() == [1]


def test_min_p_of_one_keeps_the_best_and_its_ties(sample_rows: Sample) -> None:
    row = np.array([1.0, 3.0, 2.0, 3.0], np.float32)
    params = batch(100, temperature=1.0, min_p=1.0, positions=np.arange(100))
    assert set(sample_rows(np.tile(row, (100, 1)), params).token_ids.tolist()) == {1, 3}


@pytest.mark.parametrize("length", [10, 10_000])
@pytest.mark.parametrize("random", [0.0, 1 - 2**-53, 1.0])
def test_ends_of_the_cdf_never_reach_weight_zero(random: float, length: int) -> None:
    weights = np.zeros(length, np.float32)
    weights[[3, 7]] = 0.1
    assert _inverse_cdf(weights, random) == (3 if random == 0 else 7)


def test_repetition_penalty_never_makes_a_logit_infinite(sample_rows: Sample) -> None:
    special = row_sampling(prompt_ids=int32(0))
    params = batch(1, rows=[special], repetition_penalty=1e-38, temperature=1.0)
    logits = np.array([[1e5, 1.0]], np.float32)
    assert sample_rows(logits, params).token_ids.tolist() == [0]


def test_minus_infinity_is_never_drawn(sample_rows: Sample) -> None:
    logits = np.full((500, 9000), -np.inf, np.float32)
    logits[:, [17, 8999]] = 0.0
    params = batch(500, temperature=1.0, positions=np.arange(500))
    assert set(sample_rows(logits, params).token_ids.tolist()) == {17, 8999}


def test_allowed_ids_ignores_padding_bits() -> None:
    ids = allowed_ids(mask_of([0, 31, 32, 996], 997), 997)
    assert ids is not None and ids.tolist() == [0, 31, 32, 996]


def test_no_rows(sample_rows: Sample) -> None:
    result = sample_rows(np.empty((0, 10), np.float32), batch(0))
    assert len(result.token_ids) == 0 and result.top_ids == ()


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_native_ids_equal_numpys_at_the_size_of_a_vocabulary(scale: float) -> None:
    """Every mix of filters and masks, 96 rows of 49,152 logits: flat and peaked distributions."""
    rng = np.random.default_rng(20)
    num_rows, vocab_size = 96, 49_152
    logits = (rng.standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)
    dense = rng.integers(-(2**31), 2**31, (num_rows, vocab_size // 32)).astype(np.int32)
    dense[::2] &= np.where(rng.random(vocab_size // 32) < 0.05, -1, 0).astype(np.int32)
    params = batch(
        num_rows,
        temperature=rng.choice([0, 0.5, 1, 2], num_rows),
        top_k=rng.choice([-1, 1, 40, 3000], num_rows),
        top_p=rng.choice([1, 0.3, 0.95], num_rows),
        min_p=rng.choice([0, 0.02], num_rows),
        num_top=rng.choice([-1, 0, 20], num_rows),
        seeds=np.arange(num_rows),
        masks=[row if i % 3 else None for i, row in enumerate(dense)],
    )
    expected = sampling.sample_rows(logits, params)
    pool = ops.Pool(2)
    result = NativeSampler(pool, vocab_size).sample(logits, params)
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)
    np.testing.assert_allclose(result.logprobs, expected.logprobs, rtol=0, atol=2e-6)
    for ids, wanted in zip(result.top_ids, expected.top_ids, strict=True):
        np.testing.assert_array_equal(ids, wanted)
    pool.close()


@pytest.mark.parametrize("logits", [np.zeros(4, np.float32), np.zeros((1, 4))])
def test_host_logits_refuses_other_arrays(logits: np.ndarray) -> None:
    with pytest.raises(ValueError, match="float32"):
        HostLogits(logits)
