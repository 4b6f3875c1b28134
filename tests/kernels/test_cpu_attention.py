"""Native paged attention against float64 numpy, and bit for bit against itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.cpu import build, ops
from palmette.kernels.cpu.checks import check_batch
from palmette.kernels.cpu.kv_pool import HostKVPool
from palmette.kernels.kv_dtype import HOST_KV_DTYPES, KVDtype

POOL_TOKENS = 2048
LENGTHS = ((1, 1), (570, 1), (63, 2), (64, 64), (700, 37), (129, 129))  # (tokens, of them new)


@pytest.fixture(scope="module", params=build.instruction_sets())
def pool(request: pytest.FixtureRequest) -> Iterator[ops.Pool]:
    made = ops.Pool(2, instruction_set=request.param)
    yield made
    made.close()


@dataclass(frozen=True)
class Case:
    """Sequences with their own random K and V; rows are those of the new tokens."""

    heads: int
    groups: int
    dim: int
    window: int = 0
    lengths: tuple[tuple[int, int], ...] = LENGTHS

    def tensors(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        rng = np.random.default_rng(3)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32)

        return [
            (
                2 * normal(new, self.heads, self.dim),
                normal(length, self.groups, self.dim),
                normal(length, self.groups, self.dim),
            )
            for length, new in self.lengths
        ]


CASES = [
    Case(heads=4, groups=4, dim=16),
    Case(heads=9, groups=3, dim=64),
    Case(heads=8, groups=2, dim=128),
    Case(heads=8, groups=1, dim=32),
    Case(heads=6, groups=2, dim=10),
    Case(heads=2, groups=1, dim=20, window=8),
    Case(heads=3, groups=1, dim=48, window=65),
    Case(heads=56, groups=1, dim=8),
]


def expected_rows(case: Case) -> np.ndarray:
    rows = []
    for q, k, v in case.tensors():
        length, new = len(k), len(q)
        for row in range(new):
            end = length - new + row + 1
            start = max(0, end - case.window) if case.window else 0
            for head in range(case.heads):
                group = head // (case.heads // case.groups)
                scores = k[start:end, group].astype(np.float64) @ q[row, head] / case.dim**0.5
                weights = np.exp(scores - scores.max())
                rows.append(weights @ v[start:end, group] / weights.sum())
    return np.array(rows).reshape(-1, case.heads, case.dim)


def run(
    pool: ops.Pool,
    case: Case,
    *,
    page_size: int = 16,
    chunk: int = 1000,
    order: Sequence[int] | None = None,
    seed: int = 0,
    dtype: KVDtype = "fp32",
) -> np.ndarray:
    """The rows of all sequences in order, computed in chunks; unused slots hold NaN."""
    tensors = case.tensors()
    order = order if order is not None else range(len(tensors))
    free = list(np.random.default_rng(seed).permutation(POOL_TOKENS // page_size))
    kv = pool_of(case, page_size, dtype)
    pages = [[free.pop() for _ in range(-(-len(k) // page_size))] for _, k, _ in tensors]
    for (_, k, v), ids in zip(tensors, pages, strict=True):
        pool.kv_write(batch_of([len(k)], [len(k) - 1], [ids], page_size), k, v, kv)
    results: list[list[np.ndarray]] = [[] for _ in tensors]
    for start in range(0, max(len(q) for q, _, _ in tensors), chunk):
        members = [b for b in order if start < len(tensors[b][0])]
        counts = [min(chunk, len(tensors[b][0]) - start) for b in members]
        lasts = [
            len(tensors[b][1]) - len(tensors[b][0]) + start + n - 1
            for b, n in zip(members, counts, strict=True)
        ]
        used = [pages[b][: last // page_size + 1] for b, last in zip(members, lasts, strict=True)]
        q = np.concatenate([tensors[b][0][start : start + chunk] for b in members])
        out = pool.attention(batch_of(counts, lasts, used, page_size), q, kv, window=case.window)
        bounds = np.cumsum(counts)[:-1]
        for b, part in zip(members, np.split(out, bounds), strict=True):
            results[b].append(part)
    return np.concatenate([part for parts in results for part in parts])


def pool_of(
    case: Case, page_size: int, dtype: KVDtype, num_tokens: int = POOL_TOKENS
) -> HostKVPool:
    kv = HostKVPool(
        num_layers=1,
        num_pages=num_tokens // page_size,
        page_size=page_size,
        num_kv_heads=case.groups,
        head_dim=case.dim,
        dtype=dtype,
    )
    kv.data[:] = 0xFF  # NaN in every dtype
    return kv


def batch_of(
    counts: list[int], lasts: list[int], pages: list[list[int]], page_size: int
) -> ForwardBatch:
    positions = np.concatenate(
        [np.arange(last - n + 1, last + 1) for n, last in zip(counts, lasts, strict=True)]
    )
    return ForwardBatch(
        token_ids=np.zeros(sum(counts), np.int32),
        positions=positions.astype(np.int32),
        kv_slots=np.concatenate(
            [
                np.array(ids)[np.arange(last - n + 1, last + 1) // page_size] * page_size
                + np.arange(last - n + 1, last + 1) % page_size
                for n, last, ids in zip(counts, lasts, pages, strict=True)
            ]
        ).astype(np.int32),
        qo_indptr=np.cumsum([0, *counts], dtype=np.int32),
        kv_indptr=np.cumsum([0, *map(len, pages)], dtype=np.int32),
        kv_page_ids=np.concatenate([np.array(ids, np.int32) for ids in pages]),
        kv_last_page_len=np.array([last % page_size + 1 for last in lasts], np.int32),
        sample_rows=np.zeros(0, np.int32),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_equals_float64(pool: ops.Pool, case: Case) -> None:
    np.testing.assert_allclose(run(pool, case), expected_rows(case), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),  # of the RMS error, where values are of the order of 1
    [("bf16", 4e-3), ("fp16", 5e-4), ("int8", 1e-2)],
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_narrow_pools_are_close_to_float64(
    pool: ops.Pool, case: Case, dtype: KVDtype, tolerance: float
) -> None:
    error = run(pool, case, dtype=dtype) - expected_rows(case)
    assert 0 < np.sqrt(np.square(error).mean()) < tolerance


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows of x as integers -127 .. 127, and their scales."""
    largest = np.abs(x).max(axis=-1)
    return np.rint(x * (np.float32(127) / largest)[..., None]), largest / np.float32(127)


