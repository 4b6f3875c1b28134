"""Paged attention by FlashInfer (0.6, 0.7), behind `backend.AttentionBackend`; optional.

Its page layout and CSR arrays are ours. It chooses its splits by the whole batch, so the bits of
a row depend on the other rows: the choice where speed matters more than repeatability. Its
kernels are planned on the host once a step and run once a layer; steps of decodes over shared
pages take a cascade of them (`cascade`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.kv_pool import PagedKVPool
from palmette.kernels.reference import check_batch

from .cascade import MAX_SHARED_LEVELS, Cascade, Level, cascade
from .needs import FLASHINFER_HEAD_DIMS, flashinfer_lacks
from .triton_attention import AttentionPlan, Tiles

_LEAST_WORKSPACE = 128 << 20  # what its documentation recommends
_INTEGER_BYTES = 8 << 20  # of a wrapper's plan, as its constructor takes
_MAX_ROWS = 256  # of a graph
DTYPES = (torch.bfloat16, torch.float16)


def workspace_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, *, num_processors: int = 132
) -> int:
    """What its kernels may need for the parts of split sums, by the rule of its `PrefillPlan`.

    A plan takes a part of [cta, H, D + 1] float32 for each tile of rows, and in graphs for as many
    tiles as any step could have.
    """
    group = num_heads // num_kv_heads
    split = 2 * num_processors // num_kv_heads  # tiles up to which keys are split

    def cta(rows: int) -> int:
        if rows > 64 and head_dim < 256:
            return 128
        return 64 if rows > 16 else 16

    tiles = [split * 128]  # without graphs
    for entries in (_MAX_ROWS, _entries(_MAX_ROWS)):  # of the rows' own level, of a shared one
        size = cta((_MAX_ROWS - entries + 1) * group)
        most = -(-_MAX_ROWS * group // size) + entries - 1
        tiles.append(max(split, most) * size)
    needed = 4 * num_heads * (head_dim + 1) * max(tiles) + (1 << 20)
    return max(_LEAST_WORKSPACE, needed)


def flashinfer_bytes(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """Device memory of the wrappers, beside index arrays."""
    integers = 2 * (MAX_SHARED_LEVELS + 1) * _INTEGER_BYTES
    return workspace_bytes(num_heads, num_kv_heads, head_dim) + integers


def why_not(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why FlashInfer cannot serve K and V like these here; None when it can."""
    if head_dim not in FLASHINFER_HEAD_DIMS:
        return f"flashinfer has no kernels for head size {head_dim}"
    if dtype not in DTYPES:
        return f"flashinfer has no kernels for K and V in {str(dtype).removeprefix('torch.')}"
    return flashinfer_lacks()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferPlan(AttentionPlan):
    """`arrays` is what kernels read from the uploaded arrays; the rest is planned on the host.

    levels: shared ones first, all of decodes; the last alone where nothing is shared. qo_indptr:
    of steps with longer runs of rows.
    """

    levels: tuple[Level, ...]
    qo_indptr: Int32Array


