"""Linear with 16-bit, int8 and 4-bit weights: what each kind rounds, and nothing else.

The reference rounds weights and activations as `csrc/palmette_cpu.h` says, in numpy, and then
computes in float64; what remains is the float32 sum over groups.
"""

from __future__ import annotations

from collections.abc import Iterator

import gguf
import numpy as np
import pytest

from palmette.kernels.cpu import build, ops
from palmette.kernels.cpu.ops import MatrixKind

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 40]
SHAPES = [(5, 32), (33, 64), (130, 256), (96, 576)]
FOUR_BIT = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q4_1": gguf.GGMLQuantizationType.Q4_1}


@pytest.fixture(scope="module", params=build.instruction_sets())
def pool(request: pytest.FixtureRequest) -> Iterator[ops.Pool]:
    made = ops.Pool(2, instruction_set=request.param)
    yield made
    made.close()


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def rounded_activations(x: np.ndarray, kind: MatrixKind) -> np.ndarray:
    """8 or 15 bits per group of 32 inputs, as float64."""
    is_fast = kind in (MatrixKind.INT8_FAST, MatrixKind.UINT4_FAST)
    limit = np.float32(127 if is_fast else 127 * 128)
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(
        limit, largest, out=np.zeros_like(largest), where=largest > np.float32(1e-34)
    )
    integers = np.rint(groups * inverse)
    scale = largest / limit
    return (integers.astype(np.float64) * scale).reshape(x.shape)


def rounded_int8(weights: np.ndarray) -> np.ndarray:
    groups = weights.reshape(len(weights), -1, 32)
    scale = (np.abs(groups).max(axis=2, keepdims=True) / np.float32(127)).astype(np.float16)
    scale = scale.astype(np.float32)
    integers = np.clip(np.rint(groups / np.where(scale > 0, scale, 1)), -127, 127)
    return (integers * scale).reshape(weights.shape)


