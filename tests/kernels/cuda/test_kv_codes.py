"""K and V as int8 and e4m3: what is written, what is read, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from attention_cases import Case, Sequence_, make_batch, poisoned_pool, random_rows

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl

from palmette.kernels.cuda.codes import (
    column_order,
    columns,
    e4m3_bits,
    factor_order,
    factors,
    int8_code,
    numbers_of,
)
from palmette.kernels.cuda.rope_write import rope_write
from palmette.kernels.cuda.triton_attention import TritonAttention
from palmette.kernels.kv_codes import LARGEST, decode, encode
from palmette.kernels.kv_pool import PagedKVPool

CODES = [torch.int8, torch.float8_e4m3fn]


@triton.jit
def encode_kernel(x, int8s, e4m3s, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    numbers = tl.load(x + at)
    tl.store(int8s + at, int8_code(tl.minimum(tl.maximum(numbers, -127.0), 127.0)))
    tl.store(e4m3s + at, e4m3_bits(numbers))


@triton.jit
def decode_kernel(codes, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, numbers_of(tl.load(codes + at), out.dtype.element_ty))


def test_codes_are_torchs_for_every_number_near_a_border() -> None:
    grid = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = grid[grid.isfinite()].unique()
    middles = (grid[1:] + grid[:-1]) / 2
    near = [middles * (1 + step * 2.0**-23) for step in (-2, 0, 2)]
    halves = torch.arange(-127, 127) + 0.5
    spread = torch.randn(600, generator=torch.Generator().manual_seed(0)) * 40
    x = torch.cat((grid, *near, halves, spread.clamp(-448, 448)))
    x = torch.nn.functional.pad(x, (0, 2048 - len(x)))
    int8s, e4m3s = torch.empty(2048, dtype=torch.int8), torch.empty(2048, dtype=torch.uint8)
    encode_kernel[(1,)](x, int8s, e4m3s, SIZE=2048)
    assert torch.equal(int8s, x.clamp(-127, 127).round().to(torch.int8))
    assert torch.equal(e4m3s.view(torch.float8_e4m3fn).float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_codes_are_read_exactly(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    bits[[0x7F, 0xFF]] = 0  # NaN is no code
    for codes in (bits, bits.view(torch.float8_e4m3fn), bits.view(torch.int8)):
        out = torch.empty(256, dtype=dtype)
        decode_kernel[(1,)](codes, out, SIZE=256)
        meant = bits.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
        assert torch.equal(out.float(), meant.float())


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of infinity times zero
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (3, 96)])
def test_rope_write_writes_what_torch_encodes(
    codes: torch.dtype, kv_heads: int, head_dim: int
) -> None:
    rows, heads = 5, 4
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, generator=generator)
    qkv[3] = 0.0
    qkv[4, -1] = torch.nan  # in the last v head
    qkv[4, heads * head_dim] = torch.inf  # in the first k head
    pool = PagedKVPool(
        num_layers=1, num_pages=2, page_size=8, num_kv_heads=kv_heads, head_dim=head_dim,
        dtype=codes,
    )  # fmt: skip
    slots = torch.tensor([9, 0, -1, 5, 6], dtype=torch.int32)
    before = pool.export([0, 1])
    args = {
        "positions": torch.arange(rows, dtype=torch.int32),
        "cos": torch.ones(rows, head_dim // 2),  # no rotation: numbers stay as they are
        "sin": torch.zeros(rows, head_dim // 2),
        "num_heads": heads,
        "key_scales": pool.key_scales(0),
        "value_scales": pool.value_scales(0),
    }
    rope_write(qkv, pool.keys(0), pool.values(0), slots=torch.full_like(slots, -1), **args)
    assert pool.export([0, 1]) == before
    rope_write(qkv, pool.keys(0), pool.values(0), slots=slots, **args)
    _, k, v = qkv.view(rows, -1, head_dim).split((heads, kv_heads, kv_heads), dim=1)
    written = [0, 1, 3, 4]
    found = pool.read(0, slots[written].long())
    for side, numbers in zip(found, (k, v), strict=True):
        expected = decode(*encode(numbers[written], codes))
        torch.testing.assert_close(side, expected, rtol=0, atol=0, equal_nan=True)
    assert found[0][3, 0].isnan().all() and found[1][3, -1].isnan().all()
    with pytest.raises(ValueError, match="needs scales"):
        rope_write(
            qkv, pool.keys(0), pool.values(0), slots=slots,
            **{**args, "key_scales": None},
        )  # fmt: skip


def exact(case: Case, pool: PagedKVPool, q: torch.Tensor) -> torch.Tensor:
    """Attention in float64 over the numbers that the pool holds."""
    batch = make_batch(case)
    out = torch.empty(q.shape, dtype=torch.float64)
    for index in range(batch.num_sequences):
        pages = batch.kv_page_ids[batch.kv_indptr[index] : batch.kv_indptr[index + 1]]
        size = case.page_size
        slots = torch.cat([torch.arange(int(p) * size, int(p + 1) * size) for p in pages])
        k, v = (side.double() for side in pool.read(1, slots))
        for row in range(int(batch.qo_indptr[index]), int(batch.qo_indptr[index + 1])):
            last = int(batch.positions[row])
            first = 0 if case.window is None else max(0, last - case.window + 1)
            seen = slice(first, last + 1)
            grouped = q[row].double().view(case.kv_heads, -1, case.head_dim)
            scores = torch.einsum("ghd,lgd->ghl", grouped, k[seen]) / math.sqrt(case.head_dim)
            result = torch.einsum("ghl,lgd->ghd", scores.softmax(-1), v[seen])
            out[row] = result.reshape(case.heads, case.head_dim)
    return out


CASES = {
    "decode-ragged": Case(sequences=((1, 0), (1, 15), (1, 16), (1, 300))),
    "gqa-1": Case(heads=2, kv_heads=2, sequences=((1, 40), (9, 3))),
    "gqa-3": Case(heads=6, kv_heads=2, sequences=((1, 63), (5, 64))),
    "gqa-8": Case(heads=8, kv_heads=1, sequences=((1, 257), (9, 100))),
    "extend-ragged": Case(sequences=((2, 0), (19, 0), (33, 30))),
    "page-1": Case(page_size=1, sequences=((1, 30), (5, 28))),
    "page-64": Case(page_size=64, sequences=((1, 64), (5, 60))),
    "head-96": Case(head_dim=96, sequences=((1, 20), (5, 14))),
    "head-128": Case(head_dim=128, sequences=((1, 20), (5, 14))),
    "window": Case(window=20, sequences=((1, 300), (30, 10))),
    "shared": Case(sequences=(Sequence_(1, 300, "a", 256), Sequence_(1, 280, "a", 256))),
    "half": Case(dtype=torch.float16, sequences=((1, 70), (9, 70))),
    "bf16": Case(dtype=torch.bfloat16, sequences=((1, 270), (9, 70))),
    "empty": Case(sequences=((0, 20), (4, 4))),
}
# of results of the order of 1: the roundings of weights and result; sums are float32
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("name", CASES)
def test_attention_over_codes_equals_float64(name: str, codes: torch.dtype) -> None:
    case = CASES[name]
    batch = make_batch(case)
    q, k, v = random_rows(case, batch)
    pool = poisoned_pool(case, kv_dtype=codes)
    attention = TritonAttention(
        pool, num_heads=case.heads, sliding_window=case.window, query_dtype=case.dtype,
        deterministic=name != "extend-ragged",
    )  # fmt: skip
    attention.plan(batch)
    found = attention.run(1, q, k, v)
    torch.testing.assert_close(
        found.double(), exact(case, pool, q), rtol=0, atol=TOLERANCE[case.dtype]
    )


@pytest.mark.parametrize(("codes", "largest_error"), [(torch.int8, 0.5), (torch.float8_e4m3fn, 16)])
def test_a_number_is_off_by_half_a_step_at_most(codes: torch.dtype, largest_error: float) -> None:
    """int8: half of the scale anywhere; e4m3: 2^-4 of the number, so 16 steps of the scale at most
    for the largest, and half of the smallest step below."""
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1))
    found, scales = encode(x, codes)
    error = (decode(found, scales) - x).abs()
    step = scales.unsqueeze(-1)
    assert (error <= step * (largest_error + 1e-4)).all()
    if codes == torch.float8_e4m3fn:
        assert (error <= torch.maximum(x.abs() * 2.0**-4, step * 2.0**-10) * (1 + 1e-5)).all()
    assert LARGEST[codes] == found.float().abs().max()


@triton.jit
def widen_kernel(words, out, E4M3: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    word = tl.load(words + tl.arange(0, 16)[:, None] * 4 + tl.arange(0, 4)[None, :])
    values = column_order(columns(word, E4M3, KIND))
    tl.store(out + at, values.to(tl.float32))
    tl.store(out + 256 + at, factors(word, E4M3, KIND).to(tl.float32))
    tl.store(out + 512 + at, factor_order(values).to(tl.float32))


@pytest.mark.parametrize("kind", [tl.float32, tl.float16])
@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
def test_every_code_of_a_word_is_widened_exactly(codes: torch.dtype, kind: tl.dtype) -> None:
    """Values come out in order; keys in the order that queries are put into."""
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    found = torch.empty(3, 256)
    words = numbers.view(torch.uint32)
    widen_kernel[(1,)](words, found, E4M3=codes != torch.int8, KIND=kind)
    expected = numbers.view(codes).float()
    known = ~expected.isnan()
    assert known.sum() >= 254 and torch.equal(found[0][known], expected[known])
    assert torch.equal(found[1], found[2])
