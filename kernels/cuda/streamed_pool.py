"""The KV pool whose pages go to the host and back on a queue of their own, beside the kernels.

    out   kernels so far ... | gather | later kernels            the pages may be written again
          side queue           gather | copy to pinned memory    the host reads it when it wants
    in    side queue           copy from pinned memory | scatter
          kernels so far ................. | later kernels       those wait for the scatter

Nothing here waits on the host but reading what went out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from palmette.kernels.kv_pool import PagedKVPool

from .device import Device, Event
from .staging import Staging, layout_of

CHUNK_BYTES = 64 << 20  # gathered at once, in memory that stays


class StreamedKVPool(PagedKVPool):
    """Implements `backend.StreamedPool` on the queue of the kernels and one beside it."""

    def __init__(
        self,
        queue: Device,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__(
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=queue.torch_device,
        )
        self._queue, self._side = queue, queue.side()
        # As long as they can get: memory of the side queue is made here, behind all kernels so far.
        self._indices = Staging(queue, 4 * num_pages), Staging(self._side, 2 * num_pages)
        self._chunk_pages = min(max(1, chunk_bytes // self.page_bytes), num_pages)
        shape = (self._chunk_pages, self.page_bytes)
        self._chunk = torch.empty(shape, dtype=torch.uint8, device=queue.torch_device)
        self._side.wait(_recorded(queue))

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        self._check_copy(source_pages, target_pages)
        ids = np.array([source_pages, target_pages], np.int64)
        sources, targets = self._upload(self._indices[0], ids).view(2, -1)
        self._queue.submit(lambda: self.move(sources, targets))

    def export(self, page_ids: Sequence[int]) -> bytes:
        return self.export_later(page_ids).data()

    def export_later(self, page_ids: Sequence[int]) -> PinnedPages:
        self._check_pages(page_ids)
        self._side.wait(_recorded(self._queue))  # what was enqueued writes these pages
        host = self._host(len(page_ids))
        pages = self._upload(self._indices[1], np.array(page_ids, np.int64))
        for start in range(0, len(page_ids), self._chunk_pages):
            part = slice(start, start + self._chunk_pages)
            chunk = self._chunk[: len(page_ids[part])]
            self._side.submit(_Gather(self, pages[part], chunk))
            if part.stop >= len(page_ids):
                self._queue.wait(_recorded(self._side))  # all is gathered: they may be written
            self._side.copy(host[part], chunk)
        return PinnedPages(_recorded(self._side), host)

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        self._check_import(page_ids, data)
        if not page_ids:
            return
        read = _recorded(self._queue)  # what was enqueued may use these pages still
        host = self._host(len(page_ids))
        host.numpy()[:] = np.frombuffer(data, np.uint8).reshape(host.shape)
        pages = self._upload(self._indices[1], np.array(page_ids, np.int64))
        for start in range(0, len(page_ids), self._chunk_pages):
            part = slice(start, start + self._chunk_pages)
            chunk = self._chunk[: len(page_ids[part])]
            self._side.copy(chunk, host[part])
            if start == 0:
                self._side.wait(read)
            self._side.submit(_Scatter(self, pages[part], chunk))
        self._queue.wait(_recorded(self._side))

    def _host(self, num_pages: int) -> Tensor:
        """Pinned memory of its own, [pages, page_bytes] uint8."""
        num_bytes = num_pages * self.page_bytes
        words = self._side.host_buffer(-(-num_bytes // 4))
        return words.view(torch.uint8)[:num_bytes].view(num_pages, self.page_bytes)

    def _upload(self, staging: Staging, ids: NDArray[np.int64]) -> Tensor:
        layout = layout_of({"pages": ids})
        staging.upload({"pages": ids}, layout)
        return staging.views(layout)["pages"]


class PinnedPages:
    """Implements `backend.PendingPages`."""

    def __init__(self, arrived: Event, host: Tensor) -> None:
        self._arrived = arrived
        self._host = host

    def data(self) -> bytes:
        self._arrived.synchronize()
        raw: bytes = self._host.numpy().tobytes()
        return raw


class _Gather:
    def __init__(self, pool: StreamedKVPool, pages: Tensor, chunk: Tensor) -> None:
        self._pool, self._pages, self._chunk = pool, pages, chunk

    def __call__(self) -> None:
        self._chunk.copy_(self._pool.gather(self._pages))


class _Scatter(_Gather):
    def __call__(self) -> None:
        self._pool.scatter(self._pages, self._chunk)


def _recorded(queue: Device) -> Event:
    event = queue.event()
    event.record()
    return event
