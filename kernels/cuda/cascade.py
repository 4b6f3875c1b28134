"""Which pages of a decode step several rows share, as levels of a cascade.

Rows are ordered so that those below one node of the prefix tree are neighbours. A level is a CSR
batch over that order: entry e is the rows qo_indptr[e] .. qo_indptr[e + 1], which all attend to
the level's pages of that entry; none for rows that share nothing there. The last level holds what
is a row's own. Attention of the levels, merged by log-sum-exp, is attention over everything.

Legend: B rows, E entries of a level, P pages of a level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from palmette.kernels.batch import ForwardBatch, Int32Array

MAX_SHARED_LEVELS = 2
MIN_GROUP_TOKENS = 512  # reads that a group must save to be worth an entry
MIN_SAVED = 0.2  # of all reads of the step, to be worth merging


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    qo_indptr: Int32Array  # [E + 1]
    kv_indptr: Int32Array  # [E + 1]
    page_ids: Int32Array  # [P]
    last_page_len: Int32Array  # [E] 0 where an entry has no pages

    @property
    def num_entries(self) -> int:
        return len(self.last_page_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    order: Int32Array  # [B] the step's rows in the levels' order
    levels: tuple[Level, ...]  # shared ones from the root down, then the rows' own

    @property
    def num_pages(self) -> int:
        """Pages that a step reads."""
        return sum(len(level.page_ids) for level in self.levels)


@dataclass(frozen=True, slots=True)
class _Group:
    depth: int
    rows: list[int]
    first: int  # pages first .. end of each of its rows are the same
    end: int


def cascade(
    batch: ForwardBatch, *, page_size: int, max_entries: int | None = None
) -> Cascade | None:
    """The levels of a step of decodes; None where reading shared pages once saves too little.

    max_entries: of a shared level; the groups that save least are given up. O(pages listed).
    """
    pages = [
        batch.kv_page_ids[start:stop]
        for start, stop in zip(batch.kv_indptr[:-1], batch.kv_indptr[1:], strict=True)
    ]
    firsts = batch.kv_page_ids[batch.kv_indptr[:-1]]
    if len(pages) < 2 or len(np.unique(firsts)) == len(firsts):
        return None
    order: list[int] = []
    groups = list(_groups(pages, list(range(len(pages))), (0, 0), 0, page_size, order))
    groups = _affordable(groups, len(pages), max_entries)
    saved = sum((len(group.rows) - 1) * (group.end - group.first) for group in groups)
    if saved < MIN_SAVED * len(batch.kv_page_ids):
        return None
    own = np.zeros(len(pages), np.int64)
    for group in groups:
        own[group.rows] = np.maximum(own[group.rows], group.end)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    depths = range(max(group.depth for group in groups) + 1)
    shared = [
        _shared_level([g for g in groups if g.depth == depth], pages, place, page_size)
        for depth in depths
    ]
    return Cascade(
        order=np.array(order, np.int32),
        levels=(*shared, _own_level(batch, pages, order, own)),
    )


def _groups(
    pages: list[Int32Array],
    rows: list[int],
    known: tuple[int, int],
    depth: int,
    page_size: int,
    order: list[int],
) -> Iterator[_Group]:
    """Groups among `rows`, which share their first known[1] pages, of which known[0] are in
    levels already; appends the rows to `order`. A row's last page is its own: it is written."""
    covered, same = known
    by_page: dict[int, list[int]] = {}
    for row in rows:
        if len(pages[row]) - 1 > same:
            by_page.setdefault(int(pages[row][same]), []).append(row)
    alone = [row for row in rows if len(pages[row]) - 1 <= same]
    for members in by_page.values():
        if len(members) == 1 or depth == MAX_SHARED_LEVELS:
            alone += members
            continue
        end = _common(pages, members, same)
        if (len(members) - 1) * (end - covered) * page_size >= MIN_GROUP_TOKENS:
            yield _Group(depth, members, covered, end)
            yield from _groups(pages, members, (end, end), depth + 1, page_size, order)
        else:
            yield from _groups(pages, members, (covered, end), depth, page_size, order)
    order += alone


def _common(pages: list[Int32Array], rows: list[int], start: int) -> int:
    """How many leading pages all `rows` have in common; `start` are known to be."""
    end = min(len(pages[row]) for row in rows) - 1
    first = pages[rows[0]][start:end]
    for row in rows[1:]:
        differs = first != pages[row][start : start + len(first)]
        place = int(differs.argmax()) if len(first) else 0
        if len(first) and differs[place]:
            first = first[:place]
    return start + len(first)


def _affordable(groups: list[_Group], num_rows: int, max_entries: int | None) -> list[_Group]:
    """The groups of which each level has room for, with the gaps between them."""
    if max_entries is None:
        return groups
    room = max(1, (max_entries - 1) // 2)
    kept: list[_Group] = []
    for depth in range(MAX_SHARED_LEVELS):
        level = [group for group in groups if group.depth == depth]
        level.sort(key=lambda g: (g.first - g.end) * (len(g.rows) - 1))
        kept += level[:room]
    covered = np.zeros(num_rows, np.int64)
    result = []
    for group in kept:  # a group whose parent was given up begins where its rows' levels end
        begin = int(covered[group.rows[0]])
        covered[group.rows] = group.end
        result.append(_Group(group.depth, group.rows, begin, group.end))
    return result


def _shared_level(
    groups: list[_Group], pages: list[Int32Array], place: np.ndarray, page_size: int
) -> Level:
    """Entries in the rows' order; rows in no group are entries without pages between them."""
    spans = sorted((int(place[group.rows].min()), group) for group in groups)
    qo, kv, listed, last = [0], [0], [], []

    def add(stop: int, own: Int32Array) -> None:
        if stop > qo[-1]:
            qo.append(stop)
            listed.append(own)
            kv.append(kv[-1] + len(own))
            last.append(page_size if len(own) else 0)

    nothing = np.empty(0, np.int32)
    for begin, group in spans:
        add(begin, nothing)
        add(begin + len(group.rows), pages[group.rows[0]][group.first : group.end])
    add(len(place), nothing)
    return _level(qo, kv, listed, last)


def _own_level(
    batch: ForwardBatch, pages: list[Int32Array], order: list[int], own: np.ndarray
) -> Level:
    listed = [pages[row][own[row] :] for row in order]
    kv = [0, *np.cumsum([len(part) for part in listed]).tolist()]
    return _level(range(len(order) + 1), kv, listed, batch.kv_last_page_len[order])


def _level(qo: object, kv: object, listed: list[Int32Array], last: object) -> Level:
    return Level(
        qo_indptr=np.array(qo, np.int32),
        kv_indptr=np.array(kv, np.int32),
        page_ids=np.concatenate(listed).astype(np.int32),
        last_page_len=np.array(last, np.int32),
    )
