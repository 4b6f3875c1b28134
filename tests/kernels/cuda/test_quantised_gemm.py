"""Products with quantised weights under the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda.quantised import (
    QuantisedMatrix,
    dequantised,
    from_groups,
    joined,
    packed,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    unpacked,
)
from palmette.kernels.cuda.quantised_gemm import linear, parts_of


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def int4_matrix(columns: int, depth: int, group: int, *, minimums: bool) -> QuantisedMatrix:
    generator = torch.Generator().manual_seed(3)
    shape = (columns, depth // group)
    codes = torch.randint(0, 16, (*shape, group), generator=generator).to(torch.uint8)
    scales = torch.rand(shape, generator=generator) / 8
    return from_groups(codes, scales, random(*shape, seed=4) / 4 if minimums else None)


MATRICES = {
    "int8-32": lambda n, k: quantise_int8(random(n, k, seed=1), 32),
    "int8-64": lambda n, k: quantise_int8(random(n, k, seed=1), 64),
    "int8-128": lambda n, k: quantise_int8(random(n, k, seed=1), 128),
    "int4-32": lambda n, k: int4_matrix(n, k, 32, minimums=False),
    "int4-32-minimums": lambda n, k: int4_matrix(n, k, 32, minimums=True),
    "int4-64": lambda n, k: int4_matrix(n, k, 64, minimums=False),
    "int4-128-minimums": lambda n, k: int4_matrix(n, k, 128, minimums=True),
    "fp8": lambda n, k: quantise_fp8(random(n, k, seed=1)),
}


def close(
    found: torch.Tensor, x: torch.Tensor, matrix: QuantisedMatrix, bias: torch.Tensor
) -> None:
    """Within one rounding of the result to its dtype and those of float32 sums."""
    weight = dequantised(matrix).double()
    expected = x.double() @ weight.T + bias.double()
    spread = x.double().abs() @ weight.abs().T + bias.double().abs()
    # the interpreter cuts bf16 off instead of rounding: a whole step of 2^-7
    step = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}[found.dtype]
    bound = expected.abs() * step + spread * 2.0**-20 + (found.dtype == torch.float16) * 2.0**-25
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(1, 40, torch.bfloat16), (3, 130, torch.float32), (70, 24, torch.float16)],
)
def test_equals_float64_over_the_same_weights(
    name: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    matrix = MATRICES[name](columns, 256)
    x, bias = random(rows, 272, dtype=dtype)[:, :256], random(columns, seed=2, dtype=dtype)
    close(linear(x, matrix, bias), x, matrix, bias)


@pytest.mark.parametrize("name", ["int8-32", "int4-32-minimums", "fp8"])
def test_parts_are_added_in_one_order_whatever_the_number_of_rows(name: str) -> None:
    """Few rows: each part a program; many: one program folds at the same places."""
    matrix = MATRICES[name](24, 1184)
    assert parts_of(24, 1184, 32) == (16, 3)
    x, bias = random(70, 1184), random(24, seed=2)
    whole = linear(x, matrix, bias)
    close(whole, x, matrix, bias)
    assert torch.equal(linear(x[13:14], matrix, bias), whole[13:14])
    assert torch.equal(linear(x[5:40].flip(0), matrix, bias), whole[5:40].flip(0))
    assert linear(x[:0], matrix).shape == (0, 24)


def test_fp8_takes_any_number_of_inputs() -> None:
    matrix, x = quantise_fp8(random(9, 150, seed=1)), random(2, 150)
    close(linear(x, matrix), x, matrix, torch.zeros(9))


def test_parts_make_programs_for_a_device_and_stay_large() -> None:
    assert parts_of(6144, 4096, 32) == (24, 6)  # 48 tiles of columns
    assert parts_of(4096, 14336, 32) == (52, 9)
    assert parts_of(128256, 4096, 32) == (128, 1)
    assert parts_of(24, 256, 128) == (4, 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_of_a_word_are_pairs_of_inputs_of_one_thread(dtype: torch.dtype) -> None:
    """Of a matrix instruction's 16 inputs, thread q of 4 has 2 q, 2 q + 1 and those 8 further."""
    lowest = -128 if dtype == torch.int8 else 0
    codes = torch.arange(256).view(2, 2, 64) % (16 if lowest == 0 else 256) + lowest
    codes = codes.to(dtype)
    assert torch.equal(unpacked(packed(codes)), codes)
    inputs = torch.arange(32, dtype=torch.uint8)
    if dtype == torch.int8:
        words = packed(inputs.to(torch.int8)).view(4, 2, 4)  # thread, step, bytes
        assert words[1].tolist() == [[2, 10, 3, 11], [18, 26, 19, 27]]
    else:
        low, high = (packed(part).view(4, 4)[1] for part in (inputs & 15, inputs >> 4))
        first, second = (low & 15) | high << 4, (low >> 4) | (high >> 4) << 4
        found = torch.stack((first, second), dim=1).flatten().tolist()
        assert found == [2, 10, 18, 26, 3, 11, 19, 27]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int8_weights_are_off_by_half_a_step(group: int) -> None:
    weight = random(20, 256, seed=5)
    weight[3] = 0.0
    matrix = quantise_int8(weight, group)
    assert (matrix.num_columns, matrix.depth, matrix.group) == (20, 256, group)
    assert matrix.num_bytes == 20 * 256 + 2 * 20 * 256 // group
    peak = weight.unflatten(1, (-1, group)).abs().amax(-1, keepdim=True)
    # half a step; the largest number is off by what its scale was rounded
    bound = (peak / 127 * 0.5 * (1 + 2.0**-10) + peak * 2.0**-11).expand(-1, -1, group).flatten(1)
    assert ((dequantised(matrix) - weight).abs() <= bound).all()