def assert_close(result: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def encoded(weights: np.ndarray, encoding: str) -> tuple[np.ndarray, np.ndarray]:
    """(bytes as a GGUF file has them, the numbers they stand for)"""
    kind = gguf.GGMLQuantizationType[encoding.upper()]
    data = gguf.quants.quantize(weights, kind)
    return data, gguf.quants.dequantize(data, kind)


@pytest.mark.parametrize("kind", [MatrixKind.BF16, MatrixKind.F16])
def test_16_bit_weights_give_the_bits_of_float32(pool: ops.Pool, kind: MatrixKind) -> None:
    weights = normal(77, 45)
    if kind == MatrixKind.BF16:
        exact = (weights.view(np.uint32) & 0xFFFF0000).view(np.float32)
    else:
        exact = weights.astype(np.float16).astype(np.float32)
    wide = ops.Matrix.from_float32(pool, exact)
    narrow = ops.Matrix.from_float32(pool, exact, kind)
    assert narrow.num_bytes * 2 == wide.num_bytes
    for rows in ROWS:
        x = normal(rows, 45, seed=rows)
        np.testing.assert_array_equal(pool.linear(narrow, x), pool.linear(wide, x))
    ids = np.array([76, 3], np.int32)
    np.testing.assert_array_equal(pool.embed(narrow, ids), exact[ids])


def test_16_bit_rounding_is_to_nearest_even(pool: ops.Pool) -> None:
    weights = np.concatenate((normal(1, 3000), 1e-5 * normal(1, 3000), 1e-8 * normal(1, 3000)))
    ids = np.arange(3, dtype=np.int32)
    half = pool.embed(ops.Matrix.from_float32(pool, weights, MatrixKind.F16), ids)
    np.testing.assert_array_equal(half, weights.astype(np.float16).astype(np.float32))
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(weights).bfloat16().float().numpy()
    bf16 = pool.embed(ops.Matrix.from_float32(pool, weights, MatrixKind.BF16), ids)
    np.testing.assert_array_equal(bf16, expected)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("kind", [MatrixKind.INT8, MatrixKind.INT8_FAST])
def test_int8_linear_equals_rounded_float64(
    pool: ops.Pool, kind: MatrixKind, outputs: int, inputs: int
) -> None:
    weights = normal(outputs, inputs)
    weights[0, :32] = 0
    matrix = ops.Matrix.from_float32(pool, weights, kind)
    for rows in ROWS:
        x = 3 * normal(rows, inputs, seed=rows)
        x[0, :32] = 0
        expected = rounded_activations(x, kind) @ rounded_int8(weights).T
        assert_close(pool.linear(matrix, x), expected)
    ids = np.arange(outputs, dtype=np.int32)
    np.testing.assert_array_equal(pool.embed(matrix, ids), rounded_int8(weights))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize(
    ("encoding", "kind"),
    [
        ("q8_0", MatrixKind.INT8),
        ("q8_0", MatrixKind.INT8_FAST),
        ("q4_0", MatrixKind.UINT4),
        ("q4_1", MatrixKind.UINT4),
        ("q4_1", MatrixKind.UINT4_FAST),
    ],
)
def test_stored_integers_are_kept(
    pool: ops.Pool, encoding: str, kind: MatrixKind, outputs: int, inputs: int
) -> None:
    data, numbers = encoded(normal(outputs, inputs), encoding)
    matrix = ops.Matrix(pool, (outputs, inputs), kind)
    matrix.fill_encoded(0, encoding, data)
    ids = np.arange(outputs, dtype=np.int32)
    np.testing.assert_array_equal(pool.embed(matrix, ids), numbers)
    for rows in ROWS:
        x = normal(rows, inputs, seed=rows)
        expected = rounded_activations(x, kind) @ numbers.T.astype(np.float64)
        assert_close(pool.linear(matrix, x), expected)


def test_q4_k_is_kept_but_for_the_rounding_of_its_scales(pool: ops.Pool) -> None:
    data, numbers = random_blocks("q4_k", 40, 2)
    matrix = ops.Matrix(pool, (40, 512), MatrixKind.UINT4)
    matrix.fill_encoded(0, "q4_k", data)
    result = pool.embed(matrix, np.arange(40, dtype=np.int32))
    np.testing.assert_allclose(result, numbers, rtol=0, atol=1e-3 * np.abs(numbers).max())


def random_blocks(encoding: str, rows: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(random bytes with moderate scales, the numbers they stand for)"""
    rng = np.random.default_rng(0)
    scales_at = {"q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}[encoding]
    data = rng.integers(0, 256, (rows, blocks, ops.ENCODINGS[encoding][2]), dtype=np.uint8)
    for at in scales_at:
        scales = rng.uniform(2e-4, 5e-4, (rows, blocks, 1)).astype("<f2")
        data[:, :, at : at + 2] = scales.view(np.uint8)
    data = data.reshape(rows, -1)
    return data, gguf.quants.dequantize(data, gguf.GGMLQuantizationType[encoding.upper()])


@pytest.mark.parametrize("encoding", ["q4_k", "q5_k", "q6_k"])
def test_k_blocks_widen_to_the_numbers_gguf_gives(pool: ops.Pool, encoding: str) -> None:
    data, numbers = random_blocks(encoding, 37, 2)
    matrix = ops.Matrix(pool, (37, 512), MatrixKind.F32)
    matrix.fill_encoded(0, encoding, data)
    np.testing.assert_array_equal(pool.embed(matrix, np.arange(37, dtype=np.int32)), numbers)
    assert matrix.rounding_error == 0


@pytest.mark.parametrize("encoding", ["q4_k", "q5_k", "q6_k"])
@pytest.mark.parametrize("kind", [MatrixKind.INT8_FAST, MatrixKind.BF16])
def test_k_blocks_are_rounded_and_the_error_measured(
    pool: ops.Pool, encoding: str, kind: MatrixKind
) -> None:
    data, numbers = random_blocks(encoding, 40, 2)
    matrix = ops.Matrix(pool, (40, 512), kind)
    matrix.fill_encoded(0, encoding, data[:15])
    matrix.fill_encoded(15, encoding, data[15:])
    result = pool.embed(matrix, np.arange(40, dtype=np.int32))
    if kind == MatrixKind.INT8_FAST:
        np.testing.assert_array_equal(result, rounded_int8(numbers))
    error = np.sqrt(np.square(result - numbers).sum() / np.square(numbers).sum())
    assert 0 < error < 0.01
    assert matrix.rounding_error == pytest.approx(error, rel=1e-3)


def test_rounding_of_the_scales_of_q4_k_is_measured(pool: ops.Pool) -> None:
    data, numbers = random_blocks("q4_k", 40, 2)
    matrix = ops.Matrix(pool, (40, 512), MatrixKind.UINT4_FAST)
    matrix.fill_encoded(0, "q4_k", data)
    result = pool.embed(matrix, np.arange(40, dtype=np.int32))
    error = np.sqrt(np.square(result - numbers).sum() / np.square(numbers).sum())
    assert matrix.rounding_error == pytest.approx(error, rel=1e-2)


@pytest.mark.parametrize("encoding", ["q4_0", "q4_1", "q8_0"])
def test_blocks_widen_to_the_numbers_gguf_gives(pool: ops.Pool, encoding: str) -> None:
    data, numbers = encoded(normal(37, 96), encoding)
    matrix = ops.Matrix(pool, (37, 96), MatrixKind.F32)
    matrix.fill_encoded(0, encoding, data)
    np.testing.assert_array_equal(pool.embed(matrix, np.arange(37, dtype=np.int32)), numbers)


@pytest.mark.parametrize("kind", list(MatrixKind)[MatrixKind.INT8 :])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_bits_of_a_row_do_not_depend_on_rows_or_threads(
    pool: ops.Pool, kind: MatrixKind, outputs: int, inputs: int
) -> None:
    encoding = "q8_0" if "INT8" in kind.name else "q4_1"
    matrix = ops.Matrix(pool, (outputs, inputs), kind)
    matrix.fill_encoded(0, encoding, encoded(normal(outputs, inputs), encoding)[0])
    x = normal(max(ROWS), inputs, seed=1)
    alone = np.concatenate([pool.linear(matrix, x[i : i + 1]) for i in range(len(x))])
    for rows in ROWS:
        np.testing.assert_array_equal(pool.linear(matrix, x[:rows]), alone[:rows])
    single = ops.Pool(1, instruction_set=pool.library.instruction_set)
    np.testing.assert_array_equal(single.linear(matrix, x), alone)
    single.close()


def test_15_bit_activations_leave_next_to_no_error(pool: ops.Pool) -> None:
    data, numbers = encoded(normal(96, 576), "q4_1")
    matrix = ops.Matrix(pool, (96, 576), MatrixKind.UINT4)
    matrix.fill_encoded(0, "q4_1", data)
    x = normal(20, 576, seed=1)
    expected = x @ numbers.T.astype(np.float64)
    error = np.abs(pool.linear(matrix, x) - expected).max() / expected.std()
    assert error < 2e-4  # 8 bits: 0.03


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_shows_it_and_harms_no_other(pool: ops.Pool, value: float) -> None:
    matrix = ops.Matrix.from_float32(pool, normal(40, 64), MatrixKind.INT8)
    x = normal(3, 64, seed=1)
    before = pool.linear(matrix, x)
    x[1, 50] = value
    after = pool.linear(matrix, x)
    assert np.isnan(after[1]).all()
    np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])


def test_extreme_activations_stay_finite(pool: ops.Pool) -> None:
    weights = normal(40, 32)
    matrix = ops.Matrix.from_float32(pool, weights, MatrixKind.INT8)
    for scale in (1e-38, 1e-30, 1e30):
        x = np.float32(scale) * normal(1, 32, seed=1)
        expected = rounded_activations(x, MatrixKind.INT8) @ rounded_int8(weights).T
        atol = 1e-5 * np.abs(expected).max() + 1e-36
        np.testing.assert_allclose(pool.linear(matrix, x), expected, rtol=1e-5, atol=atol)


def test_kinds_and_encodings_that_do_not_fit_are_refused(pool: ops.Pool) -> None:
    with pytest.raises(ValueError, match="out of range"):
        ops.Matrix(pool, (8, 33), MatrixKind.INT8)
    matrix = ops.Matrix(pool, (8, 32), MatrixKind.UINT4)
    with pytest.raises(ValueError, match="out of range"):
        matrix.fill(0, normal(8, 32))
    with pytest.raises(ValueError, match="shape"):
        matrix.fill_encoded(0, "q4_0", np.zeros((8, 20), np.uint8))
