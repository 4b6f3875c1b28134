"""A plan that is kept from step to step is the plan that is made anew."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.cuda.kept_work import ROOM
from palmette.kernels.cuda.triton_attention import AttentionPlan, TritonAttention
from palmette.kernels.cuda.work import SPLIT
from palmette.kernels.kv_pool import PagedKVPool

NUM_TOKENS = 1 << 16  # of the pool


@dataclass
class Row:
    pages: list[int]
    length: int  # with the token of the step


class Walk:
    """Sequences that decode, of which some join, leave, fork or stand still between steps."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        self.run = 0
        self.begin()

    def begin(self) -> None:
        self.free = list(range(NUM_TOKENS // self.page_size))
        self.random.shuffle(self.free)
        self.run += 1
        self.rows = [self.new_row(self.random.randrange(1, 700)) for _ in range(3)]

    def new_row(self, length: int) -> Row:
        return Row([self.free.pop() for _ in range(-(-length // self.page_size))], length)

    def fork(self, source: Row) -> Row:
        """It shares whole pages; or all of them, with what both write."""
        if self.random.random() < 0.3:
            return Row(source.pages, source.length)  # the same list, from now on
        shared = self.random.randrange(source.length) // self.page_size
        own = self.new_row(self.random.randrange(1, 300))
        return Row(source.pages[:shared] + own.pages, shared * self.page_size + own.length)

    def change(self) -> None:
        self.run += 1
        kind = self.random.choice(("join", "leave", "fork", "fork", "order", "again"))
        if kind == "join" or not self.rows:
            self.rows.append(self.new_row(self.random.randrange(1, 700)))
        elif kind == "leave":
            self.rows.pop(self.random.randrange(len(self.rows)))
        elif kind == "fork":
            self.rows += [self.fork(self.random.choice(self.rows)) for _ in range(2)]
        elif kind == "order":
            self.random.shuffle(self.rows)
        else:
            return  # the same step again, as after one that failed
        del self.rows[9:]
        self.grow()

    def grow(self) -> None:
        for row in self.rows:
            row.length += 1
        for row in self.rows:
            while len(row.pages) * self.page_size < row.length:
                row.pages.append(self.free.pop())

    def batch(self) -> ForwardBatch:
        lists = [row.pages[: -(-row.length // self.page_size)] for row in self.rows]
        lengths = np.array([row.length for row in self.rows], np.int32)
        last = np.array([pages[-1] for pages in lists], np.int32)
        rows = np.arange(len(lists) + 1, dtype=np.int32)
        return ForwardBatch(
            token_ids=rows[:-1],
            positions=lengths - 1,
            kv_slots=last * self.page_size + (lengths - 1) % self.page_size,
            qo_indptr=rows,
            kv_indptr=np.cumsum([0, *map(len, lists)]).astype(np.int32),
            kv_page_ids=np.concatenate(lists).astype(np.int32),
            kv_last_page_len=(lengths - 1) % self.page_size + 1,
            sample_rows=rows[:-1],
            run=np.array([self.run], np.int32),
        )


def meaning(plan: AttentionPlan, row_pages: np.ndarray, page_size: int) -> dict[str, Any]:
    """What the kernels do with a plan: places, and the order of items, are left out."""
    a = plan.arrays
    parts: dict[tuple[int, int], Any] = {}
    places = set()
    for item in range(int(a["num_items"][0])):
        first, count, split = (int(a[f"item_{name}"][item]) for name in ("first", "count", "split"))
        members = a["item_rows"][first : first + count].tolist()
        end = min((split + 1) * SPLIT, max(int(a["positions"][row]) + 1 for row in members))
        start = int(a["item_pages"][item])
        read = a["page_ids"][start + split * SPLIT // page_size : start + -(-end // page_size)]
        for row in members:
            parts[row, split] = sorted(members), read.tolist()
            places.add(int(a["row_parts"][row]) + split)
    assert len(places) == len(parts)  # each has its own
    assert max(places) < plan.num_parts
    order = a["decode_rows"].tolist()
    firsts, counts = a["first_parts"].tolist(), a["num_parts"].tolist()
    for row, first, count in zip(order, firsts, counts, strict=True):
        splits = sorted(split for owner, split in parts if owner == row)
        assert [int(a["row_parts"][row]) + split for split in splits] == list(
            range(first, first + count)
        )
    ends = a["positions"] // page_size + 1
    return {
        "parts": parts,
        "rows": order,
        "slots": a["slots"].tolist(),
        "positions": a["positions"].tolist(),
        "lists": [
            a["page_ids"][start : start + end].tolist()
            for start, end in zip(row_pages.tolist(), ends.tolist(), strict=True)
        ],
        "tiles": plan.tiles,
        "num_tiles": plan.num_tiles,
    }


def attention(page_size: int, **options: Any) -> TritonAttention:
    pool = PagedKVPool(
        num_layers=1, num_pages=NUM_TOKENS // page_size, page_size=page_size,
        num_kv_heads=1, head_dim=16, dtype=torch.bfloat16, device="cpu",
    )  # fmt: skip
    return TritonAttention(pool, num_heads=2, **options)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("page_size", "share"), [(1, True), (16, True), (32, False), (64, True)])
def test_hundreds_of_random_steps(page_size: int, share: bool, window: int | None) -> None:
    walk = Walk(page_size, seed=page_size)
    options = {"share": share, "sliding_window": window, "deterministic": False}
    kept, anew = attention(page_size, **options), attention(page_size, **options)
    num_kept, newest = 0, None
    for _ in range(400):
        if not walk.rows or len(walk.free) * page_size < NUM_TOKENS // 4:
            walk.begin()
        elif walk.random.random() < 0.05:
            walk.change()
        else:
            walk.grow()
        if not walk.rows:
            continue
        batch = walk.batch()
        plan = kept.prepare(batch)
        other = anew.prepare(replace(batch, run=np.zeros(1, np.int32)))
        assert meaning(plan, plan.arrays["row_pages"], page_size) == meaning(
            other, batch.kv_indptr[:-1], page_size
        )
        num_kept += plan is newest
        newest = plan
    assert num_kept > 250


def test_a_plan_is_kept_as_long_as_it_has_room() -> None:
    walk = Walk(16, seed=1)
    kept, newest, changes = attention(16), None, 0
    for _ in range(3 * ROOM):
        plan = kept.prepare(walk.batch())
        changes += plan is not newest
        newest = plan
        walk.grow()
    assert changes == 3


@pytest.mark.parametrize("name", ["positions", "kv_slots", "run"])
def test_what_does_not_go_on_is_planned_anew(name: str) -> None:
    """And what contradicts itself is refused, as if no plan had been kept."""
    walk = Walk(16, seed=2)
    kept = attention(16)
    newest = kept.prepare(walk.batch())
    walk.grow()
    batch = walk.batch()
    other = getattr(batch, name).copy()
    other[0] += NUM_TOKENS
    bad = replace(batch, **{name: other})
    if name == "run":
        assert kept.prepare(bad) is not newest
    else:
        with pytest.raises(ValueError):
            kept.prepare(bad)
        assert kept.prepare(batch) is not newest
