"""Levels of shared pages: every page of every row exactly once, in order, whatever the tree."""

from __future__ import annotations

import numpy as np
import pytest
from attention_cases import Case, Sequence_, make_batch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.cuda.cascade import Cascade, cascade
from palmette.kernels.cuda.work import SPLIT, decode_work


def tree_batch(paths: list[list[tuple[int, int]]], page_size: int = 16) -> ForwardBatch:
    """Decodes whose pages are those of (node, pages) on their path, and two of their own."""
    nodes: dict[int, list[int]] = {}
    free = iter(np.random.default_rng(3).permutation(1 << 16).tolist())
    lists = []
    for path in paths:
        own: list[int] = []
        for node, count in path:
            own += nodes.setdefault(node, [next(free) for _ in range(count)])
        lists.append([*own, next(free), next(free)])
    lengths = np.array([len(own) * page_size - 5 for own in lists])
    count = len(lists)
    return ForwardBatch(
        token_ids=np.zeros(count, np.int32),
        positions=(lengths - 1).astype(np.int32),
        kv_slots=np.array([own[-1] * page_size + page_size - 6 for own in lists], np.int32),
        qo_indptr=np.arange(count + 1, dtype=np.int32),
        kv_indptr=np.cumsum([0, *map(len, lists)]).astype(np.int32),
        kv_page_ids=np.concatenate(lists).astype(np.int32),
        kv_last_page_len=np.full(count, page_size - 5, np.int32),
        sample_rows=np.arange(count, dtype=np.int32),
    )


def pages_of(found: Cascade) -> list[list[int]]:
    """Of each row in the levels' order, the pages that the levels give it."""
    rows: list[list[int]] = [[] for _ in found.order]
    for level in found.levels:
        assert level.qo_indptr[0] == 0 and level.qo_indptr[-1] == len(rows)
        assert level.kv_indptr[-1] == len(level.page_ids)
        for entry in range(level.num_entries):
            pages = level.page_ids[level.kv_indptr[entry] : level.kv_indptr[entry + 1]]
            assert (level.last_page_len[entry] == 0) == (len(pages) == 0)
            for row in range(level.qo_indptr[entry], level.qo_indptr[entry + 1]):
                rows[row] += pages.tolist()
    return rows


TREES = {
    "two levels": [[(0, 64), (1 + i // 4, 40)] for i in range(12)],
    "interleaved": [[(i % 3, 50), (10 + i % 6, 40)] for i in range(24)],
    "three levels": [[(0, 64), (1 + i // 6, 64), (10 + i // 2, 64)] for i in range(12)],
    "a chain": [[(node, 32) for node in range(depth + 1)] for depth in range(8)],
    "some alone": [[(0, 70)] if i % 2 else [(100 + i, 9)] for i in range(9)],
    "large children of a small root": [
        *[[(0, 64)]] * 6,
        *[[(1, 40), (2 + i // 2, 200)] for i in range(4)],
    ],
    "a short root": [[(0, 1), (1 + i % 2, 100)] for i in range(8)],
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("max_entries", [None, 3, 5])
def test_levels_give_each_row_its_pages(name: str, max_entries: int | None) -> None:
    batch = tree_batch(TREES[name])
    found = cascade(batch, page_size=16, max_entries=max_entries)
    assert found is not None and 2 <= len(found.levels) <= 3
    assert sorted(found.order.tolist()) == list(range(len(found.order)))
    for row, pages in zip(found.order, pages_of(found), strict=True):
        own = batch.kv_page_ids[batch.kv_indptr[row] : batch.kv_indptr[row + 1]]
        assert pages == own.tolist()
    assert found.levels[-1].last_page_len.tolist() == batch.kv_last_page_len[found.order].tolist()
    if max_entries is not None:
        assert all(level.num_entries <= max_entries for level in found.levels[:-1])
    assert found.num_pages < len(batch.kv_page_ids)


def test_a_shared_page_is_read_once_in_a_tree_of_two_levels() -> None:
    found = cascade(tree_batch(TREES["two levels"]), page_size=16)
    assert found is not None
    assert [len(level.page_ids) for level in found.levels] == [64, 3 * 40, 12 * 2]


def test_little_that_is_shared_is_not_worth_a_level() -> None:
    apart = make_batch(Case(sequences=((1, 600), (1, 700))))
    assert cascade(apart, page_size=16) is None
    little = make_batch(Case(sequences=tuple(Sequence_(1, 2000, "a", 16) for _ in range(4))))
    assert cascade(little, page_size=16) is None


def test_64_forks_of_8k_tokens_read_the_prefix_once() -> None:
    """What a step plans to read, in tokens of K and V per kv head."""
    own, prefix = 2 * 16, 8192
    batch = tree_batch([[(0, prefix // 16)]] * 64)
    found = cascade(batch, page_size=16)
    assert found is not None and found.num_pages * 16 == prefix + 64 * own
    apart = decode_work(batch, page_size=16, window=None, share_rows=1)
    assert apart.num_items == 64 * (prefix // SPLIT + 1)
    shared = decode_work(batch, page_size=16, window=None, share_rows=16)  # 4 heads a row
    assert shared.num_items == 64 // 16 * (prefix // SPLIT) + 64
    assert shared.tokens_read(batch.positions) == 4 * prefix + 64 * (own - 5)
    assert apart.tokens_read(batch.positions) == 64 * (prefix + own - 5)
    assert apart.tokens_read(batch.positions) > 15 * shared.tokens_read(batch.positions)
