"""The KV pool of the native CPU path: one float32 array [L, 2, num_pages, page_size, G, D].

Index 0 of the second axis is K, 1 is V. The system gives the memory page by page as it is first
written, so a large pool costs nothing until it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Float32Array = NDArray[np.float32]


class HostKVPool:
    """Implements `kernels.backend.KVPool`."""

    def __init__(
        self, *, num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"KV pool: {num_pages} pages of {page_size} tokens; needs >= 1 of both"
            )
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        self.data: Float32Array = np.zeros(shape, dtype=np.float32)

    @property
    def num_pages(self) -> int:
        return int(self.data.shape[2])

    @property
    def page_size(self) -> int:
        return int(self.data.shape[3])

    @property
    def page_bytes(self) -> int:
        return self.data.nbytes // self.num_pages

    @property
    def layout(self) -> str:
        layers, _, _, page_size, groups, dim = self.data.shape
        return f"host fp32, {layers} layers, {page_size} tokens, {groups} heads of {dim}"

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        """All sources are read before any target is written."""
        if len(source_pages) != len(target_pages):
            raise ValueError(f"{len(source_pages)} source and {len(target_pages)} target pages")
        sources, targets = self._checked(source_pages), self._checked(target_pages)
        self.data[:, :, targets] = self.data[:, :, sources]

    def export(self, page_ids: Sequence[int]) -> bytes:
        """Page after page, each [L, 2, page_size, G, D]."""
        pages = self.data[:, :, self._checked(page_ids)]
        return np.moveaxis(pages, 2, 0).tobytes()

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        """Writes what `export` gave. Raises ValueError when the size does not fit."""
        ids = self._checked(page_ids)
        if len(data) != len(ids) * self.page_bytes:
            raise ValueError(
                f"KV pages: {len(data)} bytes for {len(ids)} pages of {self.page_bytes} bytes"
            )
        layers, _, _, page_size, groups, dim = self.data.shape
        pages = np.frombuffer(data, dtype=np.float32)
        pages = pages.reshape(len(ids), layers, 2, page_size, groups, dim)
        self.data[:, :, ids] = np.moveaxis(pages, 0, 2)

    def _checked(self, page_ids: Sequence[int]) -> NDArray[np.int64]:
        ids = np.asarray(page_ids, dtype=np.int64)
        if len(ids) and not (0 <= ids.min() and ids.max() < self.num_pages):
            raise ValueError(f"page ids: outside the pool of {self.num_pages} pages")
        return ids
