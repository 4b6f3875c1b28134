"""Kernels at the far end of tensors with more than 2^31 elements, as a full device holds them.

The tensors are real and take no memory where nothing is written. Only the last programs of a grid
run; what they compute is what small tensors give.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import Case, make_batch, poisoned_pool, random_rows

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl
from checked_interpreter import last_programs
from memory_check import MemoryFault

from palmette.kernels.cuda import fp8_gemm, gemm, quantised_gemm, sampler
from palmette.kernels.cuda.add_rms_norm import add_rms_norm
from palmette.kernels.cuda.bitmask import apply_bitmask
from palmette.kernels.cuda.quantised import QuantisedMatrix, quantise_fp8, quantise_int8
from palmette.kernels.cuda.rope_write import rope_write
from palmette.kernels.cuda.silu_mul import silu_mul
from palmette.kernels.cuda.triton_attention import TritonAttention
from palmette.kernels.kv_pool import PagedKVPool

NO_RESERVE = 0x4000  # Linux: pages that nobody wrote count for nothing
GIB = 1 << 30
ROWS = 600_000  # of 4096 numbers: 2^31 and some more
LAST = 3  # rows that are looked at
empty = torch.empty


def sparse(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros of any size."""
    num_bytes = math.prod(shape) * dtype.itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        memory = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:  # a limit of addresses
        pytest.skip(f"no {num_bytes // GIB} GiB of addresses: {error}")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@pytest.fixture(autouse=True)
def results_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def sparse_empty(*sizes: Any, **options: Any) -> torch.Tensor:
        shape = sizes[0] if isinstance(sizes[0], tuple | torch.Size) else sizes
        if math.prod(shape) < 1 << 28:
            return empty(*sizes, **options)
        return sparse(*shape, dtype=options["dtype"])

    monkeypatch.setattr(torch, "empty", sparse_empty)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def long(rows: torch.Tensor, num_rows: int = ROWS) -> torch.Tensor:
    """`rows` at the end of so many."""
    whole = sparse(num_rows, *rows.shape[1:], dtype=rows.dtype)
    whole[-len(rows) :] = rows
    assert whole.numel() > 2**31
    return whole


@triton.jit
def wrapping_kernel(x, out, num_columns):
    tl.store(out, tl.load(x + tl.program_id(0) * num_columns))


def test_an_offset_of_32_bits_would_be_found() -> None:
    with last_programs(1), pytest.raises(MemoryFault, match=r"599999 \* 4096 does not fit"):
        wrapping_kernel[(ROWS,)](sparse(ROWS, 4096), torch.zeros(1), 4096)


POOL = {"num_layers": 2, "page_size": 16, "num_kv_heads": 8, "head_dim": 64}


def huge_pool(small: PagedKVPool, num_bytes: int = 130 * GIB) -> tuple[PagedKVPool, int]:
    """(a pool of `num_bytes` whose last pages are those of `small`, where they begin)."""
    huge = PagedKVPool.__new__(PagedKVPool)
    num_pages = num_bytes // small.page_bytes
    first = num_pages - small.num_pages
    huge.dtype, huge._scales = small.dtype, None
    parts = []
    for part in small._parts():
        whole = sparse(*part.shape[:2], num_pages, *part.shape[3:], dtype=part.dtype)
        whole[:, :, first:] = part
        parts.append(whole)
    huge._data = parts[0]
    if len(parts) > 1:
        huge._scales = parts[1]
    assert huge.keys(0).numel() > 2**31
    return huge, first


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_attention_over_the_last_pages_of_a_pool(kv_dtype: torch.dtype, page_size: int) -> None:
    case = Case(
        heads=8, kv_heads=4, head_dim=64, page_size=page_size, dtype=torch.bfloat16,
        sequences=((1, 20), (5, 30)),
    )  # fmt: skip
    batch, rows = make_batch(case), random_rows(case, make_batch(case))
    small = poisoned_pool(case, kv_dtype=kv_dtype)
    huge, first = huge_pool(small)
    results = []
    for pool in (small, huge):
        if pool is huge:
            batch.kv_page_ids[:] += first
            batch.kv_slots[:] += first * page_size
        attention = TritonAttention(pool, num_heads=8, query_dtype=torch.bfloat16)
        attention.plan(batch)
        results.append(attention.run(1, *rows))
    assert results[0].isfinite().all() and torch.equal(*results)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_rope_writes_into_the_last_slots(kv_dtype: torch.dtype) -> None:
    heads, kv_heads, head_dim = 32, 8, 128
    pools = [
        PagedKVPool(
            num_layers=1, num_pages=2, page_size=16, num_kv_heads=kv_heads, head_dim=head_dim,
            dtype=kv_dtype,
        )
        for _ in range(2)
    ]  # fmt: skip
    pools[1], first = huge_pool(pools[1])
    few = random(LAST, (heads + 2 * kv_heads) * head_dim, dtype=torch.bfloat16)
    results = []
    for qkv, pool, shift in ((few, pools[0], 0), (long(few, 400_000), pools[1], first * 16)):
        positions = torch.zeros(len(qkv), dtype=torch.int32)
        positions[-LAST:] = torch.tensor([5, 17, 40])
        slots = torch.full((len(qkv),), -1, dtype=torch.int32)
        slots[-LAST:] = torch.tensor([31, 0, 17]) + shift
        angles = random(64, head_dim // 2, seed=3)
        with last_programs(LAST + 12):
            q = rope_write(
                qkv, pool.keys(0), pool.values(0), positions=positions, slots=slots,
                cos=angles.cos(), sin=angles.sin(), num_heads=heads,
                key_scales=pool.key_scales(0), value_scales=pool.value_scales(0),
            )  # fmt: skip
        results.append((q[-LAST:], pool.export(range(pool.num_pages - 2, pool.num_pages))))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] and any(results[0][1])


