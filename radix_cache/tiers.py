"""Moves pages between the device and the tiers below it.

    evict       the pages of a leaf are exported, to the host pool, else to the disk
    keep        what a request left in the tree is copied to the disk too, a few pages a step and
                on when nothing else is to be done, so that a process that is killed starts warm
    restore     pages that the tree lacks and a tier has are imported before they are computed:
                claimed and published as a step would, so siblings share them as they share steps

Bits are those that were computed: a page is only found under the exact layout, namespace and
tokens it was exported for.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

from palmette.kernels.backend import KVPool

from .disk import CLOSE_TIMEOUT_S, QUEUE_BYTES, DiskStore
from .node import TOKEN_BYTES, Lease, Node
from .store import HostStore, PageStore, StoredPage, page_digest, root_digest
from .tree import RadixTree

logger = logging.getLogger(__name__)

STEP_BYTES = 16 * 1024 * 1024  # moved in each direction in one step; at least one page


class PageTiers:
    """One engine's. `host` and `disk` may be None, not both."""

    def __init__(
        self,
        tree: RadixTree,
        pool: KVPool,
        *,
        layout: str,
        host: HostStore | None,
        disk: DiskStore | None,
    ) -> None:
        self.host, self.disk = host, disk
        self._stores: list[PageStore] = [store for store in (host, disk) if store is not None]
        self._tree = tree
        self._pool = pool
        self._layout = layout
        self._page_bytes = tree.page_size * TOKEN_BYTES
        self._to_keep: deque[Node] = deque()
        self._pages_left = 0
        self.num_restored = 0  # pages
        self.num_spilled = 0
        tree.on_evict = self._spill
        if disk is not None:
            tree.on_keep = self._to_keep.append

    @property
    def has_work(self) -> bool:
        """Whether something is to be copied to the disk."""
        return bool(self._to_keep)

    def start_step(self) -> None:
        """Copy a little of what was kept to the disk."""
        self._pages_left = max(1, STEP_BYTES // self._pool.page_bytes)
        if self.disk is not None and self._to_keep and self.disk.has_room(STEP_BYTES):
            self._keep(self._pages_left)

    def find(self, lease: Lease) -> int:
        """How many tokens from 0 the tree and the tiers have together, in whole pages."""
        size = self._tree.page_size
        start = lease.num_matched_ready // size
        limit = lease.match_limit // size
        digests = self._digests(lease._tail)[:limit] if limit > start else []
        for place in range(start, len(digests)):
            if not any(store.contains(digests[place]) for store in self._stores):
                return place * size
        return max(start, len(digests)) * size

    def restore(self, lease: Lease, end: int) -> tuple[list[tuple[int, int, str]], bool]:
        """Import pages from where nobody computes yet up to token `end`, as this step allows.

        Returns the spans that came, each with its tier, and whether this was all there is.
        """
        size = self._tree.page_size
        spans: list[tuple[int, int, str]] = []
        digests = self._digests(lease._tail)
        while (start := self._tree.frontier(lease)) < end and start % size == 0:
            if self._pages_left <= 0:
                return spans, False
            data, tier = self._read(lease, start // size, digests[start // size])
            if data is None:
                break
            self._tree.claim(lease, size)
            try:
                self._pool.import_([lease.page_ids[start // size]], data)
            except Exception:  # fault boundary: what cannot be imported is computed
                logger.exception("prefix cache: a page could not be imported")
                self._tree.unclaim(lease)
                break
            self._tree.publish(lease, start + size)
            self._pages_left -= 1
            self.num_restored += 1
            if spans and spans[-1][1] == start and spans[-1][2] == tier:
                spans[-1] = (spans[-1][0], start + size, tier)
            else:
                spans.append((start, start + size, tier))
        return spans, True

    def clear(self) -> None:
        """Forget all pages of this layout, on disk too."""
        self._to_keep.clear()
        for store in self._stores:
            store.clear()

    def close(self) -> None:
        """Bring everything that is ready to the disk, and end its writer."""
        if self.disk is not None:
            self._to_keep.extend(self._tree.leaves())
            deadline = time.monotonic() + CLOSE_TIMEOUT_S
            while self._to_keep and time.monotonic() < deadline:
                self._keep(QUEUE_BYTES // self._pool.page_bytes)
                self.disk.wait()
        for store in self._stores:
            store.close()

    def _keep(self, num_pages: int) -> None:
        try:
            self._copy_kept(num_pages)
        except Exception:  # fault boundary: the disk goes without the rest of this path
            logger.exception("prefix cache: pages could not be exported")
            if self._to_keep:
                self._to_keep.popleft()

    def _copy_kept(self, num_pages: int) -> None:
        """Copy up to `num_pages` pages, at least one, of what requests left; roots first."""
        assert self.disk is not None
        num_pages = max(1, num_pages)
        while self._to_keep and num_pages > 0:
            tail = self._to_keep[0]
            pages: list[StoredPage] = []
            for node in reversed(list(tail.path())):
                places = range(node.ready // self._tree.page_size)
                pages += self._export(node, places, self.disk, num_pages - len(pages))
            if pages:
                self.disk.put(pages)
            num_pages -= len(pages)
            if num_pages > 0:  # the whole path is there
                self._to_keep.popleft()
                if tail.parent is not None:
                    self.disk.touch(self._digests(tail))

    def _read(self, lease: Lease, place: int, digest: bytes) -> tuple[bytes | None, str]:
        tokens = bytes(lease._data[: (place + 1) * self._page_bytes])
        for store in self._stores:
            if store.contains(digest):
                data = store.get(digest, _root(lease._tail).namespace, tokens)
                if data is not None and len(data) == self._pool.page_bytes:
                    return data, store.name
        return None, ""

    def _spill(self, node: Node, keep: int) -> None:
        """A leaf is about to lose its pages from page `keep` on."""
        try:
            places = range(keep, node.ready // self._tree.page_size)
            pages = self._export(node, places, self._stores[0], len(places))
            if pages:
                self._stores[0].put(pages)
        except Exception:  # fault boundary: eviction goes on, the pages are lost
            logger.exception("prefix cache: pages could not be exported")

    def _export(
        self, node: Node, places: Sequence[int], store: PageStore, most: int
    ) -> list[StoredPage]:
        """The first `most` of those pages of a node that a tier does not have."""
        if not places or most <= 0:
            return []
        digests = self._digests(node)[-len(node.pages) :]
        wanted = [place for place in places if not store.contains(digests[place])][:most]
        if not wanted:
            return []
        path = b"".join(bytes(above.edge) for above in reversed(list(node.path())))
        start = node.start * TOKEN_BYTES
        namespace = _root(node).namespace
        pages = []
        for place in wanted:
            tokens = path[: start + (place + 1) * self._page_bytes]
            data = self._pool.export([node.pages[place]])
            pages.append(StoredPage(digests[place], namespace, tokens, data))
        self.num_spilled += len(pages)
        return pages

    def _digests(self, tail: Node) -> list[bytes]:
        """Of all pages from the root to the end of a node; each is computed once."""
        path = list(tail.path())[::-1]
        found: list[bytes] = []
        if path[0].digests is None:
            path[0].digests = [root_digest(self._layout, path[0].namespace)]
        before = path[0].digests[0]
        for node in path[1:]:
            if node.digests is None:
                node.digests = []
                for start in range(0, len(node.edge), self._page_bytes):
                    before = page_digest(before, node.edge[start : start + self._page_bytes])
                    node.digests.append(before)
            found += node.digests
            before = node.digests[-1]
        return found


def _root(node: Node) -> Node:
    *_, root = node.path()
    return root
