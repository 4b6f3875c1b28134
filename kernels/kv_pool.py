"""The KV pool in torch tensors: pages of K and V for every layer.

Who owns which page is decided by `radix_cache`; here are only bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class PagedKVPool:
    """Implements `backend.KVPool`.

    One tensor [layers, 2 (K, V), num_pages, page_size, G, D]; zeros at first, on the CPU lazily:
    pages never written take no memory.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, 2, num_pages, page_size, num_kv_heads, head_dim)
        self._data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_pages(self) -> int:
        return self._data.shape[2]

    @property
    def page_size(self) -> int:
        return self._data.shape[3]

    @property
    def page_bytes(self) -> int:
        return self._data[:, :, 0].numel() * self._data.element_size()

    @property
    def layout(self) -> str:
        layers, _, _, page_size, groups, dim = self._data.shape
        dtype = str(self._data.dtype)
        return f"{dtype}, {layers} layers, {page_size} tokens, {groups} heads of {dim}"

    def keys(self, layer: int) -> torch.Tensor:
        """[num_pages * page_size, G, D], a view: the K of every slot."""
        return self._data[layer, 0].flatten(0, 1)

    def values(self, layer: int) -> torch.Tensor:
        """[num_pages * page_size, G, D], a view: the V of every slot."""
        return self._data[layer, 1].flatten(0, 1)

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        """All sources are read before a target is written. ValueError: nothing is copied."""
        if len(source_pages) != len(target_pages):
            raise ValueError(f"{len(source_pages)} source and {len(target_pages)} target pages")
        if len(set(target_pages)) != len(target_pages):
            raise ValueError("a target page occurs twice")
        source, target = self._index(source_pages), self._index(target_pages)
        self._data[:, :, target] = self._data[:, :, source]

    def export(self, page_ids: Sequence[int]) -> bytes:
        """The pages one after the other, each [layers, 2, page_size, G, D]."""
        pages = self._data[:, :, self._index(page_ids)].movedim(2, 0).contiguous()
        raw: bytes = pages.cpu().view(torch.uint8).numpy().tobytes()
        return raw

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        """Write what `export` of a pool of this shape gave. ValueError: nothing is written."""
        if len(data) != len(page_ids) * self.page_bytes:
            raise ValueError(
                f"{len(data)} bytes for {len(page_ids)} pages of {self.page_bytes} bytes"
            )
        if len(set(page_ids)) != len(page_ids):
            raise ValueError("a page occurs twice")
        index = self._index(page_ids)
        layers, _, _, page_size, num_kv_heads, head_dim = self._data.shape
        raw = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
        pages = raw.view(self._data.dtype)
        pages = pages.view(len(page_ids), layers, 2, page_size, num_kv_heads, head_dim)
        self._data[:, :, index] = pages.movedim(0, 2).to(self._data.device)

    def _index(self, page_ids: Sequence[int]) -> torch.Tensor:
        for page_id in page_ids:
            if not 0 <= page_id < self.num_pages:
                raise ValueError(f"page {page_id} is outside of the pool of {self.num_pages}")
        return torch.tensor(list(page_ids), dtype=torch.int64, device=self._data.device)
