"""The work of one attention step as flat arrays, made on the host from a `ForwardBatch`.

Rows that are alone in their sequence decode; longer runs of rows extend. A few new rows behind a
long context would be a program or two for each kv head that walk over all of it: those decode,
too, a part of the context each (`in_parts`).

Legend: T rows of the step, B decode rows, I items, N tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from palmette.kernels.batch import ForwardBatch, Int32Array

_FEW_ROWS = 64  # of a sequence, for which an extend has too few programs
_LONG_PARTS = 8  # of a context that is worth cutting
_MOST_PARTS = 4096  # of all rows that are cut: 64 MB of 4096 values each
_PROGRAMS = 66  # of an extend that has enough: half of an H200's processors
SPLIT = 256  # keys per part of a decode; a multiple of every page size and tile


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """What `paged_decode` reads; see its docstring."""

    rows: Int32Array  # [B] rows of the step
    first_parts: Int32Array  # [B]
    num_parts: Int32Array  # [B]
    row_parts: Int32Array  # [T] first part of that row, less its first split
    num_shared: int  # items of more than one row
    item_first: Int32Array  # [I]
    item_count: Int32Array  # [I]
    item_pages: Int32Array  # [I]
    item_split: Int32Array  # [I]
    item_rows: Int32Array  # [I or more]

    @property
    def num_items(self) -> int:
        return len(self.item_first)

    @property
    def total_parts(self) -> int:
        return int(self.num_parts.sum())

    def tokens_read(self, positions: Int32Array) -> int:
        """Keys that the items read, per kv head: the traffic of the step."""
        leaders = self.item_rows[self.item_first]
        ends = np.minimum((self.item_split + 1) * SPLIT, positions[leaders] + 1)
        return int((ends - self.item_split * SPLIT).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendWork:
    """What `paged_extend` reads, longest tiles first."""

    rows: Int32Array  # [N]
    tokens: Int32Array  # [N]
    pages: Int32Array  # [N]
    starts: Int32Array  # [N] a multiple of SPLIT
    ends: Int32Array  # [N]


def decode_work(
    batch: ForwardBatch,
    *,
    page_size: int,
    window: int | None,
    share_rows: int,
    spare_parts: int = 0,
    cut: NDArray[np.bool_] | None = None,
) -> DecodeWork:
    """Work of the rows that are alone in their sequence, and of all rows of the `cut` sequences.

    share_rows: how many rows one item may serve; 1 reads a shared page once per row. spare_parts:
    places for more parts behind those of each row.
    """
    lengths = np.diff(batch.qo_indptr)
    chosen = lengths == 1 if cut is None else (lengths == 1) | cut
    rows = np.flatnonzero(np.repeat(chosen, lengths))
    positions = batch.positions[rows]
    pages = np.repeat(batch.kv_indptr[:-1][chosen], lengths[chosen])
    first_split = _first_split(positions, window)
    num_parts = positions // SPLIT + 1 - first_split
    first_items = np.cumsum(num_parts) - num_parts  # if none had more than one row
    first_parts = first_items + spare_parts * np.arange(len(rows))
    row_parts = np.zeros(batch.num_tokens, np.int32)
    row_parts[rows] = first_parts - first_split
    owner = np.repeat(np.arange(len(rows)), num_parts)
    split = np.arange(len(owner)) + (first_split - first_items)[owner]
    leaders, members, counts = (
        _groups(batch, pages, positions, owner, split, page_size=page_size, share_rows=share_rows)
        if share_rows > 1
        else (np.arange(len(owner)), np.arange(len(owner)), np.ones(len(owner), np.int64))
    )
    return DecodeWork(
        rows=rows.astype(np.int32),
        first_parts=first_parts.astype(np.int32),
        num_parts=num_parts.astype(np.int32),
        row_parts=row_parts,
        num_shared=int((counts > 1).sum()),
        item_first=(np.cumsum(counts) - counts).astype(np.int32),
        item_count=counts.astype(np.int32),
        item_pages=pages[owner[leaders]].astype(np.int32),
        item_split=split[leaders].astype(np.int32),
        item_rows=rows[owner[members]].astype(np.int32),
    )


def _first_split(positions: NDArray[np.int32], window: int | None) -> NDArray[np.int32]:
    if window is None:
        return np.zeros(len(positions), np.int32)
    return np.maximum(positions - window + 1, 0) // SPLIT


def _groups(
    batch: ForwardBatch,
    pages: NDArray[np.int32],
    positions: NDArray[np.int32],
    owner: NDArray[np.intp],
    split: NDArray[np.intp],
    *,
    page_size: int,
    share_rows: int,
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
    """(leader, members in order, member counts) of the items.

    Parts are one item when they are the same split, not the newest of a row, over the same page
    ids.
    In a prefix tree rows that share anything share their first page: that is looked at first.
    """
    per_split = SPLIT // page_size
    firsts = batch.kv_page_ids[pages]
    order = np.argsort(firsts, kind="stable")
    is_same = firsts[order][1:] == firsts[order][:-1]
    joined = np.zeros(len(pages), np.bool_)
    joined[order[1:][is_same]] = True
    joined[order[:-1][is_same]] = True
    whole_splits = positions // SPLIT  # of a row: those before that of its newest key
    candidate = split < np.where(joined, whole_splits, 0)[owner]
    candidates = np.flatnonzero(candidate)
    if len(candidates) < 2:
        everything = np.arange(len(owner))
        return everything, everything, np.ones(len(owner), np.int64)
    starts = pages[owner[candidates]] + split[candidates] * per_split
    windows = np.lib.stride_tricks.sliding_window_view(batch.kv_page_ids, per_split)
    order, begins, counts = _equal_runs(windows[starts], split[candidates], share_rows)
    rest = np.flatnonzero(~candidate)
    members = np.concatenate((candidates[order], rest))
    counts = np.concatenate((counts, np.ones(len(rest), np.int64)))
    begins = np.concatenate((begins, len(order) + np.arange(len(rest))))
    return members[begins], members, counts


def _equal_runs(
    lists: Int32Array, split: NDArray[np.intp], longest: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.int64]]:
    """(order, run starts in it, run lengths): equal rows of `lists` in the same split together.

    Sorted by split and last page, which decide in a prefix tree; where they do not, the
    neighbours that differ are parted all the same.
    """
    keys = (split.astype(np.int64) << 32) | lists[:, -1]
    order = np.argsort(keys, kind="stable")
    keys, rows = keys[order], lists[order]
    differs = keys[1:] != keys[:-1]
    same = np.flatnonzero(~differs)
    differs[same] = (rows[same] != rows[same + 1]).any(axis=1)
    group_starts = np.append(0, np.flatnonzero(differs) + 1)
    lengths = np.diff(np.append(group_starts, len(order)))
    place = np.arange(len(order)) - np.repeat(group_starts, lengths)
    begins = np.flatnonzero(place % longest == 0)
    return order, begins, np.diff(np.append(begins, len(order)))


def in_parts(
    batch: ForwardBatch, *, tile_tokens: int, num_kv_heads: int
) -> NDArray[np.bool_] | None:
    """Which sequences of several rows had better decode; None: none. Without a window only."""
    lengths = np.diff(batch.qo_indptr)
    several = lengths > 1
    tiles = int((-(-lengths[several] // tile_tokens)).sum())
    if not 0 < tiles * num_kv_heads < _PROGRAMS:
        return None
    last = batch.positions[np.maximum(batch.qo_indptr[1:] - 1, 0)]
    parts = lengths * (last // SPLIT + 1)
    cut = several & (lengths <= _FEW_ROWS) & (last >= _LONG_PARTS * SPLIT)
    cut &= np.cumsum(np.where(cut, parts, 0)) <= _MOST_PARTS
    return cut if cut.any() else None


def extend_work(
    batch: ForwardBatch,
    *,
    tile_tokens: int,
    window: int | None,
    with_single: bool = False,
    cut: NDArray[np.bool_] | None = None,
) -> ExtendWork:
    """Tiles of the sequences with several rows, but the `cut` ones; with_single: of those with one
    row, too."""
    lengths = np.diff(batch.qo_indptr)
    wanted = lengths > (0 if with_single else 1)
    chosen = np.flatnonzero(wanted if cut is None else wanted & ~cut)
    num_tiles = -(-lengths[chosen] // tile_tokens)
    owner = np.repeat(chosen, num_tiles)
    index = np.arange(len(owner)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    rows = batch.qo_indptr[owner] + index * tile_tokens
    stops = np.minimum(rows + tile_tokens, batch.qo_indptr[owner + 1])
    lows, highs = _extremes(batch.positions, rows, stops)
    ends = highs + 1
    order = np.argsort(-ends, kind="stable")
    return ExtendWork(
        rows=rows[order].astype(np.int32),
        tokens=(stops - rows)[order].astype(np.int32),
        pages=batch.kv_indptr[owner][order].astype(np.int32),
        starts=(_first_split(lows, window) * SPLIT)[order].astype(np.int32),
        ends=ends[order].astype(np.int32),
    )


def _extremes(
    positions: Int32Array, rows: NDArray[np.intp], stops: NDArray[np.intp]
) -> tuple[Int32Array, Int32Array]:
    """Lowest and highest position of each run of rows; runs may leave gaps between them."""
    if len(rows) == 0:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    bounds = np.stack((rows, stops), axis=1).reshape(-1)
    padded = np.append(positions, np.int32(0))  # a stop may be the end of the array
    return np.minimum.reduceat(padded, bounds)[::2], np.maximum.reduceat(padded, bounds)[::2]
