"""Triton's attention under the interpreter against the reference, and against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import (
    CASES,
    FORKS,
    TOLERANCE,
    TREE,
    Case,
    Sequence_,
    make_batch,
    poisoned_pool,
    random_rows,
)

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda.triton_attention import TritonAttention, narrow_tiles, wide_tiles
from palmette.kernels.cuda.work import SPLIT, decode_work
from palmette.kernels.reference import ReferenceAttention


def outputs(case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(reference, triton) over pools whose unwritten slots hold NaN."""
    batch = make_batch(case)
    q, k, v = random_rows(case, batch)
    results = []
    for kind, extra in ((ReferenceAttention, {}), (TritonAttention, {"num_heads": case.heads})):
        pool = poisoned_pool(case)
        attention = kind(pool, sliding_window=case.window, **extra, **(options if extra else {}))
        attention.plan(batch)
        results.append(attention.run(1, q, k, v))
    return results[0], results[1]


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case = CASES[name]
    expected, found = outputs(case, deterministic=name in ("mixed", "bf16-head-128"))
    assert found.dtype == case.dtype and found.shape == expected.shape
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=TOLERANCE[case.dtype])


@pytest.mark.parametrize("window", [None, 100])
def test_pages_that_rows_share_are_read_once_and_give_the_same_bits(window: int | None) -> None:
    case = Case(sequences=FORKS.sequences, window=window)
    expected, shared = outputs(case, share=True)
    torch.testing.assert_close(shared, expected, rtol=0, atol=TOLERANCE[case.dtype])
    assert torch.equal(shared, outputs(case, share=False)[1])


@pytest.mark.parametrize(("page_size", "heads"), [(16, 4), (64, 2)])
def test_a_tree_of_several_levels_equals_the_reference(page_size: int, heads: int) -> None:
    """Rows part from each other after one split and after two, and some share nothing; what is
    read once for several has the bits of what is read for each."""
    case = Case(sequences=TREE.sequences, page_size=page_size, heads=heads)
    expected, shared = outputs(case, share=True)
    torch.testing.assert_close(shared, expected, rtol=0, atol=TOLERANCE[case.dtype])
    assert torch.equal(shared, outputs(case, share=False)[1])
    work = decode_work(make_batch(case), page_size=page_size, window=None, share_rows=8)
    assert work.num_shared >= 2


def test_what_must_not_depend_on_the_batch_uses_one_size_of_everything() -> None:
    """The deterministic mode: the tiles of decode are extend's, shared or not; parts end at fixed
    positions, of which every tile is a divisor; products and sums are not fused."""
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(dtype=dtype, sequences=FORKS.sequences, head_dim=128)
        attention = TritonAttention(poisoned_pool(case), num_heads=case.heads)
        alone = attention.prepare(make_batch(Case(dtype=dtype, sequences=((1, 700),))))
        assert attention.prepare(make_batch(case)).tiles == attention.tiles_alone == alone.tiles
        assert SPLIT % alone.tiles.block_n == 0 and SPLIT % 128 == 0
        assert attention._compile(alone.tiles)["enable_fp_fusion"] is False
        free = TritonAttention(poisoned_pool(case), num_heads=case.heads, deterministic=False)
        assert free._compile(alone.tiles)["enable_fp_fusion"] is True


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
def test_a_part_is_whole_tiles_of_any_head_size(head_dim: int) -> None:
    """Decode and extend then fold their sums at the same keys."""
    tiles = [narrow_tiles(head_dim, group, size) for group in (1, 8) for size in (2, 4)]
    for size, capability in ((2, 90), (2, 80), (4, 90)):
        for scaled in (False, True):
            tiles.append(wide_tiles(head_dim, size, scaled=scaled, capability=capability))
    assert all(SPLIT % one.block_n == 0 and one.block_m >= 16 for one in tiles)