def test_int4_weights_are_off_by_half_a_step() -> None:
    weight = random(20, 64, seed=5)
    matrix = quantise_int4(weight)
    assert (matrix.kind, matrix.num_bytes) == ("int4", 20 * 64 // 2 + 2 * 20 * 2)
    peak = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
    bound = (peak / 7 * 0.5 * (1 + 2.0**-10) + peak * 2.0**-11).expand(-1, -1, 32).flatten(1)
    assert ((dequantised(matrix) - weight).abs() <= bound).all()


def test_fp8_weights_are_off_by_their_16th() -> None:
    weight = random(20, 64, seed=5) * torch.logspace(-3, 3, 20).unsqueeze(1)
    matrix = quantise_fp8(weight)
    assert matrix.num_bytes == 20 * 64 + 4 * 20
    smallest = weight.abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    bound = torch.maximum(weight.abs() * 2.0**-4, smallest) * (1 + 1e-5)
    assert ((dequantised(matrix) - weight).abs() <= bound).all()


@pytest.mark.parametrize("name", ["int8-32", "int4-32", "int4-32-minimums", "fp8"])
def test_joined_matrices_keep_their_outputs(name: str) -> None:
    parts = [MATRICES[name](n, 64) for n in (8, 3)]
    whole = joined(parts)
    assert torch.equal(dequantised(whole), torch.cat([dequantised(part) for part in parts]))
    ids = torch.tensor([9, 0, 9])
    assert torch.equal(whole.rows(ids), dequantised(whole)[ids])


def test_a_part_without_minimums_gets_them_beside_one_that_has_them() -> None:
    parts = [int4_matrix(4, 64, 32, minimums=minimums) for minimums in (False, True)]
    expected = torch.cat([dequantised(part) for part in parts])
    torch.testing.assert_close(dequantised(joined(parts)), expected, rtol=1e-6, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="48 inputs are not supported"):
        quantise_int8(random(4, 96), 48)
    with pytest.raises(ValueError, match="beyond float16"):
        quantise_int8(random(4, 32) * 1e8)
    with pytest.raises(ValueError, match="64 inputs do not fit a matrix of 32"):
        linear(random(1, 64), quantise_int8(random(4, 32)))


def test_nibbles_are_read_as_bytes_where_bytes_may_be_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that converts e4m3, uint8 codes of fp8 are read as such; those of int4 are not."""
    monkeypatch.setattr("palmette.kernels.cuda.codes.native_e4m3", lambda device: True)
    x, bias = random(2, 64), random(24, seed=2)
    matrix = MATRICES["int4-32"](24, 64)
    close(linear(x, matrix, bias), x, matrix, bias)
