"""The decode work of a run of steps, changed from each step to the next.

A row that is a token further has one more key in its newest part, which kernels see from its
position. What is written is what begins: a page, at the end of the row's list, and a part of the
next SPLIT keys, as an item of its own. There is room for both, for ROOM steps.

Legend: B rows, I items, P pages over all rows; the room included.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from palmette.kernels.batch import ForwardBatch, Int32Array

from .work import SPLIT, decode_work

ROOM = SPLIT  # steps, in which a row begins one part and SPLIT // page_size pages


class KeptWork:
    """Work of a step whose `run` is not 0; see `ForwardBatch`. The arrays are changed in place.

    `arrays` are what `paged_decode` reads, as `DecodeWork` has it, and row_pages [B]: where the
    list of each row begins in page_ids [P]. num_parts, num_items: as many as there may be.
    version: changes with the items; num_steps: since it was made.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        *,
        page_size: int,
        num_pages: int,
        window: int | None,
        share_rows: int,
    ) -> None:
        work = decode_work(
            batch, page_size=page_size, window=window, share_rows=share_rows, spare_parts=1
        )
        num_rows = len(work.rows)
        self._run = int(batch.run[0])
        self._page_size, self._pool_pages, self._window = page_size, num_pages, window
        self._num_items, self._num_members = work.num_items, len(work.item_rows)
        self.num_shared = work.num_shared
        self.num_parts = work.total_parts + num_rows
        self.num_items = work.num_items + num_rows
        self.version = self.num_steps = 0
        row_pages, page_ids = _page_lists(batch, room=ROOM // page_size)
        self._may_share = share_rows > 1 and _has_equal(page_ids[row_pages])

        def with_room(items: Int32Array) -> Int32Array:
            return np.append(items, np.zeros(num_rows, np.int32))

        self._positions, self._slots = batch.positions.copy(), batch.kv_slots.copy()
        self.arrays: Mapping[str, Int32Array] = {
            "slots": self._slots,
            "positions": self._positions,
            "num_items": np.array([work.num_items], np.int32),
            "num_parts": work.num_parts,
            "item_first": with_room(work.item_first),
            "item_count": with_room(work.item_count),
            "item_pages": with_room(row_pages[work.item_rows[work.item_first]]),
            "item_split": with_room(work.item_split),
            "item_rows": with_room(work.item_rows),
            "decode_rows": work.rows,
            "first_parts": work.first_parts,
            "row_parts": work.row_parts,
            "row_pages": row_pages,
            "page_ids": page_ids,
        }

    def advance(self, batch: ForwardBatch) -> bool:
        """Whether `batch` is the next step of the run; then the arrays are its work.

        False: they are of no use any more, and the batch may be of any kind.
        """
        positions, slots = self._positions, self._slots
        if batch.run[0] != self._run or self.num_steps == ROOM:
            return False
        positions += 1
        slots += 1
        if batch.positions.tobytes() != positions.tobytes():
            return False
        (begins,) = (positions % self._page_size == 0).nonzero()
        if len(begins) and not self._begin_pages(begins, batch.kv_slots.take(begins)):
            return False
        if self._window is not None and _some_end(positions - self._window + 1):
            return False
        self.num_steps += 1
        return batch.kv_slots.tobytes() == slots.tobytes()

    def _begin_pages(self, rows: NDArray[np.intp], slots: Int32Array) -> bool:
        """`rows` begin a page, at `slots`; False: those are not in the pool, or see below."""
        pages, rest = np.divmod(slots, self._page_size)
        if rest.any() or np.maximum.reduce(pages.view(np.uint32)) >= self._pool_pages:
            return False  # as uint32, so that negative ones are too large
        self._slots[rows] = slots
        positions, arrays = self._positions.take(rows), self.arrays
        index = positions // self._page_size
        arrays["page_ids"][arrays["row_pages"].take(rows) + index] = pages
        begins = positions % SPLIT == 0
        return not begins.any() or self._begin_parts(rows[begins], index[begins])

    def _begin_parts(self, rows: NDArray[np.intp], index: NDArray[np.int32]) -> bool:
        """`rows` begin a part with page number `index` of their lists.

        False: the part before it, which is full now, may be one that rows share.
        """
        arrays, num_rows = self.arrays, len(rows)
        if self._may_share and self._is_listed_twice(rows, index - 1):
            return False
        items = slice(self._num_items, self._num_items + num_rows)
        members = slice(self._num_members, self._num_members + num_rows)
        arrays["item_first"][items] = np.arange(members.start, members.stop)
        arrays["item_count"][items] = 1
        arrays["item_pages"][items] = arrays["row_pages"][rows]
        arrays["item_split"][items] = self._positions[rows] // SPLIT
        arrays["item_rows"][members] = rows
        arrays["num_parts"][rows] += 1
        self._num_items, self._num_members = items.stop, members.stop
        arrays["num_items"][0] = items.stop
        self.version += 1
        return True

    def _is_listed_twice(self, rows: NDArray[np.intp], index: NDArray[np.int32]) -> bool:
        """Whether another row may have the same page at `index` of its list; see `_groups`."""
        row_pages, page_ids = self.arrays["row_pages"], self.arrays["page_ids"]
        listed = page_ids.take(row_pages + index[:, None], mode="clip")  # room holds anything
        own = page_ids[row_pages[rows] + index]
        return bool((np.count_nonzero(listed == own[:, None], axis=1) > 1).any())


def _page_lists(batch: ForwardBatch, *, room: int) -> tuple[Int32Array, Int32Array]:
    """(row_pages [B], page_ids [P]): the lists of the batch with room behind each."""
    bounds = batch.kv_indptr
    row_pages = bounds[:-1] + room * np.arange(len(bounds) - 1, dtype=np.int32)
    page_ids = np.zeros(int(bounds[-1]) + room * len(row_pages), np.int32)
    starts, ends = bounds[:-1].tolist(), bounds[1:].tolist()
    for first, start, end in zip(row_pages.tolist(), starts, ends, strict=True):
        page_ids[first : first + end - start] = batch.kv_page_ids[start:end]
    return row_pages, page_ids


def _has_equal(values: Int32Array) -> bool:
    return len(np.unique(values)) < len(values)


def _some_end(starts: NDArray[np.int32]) -> bool:
    """Whether a window that begins at one of `starts` has just left a part."""
    return bool(((starts > 0) & (starts % SPLIT == 0)).any())