@pytest.mark.parametrize("page_size", [1, 64])
def test_bits_of_a_row_of_a_crowd_are_those_alone(page_size: int) -> None:
    """The last row of a context: decoded alone, among others, over shared pages, and extended."""
    alone = Case(page_size=page_size, sequences=(Sequence_(1, 520, "a", 512),))
    crowd = Case(
        page_size=page_size,
        sequences=(*alone.sequences, Sequence_(1, 530, "a", 512), (3, 40), (1, 9), (1, 700)),
    )
    results = []
    for case in (alone, crowd):
        batch = make_batch(case)
        pool = poisoned_pool(crowd)  # the same pages and numbers for both
        pages = make_batch(crowd).kv_page_ids[: len(batch.kv_page_ids)]
        if case is alone:
            batch.kv_page_ids[:] = pages
            batch.kv_slots[:] = pages[-1] * page_size + 520 % page_size
        q, k, v = (rows[: batch.num_tokens] for rows in random_rows(crowd, make_batch(crowd)))
        for options in ({"share": True}, {"share": False}):
            attention = TritonAttention(pool, num_heads=case.heads, **options)
            attention.plan(batch)
            results.append(attention.run(0, q, k, v)[0])
    assert torch.isfinite(results[0]).all()
    for other in results[1:]:
        assert torch.equal(other, results[0])


def test_bits_do_not_depend_on_batch_chunks_or_pages() -> None:
    """Row 280 of a context decoded alone, in a crowd, and as part of chunks."""
    dtype, last = torch.float32, 280

    def run(page_size: int, chunks: list[int], crowd: tuple[tuple[int, int], ...]) -> torch.Tensor:
        case = Case(page_size=page_size, dtype=dtype, sequences=((last + 1, 0), *crowd))
        generator = torch.Generator().manual_seed(5)
        rows = [torch.randn(last + 1, n, 64, generator=generator) for n in (4, 2, 2)]
        pool = poisoned_pool(case)
        attention = TritonAttention(pool, num_heads=4)
        start = 0
        for size in chunks:
            step = Case(
                page_size=page_size, dtype=dtype, sequences=((size, start), *crowd), seed=case.seed
            )
            batch = make_batch(step, like=case)
            own = [t[start : start + size] for t in rows]
            q, k, v = (
                torch.cat((mine, other[size:]))
                for mine, other in zip(own, random_rows(step, batch), strict=True)
            )
            attention.plan(batch)
            result = attention.run(0, q, k, v)[size - 1]
            start += size
        return result

    alone = run(16, [280, 1], ())
    assert torch.isfinite(alone).all()
    assert torch.equal(run(16, [281], ()), alone)
    assert torch.equal(run(32, [200, 81], ((1, 0), (3, 20))), alone)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_few_rows_in_parts_are_those_of_an_extend(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A context cut for a few new rows: the reference's results, and bit by bit an extend's."""
    case = Case(sequences=((5, 510), (1, 300), (3, 40)))
    uncut = outputs(case, deterministic=deterministic)[1]
    monkeypatch.setattr("palmette.kernels.cuda.work._LONG_PARTS", 2)
    expected, found = outputs(case, deterministic=deterministic)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[case.dtype])
    assert torch.equal(found, uncut) or not deterministic
    attention = TritonAttention(poisoned_pool(case), num_heads=case.heads)
    plan = attention.prepare(make_batch(case))
    assert (plan.num_decodes, plan.num_tiles) == (6, 1)


def test_plan_refuses_what_it_cannot_compute() -> None:
    pool = poisoned_pool(Case())
    with pytest.raises(ValueError, match="share"):
        TritonAttention(pool, num_heads=3)
    attention = TritonAttention(pool, num_heads=4)
    with pytest.raises(RuntimeError, match="no step"):
        attention.attend(0, torch.zeros(1, 4, 64))
    batch = make_batch(Case(sequences=((1, 5),)))
    batch.positions[0] = 50
    with pytest.raises(ValueError, match="position"):
        attention.plan(batch)
    assert np.all(batch.kv_slots >= 0)
