"""The matrix product whose rows are independent, under the interpreter."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda.gemm import linear, tiles_of


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(0, 8, 8), (1, 1, 3), (65, 40, 150)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_torch(
    rows: int, columns: int, depth: int, dtype: torch.dtype, has_bias: bool
) -> None:
    x, weight = random(rows, depth, dtype=dtype), random(columns, depth, seed=1, dtype=dtype)
    bias = random(columns, seed=2, dtype=dtype) if has_bias else None
    expected = functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    tolerance = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
    found = linear(x, weight, bias)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=16 * tolerance)


def test_bits_do_not_depend_on_other_rows() -> None:
    x, weight = random(70, 96), random(24, 96, seed=1)
    whole = linear(x, weight)
    assert torch.equal(linear(x[13:14], weight), whole[13:14])
    assert torch.equal(linear(x[5:60].flip(0), weight), whole[5:60].flip(0))


def test_tiles_are_large_where_all_processors_have_one() -> None:
    def block(rows: int, columns: int, capability: int = 90) -> tuple[int, int, int]:
        tiles = tiles_of(rows, columns, torch.bfloat16, capability=capability)
        return tiles["BLOCK_M"], tiles["BLOCK_N"], tiles["BLOCK_K"]

    assert block(1, 32768) == block(16, 32768) == block(64, 4096) == (64, 32, 256)
    assert block(17, 32768) == (64, 128, 128)
    assert block(65, 4096) == block(1023, 32768) == block(4096, 2048) == (128, 128, 64)
    assert block(1024, 4096) == block(4096, 32768) == (128, 256, 64)
    assert block(1, 32768, 89) == (64, 32, 128) and block(2048, 32768, 80) == (128, 128, 64)
