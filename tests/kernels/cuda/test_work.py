"""The host's plan of a step: every key of every row exactly once, shared parts together."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import Case, Sequence_, make_batch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.cuda.work import SPLIT, decode_work, extend_work, in_parts

TREE = Case(
    sequences=(
        *(Sequence_(1, 512 + i, "a", 512) for i in range(5)),
        *(Sequence_(1, 800 + i, "a", 256) for i in range(3)),
        Sequence_(1, 700, "b", 512),
        Sequence_(7, 600, "b", 512),
        Sequence_(1, 520, "b", 512),
        Sequence_(1, 30),
    )
)


@pytest.mark.parametrize("share_rows", [1, 2, 16])
@pytest.mark.parametrize("window", [None, 300])
def test_each_part_of_each_row_is_done_once(share_rows: int, window: int | None) -> None:
    batch = make_batch(TREE)
    work = decode_work(batch, page_size=16, window=window, share_rows=share_rows)
    done = []
    for item in range(work.num_items):
        first, count = work.item_first[item], work.item_count[item]
        assert 1 <= count <= share_rows
        split = int(work.item_split[item])
        leader = batch.kv_page_ids[work.item_pages[item] :]
        for row in work.item_rows[first : first + count].tolist():
            done.append((row, split))
            sequence = int(np.searchsorted(batch.qo_indptr, row, side="right")) - 1
            own = batch.kv_page_ids[batch.kv_indptr[sequence] : batch.kv_indptr[sequence + 1]]
            end = min((split + 1) * SPLIT, int(batch.positions[row]) + 1)
            pages = slice(split * SPLIT // 16, -(-end // 16))
            np.testing.assert_array_equal(leader[pages], own[pages])
            if count > 1:
                assert end == (split + 1) * SPLIT
    expected = [
        (row, split)
        for row in work.rows.tolist()
        for position in (int(batch.positions[row]),)
        for split in range(
            0 if window is None else max(0, position - window + 1) // SPLIT, position // SPLIT + 1
        )
    ]
    assert sorted(done) == sorted(expected)
    parts = [work.row_parts[row] + split for row, split in sorted(done)]
    assert sorted(parts) == list(range(work.total_parts))
    assert (work.num_shared > 0) == (share_rows > 1)


def test_shared_parts_are_joined_as_far_as_a_tile_reaches() -> None:
    work = decode_work(make_batch(TREE), page_size=16, window=None, share_rows=16)
    assert sorted(work.item_count[work.item_count > 1].tolist()) == [2, 2, 5, 8]
    work = decode_work(make_batch(TREE), page_size=16, window=None, share_rows=4)
    assert sorted(work.item_count[work.item_count > 1].tolist()) == [2, 2, 4, 4, 4]


def test_parts_that_end_alike_but_differ_before_are_not_joined() -> None:
    """No prefix tree has such pages; reading another row's would be a wrong answer."""
    batch = make_batch(Case(sequences=tuple(Sequence_(1, 300 + i, "a", 256) for i in range(2))))
    counts = []
    for page in (int(batch.kv_page_ids[7]), 999):
        batch.kv_page_ids[batch.kv_indptr[1] + 7] = page
        work = decode_work(batch, page_size=16, window=None, share_rows=16)
        counts.append(sorted(work.item_count.tolist()))
    assert counts == [[1, 1, 2], [1, 1, 1, 1]]


def test_tiles_cover_the_rows_of_longer_runs() -> None:
    batch = make_batch(Case(sequences=((1, 5), (33, 10), (16, 0), (0, 9), (2, 700))))
    work = extend_work(batch, tile_tokens=16, window=300)
    rows = sorted(
        row
        for first, n in zip(work.rows, work.tokens, strict=True)
        for row in range(first, first + n)
    )
    assert rows == list(range(1, 52))
    assert work.ends.tolist() == sorted(work.ends.tolist(), reverse=True)
    by_row = dict(zip(work.rows.tolist(), zip(work.starts, work.ends, strict=True), strict=True))
    assert by_row[1] == (0, 26) and by_row[33] == (0, 43) and by_row[50] == (256, 702)


def test_a_few_rows_behind_a_long_context_decode_in_parts() -> None:
    """All their rows, those of one part together as far as its keys are seen by all of them."""
    case = Case(sequences=((6, 2300), (1, 40), (7, 100), (65, 2100), (0, 2200), (3, 2045)))
    batch = make_batch(case)
    cut = in_parts(batch, tile_tokens=32, num_kv_heads=8)
    assert cut is not None and cut.tolist() == [True, False, False, False, False, False]
    work = decode_work(batch, page_size=16, window=None, share_rows=16, cut=cut)
    assert work.rows.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert work.num_parts.tolist() == [9, 9, 9, 9, 10, 10, 1]  # position 2303 is a part's last
    assert sorted(work.item_count.tolist()) == [1] * 7 + [2] + [6] * 8
    assert work.total_parts == 57 and work.num_shared == 9
    extend = extend_work(batch, tile_tokens=32, window=None, cut=cut)
    assert sorted(zip(extend.rows.tolist(), extend.tokens.tolist(), strict=True)) == [
        (7, 7), (14, 32), (46, 32), (78, 1), (79, 3),
    ]  # fmt: skip
    assert in_parts(batch, tile_tokens=32, num_kv_heads=16) is None  # programs enough
    assert in_parts(make_batch(TREE), tile_tokens=32, num_kv_heads=8) is None
