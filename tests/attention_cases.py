"""Ragged attention steps for kernel tests: batches over pools that are NaN where nothing is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.kv_pool import PagedKVPool


class Sequence_(NamedTuple):
    """New tokens after cached ones; sequences with a `prefix` share its pages up to `shared`."""

    new: int
    cached: int
    prefix: str | None = None
    shared: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    sequences: tuple[tuple[int, int] | Sequence_, ...] = ()
    seed: int = 0


# of results beside the reference's
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
CASES = {
    "decode-ragged": Case(sequences=((1, 0), (1, 1), (1, 15), (1, 16), (1, 300))),
    "decode-gqa-1": Case(heads=2, kv_heads=2, sequences=((1, 40), (1, 3))),
    "decode-gqa-3": Case(heads=6, kv_heads=2, sequences=((1, 63), (1, 64))),
    "decode-gqa-8": Case(heads=8, kv_heads=1, sequences=((1, 257),)),
    "extend-ragged": Case(sequences=((2, 0), (19, 0), (33, 30), (3, 253))),
    "extend-gqa-1": Case(heads=2, kv_heads=2, sequences=((70, 5),)),
    "extend-gqa-3": Case(heads=3, kv_heads=1, sequences=((17, 16), (16, 16))),
    "extend-gqa-8": Case(heads=8, kv_heads=1, sequences=((9, 100),)),
    "mixed": Case(sequences=((1, 20), (12, 4), (1, 0), (2, 255))),
    "page-1": Case(page_size=1, sequences=((1, 30), (5, 28))),
    "page-32": Case(page_size=32, sequences=((1, 31), (5, 32))),
    "page-64": Case(page_size=64, sequences=((1, 64), (5, 60))),
    "head-96": Case(head_dim=96, sequences=((1, 20), (5, 14))),
    "head-128": Case(head_dim=128, sequences=((1, 20), (5, 14))),
    "head-256": Case(head_dim=256, sequences=((1, 40), (5, 33))),
    "window": Case(window=20, sequences=((1, 300), (30, 10), (7, 270))),
    "half": Case(dtype=torch.float16, sequences=((1, 70), (9, 70))),
    "bf16": Case(dtype=torch.bfloat16, sequences=((1, 270), (9, 70))),
    # with the tiles that devices run: those of float32 are smaller
    "bf16-head-128": Case(
        heads=4, kv_heads=1, head_dim=128, dtype=torch.bfloat16, sequences=((1, 270), (20, 250))
    ),
    "bf16-head-256": Case(
        heads=8, kv_heads=1, head_dim=256, dtype=torch.bfloat16, sequences=((1, 40), (9, 33))
    ),
    "empty-sequence": Case(sequences=((0, 20), (1, 20), (0, 3), (4, 4))),
    "nothing": Case(sequences=((0, 20),)),
}
FORKS = Case(
    sequences=(
        Sequence_(1, 530, "a", 512),
        Sequence_(1, 515, "a", 512),
        Sequence_(1, 300, "a", 256),
        Sequence_(1, 40),
        Sequence_(1, 511, "a", 496),  # its second part is full but its last page is not shared
        Sequence_(1, 256, "a", 256),
    )
)
TREE = Case(
    sequences=(
        *(Sequence_(1, 520 + i, "a", 512) for i in range(3)),
        *(Sequence_(1, 300 + 256 * (i % 2), "a", 256 + 256 * (i % 2)) for i in range(4)),
        Sequence_(1, 260, "b", 256),
        Sequence_(9, 300, "b", 256),
        Sequence_(1, 256, "b", 256),
    )
)


def _sequences(case: Case) -> list[Sequence_]:
    return [Sequence_(*sequence) for sequence in case.sequences]


def _page_lists(case: Case) -> tuple[list[list[int]], int]:
    """Pages of each sequence, shuffled over the pool, and how many the pool needs."""
    size = case.page_size
    counts = [max(1, -(-(s.new + s.cached) // size)) for s in _sequences(case)]
    free = list(np.random.default_rng(case.seed).permutation(sum(counts) + 2))
    prefixes: dict[str, list[int]] = {}
    lists = []
    for sequence, count in zip(_sequences(case), counts, strict=True):
        pages: list[int] = []
        if sequence.prefix is not None:
            known = prefixes.setdefault(sequence.prefix, [])
            while len(known) * size < sequence.shared:
                known.append(int(free.pop()))
            pages = known[: sequence.shared // size]
        lists.append(pages + [int(free.pop()) for _ in range(count - len(pages))])
    return lists, sum(counts) + 2


def make_batch(case: Case, *, like: Case | None = None) -> ForwardBatch:
    """The step of `case`; with `like`, sequences take the pages that they have in that case."""
    size = case.page_size
    lists, _ = _page_lists(like or case)
    positions, slots, qo, kv, pages, last = [], [], [0], [0], [], []
    for sequence, own in zip(_sequences(case), lists, strict=True):
        length = sequence.cached + sequence.new
        own = own[: max(1, -(-length // size))]
        for position in range(sequence.cached, length):
            positions.append(position)
            slots.append(own[position // size] * size + position % size)
        pages += own
        qo.append(len(positions))
        kv.append(len(pages))
        last.append((max(length, 1) - 1) % size + 1)
    return ForwardBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=np.array(positions, np.int32),
        kv_slots=np.array(slots, np.int32),
        qo_indptr=np.array(qo, np.int32),
        kv_indptr=np.array(kv, np.int32),
        kv_page_ids=np.array(pages, np.int32),
        kv_last_page_len=np.array(last, np.int32),
        sample_rows=np.empty(0, np.int32),
    )


def poisoned_pool(
    case: Case, device: str = "cpu", *, kv_dtype: torch.dtype | None = None
) -> PagedKVPool:
    """Random K and V where the case's cached tokens are, NaN everywhere else; two layers.

    kv_dtype: of the pool; None: the case's."""
    lists, num_pages = _page_lists(case)
    pool = PagedKVPool(
        num_layers=2,
        num_pages=num_pages,
        page_size=case.page_size,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=kv_dtype or case.dtype,
        device=device,
    )
    generator = torch.Generator().manual_seed(case.seed + 1)
    shape = (num_pages * case.page_size, case.kv_heads, case.head_dim)
    written = torch.zeros(shape[0], dtype=torch.bool)
    for sequence, pages in zip(_sequences(case), lists, strict=True):
        for position in range(sequence.cached):
            written[
                pages[position // case.page_size] * case.page_size + position % case.page_size
            ] = True
    slots = torch.arange(shape[0], device=device)
    for layer in range(2):
        sides = [torch.randn(shape, generator=generator) for _ in range(2)]
        for filled in sides:
            filled[~written] = torch.nan
        pool.write(layer, slots, *(filled.to(device) for filled in sides))
    return pool


def random_rows(
    case: Case, batch: ForwardBatch, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [T, H, D], k and v [T, G, D]."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    q, k, v = (
        torch.randn(batch.num_tokens, heads, case.head_dim, generator=generator)
        .to(case.dtype)
        .to(device)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    return q, k, v
