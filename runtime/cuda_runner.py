"""The CUDA runner: one upload and one graph launch per decode step, tokens chosen on the device.

A step of decodes only replays a graph that was captured for the next larger number of rows;
rows it has too many write nowhere and attend to nothing. Other steps launch kernel by kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.cuda.device import CudaDevice, Device, Graph
from palmette.kernels.cuda.flashinfer import FlashInferAttention
from palmette.kernels.cuda.logits import DeviceLogits, DeviceSampler
from palmette.kernels.cuda.staging import Section, Staging, layout_of, num_words
from palmette.kernels.cuda.triton_attention import AttentionPlan, Tiles, TritonAttention
from palmette.kernels.kv_pool import PagedKVPool

from .models.decoder import LoadTensor
from .models.fused_decoder import FusedDecoder

if TYPE_CHECKING:  # readers of files, which random weights do not need
    from .weights import Checkpoint

logger = logging.getLogger(__name__)

GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
_ITEMS_PER_ROW = 64  # of 256 keys each: what a graph holds of long contexts
_ITEMS = (1024, 8192)  # at least and at most per graph
_GRAPH_PAGES = 1 << 18
_ROW_ARRAYS = {  # what rows beyond the step's hold
    "token_ids": 0,
    "positions": 0,
    "slots": -1,
    "decode_rows": 0,
    "first_parts": 0,
    "num_parts": 0,
    "row_parts": 0,
    "row_order": 0,
    "row_places": 0,
}
_ROW_NUMBERS = {"decode_rows", "row_order", "row_places"}  # they hold themselves
_ITEM_ARRAYS = ("item_first", "item_count", "item_pages", "item_split", "item_rows")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KV_DTYPES = {**_DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: Graph
    layout: Mapping[str, Section]
    views: Mapping[str, Tensor]  # of the arrays that it reads
    logits: Tensor  # [rows, V] float32


class CudaRunner:
    """Implements `runner.ModelRunner`; a step at a time, `launch` does not wait for the device.

    dtype is that of weights and activations; kv_dtype that of K and V: auto is dtype, int8 and fp8
    keep a scale for each token and kv head. deterministic: a row's bits do not depend on
    batch, chunks, pages or cache. graph_rows: numbers of rows to capture graphs for, ascending;
    the graphs of shared pages are captured when they are first needed. load: gives the weights by
    name, on the device in dtype; None reads the checkpoint's. attention: triton or flashinfer.

    Raises:
        ValueError: a weight is not finite or a shape is not supported by the kernels.
    """

    name = "cuda"
    is_async = True

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        num_pages: int,
        page_size: int,
        dtype: str = "bf16",
        kv_dtype: str = "auto",
        deterministic: bool = True,
        share_pages: bool = True,
        attention: str = "triton",
        graph_rows: Sequence[int] = GRAPH_ROWS,
        device: Device | None = None,
        load: LoadTensor | None = None,
    ) -> None:
        config = checkpoint.config
        self._device: Device = CudaDevice() if device is None else device
        target, kind = self._device.torch_device, _DTYPES[dtype]

        def load_file(name: str) -> Tensor:
            array = checkpoint.weights.get(name).to_float32()
            return torch.tensor(array).to(device=target, dtype=kind)

        self.vocab_size = config.vocab_size
        self._max_positions = min(config.context_length, num_pages * page_size)
        self.pool = PagedKVPool(
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=kind if kv_dtype == "auto" else _KV_DTYPES[kv_dtype],
            device=target,
        )
        with torch.inference_mode():
            self._model = FusedDecoder(
                config,
                load_file if load is None else load,
                self._max_positions,
                deterministic=deterministic,
            )
            self._attention: TritonAttention | FlashInferAttention
            if attention == "flashinfer":
                self._attention = FlashInferAttention(
                    self.pool,
                    num_heads=config.num_heads,
                    sliding_window=config.sliding_window,
                    share=share_pages,
                )
            else:
                self._attention = TritonAttention(
                    self.pool,
                    num_heads=config.num_heads,
                    sliding_window=config.sliding_window,
                    deterministic=deterministic,
                    share=share_pages,
                    query_dtype=kind,
                )
            self._sampler = DeviceSampler(self._device)
            self._eager = Staging(self._device, 1 << 16)
            self._graph_rows = tuple(graph_rows)
            self._graphs: dict[tuple[int, Tiles], _Captured] = {}
            self._graph_staging: Staging | None = None
            self.graph_replays = 0  # steps that were one graph
            self.eager_steps = 0
            self._capture_all()

    def launch(self, batch: ForwardBatch) -> DeviceLogits:
        """Enqueues the step. ValueError when the arrays are inconsistent: nothing was computed."""
        self._check(batch)
        plan = self._attention.prepare(batch)
        with torch.inference_mode():
            rows = self._rows_of_graph(batch, plan)
            logits = (
                self._launch_eager(batch, plan) if rows is None else self._replay(batch, plan, rows)
            )
        return DeviceLogits(logits, self._sampler)

    def close(self) -> None:
        """Drops the graphs; other memory goes with the object."""
        self._graphs.clear()

    def _check(self, batch: ForwardBatch) -> None:
        for name, values, end in (
            ("token id", batch.token_ids, self.vocab_size),
            ("position", batch.positions, self._max_positions),
        ):
            if len(values) and (values.min() < 0 or values.max() >= end):
                raise ValueError(
                    f"a {name} is outside of 0..{end - 1}: {values.min()}..{values.max()}"
                )

    def _launch_eager(self, batch: ForwardBatch, plan: AttentionPlan) -> Tensor:
        self.eager_steps += 1
        arrays: dict[str, NDArray[Any]] = {
            "token_ids": batch.token_ids,
            "sample_rows": batch.sample_rows,
            **plan.arrays,
        }
        layout = layout_of(arrays)
        self._eager.upload(arrays, layout)
        views = self._eager.views(layout)
        self._attention.bind(plan, views)
        if batch.num_tokens == 0:
            return torch.empty(0, self.vocab_size, device=self._device.torch_device)
        return self._model.forward(
            views["token_ids"], views["positions"], views["sample_rows"], self._attention
        )

    def _rows_of_graph(self, batch: ForwardBatch, plan: AttentionPlan) -> int | None:
        """The number of rows of the graph that can run this step, None when none can."""
        num_rows = batch.num_tokens
        if plan.num_tiles or plan.num_decodes != num_rows or num_rows == 0:
            return None
        if not np.array_equal(batch.sample_rows, np.arange(num_rows)):
            return None
        rows = next((size for size in self._graph_rows if size >= num_rows), None)
        if rows is None or plan.num_parts > _num_items(rows):
            return None
        return rows if len(batch.kv_page_ids) <= self._num_pages_of(rows) else None

    def _replay(self, batch: ForwardBatch, plan: AttentionPlan, rows: int) -> Tensor:
        captured = self._graphs.get((rows, plan.tiles))
        if captured is None:
            captured = self._capture(rows, plan.tiles)
        arrays = {"token_ids": batch.token_ids, **plan.arrays}
        arrays = {name: arrays[name] for name in captured.layout}
        missing = rows - batch.num_tokens
        for name in arrays.keys() & _ROW_ARRAYS.keys():
            arrays[name] = np.pad(arrays[name], (0, missing), constant_values=_ROW_ARRAYS[name])
        for name in arrays.keys() & _ROW_NUMBERS:
            arrays[name][batch.num_tokens :] = np.arange(batch.num_tokens, rows)
        assert self._graph_staging is not None
        self._graph_staging.upload(arrays, captured.layout)
        self._attention.before_replay(plan, rows, captured.views)
        captured.graph.replay()
        self.graph_replays += 1
        return captured.logits[: batch.num_tokens]

    def _num_pages_of(self, rows: int) -> int:
        per_row = -(-self._max_positions // self.pool.page_size)
        return min(rows * per_row, _GRAPH_PAGES)

    def _empty_arrays(self, rows: int) -> dict[str, Int32Array]:
        """A graph's arrays at their full length, in the order of its layout; nothing to do."""
        arrays = {name: np.full(rows, fill, np.int32) for name, fill in _ROW_ARRAYS.items()}
        arrays.update({name: np.arange(rows, dtype=np.int32) for name in sorted(_ROW_NUMBERS)})
        arrays["num_items"] = np.zeros(1, np.int32)
        arrays.update({name: np.zeros(_num_items(rows), np.int32) for name in _ITEM_ARRAYS})
        arrays["page_ids"] = np.zeros(self._num_pages_of(rows), np.int32)
        known = ("token_ids", *self._attention.array_names)
        return {name: array for name, array in arrays.items() if name in known}

    def _capture_all(self) -> None:
        if not self._graph_rows:
            return
        started, before = time.monotonic(), self._device.memory_used()
        largest = layout_of(self._empty_arrays(self._graph_rows[-1]))
        self._graph_staging = Staging(self._device, num_words(largest))
        for rows in reversed(self._graph_rows):  # the largest first: the others fit its memory
            self._capture(rows, self._attention.tiles_alone)
        logger.info(
            "cuda graphs: %d, up to %d rows, %.0f MiB, captured in %.1f s",
            len(self._graphs),
            self._graph_rows[-1],
            (self._device.memory_used() - before) / 2**20,
            time.monotonic() - started,
        )

    def _capture(self, rows: int, tiles: Tiles) -> _Captured:
        staging = self._graph_staging
        assert staging is not None
        arrays = self._empty_arrays(rows)
        layout = layout_of(arrays)
        staging.upload(arrays, layout)
        views = staging.views(layout)
        plan = self._attention.graph_plan(rows, tiles, arrays)
        self._attention.before_replay(plan, rows, views)
        results: list[Tensor] = []

        def step() -> None:
            self._attention.bind(plan, views)
            logits = self._model.forward(
                views["token_ids"], views["positions"], None, self._attention
            )
            if results:
                results[0].copy_(logits)
            else:
                results.append(logits)

        step()  # compiles the kernels; on padding only, so nothing is written
        results[0] = torch.empty_like(results[0])
        graph = self._device.capture(step)
        captured = _Captured(graph, layout, views, results[0])
        self._graphs[rows, tiles] = captured
        return captured


def graph_rows_up_to(max_rows: int) -> tuple[int, ...]:
    """The sizes of `GRAPH_ROWS` that steps of up to `max_rows` decodes can use."""
    smaller = [rows for rows in GRAPH_ROWS if rows < max_rows]
    return (*smaller, *GRAPH_ROWS[len(smaller) : len(smaller) + 1])


def _num_items(rows: int) -> int:
    """How many items of attention the graph of so many rows holds."""
    return min(max(_ITEMS[0], rows * _ITEMS_PER_ROW), _ITEMS[1])
