"""The KV pool in torch tensors: pages of K and V for every layer.

Who owns which page is decided by `radix_cache`; here are only bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .kv_codes import LARGEST, decode, encode


class PagedKVPool:
    """Implements `backend.KVPool`.

    One tensor [layers, 2 (K, V), num_pages, page_size, G, D]; zeros at first, on the CPU lazily:
    pages never written take no memory. With dtype int8 or float8_e4m3fn its numbers are codes, and
    a second tensor [layers, 2, num_pages, page_size, G] float32 holds the scales.
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
        self.dtype = dtype
        # e4m3 lies in bytes: torch copies those on every device
        stored = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
        self._data = torch.zeros(shape, dtype=stored, device=device)
        self._scales: Tensor | None = None
        if dtype in LARGEST:
            self._scales = torch.zeros(shape[:-1], dtype=torch.float32, device=device)

    @property
    def num_pages(self) -> int:
        return self._data.shape[2]

    @property
    def page_size(self) -> int:
        return self._data.shape[3]

    @property
    def page_bytes(self) -> int:
        return sum(part[:, :, 0].numel() * part.element_size() for part in self._parts())

    @property
    def layout(self) -> str:
        layers, _, _, page_size, groups, dim = self._data.shape
        return f"{self.dtype}, {layers} layers, {page_size} tokens, {groups} heads of {dim}"

    def keys(self, layer: int) -> Tensor:
        """[num_pages * page_size, G, D], a view: the K of every slot; codes where it has scales.

        Codes of float8_e4m3fn are uint8."""
        return self._data[layer, 0].flatten(0, 1)

    def values(self, layer: int) -> Tensor:
        """[num_pages * page_size, G, D], a view: the V of every slot, as `keys`."""
        return self._data[layer, 1].flatten(0, 1)

    def key_scales(self, layer: int) -> Tensor | None:
        """[num_pages * page_size, G] float32, a view; None where numbers are no codes."""
        return None if self._scales is None else self._scales[layer, 0].flatten(0, 1)

    def value_scales(self, layer: int) -> Tensor | None:
        return None if self._scales is None else self._scales[layer, 1].flatten(0, 1)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [T, G, D] into slots [T] int64."""
        for side, numbers in enumerate((k, v)):
            data = self._data[layer, side].flatten(0, 1)
            if self._scales is None:
                data[slots] = numbers.to(self.dtype)
            else:
                codes, scales = encode(numbers, self.dtype)
                data[slots] = codes.view(self._data.dtype)
                self._scales[layer, side].flatten(0, 1)[slots] = scales

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of slots [L] int64, each [L, G, D] float32."""
        if self._scales is None:
            return self.keys(layer)[slots].float(), self.values(layer)[slots].float()
        codes = self._data[layer].flatten(1, 2)[:, slots].view(self.dtype)
        k, v = decode(codes, self._scales[layer].flatten(1, 2)[:, slots])
        return k, v

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        """All sources are read before a target is written. ValueError: nothing is copied."""
        self._check_copy(source_pages, target_pages)
        self.move(self._index(source_pages), self._index(target_pages))

    def export(self, page_ids: Sequence[int]) -> bytes:
        """The pages one after the other, each [layers, 2, page_size, G, D], then its scales."""
        self._check_pages(page_ids)
        raw: bytes = self.gather(self._index(page_ids)).cpu().numpy().tobytes()
        return raw

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        """Write what `export` of a pool of this shape gave. ValueError: nothing is written."""
        self._check_import(page_ids, data)
        raw = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
        raw = raw.view(len(page_ids), self.page_bytes).to(self._data.device)
        self.scatter(self._index(page_ids), raw)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy pages sources [N] int64 to targets [N], on the device."""
        for part in self._parts():
            part[:, :, targets] = part[:, :, sources]

    def gather(self, pages: Tensor) -> Tensor:
        """[N, page_bytes] uint8 on the device: pages [N] int64 as `export` has them."""
        parts = [
            part[:, :, pages].movedim(2, 0).flatten(1).contiguous().view(torch.uint8)
            for part in self._parts()
        ]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def scatter(self, pages: Tensor, raw: Tensor) -> None:
        """Write what `gather` gave into pages [N] int64, on the device."""
        start = 0
        for part in self._parts():
            page = part[:, :, 0]
            stop = start + page.numel() * part.element_size()
            numbers = raw[:, start:stop].contiguous().view(part.dtype)
            part[:, :, pages] = numbers.view(len(pages), *page.shape).movedim(0, 2)
            start = stop

    def _check_copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        if len(source_pages) != len(target_pages):
            raise ValueError(f"{len(source_pages)} source and {len(target_pages)} target pages")
        if len(set(target_pages)) != len(target_pages):
            raise ValueError("a target page occurs twice")
        self._check_pages((*source_pages, *target_pages))

    def _check_import(self, page_ids: Sequence[int], data: bytes) -> None:
        if len(data) != len(page_ids) * self.page_bytes:
            raise ValueError(
                f"{len(data)} bytes for {len(page_ids)} pages of {self.page_bytes} bytes"
            )
        if len(set(page_ids)) != len(page_ids):
            raise ValueError("a page occurs twice")
        self._check_pages(page_ids)

    def _check_pages(self, page_ids: Sequence[int]) -> None:
        for page_id in page_ids:
            if not 0 <= page_id < self.num_pages:
                raise ValueError(f"page {page_id} is outside of the pool of {self.num_pages}")

    def _parts(self) -> list[Tensor]:
        return [self._data] if self._scales is None else [self._data, self._scales]

    def _index(self, page_ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(page_ids), dtype=torch.int64, device=self._data.device)
