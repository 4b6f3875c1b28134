"""Native operations on rows against float64 numpy, and bit for bit against themselves.

Each instruction set that this machine runs is tested; bits are promised inside one of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from palmette.kernels.cpu import build, ops

INSTRUCTION_SETS = build.instruction_sets()
SHAPES = [(1, 1), (5, 3), (16, 31), (32, 64), (33, 7), (130, 96), (576, 193), (1000, 40)]
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 25, 64]


@pytest.fixture(scope="module", params=INSTRUCTION_SETS)
def pool(request: pytest.FixtureRequest) -> Iterator[ops.Pool]:
    made = ops.Pool(2, instruction_set=request.param)
    yield made
    made.close()


@pytest.fixture
def single(pool: ops.Pool) -> Iterator[ops.Pool]:
    """A pool of one thread, same instruction set."""
    made = ops.Pool(1, instruction_set=pool.library.instruction_set)
    yield made
    made.close()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_linear_equals_float64(pool: ops.Pool, outputs: int, inputs: int) -> None:
    weights = normal(outputs, inputs)
    matrix = ops.Matrix.from_float32(pool, weights)
    for rows in ROWS:
        x = normal(rows, inputs, seed=rows)
        expected = x.astype(np.float64) @ weights.T.astype(np.float64)
        np.testing.assert_allclose(pool.linear(matrix, x), expected, rtol=1e-5, atol=3e-5)
    matrix.close()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_linear_bits_of_a_row_do_not_depend_on_rows_or_threads(
    pool: ops.Pool, single: ops.Pool, outputs: int, inputs: int
) -> None:
    weights = normal(outputs, inputs)
    matrix = ops.Matrix.from_float32(pool, weights)
    x = normal(max(ROWS), inputs, seed=1)
    alone = np.concatenate([pool.linear(matrix, x[i : i + 1]) for i in range(len(x))])
    for rows in ROWS:
        np.testing.assert_array_equal(pool.linear(matrix, x[:rows]), alone[:rows])
    np.testing.assert_array_equal(single.linear(matrix, x), alone)
    matrix.close()


def test_matrix_filled_in_parts_equals_whole(pool: ops.Pool) -> None:
    weights, x = normal(75, 20), normal(3, 20, seed=1)
    whole = ops.Matrix.from_float32(pool, weights)
    parts = ops.Matrix(pool, (75, 20), ops.MatrixKind.F32)
    for start, stop in ((0, 33), (33, 34), (34, 75)):
        parts.fill(start, weights[start:stop])
    np.testing.assert_array_equal(pool.linear(parts, x), pool.linear(whole, x))
    with pytest.raises(ValueError, match="out of range"):
        parts.fill(70, weights[:10])


def test_embed_returns_the_rows(pool: ops.Pool) -> None:
    weights = normal(75, 20)
    matrix = ops.Matrix.from_float32(pool, weights)
    ids = np.array([74, 0, 33, 33], np.int32)
    np.testing.assert_array_equal(pool.embed(matrix, ids), weights[ids])
    with pytest.raises(ValueError, match="out of range"):
        pool.embed(matrix, np.array([75], np.int32))


@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
def test_rms_norm_equals_float64(pool: ops.Pool, size: int) -> None:
    x, weight = normal(9, size), normal(size, seed=1)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    result = pool.rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(pool.rms_norm(x[4:5], weight, 1e-5)[0], result[4])


@pytest.mark.parametrize("size", [1, 7, 16, 33, 576])
def test_silu_mul_equals_float64(pool: ops.Pool, size: int) -> None:
    gate_up = 8 * normal(5, 2 * size)
    gate, up = gate_up[:, :size].astype(np.float64), gate_up[:, size:]
    expected = gate / (1 + np.exp(-gate)) * up
    np.testing.assert_allclose(pool.silu_mul(gate_up), expected, rtol=2e-6, atol=1e-7)


def test_exp_is_accurate_and_keeps_nan(pool: ops.Pool) -> None:
    x = np.linspace(-86.9, 87.9, 100_003, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    assert (np.abs(pool.exp(x) - expected) / expected).max() < 2e-7
    special = np.array([0, -np.inf, -1000, 1000, np.nan], np.float32)
    result = pool.exp(special)
    assert result[0] == 1
    assert result[1] == result[2] < 2e-38
    assert np.isfinite(result[3])
    assert np.isnan(result[4])


def test_exp_bits_do_not_depend_on_the_lane(pool: ops.Pool) -> None:
    x = 20 * normal(37)
    alone = np.concatenate([pool.exp(x[i : i + 1]) for i in range(37)])
    np.testing.assert_array_equal(pool.exp(x), alone)


@pytest.mark.parametrize("dim", [2, 6, 16, 64, 80])
def test_rope_rotates_halves(pool: ops.Pool, dim: int) -> None:
    positions = np.array([0, 5, 99, 5], np.int32)
    angles = np.outer(np.arange(100), 10000.0 ** -(np.arange(0, dim, 2) / dim))
    x = normal(4, 3, dim)
    low, high = x[..., : dim // 2].astype(np.float64), x[..., dim // 2 :].astype(np.float64)
    cos, sin = np.cos(angles)[positions][:, None], np.sin(angles)[positions][:, None]
    expected = np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    np.testing.assert_allclose(pool.rope(x, positions, *tables), expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="positions"):
        pool.rope(x, np.array([0, 5, 100, 5], np.int32), *tables)


def test_results_do_not_depend_on_the_callers_float_mode(pool: ops.Pool) -> None:
    torch = pytest.importorskip("torch")
    x = np.full(16, -86.0, np.float32)
    tiny = np.full((1, 32), 1e-38, np.float32)  # gate * sigmoid is denormal
    before = pool.exp(x), pool.silu_mul(tiny)
    torch.set_flush_denormal(True)
    try:
        after = pool.exp(x), pool.silu_mul(tiny)
    finally:
        torch.set_flush_denormal(False)
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1], before[1])


def test_arrays_of_the_wrong_kind_are_refused(pool: ops.Pool) -> None:
    matrix = ops.Matrix.from_float32(pool, normal(8, 4))
    with pytest.raises(ValueError, match="float32"):
        pool.linear(matrix, normal(2, 4).astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        pool.linear(matrix, normal(4, 2).T)
    with pytest.raises(ValueError, match="shape"):
        pool.linear(matrix, normal(2, 5))
    with pytest.raises(ValueError, match="out of range"):
        ops.Pool(0, instruction_set=pool.library.instruction_set)
