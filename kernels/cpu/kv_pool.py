"""The KV pool of the native CPU path: bytes [L, 2, num_pages, bytes of a page's K or V].

Index 0 of the second axis is K, 1 is V. What a page holds depends on the dtype:

fp32, bf16, fp16  [page_size, G, D] numbers
int8              integers q in -127..127, page_size * D bytes for each kv head, then
                  [G, page_size] float32 scales; a number is scale * q

The integers of a head are rows [page_size, D]. Where page_size and D are multiples of 16 they are
packed as the dot products of attention read them: K [D / 4, page_size, 4 of D] and V
[page_size / 4, D, 4 tokens]. csrc/attention.h is the other side of this.

The system gives the memory page by page as it is first written, so a large pool costs nothing
until it is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from palmette.kernels.kv_dtype import KVDtype, kv_head_bytes

_PACKED_MULTIPLE = 16
_ALIGNMENT = 64  # a cache line: the rows of most models are then as few lines as can be


class HostKVPool:
    """Implements `kernels.backend.KVPool`."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: KVDtype = "fp32",
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(
                f"KV pool: {num_pages} pages of {page_size} tokens; needs >= 1 of both"
            )
        self.dtype: KVDtype = dtype
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        side_bytes = page_size * num_kv_heads * kv_head_bytes(dtype, head_dim)
        num_bytes = num_layers * 2 * num_pages * side_bytes
        memory = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        memory = memory[start : start + num_bytes]
        self.data: NDArray[np.uint8] = memory.reshape(num_layers, 2, num_pages, side_bytes)

    @property
    def num_pages(self) -> int:
        return int(self.data.shape[2])

    @property
    def page_bytes(self) -> int:
        return self.data.nbytes // self.num_pages

    @property
    def is_packed(self) -> bool:
        sizes = (self.page_size, self.head_dim)
        return self.dtype == "int8" and all(size % _PACKED_MULTIPLE == 0 for size in sizes)

    @property
    def layout(self) -> str:
        layers, heads = self.data.shape[0], f"{self.num_kv_heads} heads of {self.head_dim}"
        dtype = f"packed {self.dtype}" if self.is_packed else self.dtype
        return f"host {dtype}, {layers} layers, {self.page_size} tokens, {heads}"

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        """All sources are read before any target is written."""
        if len(source_pages) != len(target_pages):
            raise ValueError(f"{len(source_pages)} source and {len(target_pages)} target pages")
        sources, targets = self._checked(source_pages), self._checked(target_pages)
        self.data[:, :, targets] = self.data[:, :, sources]

    def export(self, page_ids: Sequence[int]) -> bytes:
        """Page after page, each [L, 2, bytes of a page's K or V]."""
        pages = self.data[:, :, self._checked(page_ids)]
        return np.moveaxis(pages, 2, 0).tobytes()

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        """Writes what `export` of a pool of this shape and dtype gave.

        Raises:
            ValueError: the size does not fit; nothing is written.
        """
        ids = self._checked(page_ids)
        if len(data) != len(ids) * self.page_bytes:
            raise ValueError(
                f"KV pages: {len(data)} bytes for {len(ids)} pages of {self.page_bytes} bytes"
            )
        layers, _, _, side_bytes = self.data.shape
        pages = np.frombuffer(data, dtype=np.uint8).reshape(len(ids), layers, 2, side_bytes)
        self.data[:, :, ids] = np.moveaxis(pages, 0, 2)

    def _checked(self, page_ids: Sequence[int]) -> NDArray[np.int64]:
        ids = np.asarray(page_ids, dtype=np.int64)
        if len(ids) and not (0 <= ids.min() and ids.max() < self.num_pages):
            raise ValueError(f"page ids: outside the pool of {self.num_pages} pages")
        return ids
