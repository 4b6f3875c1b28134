"""The interfaces of the device layer. Implementations inherit nothing from here.

Legend: T tokens of the step, H query heads, G kv heads, D head dim.
`Array` is a numpy array or a torch tensor, of the device the implementation is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, runtime_checkable

from .batch import ForwardBatch

Array = TypeVar("Array")


class KVPool(Protocol):
    """The K and V of every layer, in pages.

    Layout per layer: K and V each [num_pages, page_size, G, D] (FlashInfer's NHD). Who owns which
    page is decided by `radix_cache`; the pool only holds bytes.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, K and V."""
        ...

    @property
    def layout(self) -> str:
        """What the bytes of a page are: equal layouts, and no others, may exchange pages."""
        ...

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None: ...

    def export(self, page_ids: Sequence[int]) -> bytes:
        """The bytes of the pages, one after the other, `page_bytes` each."""
        ...

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        """Write what `export` gave, or some whole pages of it."""
        ...


class PendingPages(Protocol):
    """Pages on their way to the host."""

    def data(self) -> bytes:
        """What `KVPool.export` gives; waits for it."""
        ...


@runtime_checkable
class StreamedPool(KVPool, Protocol):
    """A pool whose copies run beside the kernels, in order with what touches the same pages."""

    def export_later(self, page_ids: Sequence[int]) -> PendingPages:
        """As `export`, without waiting; the pages may be given away at once."""
        ...


class AttentionBackend(Protocol[Array]):
    """Paged, ragged, causal attention with grouped query heads.

    The result of a row depends on that row's query and its sequence's K and V only: not on the
    other rows, the page size, the page ids or how the prompt was cut into chunks.
    """

    def plan(self, batch: ForwardBatch) -> None:
        """Once per step: check the arrays, lay out work, upload indices."""
        ...

    def run(self, layer: int, q: Array, k: Array, v: Array) -> Array:
        """Write k, v [T, G, D] at the step's kv_slots, then attend with q [T, H, D].

        Returns [T, H, D], owned by the caller.
        """
        ...
