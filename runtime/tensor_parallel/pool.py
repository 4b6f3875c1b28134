"""The KV pool of a model over several ranks: a page is its parts of all ranks, in order of rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from palmette.kernels.backend import KVPool, PendingPages, StreamedPool

from .frames import Copy, Export, Fetch, Forget, Frame, Import, Pages

Tell = Callable[[Sequence[Frame]], None]  # a frame for each of the other ranks
Ask = Callable[[Frame], list[Pages]]  # all of them the same


class RankedPool:
    """Implements `backend.StreamedPool`. What is refused here is told to nobody."""

    def __init__(self, inner: KVPool, size: int, *, tell: Tell, ask: Ask) -> None:
        self._inner = inner
        self._size = size
        self._tell, self._ask = tell, ask
        self._num_exports = 0
        self._unwanted: list[int] = []  # exports that nobody can fetch any more

    @property
    def num_pages(self) -> int:
        return self._inner.num_pages

    @property
    def page_size(self) -> int:
        return self._inner.page_size

    @property
    def page_bytes(self) -> int:
        return self._inner.page_bytes * self._size

    @property
    def layout(self) -> str:
        return f"{self._inner.layout}, of each of {self._size} ranks"

    def copy(self, source_pages: Sequence[int], target_pages: Sequence[int]) -> None:
        self._inner.copy(source_pages, target_pages)
        self._tell_all(Copy(list(source_pages), list(target_pages)))

    def export(self, page_ids: Sequence[int]) -> bytes:
        return self.export_later(page_ids).data()

    def export_later(self, page_ids: Sequence[int]) -> PendingPages:
        inner = self._inner
        own: PendingPages | bytes
        if isinstance(inner, StreamedPool):
            own = inner.export_later(page_ids)
        else:
            own = inner.export(page_ids)
        self._forget()
        self._num_exports += 1
        self._tell_all(Export(list(page_ids), self._num_exports))
        return _RankedPages(self, own, self._num_exports)

    def import_(self, page_ids: Sequence[int], data: bytes) -> None:
        if len(data) != len(page_ids) * self.page_bytes:
            raise ValueError(
                f"{len(data)} bytes for {len(page_ids)} pages of {self.page_bytes} bytes"
            )
        size = self._inner.page_bytes
        starts = range(0, len(data), self.page_bytes)
        parts = [
            b"".join(data[start + rank * size : start + (rank + 1) * size] for start in starts)
            for rank in range(self._size)
        ]
        self._inner.import_(page_ids, parts[0])
        self._tell([Import(list(page_ids), part) for part in parts[1:]])

    def joined(self, own: bytes, number: int) -> bytes:
        """The whole pages of an export."""
        parts = [own, *(pages.data for pages in self._ask(Fetch(number)))]
        size = self._inner.page_bytes
        return b"".join(
            part[start : start + size] for start in range(0, len(own), size) for part in parts
        )

    def drop(self, number: int) -> None:
        """The others forget an export with the next one: this may be called at any time."""
        self._unwanted.append(number)

    def _forget(self) -> None:
        unwanted, self._unwanted = self._unwanted, []
        if unwanted:
            self._tell_all(Forget(unwanted))

    def _tell_all(self, frame: Frame) -> None:
        self._tell([frame] * (self._size - 1))


class _RankedPages:
    """Implements `backend.PendingPages`."""

    def __init__(self, pool: RankedPool, own: PendingPages | bytes, number: int) -> None:
        self._pool = pool
        self._own = own
        self._number = number
        self._data: bytes | None = None

    def data(self) -> bytes:
        if self._data is None:
            own = self._own if isinstance(self._own, bytes) else self._own.data()
            self._data = self._pool.joined(own, self._number)
        return self._data

    def __del__(self) -> None:
        if self._data is None:
            self._pool.drop(self._number)
