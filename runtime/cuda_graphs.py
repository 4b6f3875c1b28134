"""Decode steps as CUDA graphs: one per number of rows, captured at start, replayed in one launch.

A step takes the graph for the next larger number of rows; the rows it has too many write nowhere
and attend to nothing. A step that fits no graph is launched kernel by kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.cuda.device import Device, Graph
from palmette.kernels.cuda.feed import feed_tokens
from palmette.kernels.cuda.flashinfer import FlashInferAttention
from palmette.kernels.cuda.kept_work import ROOM
from palmette.kernels.cuda.triton_attention import AttentionPlan, Tiles, TritonAttention

from .cuda_inputs import ITEM_ARRAYS, NAMES, GraphInputs
from .models.config import ModelConfig
from .models.fused_decoder import FusedDecoder

logger = logging.getLogger(__name__)

GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_ITEMS_PER_ROW = 64  # of 256 keys each: what a graph holds of long contexts
_ITEMS = (1024, 8192)  # at least and at most per graph
_GRAPH_PAGES = 1 << 18

CaptureProgress = Callable[[int, int], None]  # graphs captured, of how many


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    views: Mapping[str, Tensor]  # of the arrays that it reads
    logits: Tensor  # [rows, V] float32


class DecodeGraphs:
    """The graphs of one model. They share their memory and one set of inputs.

    rows: numbers of rows, ascending. The graphs of steps with shared pages are captured when they
    are first needed; a graph for which there is no memory is done without. is_alone: off, where
    other ranks have the same graphs: a call that is captured on one must be so on all, and then
    what would be done without raises.
    """

    def __init__(
        self,
        device: Device,
        model: FusedDecoder,
        attention: TritonAttention | FlashInferAttention,
        *,
        chosen: Tensor,
        rows: Sequence[int],
        max_positions: int,
        progress: CaptureProgress | None = None,
        is_alone: bool = True,
    ) -> None:
        self._device = device
        self._is_alone = is_alone
        self._model = model
        self._attention = attention
        self._chosen = chosen
        self._rows = tuple(rows)
        page_size = attention.pool.page_size
        self._pages_per_row = -(-max_positions // page_size) + ROOM // page_size
        self._graphs: dict[tuple[int, Tiles], _Captured | None] = {}
        self._inputs = GraphInputs(device, {size: self._lengths(size) for size in rows})
        self._newest_plan: AttentionPlan | None = None
        self._newest_rows: int | None = None  # of the graph for it
        self._logits: Tensor | None = None  # [most rows, V] float32: what all graphs write
        self.num_bytes = 0  # of device memory
        self.num_replays = 0
        self.newest: Graph | None = None  # that was replayed
        self._results = (chosen, chosen)  # of it
        self.is_on = True  # off: every step is launched kernel by kernel
        self._may_capture = True
        if rows:
            self._capture_all(progress)

    def __len__(self) -> int:
        return sum(captured is not None for captured in self._graphs.values())

    def close(self) -> None:
        self._graphs.clear()

    def capture_shared(self) -> None:
        """The graphs of steps with shared pages, where those are others."""
        with torch.inference_mode():
            for tiles in self._attention.tiles_shared:
                for rows in reversed(self._rows):
                    if rows > 1 and (rows, tiles) not in self._graphs:
                        self._capture(rows, tiles)

    def replay(
        self, batch: ForwardBatch, plan: AttentionPlan, sources: Int32Array
    ) -> tuple[Tensor, Tensor] | None:
        """Logits [T, V] and positions [T] on the device, the same tensors for steps that follow
        each other in one graph; None when no graph can run the step."""
        rows = self._rows_for(batch, plan)
        if rows is None:
            return None
        key = rows, plan.tiles
        if key not in self._graphs:
            self._capture(*key)
        captured = self._graphs[key]
        if captured is None:
            return None
        self._inputs.put(rows, plan, batch, sources)
        self._attention.before_replay(plan, rows, captured.views)
        captured.graph.replay()
        self.num_replays += 1
        if self.newest is not captured.graph or len(self._results[0]) != batch.num_tokens:
            self.newest = captured.graph
            self._results = captured.logits[: batch.num_tokens], captured.views["positions"]
        return self._results

    def _rows_for(self, batch: ForwardBatch, plan: AttentionPlan) -> int | None:
        num_rows = batch.num_tokens
        if not self.is_on or plan.num_tiles or plan.num_decodes != num_rows or num_rows == 0:
            return None
        if plan.kept is not None and plan is self._newest_plan:
            return self._newest_rows
        rows = next((size for size in self._rows if size >= num_rows), None)
        if not np.array_equal(batch.sample_rows, np.arange(num_rows)):
            rows = None
        elif rows is not None and (
            plan.num_parts > _num_items(rows)
            or len(plan.arrays["page_ids"]) > self._num_pages(rows)
        ):
            rows = None
        self._newest_plan, self._newest_rows = plan, rows
        return rows

    def _num_pages(self, rows: int) -> int:
        return min(rows * self._pages_per_row, _GRAPH_PAGES)

    def _lengths(self, rows: int) -> dict[str, int]:
        """Of the arrays of a graph of so many rows."""
        lengths = {
            **dict.fromkeys(NAMES, rows),
            **dict.fromkeys(ITEM_ARRAYS, _num_items(rows)),
            "num_items": 1,
            "page_ids": self._num_pages(rows),
        }
        known = ("token_ids", "sources", *self._attention.array_names)
        return {name: length for name, length in lengths.items() if name in known}

    def _capture_all(self, progress: CaptureProgress | None) -> None:
        started, before = time.monotonic(), self._device.memory_used()
        for done, rows in enumerate(reversed(self._rows)):  # the others fit the largest's memory
            if progress is not None:
                progress(done, len(self._rows))
            self._capture(rows, self._attention.tiles_alone)
        if progress is not None:
            progress(len(self._rows), len(self._rows))
        self.num_bytes = self._device.memory_used() - before
        logger.info(
            "cuda graphs: %d of %d, up to %d rows, %.0f MiB, captured in %.1f s",
            len(self),
            len(self._rows),
            max((rows for (rows, _), one in self._graphs.items() if one is not None), default=0),
            self.num_bytes / 2**20,
            time.monotonic() - started,
        )

    def _capture(self, rows: int, tiles: Tiles) -> None:
        self._graphs[rows, tiles] = None
        if not self._may_capture:
            return
        try:
            self._graphs[rows, tiles] = self._captured(rows, tiles)
        except torch.OutOfMemoryError:
            if not self._is_alone:
                raise
            logger.warning(
                "cuda graphs: no memory for %d rows, which run without; "
                "a smaller --memory-fraction or --max-running leaves more",
                rows,
            )

    def _captured(self, rows: int, tiles: Tiles) -> _Captured | None:
        """None when CUDA refused. What the kernels raise without a capture is raised."""
        arrays, views = self._inputs.clear(rows)
        plan = self._attention.graph_plan(rows, tiles, arrays)
        self._attention.before_replay(plan, rows, views)
        warm: list[Tensor] = []  # what the first run gives
        kept: list[Tensor] = []  # where the graph writes

        def step() -> None:
            self._attention.bind(plan, views)
            token_ids = feed_tokens(
                views["token_ids"],
                views["sources"],
                self._chosen,
                lists=views if "row_pages" in views else None,
                page_size=self._attention.pool.page_size,
            )
            logits = self._model.forward(token_ids, views["positions"], None, self._attention)
            if kept:
                kept[0].copy_(logits)
            else:
                warm.append(logits)

        self._device.submit(step)  # compiles the kernels; on padding only: nothing is written
        done = self._device.event()
        done.record()
        done.synchronize()
        example = warm.pop()
        kept.append(self._logits_of(example)[:rows])
        self._device.submit(lambda: kept[0].copy_(example))  # loads the kernel of the copy
        try:
            graph = self._device.capture(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # steps run without, which only takes longer
            if not self._is_alone:
                raise
            self._may_capture = False
            logger.error("cuda graphs: %d rows were not captured, no more are: %s", rows, error)
            return None
        return _Captured(graph, views, kept[0])

    def _logits_of(self, example: Tensor) -> Tensor:
        """Memory for logits like these: that of the largest graph so far."""
        if self._logits is None or len(self._logits) < len(example):
            self._logits = torch.empty_like(example)
        return self._logits


def graph_rows_up_to(max_rows: int) -> tuple[int, ...]:
    """The sizes of `GRAPH_ROWS` that steps of up to `max_rows` decodes can use."""
    smaller = [rows for rows in GRAPH_ROWS if rows < max_rows]
    return (*smaller, *GRAPH_ROWS[len(smaller) : len(smaller) + 1])


def graph_bytes(model: ModelConfig, rows: Sequence[int]) -> int:
    """What the graphs of so many rows are going to take, about: logits and the partial sums of
    attention of the largest, whose memory the others use as well."""
    if not rows:
        return 0
    parts = _num_items(max(rows)) * model.num_heads * (model.head_dim + 2)
    return 4 * (parts + 3 * max(rows) * model.vocab_size)  # logits: made, widened, kept


def _num_items(rows: int) -> int:
    """How many items of attention the graph of so many rows holds."""
    return min(max(_ITEMS[0], rows * _ITEMS_PER_ROW), _ITEMS[1])
