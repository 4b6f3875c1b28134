"""Triton's elementwise kernels under the interpreter against the reference operations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels import reference
from palmette.kernels.cuda.add_rms_norm import add_rms_norm
from palmette.kernels.cuda.bitmask import apply_bitmask
from palmette.kernels.cuda.rope_write import rope_write
from palmette.kernels.cuda.silu_mul import silu_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# a few roundings to the dtype; the interpreter cuts bf16 off instead of rounding
ROUNDINGS = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-5}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (1, 1), (3, 72), (2, 1100)])
def test_silu_mul(rows: int, columns: int, dtype: torch.dtype) -> None:
    both = random(rows, 2 * columns, dtype=dtype)
    expected = reference.silu_mul(both[:, :columns].contiguous(), both[:, columns:].contiguous())
    torch.testing.assert_close(silu_mul(both), expected, rtol=ROUNDINGS[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (1, 1), (3, 72), (2, 1100)])
@pytest.mark.parametrize("adds", [True, False])
def test_add_rms_norm(rows: int, columns: int, dtype: torch.dtype, adds: bool) -> None:
    x, weight = random(rows, columns, dtype=dtype), random(columns, seed=1, dtype=dtype)
    before = random(rows, columns, seed=2, dtype=dtype) if adds else None
    residual = None if before is None else before.clone()
    found = add_rms_norm(x, weight, 1e-5, residual)
    total = x if before is None else x + before
    if residual is not None:
        torch.testing.assert_close(residual, total, rtol=ROUNDINGS[dtype], atol=1e-6)
    expected = reference.rms_norm(total, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=ROUNDINGS[dtype], atol=1e-6)


def test_add_rms_norm_refuses_another_shape() -> None:
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(random(2, 8), random(8), 1e-5, random(3, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "has_norm"),
    [(4, 2, 64, False), (9, 3, 64, True), (2, 1, 96, True), (12, 12, 16, False)],
)
def test_rope_write(
    heads: int, kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    rows, num_slots = 5, 12
    width = (heads + 2 * kv_heads) * head_dim
    qkv = random(rows, width + 16, dtype=dtype)[:, :width]  # rows of a wider matrix
    angles = random(30, head_dim // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([0, 29, 7, 7, 3], dtype=torch.int32)
    slots = torch.tensor([11, 0, -1, 5, 6], dtype=torch.int32)
    norms = [1 + random(head_dim, seed=s, dtype=dtype) / 4 for s in (3, 4)] if has_norm else []
    keys = torch.full((num_slots, kv_heads, head_dim), torch.nan, dtype=dtype)
    values = keys.clone()
    found = rope_write(
        qkv,
        keys,
        values,
        positions=positions,
        slots=slots,
        cos=cos,
        sin=sin,
        num_heads=heads,
        q_norm=norms[0] if norms else None,
        k_norm=norms[1] if norms else None,
        eps=1e-5,
    )
    q, k, v = qkv.reshape(rows, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    if norms:
        q, k = (reference.rms_norm(x, n, 1e-5) for x, n in zip((q, k), norms, strict=True))
    rope = (cos[positions.long()], sin[positions.long()])
    tolerance = 4 * ROUNDINGS[dtype]  # of numbers of the order of 4
    torch.testing.assert_close(found, reference.rope(q, *rope), rtol=0, atol=tolerance)
    written = slots >= 0
    at = slots[written].long()
    expected = reference.rope(k, *rope)[written]
    torch.testing.assert_close(keys[at], expected, rtol=0, atol=tolerance)
    assert torch.equal(values[at], v[written])
    untouched = [slot for slot in range(num_slots) if slot not in at.tolist()]
    assert keys[untouched].isnan().all() and values[untouched].isnan().all()


def test_bitmask() -> None:
    logits = random(3, 77)
    bits = torch.rand(3, 96, generator=torch.Generator().manual_seed(1)) < 0.5
    bits[2] = False
    words = (bits.view(3, 3, 32).long() << torch.arange(32)).sum(-1)
    masks = torch.where(words >= 2**31, words - 2**32, words).int()
    expected = logits.masked_fill(~bits[:, :77], -torch.inf)
    apply_bitmask(logits, masks)
    assert torch.equal(logits, expected)
    with pytest.raises(ValueError, match="does not cover"):
        apply_bitmask(random(3, 200), masks)
