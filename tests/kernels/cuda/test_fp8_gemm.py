"""e4m3 products by the library, which has them on the CPU too; the interpreter encodes rows."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda import fp8_gemm, quantised_gemm
from palmette.kernels.cuda.quantised import dequantised, quantise_fp8, quantise_int8
from palmette.kernels.kv_codes import decode, encode
from palmette.runtime.models.fused_decoder import _Linear


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_rows_are_encoded_as_torch_encodes_them() -> None:
    x = random(5, 150).bfloat16()
    x[2] = 0.0
    codes, scales = fp8_gemm.encode_rows(x[:, :144])
    expected = encode(x[:, :144], torch.float8_e4m3fn)
    assert torch.equal(codes.float(), expected[0].float())
    assert torch.equal(scales[:, 0], expected[1])
    assert scales.is_contiguous() and scales.untyped_storage().nbytes() == 4 * 256


@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_float64_over_the_same_codes(has_bias: bool) -> None:
    x, matrix = random(7, 96).bfloat16(), quantise_fp8(random(48, 96, seed=1))
    bias = random(48, seed=2).bfloat16() if has_bias else None
    rounded = decode(*encode(x, torch.float8_e4m3fn)).double()
    expected = rounded @ dequantised(matrix).double().T
    if bias is not None:
        expected += bias.double()
    found = fp8_gemm.linear(x, matrix, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-7, atol=2.0**-7)


def test_what_the_library_cannot_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = quantise_fp8(random(48, 96))
    assert "sm_89" in str(fp8_gemm.why_not(matrix, torch.bfloat16))
    monkeypatch.setattr(fp8_gemm, "native_e4m3", lambda device: True)
    assert fp8_gemm.why_not(matrix, torch.bfloat16) is None
    assert "float32" in str(fp8_gemm.why_not(matrix, torch.float32))
    assert "multiples of 16" in str(fp8_gemm.why_not(quantise_fp8(random(40, 96)), torch.bfloat16))
    assert "int8" in str(fp8_gemm.why_not(quantise_int8(random(48, 96)), torch.bfloat16))


def test_deterministic_models_do_not_take_the_librarys_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also on a device that has it: its kernel depends on the number of rows."""
    monkeypatch.setattr(fp8_gemm, "native_e4m3", lambda device: True)
    x, matrix = random(5, 96).bfloat16(), quantise_fp8(random(48, 96, seed=1))
    assert fp8_gemm.why_not(matrix, x.dtype) is None
    ours, library = quantised_gemm.linear(x, matrix), fp8_gemm.linear(x, matrix)
    assert not torch.equal(ours, library)
    for deterministic, expected in ((True, ours), (False, library)):
        assert torch.equal(_Linear(matrix, None, deterministic=deterministic)(x), expected)