class FlashInferAttention:
    """Plans once a step, runs once a layer.

    share: steps of decodes that list the same pages read them once. A plan for a graph has
    `graph_rows`: its kernels are planned by `before_replay`, from the arrays of the step that is
    about to be replayed, and `bind` only chooses them.
    """

    name = "flashinfer"

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        num_heads: int,
        sliding_window: int | None = None,
        share: bool = True,
    ) -> None:
        self.pool = pool
        self._num_heads = num_heads
        self._num_kv_heads, self._head_dim = pool.keys(0).shape[1:]
        self._window_left = -1 if sliding_window is None else sliding_window - 1
        self._share = share and sliding_window is None  # a level does not know where rows end
        device = pool.keys(0).device
        self._wrappers = _Wrappers(
            device,
            workspace_bytes(
                num_heads,
                self._num_kv_heads,
                self._head_dim,
                num_processors=_num_processors(device),
            ),
            use_tensor_cores=num_heads // self._num_kv_heads not in (1, 2, 3),
        )
        self._make_event: Callable[[], Any] | None = (
            torch.cuda.Event if device.type == "cuda" else None
        )
        self._copied: dict[int, Any] = {}  # by wrapper: its last plan has left its host buffers
        self._active: list[Any] = []
        self._views: Mapping[str, Tensor] = {}

    @property
    def tiles_alone(self) -> Tiles:
        """A graph's kind: here, how many levels its cascade has."""
        return _kind(1)

    @property
    def tiles_shared(self) -> tuple[Tiles, ...]:
        """Of decode steps in which pages are shared."""
        if not self._share:
            return ()
        return tuple(_kind(levels) for levels in range(2, MAX_SHARED_LEVELS + 2))

    @property
    def array_names(self) -> tuple[str, ...]:
        """The arrays of a plan that graphs of decodes take."""
        return ("slots", "positions", "page_ids", "row_order", "row_places")

    @property
    def write_slots(self) -> Tensor:
        return self._views["slots"]

    def prepare(self, batch: ForwardBatch) -> FlashInferPlan:
        """Checks the batch. ValueError when it contradicts itself."""
        check_batch(batch, num_pages=self.pool.num_pages, page_size=self.pool.page_size)
        is_decode = batch.num_tokens > 0 and bool((np.diff(batch.qo_indptr) == 1).all())
        found: Cascade | None = None
        if is_decode and self._share:
            entries = _entries(batch.num_tokens)
            found = cascade(batch, page_size=self.pool.page_size, max_entries=entries)
        levels = _whole(batch) if found is None else found.levels
        order = np.arange(batch.num_tokens, dtype=np.int32) if found is None else found.order
        places = np.empty_like(order)
        places[order] = np.arange(len(order), dtype=np.int32)
        return FlashInferPlan(
            num_decodes=batch.num_tokens if is_decode else 0,
            num_parts=0,
            num_items=0,
            num_tiles=0 if is_decode else batch.num_sequences,
            tiles=_kind(len(levels)),
            arrays={
                "slots": batch.kv_slots,
                "positions": batch.positions,
                "page_ids": np.concatenate([level.page_ids for level in levels]),
                "row_order": order,
                "row_places": places,
            },
            levels=levels,
            qo_indptr=batch.qo_indptr,
        )

    def bind(self, plan: AttentionPlan, views: Mapping[str, Tensor]) -> None:
        """Run the next layers over `views`: the arrays of `plan` on the device."""
        assert isinstance(plan, FlashInferPlan)
        self._views = views
        if plan.graph_rows:
            self._active = self._wrappers.graphed(plan.graph_rows, plan.tiles.block_m)[0]
        elif plan.num_tiles:
            self._active = [self._wrappers.extend]
            (level,) = plan.levels
            qo = _tensor(plan.qo_indptr)
            self._plan(self._active[0], qo, level, views["page_ids"], causal=True)
        elif plan.num_decodes:
            self._active = self._wrappers.eager(len(plan.levels))
            self._plan_levels(plan.levels, views["page_ids"])

    def before_replay(self, plan: AttentionPlan, rows: int, views: Mapping[str, Tensor]) -> None:
        """Plan the kernels of the graph of `rows` rows for this step; waits for nothing new."""
        assert isinstance(plan, FlashInferPlan)
        levels = _padded(plan.levels, rows, num_rows=plan.num_decodes)
        page_ids = views["page_ids"]
        self._active, listed = self._wrappers.graphed(
            rows, len(levels), num_pages=len(page_ids) + rows
        )
        self._plan_levels(levels, page_ids)
        missing = rows - plan.num_decodes
        if missing:  # the padding's pages, behind the step's: page 0
            end = len(plan.levels[-1].page_ids)
            listed[end : end + missing].zero_()

    def graph_plan(
        self, rows: int, tiles: Tiles, arrays: Mapping[str, Int32Array]
    ) -> FlashInferPlan:
        """What a graph is captured with: padding alone."""
        zero, nothing = np.zeros(1, np.int32), np.empty(0, np.int32)
        level = Level(qo_indptr=zero, kv_indptr=zero, page_ids=nothing, last_page_len=nothing)
        return FlashInferPlan(
            num_decodes=0,
            num_parts=0,
            num_items=0,
            num_tiles=0,
            tiles=tiles,
            arrays=arrays,
            graph_rows=rows,
            levels=(level,) * tiles.block_m,
            qo_indptr=zero,
        )

    def plan(self, batch: ForwardBatch) -> None:
        plan = self.prepare(batch)
        device = self.pool.keys(0).device
        self.bind(
            plan, {name: torch.from_numpy(a.copy()).to(device) for name, a in plan.arrays.items()}
        )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.pool.write(layer, self.write_slots.long(), k, v)
        return self.attend(layer, q)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """[T, H, D] -> [T, H, D]; the step's K and V of this layer are written already."""
        if not len(q):
            return torch.empty_like(q)
        shape = (self.pool.num_pages, self.pool.page_size, self._num_kv_heads, self._head_dim)
        cache = (self.pool.keys(layer).view(shape), self.pool.values(layer).view(shape))
        *shared, own = self._active
        if not shared:
            out: Tensor = own.run(q, cache)
            return out
        q = q.index_select(0, self._views["row_order"])
        out, weight = own.run(q, cache, return_lse=True)
        for wrapper in shared:
            other, other_weight = wrapper.run(q, cache, return_lse=True)
            self._wrappers.library.merge_state_in_place(out, weight, other, other_weight)
        return out.index_select(0, self._views["row_places"])

    def _plan_levels(self, levels: tuple[Level, ...], page_ids: Tensor) -> None:
        """page_ids: of all levels, one after the other, on the device."""
        start = 0
        for wrapper, level in zip(self._active[:-1], levels[:-1], strict=True):
            own = page_ids[start : start + len(level.page_ids)]
            self._plan(wrapper, _tensor(level.qo_indptr), level, own, causal=False)
            start += len(level.page_ids)
        own = page_ids[start : start + len(levels[-1].page_ids)]
        self._plan(self._active[-1], None, levels[-1], own)

    def _plan(
        self, wrapper: Any, qo_indptr: Tensor | None, level: Level, page_ids: Tensor, **extra: bool
    ) -> None:
        """qo_indptr: None for kernels of decodes. Index arrays that it reads on the host are given
        there: from the device they would be waited for. So would another wrapper's plan of this
        step, which lies behind the step that is computed now: each has host buffers of its own."""
        copied = self._copied.get(id(wrapper))
        if copied is not None:
            copied.synchronize()
        rows = () if qo_indptr is None else (qo_indptr,)
        kind = self.pool.keys(0).dtype
        wrapper.plan(
            *rows,
            _tensor(level.kv_indptr),
            page_ids,
            _tensor(level.last_page_len),
            self._num_heads,
            self._num_kv_heads,
            self._head_dim,
            self.pool.page_size,
            window_left=self._window_left,
            q_data_type=kind,
            kv_data_type=kind,
            **extra,
        )
        if copied is None and self._make_event is not None:
            copied = self._copied[id(wrapper)] = self._make_event()
        if copied is not None:
            copied.record()