def coarse_exp(x: np.ndarray) -> np.ndarray:
    """e^x as the int8 kernels compute it: a cubic polynomial between whole powers of two."""
    y = x * np.log2(np.e)
    whole = np.rint(y)
    r = y - whole
    cubic = 1 + r * (0.693282961845398 + r * (0.24221105873584747 + r * 0.05500897020101547))
    return cubic * np.exp2(whole)


def integer_rows(case: Case, limit: int) -> np.ndarray:
    """The arithmetic of int8 pools in float64: q, K, V and weights rounded as the kernels do."""
    rows = []
    for q, k, v in case.tensors():
        length, new = len(k), len(q)
        (q_int, q_scale), (k_int, k_scale), (v_int, v_scale) = map(quantised, (q, k, v))
        for row in range(new):
            end = length - new + row + 1
            start = max(0, end - case.window) if case.window else 0
            for head in range(case.heads):
                group = head // (case.heads // case.groups)
                scores = k_int[start:end, group] @ q_int[row, head] * k_scale[start:end, group]
                scores = scores.astype(np.float64) * q_scale[row, head] / case.dim**0.5
                maximum, total, out = -np.inf, 0.0, np.zeros(case.dim)
                for first in range(start // 64 * 64, end, 64):
                    part = slice(max(first - start, 0), first + 64 - start)
                    now = max(maximum, scores[part].max())
                    p = coarse_exp(scores[part] - now)
                    weights = p * v_scale[start:end, group][part]
                    unit = weights.max() / limit
                    integers = np.rint(weights / unit) @ v_int[start:end, group][part]
                    keep = np.exp(maximum - now)
                    total, out = total * keep + p.sum(), out * keep + integers * unit
                    maximum = now
                rows.append(out / total)
    return np.array(rows).reshape(-1, case.heads, case.dim)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_int8_pools_compute_what_numpy_does(pool: ops.Pool, case: Case) -> None:
    limit = 255 if pool.library.instruction_set in ("avx512", "avxvnni") else 127
    error = np.abs(run(pool, case, dtype="int8") - integer_rows(case, limit))
    assert np.median(error) < 1e-7
    # now and then a weight next to a half is rounded the other way
    assert (error < 1e-5).mean() > 0.9
    assert (error < 1e-3).mean() > 0.995
    assert error.max() < 4 / limit


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES for dtype in ("fp32", "int8")]
    + [(CASES[4], "bf16"), (CASES[6], "fp16")],
    ids=str,
)
def test_bits_do_not_depend_on_the_arrangement(pool: ops.Pool, case: Case, dtype: KVDtype) -> None:
    whole = run(pool, case, dtype=dtype)
    ways: list[dict[str, Any]] = [
        dict(page_size=1, seed=9),
        dict(page_size=64, chunk=32),
        dict(page_size=48, chunk=100, seed=4),
        dict(chunk=1, seed=1),
        dict(chunk=7, order=[3, 5, 0, 4, 2, 1]),
    ]
    for way in ways:
        np.testing.assert_array_equal(run(pool, case, dtype=dtype, **way), whole)


