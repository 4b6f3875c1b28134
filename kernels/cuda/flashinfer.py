"""Paged attention by FlashInfer (0.6, 0.7), behind `backend.AttentionBackend`; optional.

Its page layout and CSR arrays are ours. It chooses its splits by the whole batch, so the bits of
a row depend on the other rows: the choice where speed matters more than repeatability.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from palmette.kernels.batch import ForwardBatch
from palmette.kernels.kv_pool import PagedKVPool
from palmette.kernels.reference import check_batch

from .triton_attention import AttentionPlan, Tiles

WORKSPACE_BYTES = 128 << 20
_NO_TILES = Tiles(block_m=0, block_n=0, num_warps=0, num_stages=0)


def why_not(head_dim: int) -> str | None:
    """Why FlashInfer cannot serve this head size here; None when it can."""
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if head_dim not in (64, 128, 256):
        return f"flashinfer has no kernels for head size {head_dim}"
    return None


class FlashInferAttention:
    """Plans once a step, runs once a layer. Steps of decodes alone take its decode kernels."""

    name = "flashinfer"
    tiles_alone = _NO_TILES

    def __init__(
        self, pool: PagedKVPool, *, num_heads: int, sliding_window: int | None = None
    ) -> None:
        import flashinfer

        self.pool = pool
        self._num_heads = num_heads
        self._num_kv_heads, self._head_dim = pool.keys(0).shape[1:]
        self._window_left = -1 if sliding_window is None else sliding_window - 1
        device = pool.keys(0).device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        group = num_heads // self._num_kv_heads
        self._decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=group >= 4
        )
        self._extend = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._active: Any = self._decode
        self._batch: ForwardBatch | None = None
        self._views: Mapping[str, Tensor] = {}

    @property
    def write_slots(self) -> Tensor:
        return self._views["slots"]

    def prepare(self, batch: ForwardBatch) -> AttentionPlan:
        """Checks the batch. ValueError when it contradicts itself."""
        check_batch(batch, num_pages=self.pool.num_pages, page_size=self.pool.page_size)
        self._batch = batch
        return AttentionPlan(
            num_decodes=0,
            num_parts=0,
            num_items=0,
            num_tiles=batch.num_sequences,
            tiles=_NO_TILES,
            arrays={"slots": batch.kv_slots, "positions": batch.positions},
        )

    def bind(self, plan: AttentionPlan, views: Mapping[str, Tensor]) -> None:
        """`plan` must be the last one that was prepared."""
        batch = self._batch
        if batch is None or batch.num_sequences != plan.num_tiles:
            raise ValueError("flashinfer: this step is not the one that was prepared")
        self._views = views
        paging = [
            torch.from_numpy(np.array(array))
            for array in (batch.kv_indptr, batch.kv_page_ids, batch.kv_last_page_len)
        ]
        shape = (self._num_heads, self._num_kv_heads, self._head_dim, self.pool.page_size)
        kind = self.pool.keys(0).dtype
        options = {
            "window_left": self._window_left,
            "q_data_type": kind,
            "kv_data_type": kind,
        }
        lengths = np.diff(batch.qo_indptr)
        if batch.num_tokens == 0:
            return
        if (lengths == 1).all():
            self._active = self._decode
            self._decode.plan(*paging, *shape, **options)
        else:
            self._active = self._extend
            rows = torch.from_numpy(np.array(batch.qo_indptr))
            self._extend.plan(rows, *paging, *shape, causal=True, **options)

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
        shape = (self.pool.num_pages, self.pool.page_size, self._num_kv_heads, self._head_dim)
        cache = (self.pool.keys(layer).view(shape), self.pool.values(layer).view(shape))
        out: Tensor = self._active.run(q, cache)
        return out