class _Wrappers:
    """FlashInfer's planned kernels: one set for steps without a graph, one for each graph.

    The plans of all graphs lie in the same integer buffers: each is made anew before its replay.
    """

    def __init__(
        self, device: torch.device, workspace_bytes: int, *, use_tensor_cores: bool
    ) -> None:
        import flashinfer

        self.library: Any = flashinfer
        self._device = device
        self._use_tensor_cores = use_tensor_cores
        self._workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self._integers: list[Tensor] = []
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=use_tensor_cores
        )
        self.extend: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        self._shared: list[Any] = []
        self._graphed: dict[tuple[int, int], tuple[list[Any], Tensor]] = {}

    def eager(self, num_levels: int) -> list[Any]:
        while len(self._shared) < num_levels - 1:
            self._shared.append(
                self.library.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace, "NHD", backend="fa2"
                )
            )
        return [*self._shared[: num_levels - 1], self._decode]

    def graphed(
        self, rows: int, num_levels: int, *, num_pages: int = 0
    ) -> tuple[list[Any], Tensor]:
        """(kernels over buffers that never move, the page ids of the last one).

        For a fixed number of rows and entries, and up to num_pages pages per level.
        """
        key = rows, num_levels
        if key not in self._graphed:
            listed = self._buffer(num_pages)
            made = [self._graphed_level(_entries(rows), num_pages) for _ in range(num_levels - 1)]
            made.append(
                self.library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace,
                    "NHD",
                    use_cuda_graph=True,
                    use_tensor_cores=self._use_tensor_cores,
                    paged_kv_indptr_buffer=self._buffer(rows + 1),
                    paged_kv_indices_buffer=listed,
                    paged_kv_last_page_len_buffer=self._buffer(rows),
                )
            )
            for level, wrapper in enumerate(made):
                while len(self._integers) <= level:
                    self._integers.append(self._buffer(_INTEGER_BYTES, torch.uint8))
                wrapper.reset_workspace_buffer(self._workspace, self._integers[level])
            self._graphed[key] = made, listed
        return self._graphed[key]

    def _graphed_level(self, entries: int, num_pages: int) -> Any:
        """Fewer entries than rows: it then takes wide tiles for the rows that share."""
        return self.library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._buffer(entries + 1),
            paged_kv_indptr_buf=self._buffer(entries + 1),
            paged_kv_indices_buf=self._buffer(num_pages),
            paged_kv_last_page_len_buf=self._buffer(entries),
            backend="fa2",
        )

    def _buffer(self, length: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(length, dtype=dtype, device=self._device)


def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _kind(num_levels: int) -> Tiles:
    return Tiles(block_m=num_levels, block_n=0, num_warps=0, num_stages=0)


def _entries(rows: int) -> int:
    """Of a shared level in a step of so many rows."""
    return max(3, rows // 4)


def _whole(batch: ForwardBatch) -> tuple[Level, ...]:
    """Every sequence and all its pages as one level."""
    return (
        Level(
            qo_indptr=batch.qo_indptr,
            kv_indptr=batch.kv_indptr,
            page_ids=batch.kv_page_ids,
            last_page_len=batch.kv_last_page_len,
        ),
    )


def _padded(levels: tuple[Level, ...], rows: int, *, num_rows: int) -> tuple[Level, ...]:
    """The levels of a step for a graph of `rows` rows: those it has too many attend to one token
    and share nothing; shared levels are filled up with entries without rows."""
    *shared, own = levels
    missing = rows - num_rows
    ends = own.kv_indptr[-1] + np.arange(1, missing + 1, dtype=np.int32)
    padded = Level(
        qo_indptr=np.arange(rows + 1, dtype=np.int32),
        kv_indptr=np.append(own.kv_indptr, ends).astype(np.int32),
        page_ids=own.page_ids,
        last_page_len=np.append(own.last_page_len, np.ones(missing, np.int32)).astype(np.int32),
    )
    return (*(_filled(level, rows, entries=_entries(rows)) for level in shared), padded)


def _filled(level: Level, rows: int, *, entries: int) -> Level:
    qo, kv = level.qo_indptr, level.kv_indptr
    if qo[-1] < rows:
        qo, kv = np.append(qo, np.int32(rows)), np.append(kv, kv[-1])
    missing = entries + 1 - len(qo)
    return Level(
        qo_indptr=np.pad(qo, (0, missing), mode="edge"),
        kv_indptr=np.pad(kv, (0, missing), mode="edge"),
        page_ids=level.page_ids,
        last_page_len=np.pad(level.last_page_len, (0, entries - level.num_entries)),
    )


def _tensor(array: Int32Array) -> Tensor:
    """On the host: a copy, as it may be read after the step's arrays are built anew."""
    return torch.from_numpy(np.array(array, np.int32))
