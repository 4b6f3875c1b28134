"""Paged attention by our Triton kernels, behind `backend.AttentionBackend`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from torch import Tensor

from palmette.kernels.batch import ForwardBatch, Int32Array
from palmette.kernels.kv_pool import PagedKVPool
from palmette.kernels.reference import check_batch

from .codes import readable
from .common import INTERPRETED, LOG2E, capability_of, padded
from .kept_work import KeptWork
from .paged_decode import REDUCED_TOGETHER, paged_decode_kernel, reduce_kernel
from .paged_extend import paged_extend_kernel
from .work import SPLIT, decode_work, extend_work, in_parts

HEAD_DIMS = range(16, 257)
MIN_BLOCK_M = 16  # rows of the smallest matrix instruction
_DECODE_ARRAYS = (
    *("slots", "positions", "num_items", "decode_rows", "first_parts", "num_parts", "row_parts"),
    *("item_first", "item_count", "item_pages", "item_split", "item_rows"),
    *("row_pages", "page_ids"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a kernel is compiled: rows and keys of a tile, warps, stages of the pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def wide_tiles(
    head_dim: int, element_bytes: int = 2, *, scaled: bool = False, capability: int = 90
) -> Tiles:
    """Tiles of shared items, and of every decode that must give the bits of an extend.

    element_bytes: of a query. scaled: K and V are codes, which take registers to widen.
    capability: 90 for Hopper and later, whose products read shared memory and take 64 rows from
    four warps: eight would compute them twice. Five stages there are two tiles ahead of the
    products, behind page ids that are read two tiles ahead of those.
    """
    if element_bytes > 2:  # float32 is for comparisons: small tiles, three products each
        block_m, block_n = (32, 32) if head_dim <= 64 else (16, 16)
        return Tiles(block_m=block_m, block_n=block_n, num_warps=4, num_stages=1)
    if head_dim > 128 and scaled:
        return Tiles(block_m=32, block_n=32, num_warps=8, num_stages=2)
    if head_dim > 128:
        return Tiles(block_m=64, block_n=32, num_warps=8, num_stages=2)
    if capability >= 90:
        return Tiles(block_m=64, block_n=64, num_warps=4, num_stages=5)
    return Tiles(block_m=64, block_n=64, num_warps=4 if head_dim <= 64 else 8, num_stages=3)


def extend_tiles(
    head_dim: int, element_bytes: int = 2, *, scaled: bool = False, capability: int = 90
) -> Tiles:
    """Tiles of extend: `wide_tiles`, on Hopper with twice the rows and warps, which read K and V
    half as often. A warp has 16 rows and all keys of a tile in both, and bits do not differ."""
    tiles = wide_tiles(head_dim, element_bytes, scaled=scaled, capability=capability)
    if element_bytes > 2 or head_dim > 128 or capability < 90:
        return tiles
    stages = tiles.num_stages if padded(head_dim) == head_dim else 2  # masks take registers
    return replace(tiles, block_m=128, num_warps=8, num_stages=stages)


def narrow_tiles(
    head_dim: int,
    group: int,
    element_bytes: int = 2,
    *,
    scaled: bool = False,
    capability: int = 90,
) -> Tiles:
    """Tiles of decode when no page is shared and bits may differ from extend's.

    Of short codes four programs are at work at once, for which more stages have no registers.
    """
    if element_bytes > 2:
        return wide_tiles(head_dim, element_bytes)
    block_m = max(MIN_BLOCK_M, padded(group))
    is_short = scaled and head_dim <= 64
    stages = 5 if capability >= 90 and head_dim <= 128 and not is_short else 3
    return Tiles(
        block_m=block_m, block_n=64 if head_dim <= 128 else 32, num_warps=4, num_stages=stages
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """A step's work: what decides the launches, and the arrays the kernels read.

    kept: the same plan may be given for the next step, with other numbers in its arrays.
    """

    num_decodes: int
    num_parts: int
    num_items: int
    num_tiles: int
    tiles: Tiles  # of the decode launch
    arrays: Mapping[str, Int32Array]
    graph_rows: int = 0  # of the graph that is captured with it
    kept: KeptWork | None = None


class TritonAttention:
    """Implements `backend.AttentionBackend` over a `PagedKVPool` on the device.

    deterministic: decode and extend use tiles of the same keys and fold their sums there, so
    the bits of a row do not depend on how its context was computed. share: pages that several
    decoding rows list are read once. Neither changes which keys a row sees. query_dtype: of q and
    of the products; None: the pool's, bf16 where it holds codes.

    A step may be planned in one call (`plan`), or `prepare`d on the host and bound later to
    arrays that a caller uploaded (`bind`), which is how graphs replay it.
    """

    name = "triton"

    def __init__(
        self,
        pool: PagedKVPool,
        *,
        num_heads: int,
        sliding_window: int | None = None,
        deterministic: bool = True,
        share: bool = True,
        query_dtype: torch.dtype | None = None,
    ) -> None:
        num_kv_heads, head_dim = pool.keys(0).shape[1:]
        if num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} kv heads evenly")
        if head_dim not in HEAD_DIMS or head_dim % 2:
            raise ValueError(f"head_dim: {head_dim} is not supported; even, 16 to 256")
        group = num_heads // num_kv_heads
        self._pool = pool
        self._window = sliding_window
        self._deterministic = deterministic
        self._share = share
        self._num_heads, self._num_kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._group_pad = padded(group)
        element_bytes = (query_dtype or default_query_dtype(pool)).itemsize
        scaled = pool.key_scales(0) is not None
        capability = capability_of(pool.keys(0).device)
        self._wide = wide_tiles(head_dim, element_bytes, scaled=scaled, capability=capability)
        self._extending = extend_tiles(
            head_dim, element_bytes, scaled=scaled, capability=capability
        )
        if self._group_pad > self._wide.block_m:
            raise ValueError(
                f"{group} query heads per kv head are not supported; at most {self._wide.block_m}"
            )
        self._narrow = (
            self._wide
            if deterministic
            else narrow_tiles(head_dim, group, element_bytes, scaled=scaled, capability=capability)
        )
        self._programs = _num_programs(pool)
        self._constants = {
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": num_kv_heads,
            "GROUP_PAD": self._group_pad,
            "HEAD_DIM": head_dim,
            "DIM_PAD": padded(head_dim),
            "PAGE": pool.page_size,
            "WINDOW": sliding_window or 0,
            "UPCAST": INTERPRETED,
            "SCALED": scaled,
            "E4M3": scaled and pool.keys(0).dtype != torch.int8,
        }
        self._kept: AttentionPlan | None = None  # of the newest step, if that is one of a run
        self._plan: AttentionPlan | None = None
        self._views: Mapping[str, Tensor] = {}

    @property
    def pool(self) -> PagedKVPool:
        return self._pool

    @property
    def tiles_alone(self) -> Tiles:
        """Tiles of a decode step in which no page is shared."""
        return self._narrow

    @property
    def tiles_shared(self) -> tuple[Tiles, ...]:
        """Of decode steps in which pages are shared."""
        return (self._wide,) if self._share else ()

    @property
    def array_names(self) -> tuple[str, ...]:
        """The arrays of a plan that graphs of decodes take."""
        return _DECODE_ARRAYS

    @property
    def write_slots(self) -> Tensor:
        """[T] int32: where the planned step's K and V go; -1 writes nothing."""
        return self._views["slots"]

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        """The step's work, on the host. ValueError when the batch contradicts itself."""
        newest, self._kept = self._kept, None
        if newest is not None and newest.kept is not None and newest.kept.advance(batch):
            self._kept = newest
            return newest
        page_size = self._pool.page_size
        check_batch(batch, num_pages=self._pool.num_pages, page_size=page_size)
        wide_rows = self._wide.block_m // self._group_pad
        share_rows = wide_rows if self._share else 1
        if batch.run[0]:
            self._kept = self._keep(batch, share_rows)
            return self._kept
        tile_tokens, window = self._extending.block_m // self._group_pad, self._window
        cut = None
        if share_rows > 1 and window is None:
            cut = in_parts(batch, tile_tokens=tile_tokens, num_kv_heads=self._num_kv_heads)
        decode = decode_work(
            batch, page_size=page_size, window=window, share_rows=share_rows, cut=cut
        )
        extend = extend_work(batch, tile_tokens=tile_tokens, window=window, cut=cut)
        return AttentionPlan(
            num_decodes=len(decode.rows),
            num_parts=decode.total_parts,
            num_items=decode.num_items,
            num_tiles=len(extend.rows),
            tiles=self._wide if decode.num_shared else self._narrow,
            arrays={
                "slots": batch.kv_slots,
                "positions": batch.positions,
                "num_items": np.array([decode.num_items], np.int32),
                "decode_rows": decode.rows,
                "first_parts": decode.first_parts,
                "num_parts": decode.num_parts,
                "row_parts": decode.row_parts,
                "item_first": decode.item_first,
                "item_count": decode.item_count,
                "item_pages": decode.item_pages,
                "item_split": decode.item_split,
                "item_rows": decode.item_rows,
                "tile_rows": extend.rows,
                "tile_tokens": extend.tokens,
                "tile_pages": extend.pages,
                "tile_starts": extend.starts,
                "tile_ends": extend.ends,
                "page_ids": batch.kv_page_ids,
            },
        )

    def _keep(self, batch: ForwardBatch, share_rows: int) -> AttentionPlan:
        """The plan of the first step of a run, with room for the steps behind it."""
        kept = KeptWork(
            batch,
            page_size=self._pool.page_size,
            num_pages=self._pool.num_pages,
            window=self._window,
            share_rows=share_rows,
        )
        return AttentionPlan(
            num_decodes=batch.num_tokens,
            num_parts=kept.num_parts,
            num_items=kept.num_items,
            num_tiles=0,
            tiles=self._wide if kept.num_shared else self._narrow,
            arrays=kept.arrays,
            kept=kept,
        )

    def bind(self, plan: AttentionPlan, views: Mapping[str, Tensor]) -> None:
        """Run the next layers over `views`: the arrays of `plan` on the device, at least as long.

        With longer arrays a plan may stand for the largest step that they hold.
        """
        self._plan, self._views = plan, views

    def graph_plan(
        self, rows: int, tiles: Tiles, arrays: Mapping[str, Int32Array]
    ) -> AttentionPlan:
        """What a graph of `rows` decodes is captured with: `arrays` at their full length."""
        num_items = len(arrays["item_first"])
        return AttentionPlan(
            num_decodes=rows,
            num_parts=num_items,
            num_items=num_items,
            num_tiles=0,
            tiles=tiles,
            arrays=arrays,
            graph_rows=rows,
        )

    def before_replay(self, plan: AttentionPlan, rows: int, views: Mapping[str, Tensor]) -> None:
        """Nothing: the kernels of a graph read the step's work from the uploaded arrays."""

    def plan(self, batch: ForwardBatch) -> None:
        plan = self.prepare(batch)
        device = self._pool.keys(0).device
        self.bind(
            plan,
            {
                name: torch.from_numpy(array.copy()).to(device)
                for name, array in plan.arrays.items()
            },
        )

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._pool.write(layer, self.write_slots.long(), k, v)
        return self.attend(layer, q)

    def _sides(self, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """K, V and their scales as kernels take them, codes as words of four.

        Without scales numbers stand in for them.
        """
        keys, values = self._pool.keys(layer), self._pool.values(layer)
        key_scales, value_scales = self._pool.key_scales(layer), self._pool.value_scales(layer)
        if key_scales is None or value_scales is None:
            return keys, values, keys, values
        if self._head_dim % 4 == 0:
            keys, values = keys.view(torch.uint32), values.view(torch.uint32)
        else:
            keys, values = readable(keys), readable(values)
        return keys, values, key_scales, value_scales

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """[T, H, D] -> [T, H, D]; the step's K and V of this layer are written already."""
        plan = self._plan
        if plan is None:
            raise RuntimeError("attention: no step is planned")
        q = q.flatten(1)
        out = torch.empty(len(q), self._num_heads, self._head_dim, dtype=q.dtype, device=q.device)
        if plan.num_decodes:
            self._decode(plan, layer, q, out)
        if plan.num_tiles:
            self._extend(plan, layer, q, out)
        return out

    def _decode(self, plan: AttentionPlan, layer: int, q: Tensor, out: Tensor) -> None:
        views, tiles = self._views, plan.tiles
        shape = (plan.num_parts, self._num_heads)
        acc = torch.empty(*shape, self._head_dim, dtype=torch.float32, device=q.device)
        peak = torch.empty(shape, dtype=torch.float32, device=q.device)
        total = torch.empty(shape, dtype=torch.float32, device=q.device)
        grid = (min(plan.num_items, self._programs), self._num_kv_heads)
        paged_decode_kernel[grid](
            q, *self._sides(layer), acc, peak, total,
            views["num_items"], views["item_first"], views["item_count"], views["item_pages"],
            views["item_split"], views["item_rows"], views["row_parts"], views["positions"],
            views["page_ids"], q.stride(0), self._scale,
            SPLIT=SPLIT, **self._compile(tiles),
        )  # fmt: skip
        reduce_kernel[(plan.num_decodes, self._num_heads)](
            acc, peak, total, out, views["decode_rows"], views["first_parts"], views["num_parts"],
            NUM_HEADS=self._num_heads, HEAD_DIM=self._head_dim, DIM_PAD=padded(self._head_dim),
            PARTS=REDUCED_TOGETHER,
            num_warps=1, enable_fp_fusion=not self._deterministic,
        )  # fmt: skip

    def _extend(self, plan: AttentionPlan, layer: int, q: Tensor, out: Tensor) -> None:
        views = self._views
        paged_extend_kernel[(plan.num_tiles, self._num_kv_heads)](
            q, *self._sides(layer), out,
            views["tile_rows"], views["tile_tokens"], views["tile_pages"], views["tile_starts"],
            views["tile_ends"], views["positions"], views["page_ids"], q.stride(0), self._scale,
            SPLIT=SPLIT if self._deterministic else 0, **self._compile(self._extending),
        )  # fmt: skip

    @property
    def _scale(self) -> float:
        return LOG2E / math.sqrt(self._head_dim)

    def _compile(self, tiles: Tiles) -> dict[str, int | bool]:
        return {
            **self._constants,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            "enable_fp_fusion": not self._deterministic,
        }


def default_query_dtype(pool: PagedKVPool) -> torch.dtype:
    return pool.dtype if pool.key_scales(0) is None else torch.bfloat16


def _num_programs(pool: PagedKVPool) -> int:
    """Programs per kv head that take items in turn: enough to fill the device several times."""
    device = pool.keys(0).device
    if device.type != "cuda":
        return 3  # the interpreter: fewer than items, so that taking turns is tested
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return int(triton.cdiv(16 * processors, pool.keys(0).shape[1]))
