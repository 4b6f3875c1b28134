"""What the graphs of decodes read: one buffer on the device for all of them, and what it holds.

Sections lie in the order in which they change, so that one copy from the start brings a step what
it needs and little that the device has:

    each step | with a new part of attention | with other rows

The pages that rows begin are put into their lists on the device (`feed_tokens`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.cuda.device import Device
from palmette.kernels.cuda.staging import Section, Staging, layout_of, num_words
from palmette.kernels.cuda.triton_attention import AttentionPlan

ITEM_ARRAYS = ("item_first", "item_count", "item_pages", "item_split", "item_rows")
_EACH_STEP = ("token_ids", "sources", "positions", "slots")
_NEW_PARTS = ("num_items", "num_parts", *ITEM_ARRAYS)
_OTHER_ROWS = ("decode_rows", "first_parts", "row_parts", "row_order", "row_places", "row_pages")
NAMES = (*_EACH_STEP, *_NEW_PARTS, *_OTHER_ROWS, "page_ids")
_ROW_ARRAYS = (*_EACH_STEP, "num_parts", *_OTHER_ROWS)
_PADDING = {"sources": -1, "slots": -1, "row_pages": -1}  # of rows beyond the step's; others: 0
_ROW_NUMBERS = ("decode_rows", "row_order", "row_places")  # there they hold themselves


class GraphInputs:
    """Inputs of graphs, of which one is replayed at a time.

    lengths: by number of rows, of each array that the graphs take, in the order of `NAMES`.
    """

    def __init__(self, device: Device, lengths: Mapping[int, Mapping[str, int]]) -> None:
        self._layouts: dict[int, Mapping[str, Section]] = {
            rows: layout_of({name: np.empty(length, np.int32) for name, length in own.items()})
            for rows, own in lengths.items()
        }
        self._words = np.zeros(max(map(num_words, self._layouts.values()), default=0), np.int32)
        self._parts = {  # of `_words`, as the device has them
            rows: {n: self._words[s.start : s.start + s.num_words] for n, s in layout.items()}
            for rows, layout in self._layouts.items()
        }
        self._staging = Staging(device, len(self._words))
        self._held: AttentionPlan | None = None  # what the device has
        self._held_rows = self._held_steps = self._held_version = 0

    def clear(self, rows: int) -> tuple[Mapping[str, Int32Array], Mapping[str, Tensor]]:
        """Upload nothing to do; returns the arrays at full length, on the host and the device."""
        layout = self._layouts[rows]
        self._held = None
        self._pad(rows)
        self._staging.upload_front(self._words[: num_words(layout)])
        return self._parts[rows], self._staging.views(layout)

    def put(self, rows: int, plan: AttentionPlan, batch: ForwardBatch, sources: Int32Array) -> None:
        """Upload a step of decodes for a graph of `rows` rows: what the device has not, in one
        copy, which is not waited for."""
        kept, parts, num_rows = plan.kept, self._parts[rows], batch.num_tokens
        if not self._has_rows(rows, plan):
            self._pad(rows)
            given = {"token_ids": batch.token_ids, "sources": sources, **plan.arrays}
            end = self._put([name for name in parts if name in given], rows, given)
        else:
            assert kept is not None
            parts["token_ids"][:num_rows] = batch.token_ids
            parts["sources"][:num_rows] = sources
            parts["positions"][:num_rows] = plan.arrays["positions"]
            parts["slots"][:num_rows] = plan.arrays["slots"]
            end = self._layouts[rows]["slots"].start + rows
            if kept.version != self._held_version:
                end = self._put(_NEW_PARTS, rows, plan.arrays)
        self._staging.upload_front(self._words[:end])
        self._held, self._held_rows = plan, rows
        if kept is not None:
            self._held_steps, self._held_version = kept.num_steps, kept.version

    def _has_rows(self, rows: int, plan: AttentionPlan) -> bool:
        """Whether the device has the step before this one, of the same rows."""
        kept = plan.kept
        if kept is None or plan is not self._held or rows != self._held_rows:
            return False
        return kept.num_steps == self._held_steps + 1

    def _pad(self, rows: int) -> None:
        """No row does anything, and there are no items."""
        for name, part in self._parts[rows].items():
            if name in _ROW_NUMBERS:
                part[:] = np.arange(rows)
            elif name in _ROW_ARRAYS or name == "num_items":
                part[:] = _PADDING.get(name, 0)

    def _put(self, names: Sequence[str], rows: int, given: Mapping[str, Int32Array]) -> int:
        """Returns the end of what was put, in words; names in order."""
        parts = self._parts[rows]
        for name in names:
            parts[name][: len(given[name])] = given[name]
        return self._layouts[rows][names[-1]].start + len(given[names[-1]])