def test_the_last_pages_go_out_and_in() -> None:
    small = poisoned_pool(Case(page_size=16, kv_heads=8, sequences=((0, 60),)), kv_dtype=torch.int8)
    huge, first = huge_pool(small)
    pages = list(range(small.num_pages))
    last = [page + first for page in pages]
    data = small.export(pages)
    assert huge.export(last) == data
    huge.copy(last, pages)
    assert huge.export(pages) == data
    huge.import_(last[::-1], data)
    assert huge.export(last[::-1]) == data


def test_elementwise_kernels_on_the_last_rows() -> None:
    few, weight = random(LAST, 4096, dtype=torch.bfloat16), random(4096, dtype=torch.bfloat16)
    added = random(LAST, 4096, seed=2, dtype=torch.bfloat16)
    many, many_added = long(few), long(added)
    with last_programs(LAST):
        assert torch.equal(silu_mul(many)[-LAST:], silu_mul(few))
        normed = add_rms_norm(many, weight, 1e-6, many_added)[-LAST:]
        assert torch.equal(normed, add_rms_norm(few, weight, 1e-6, added))
        assert torch.equal(many_added[-LAST:], added)
        codes, scales = fp8_gemm.encode_rows(many)
        few_codes, few_scales = fp8_gemm.encode_rows(few)
    assert torch.equal(codes[-LAST:].view(torch.uint8), few_codes.view(torch.uint8))
    assert torch.equal(scales[-LAST:], few_scales)


def test_sampling_of_the_last_rows() -> None:
    """16,384 rows of Qwen's vocabulary, as a long prompt with log-probabilities has them."""
    vocab_size, num_rows = 151_936, 16_384
    few = random(2, vocab_size) * 3
    words = np.random.default_rng(1).integers(-(2**31), 2**31, (2, -(-vocab_size // 32)))
    few_masks = torch.from_numpy(words.astype(np.int32))
    many, masks = long(few, num_rows), sparse(num_rows, words.shape[1], dtype=torch.int32)
    masks[-2:] = few_masks
    results = []
    for logits, mask in ((few, few_masks), (many, masks)):
        rows = len(logits)
        edited, masked = (long(few, rows) if rows > 2 else few.clone() for _ in range(2))
        at = torch.full((3,), rows - 1, dtype=torch.int32)
        ids = torch.tensor([0, 77, vocab_size - 1], dtype=torch.int32)
        sampler.apply_edits(edited, at, ids, *(random(3, seed=s).abs() for s in (1, 2, 3)))
        with last_programs(2):
            found = sampler.sample(
                logits, edited, mask,
                has_masks=torch.ones(rows, dtype=torch.int32),
                targets=torch.full((rows,), -1, dtype=torch.int32),
                temperatures=torch.tensor([0.0, 0.8]).repeat(rows // 2),
                top_ks=torch.zeros(rows, dtype=torch.int32),
                top_ps=torch.ones(rows), min_ps=torch.zeros(rows),
                randoms=torch.full((rows,), 0.7, dtype=torch.float64),
                wants_logprob=torch.ones(rows, dtype=torch.int32),
            )  # fmt: skip
            apply_bitmask(masked, mask)
        results.append([*(part[-2:] for part in found), edited[-2:], masked[-2:, -4000:]])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    assert (results[0][0] >= 0).all() and results[0][1].isfinite().all()


def test_the_last_tile_of_a_product() -> None:
    """Rows, outputs and results beyond 2^31 numbers, in one program."""
    few, weight = (random(LAST, 4096, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    with last_programs(1):
        found = gemm.linear(long(few), long(weight))
    assert found.shape == (ROWS, ROWS)
    expected = few.double() @ weight.double().T
    torch.testing.assert_close(found[-LAST:, -LAST:].double(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("rows", [64, ROWS])
def test_the_last_tile_of_a_product_with_quantised_weights(kind: str, rows: int) -> None:
    weight = random(LAST, 4096, seed=1)
    few = quantise_fp8(weight) if kind == "fp8" else quantise_int8(weight, 32)
    if kind == "fp8":
        matrix = QuantisedMatrix(kind="fp8", codes=long(few.codes), scales=sparse(ROWS))
        matrix.scales[-LAST:] = few.scales
    else:
        codes = sparse(128, ROWS, 32, dtype=torch.int8)
        scales = sparse(128, ROWS, dtype=torch.float16)
        codes[:, -LAST:], scales[:, -LAST:] = few.codes, few.scales
        matrix = QuantisedMatrix(kind="int8", codes=codes, scales=scales)
    assert matrix.codes.numel() > 2**31
    x = random(LAST, 4096, dtype=torch.bfloat16)
    many = sparse(rows, 4096, dtype=torch.bfloat16)
    many[-LAST:] = x
    with last_programs(1):
        found = quantised_gemm.linear(many, matrix)[-LAST:, -LAST:]
    assert torch.equal(found, quantised_gemm.linear(x, few))
