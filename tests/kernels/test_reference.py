"""The reference operations against torch's own, and their bits against themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from palmette.kernels import reference
from palmette.kernels.batch import ForwardBatch
from palmette.kernels.kv_pool import PagedKVPool
from palmette.kernels.reference import ReferenceAttention


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 576, 1000])
def test_tree_sum_equals_the_exact_sum(length: int) -> None:
    x = random(3, length)
    exact = x.double().sum(-1)
    torch.testing.assert_close(reference.tree_sum(x).double(), exact, rtol=0, atol=1e-4)


def test_rms_norm_equals_torch() -> None:
    x, weight = random(5, 3, 72), random(72, seed=1)
    expected = functional.rms_norm(x, (72,), weight, 1e-5)
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-5), expected)


def test_silu_mul_equals_torch_even_for_large_numbers() -> None:
    gate, up = random(5, 37), random(5, 37, seed=1)
    gate[0, 0], gate[1, 1] = -200.0, 200.0
    torch.testing.assert_close(reference.silu_mul(gate, up), functional.silu(gate) * up)


def test_rope_turns_pairs_by_the_angle() -> None:
    x = random(4, 3, 10)
    angles = random(4, 5, seed=1)
    turned = torch.polar(torch.ones(4, 1, 5), angles[:, None]) * torch.complex(
        x[..., :5], x[..., 5:]
    )
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(reference.rope(x, angles.cos(), angles.sin()), expected)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (30, 72), (131, 88), (300, 576)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_torch(rows: int, columns: int, bias: bool) -> None:
    weight, x = random(rows, columns), random(11, columns, seed=1)
    added = random(rows, seed=2) if bias else None
    result = reference.linear(x, weight, added, block=reference.row_block(weight))
    torch.testing.assert_close(result, functional.linear(x, weight, added), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (30, 72), (131, 88), (576, 1536)])
def test_linear_bits_do_not_depend_on_other_rows(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    weight, x = random(rows, columns).to(dtype), random(37, columns, seed=1).to(dtype)
    block = reference.row_block(weight)
    whole = reference.linear(x, weight, block=block)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(2))
    assert torch.equal(reference.linear(x[order], weight, block=block), whole[order])
    alone = [reference.linear(x[row : row + 1], weight, block=block) for row in range(37)]
    assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize("columns", [5, 16, 88, 1535])
def test_elementwise_bits_do_not_depend_on_other_rows(columns: int) -> None:
    gate, up, weight = random(23, columns), random(23, columns, seed=1), random(columns, seed=2)
    silu = reference.silu_mul(gate, up)
    norm = reference.rms_norm(gate, weight, 1e-6)
    for row in range(23):
        one = slice(row, row + 1)
        assert torch.equal(reference.silu_mul(gate[one], up[one]), silu[one])
        assert torch.equal(reference.rms_norm(gate[one], weight, 1e-6), norm[one])


def test_row_block_falls_back_to_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library whose last row differs in the last bit must be noticed."""
    honest = functional.linear

    def uneven(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = honest(x, weight)
        out[-1] = torch.nextafter(out[-1], torch.tensor(torch.inf))
        return out

    assert reference.row_block(random(30, 72)) == reference.ROW_BLOCK_CPU
    monkeypatch.setattr(functional, "linear", uneven)
    assert reference.row_block(random(30, 72)) == 1


def one_sequence(length: int, start: int, pages: list[int], page_size: int) -> ForwardBatch:
    """Rows start..length of one sequence."""
    positions = np.arange(start, length, dtype=np.int32)
    table = np.array(pages, np.int32)
    return ForwardBatch(
        token_ids=np.zeros(length - start, np.int32),
        positions=positions,
        kv_slots=(table[positions // page_size] * page_size + positions % page_size).astype(
            np.int32
        ),
        qo_indptr=np.array([0, length - start], np.int32),
        kv_indptr=np.array([0, len(pages)], np.int32),
        kv_page_ids=table,
        kv_last_page_len=np.array([(length - 1) % page_size + 1], np.int32),
        sample_rows=np.empty(0, np.int32),
    )


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 16), (4, 4, 10), (5, 1, 32)])
def test_attention_equals_torch(
    window: int | None, heads: int, kv_heads: int, head_dim: int
) -> None:
    length = 19
    pool = PagedKVPool(
        num_layers=2, num_pages=9, page_size=4, num_kv_heads=kv_heads, head_dim=head_dim
    )
    attention = ReferenceAttention(pool, sliding_window=window)
    attention.plan(one_sequence(length, 0, [7, 2, 0, 8, 3], 4))
    q = random(length, heads, head_dim)
    k, v = random(length, kv_heads, head_dim, seed=1), random(length, kv_heads, head_dim, seed=2)
    rows, columns = torch.arange(length)[:, None], torch.arange(length)
    seen = (columns <= rows) & (columns > rows - (window or length))
    expected = functional.scaled_dot_product_attention(
        q.movedim(0, 1), k.movedim(0, 1), v.movedim(0, 1), attn_mask=seen, enable_gqa=True
    ).movedim(0, 1)
    torch.testing.assert_close(attention.run(1, q, k, v), expected, rtol=1e-5, atol=1e-5)
    assert not pool.keys(0).any()  # the other layer is untouched


@pytest.mark.parametrize("window", [None, 6])
def test_attention_bits_do_not_depend_on_pages_or_chunks(window: int | None) -> None:
    length, heads, kv_heads, head_dim = 33, 6, 2, 16
    q = random(length, heads, head_dim)
    k, v = random(length, kv_heads, head_dim, seed=1), random(length, kv_heads, head_dim, seed=2)

    def run(pages: list[int], page_size: int, cuts: list[int]) -> torch.Tensor:
        pool = PagedKVPool(
            num_layers=1,
            num_pages=max(pages) + 1,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
        )
        pool.keys(0).fill_(torch.nan)
        pool.values(0).fill_(torch.nan)
        attention = ReferenceAttention(pool, sliding_window=window)
        parts = []
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            attention.plan(one_sequence(stop, start, pages[: -(-stop // page_size)], page_size))
            parts.append(attention.run(0, q[start:stop], k[start:stop], v[start:stop]))
        return torch.cat(parts)

    whole = run([0], 64, [])
    assert torch.isfinite(whole).all()
    assert torch.equal(run(list(range(40))[::-1], 1, [5, 6, 30]), whole)
    assert torch.equal(run([4, 0, 2], 16, [17]), whole)


def test_plan_rejects_arrays_that_contradict_each_other() -> None:
    pool = PagedKVPool(num_layers=1, num_pages=4, page_size=4, num_kv_heads=1, head_dim=4)
    attention = ReferenceAttention(pool)
    good = one_sequence(7, 0, [1, 2], 4)
    attention.plan(good)
    bad: dict[str, Any] = {
        "positions": good.positions[:-1],
        "kv_slots": good.kv_slots + 12,
        "qo_indptr": np.array([1, 7], np.int32),
        "kv_indptr": np.array([0, 3], np.int32),
        "kv_page_ids": np.array([1, -1], np.int32),
        "kv_last_page_len": np.array([0], np.int32),
        "sample_rows": np.array([7], np.int32),
    }
    for name, value in bad.items():
        arrays = {key: getattr(good, key) for key in good.__slots__} | {name: value}
        with pytest.raises(ValueError, match=r"qo_indptr|kv_|positions|position|sample_rows"):
            attention.plan(ForwardBatch(**arrays))