@pytest.mark.parametrize("dtype", HOST_KV_DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 5, 16, 23])
def test_bits_do_not_depend_on_who_shares_pages(pool: ops.Pool, dtype: KVDtype, rows: int) -> None:
    case = Case(heads=6, groups=2, dim=32, lengths=((330, 1),) * rows)
    tensors = case.tensors()
    shared, kv = list(range(20)), pool_of(case, 16, dtype, 1024)
    pages = [[*shared, 20 + b] for b in range(rows)]
    for (_, k, v), ids in zip(tensors, pages, strict=True):  # the last one's prefix is left
        pool.kv_write(batch_of([330], [329], [ids], 16), k, v, kv)
    together = batch_of([1] * rows, [320 + b % 10 for b in range(rows)], pages, 16)
    q = np.concatenate([q for q, _, _ in tensors])
    out = pool.attention(together, q, kv)
    for b in range(rows):
        alone = batch_of([1], [320 + b % 10], [pages[b]], 16)
        np.testing.assert_array_equal(pool.attention(alone, q[b : b + 1], kv)[0], out[b])


@pytest.mark.parametrize(
    ("page_size", "dim", "is_packed"),
    [(16, 64, True), (48, 16, True), (8, 64, False), (16, 20, False)],
)
def test_int8_pages_lie_as_their_layout_says(
    pool: ops.Pool, page_size: int, dim: int, is_packed: bool
) -> None:
    case = Case(heads=3, groups=3, dim=dim, lengths=((2 * page_size, 1),))
    ((_, k, v),) = case.tensors()
    kv = pool_of(case, page_size, "int8", 2 * page_size)
    assert kv.layout.startswith("host packed int8," if is_packed else "host int8,")
    batch = batch_of([2 * page_size], [2 * page_size - 1], [[1, 0]], page_size)
    pool.kv_write(batch, k, v, kv)
    for side, x in enumerate((k, v)):
        integers, scales = quantised(x)
        for page, first in ((1, 0), (0, page_size)):
            rows = integers[first : first + page_size].transpose(1, 0, 2)  # [G, page_size, D]
            if is_packed and side == 0:
                rows = rows.reshape(3, page_size, dim // 4, 4).transpose(0, 2, 1, 3)
            elif is_packed:
                rows = rows.reshape(3, page_size // 4, 4, dim).transpose(0, 1, 3, 2)
            data = kv.data[0, side, page]
            np.testing.assert_array_equal(data[: rows.size].view(np.int8), rows.ravel())
            np.testing.assert_array_equal(
                data[rows.size :].view(np.float32), scales[first : first + page_size].T.ravel()
            )


@pytest.mark.parametrize("dtype", HOST_KV_DTYPES)
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_bits_do_not_depend_on_threads_or_company(
    pool: ops.Pool, case: Case, dtype: KVDtype
) -> None:
    whole = run(pool, case, dtype=dtype)
    single = ops.Pool(1, instruction_set=pool.library.instruction_set)
    np.testing.assert_array_equal(run(single, case, dtype=dtype), whole)
    single.close()
    for first in range(len(LENGTHS)):
        alone = run(pool, case, order=[first], dtype=dtype)
        start = sum(new for _, new in LENGTHS[:first])
        np.testing.assert_array_equal(alone, whole[start : start + LENGTHS[first][1]])


@pytest.mark.parametrize("dtype", HOST_KV_DTYPES)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_shows_and_harms_no_other_row(
    pool: ops.Pool, dtype: KVDtype, where: str, value: float
) -> None:
    case = Case(heads=2, groups=1, dim=16, lengths=((40, 1), (40, 1)))
    rows = [tensor.copy() for tensor in case.tensors()[0]]
    batch, both = (
        batch_of([1], [39], [[0, 1, 2]], 16),
        batch_of([1, 1], [39, 5], [[0, 1, 2], [0]], 16),
    )
    written = batch_of([40], [39], [[0, 1, 2]], 16)
    q, k, v = rows
    kv = pool_of(case, 16, dtype, 48)
    pool.kv_write(written, k, v, kv)
    clean = pool.attention(both, np.concatenate((q, q)), kv)
    assert np.isfinite(clean).all()
    {"q": q, "k": k, "v": v}[where][0 if where == "q" else 7] = value
    pool.kv_write(written, k, v, kv)
    assert not np.isfinite(pool.attention(batch, q, kv)).any()
    # the other row sees the positions 0 .. 5 only
    q = np.concatenate((q, case.tensors()[0][0]))
    np.testing.assert_array_equal(pool.attention(both, q, kv)[1], clean[1])


def natively_valid(batch: ForwardBatch) -> bool:
    """What the native check says of a batch in a pool of 3 pages of 16 tokens."""
    kv = HostKVPool(
        num_layers=1, num_pages=3, page_size=16, num_kv_heads=1, head_dim=8, dtype="fp32"
    )
    arguments, pool = ops._batch(batch), ops._kv(kv)
    status = ops.Library().functions.pm_check_batch(
        *(ops.ctypes.addressof(arguments), len(batch.kv_page_ids), ops.ctypes.addressof(pool)),
        *(2**31 - 1, 2**31 - 1),
    )
    return bool(status == 0)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("positions", [38, 48], "positions"),
        ("positions", [-1, 39], "positions"),
        ("kv_page_ids", [0, 1, 3], "kv_page_ids"),
        ("kv_page_ids", [0, 1], "kv_indptr"),
        ("kv_indptr", [0, 2], "kv_indptr"),
        ("kv_indptr", [0, 0], "kv_indptr"),
        ("qo_indptr", [0, 3], "qo_indptr"),
        ("qo_indptr", [1, 2], "qo_indptr"),
        ("kv_last_page_len", [0], "kv_last_page_len"),
        ("kv_last_page_len", [17], "kv_last_page_len"),
        ("kv_slots", [0, 48], "kv_slots"),
        ("sample_rows", [2], "sample_rows"),
    ],
)
def test_check_batch_names_the_bad_array(field: str, values: list[int], message: str) -> None:
    batch = batch_of([2], [39], [[0, 1, 2]], 16)
    check_batch(batch, num_pages=3, page_size=16)
    assert natively_valid(batch)
    bad = replace(batch, **{field: np.array(values, np.int32)})
    assert not natively_valid(bad)
    with pytest.raises(ValueError, match=message):
        check_batch(bad, num_pages=3, page_size=16)
    with pytest.raises(ValueError, match=field):
        check_batch(
            replace(batch, **{field: np.array(values, np.int64)}), num_pages=3, page_size=16
        )
